"""LightRFT's loss modules, over the pure functions of ``algorithms`` and ``models``.

Constructors and ``forward`` take LightRFT's arguments, and numbers are equal. Where LightRFT's
result is not the published formula, the docstring says so and the formula holds here. A row or a
batch in which nothing counts gives 0, where LightRFT gives NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightrft.algorithms.aggregation import AGGREGATIONS
from lightrft.algorithms.policy_losses import POLICY_LOSSES, value_loss
from lightrft.algorithms.preference.inputs import Labelled, Pairs, Responses
from lightrft.algorithms.preference.losses import PREFERENCE_LOSSES
from lightrft.algorithms.preference.registry import smoothed_logistic
from lightrft.algorithms.process_reward.losses import STEP_LOSSES, LabelledSteps
from lightrft.algorithms.token_ops import TokenRows
from lightrft.config.algorithm import LossConfig
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.models.utils import masked_mean
from lightrft.utils.errors import ConfigError, DataError

IGNORE_INDEX = -100
"""Label of a token that has no loss."""


class GPTLMLoss(nn.Module):
    """The mean cross-entropy of the next token over the labels that are not -100."""

    IGNORE_INDEX = IGNORE_INDEX

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, 0-d.

        Args:
            logits: ``[..., L, V]``. Place ``t`` predicts label ``t + 1``.
            labels: ``[..., L]`` token ids, or -100.
        """
        shifted = labels[..., 1:].flatten()
        losses = functional.cross_entropy(
            logits[..., :-1, :].flatten(0, -2),
            shifted,
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        # A sum of many half-precision losses would lose the small ones.
        wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
        return masked_mean(wide, shifted != IGNORE_INDEX).to(logits.dtype)


class PolicyLoss(nn.Module):
    """The clipped loss of PPO (arXiv 1707.06347, eq. 7), or of CPGD (arXiv 2505.12504).

    The loss is the mean over rows of the mean over the counted tokens of a row.

    Args:
        clip_eps: Largest distance of the ratio from 1.
        use_dapo: Must be false. LightRFT ignores it.
        use_cpg_loss: Compute the loss of CPGD, ``-A logp`` with ``logp`` clipped around the old
            one.
        high_entropy_token_ratio: Above 0, ``forward`` needs the mask of such tokens. LightRFT
            trains all tokens without it.

    Raises:
        ConfigError: ``use_dapo`` is true.
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        use_dapo: bool = False,
        use_cpg_loss: bool = False,
        high_entropy_token_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        if use_dapo:
            raise ConfigError(
                "use_dapo = True selects nothing in PolicyLoss; leave it out, and train by "
                "`lightrft rl algorithm=dapo` for the loss of DAPO"
            )
        self.clip_eps = clip_eps
        self.use_dapo = use_dapo
        self.use_cpg_loss = use_cpg_loss
        self.high_entropy_token_ratio = high_entropy_token_ratio

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        entropy_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, 0-d.

        Args:
            log_probs: ``[B, L]`` of the current policy.
            old_log_probs: ``[B, L]`` of the policy that sampled.
            advantages: ``[B, L]``.
            action_mask: ``[B, L]``, 1 for actions. ``None`` means all.
            entropy_mask: ``[B, L]``, 1 for the actions that are trained, as
                ``create_high_entropy_mask`` returns them. ``None`` means all actions.

        Raises:
            ConfigError: ``high_entropy_token_ratio`` is set and ``entropy_mask`` is ``None``.
        """
        if self.high_entropy_token_ratio > 0 and entropy_mask is None:
            ratio = self.high_entropy_token_ratio
            raise ConfigError(
                f"high_entropy_token_ratio = {ratio} needs entropy_mask: pass "
                f"create_high_entropy_mask(entropy, action_mask, {ratio}), or set the ratio to 0"
            )
        mask = full_mask(log_probs, action_mask)
        if entropy_mask is not None:
            mask = mask & entropy_mask.bool()
        rows = rows_of(mask)
        settings = LossConfig(clip_low=self.clip_eps, clip_high=self.clip_eps)
        new, old, advantage = (x.flatten() for x in (log_probs, old_log_probs, advantages))
        name = "cpgd" if self.use_cpg_loss else "ppo_clip"
        losses, _ = POLICY_LOSSES[name](new, old, advantage, rows, settings)
        if self.use_cpg_loss:
            # LightRFT clips the log-prob and not the log-ratio: a constant more, for each token.
            losses = losses - advantage * old
        return sequence_mean(losses, rows)


class ValueLoss(nn.Module):
    """Half the squared error of values, as the mean over rows of the mean over a row's tokens.

    Args:
        clip_eps: Largest change of a value. ``None`` disables clipping.
    """

    def __init__(self, clip_eps: float | None = None) -> None:
        super().__init__()
        self.clip_eps = clip_eps

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, 0-d.

        Args:
            values: ``[B, L]``.
            old_values: ``[B, L]``. Values before the update.
            returns: ``[B, L]``. Targets.
            action_mask: ``[B, L]``, 1 for actions. ``None`` means all.
        """
        losses = value_loss(values, old_values, returns, self.clip_eps)
        return sequence_mean(losses.flatten(), rows_of(full_mask(values, action_mask)))


class LogSigmoidLoss(nn.Module):
    """The loss of Bradley and Terry for scores, with a margin (arXiv 2307.09288, eq. 2)."""

    def forward(
        self,
        chosen_reward: Tensor,
        reject_reward: Tensor,
        margin: Tensor | float | None = None,
    ) -> Tensor:
        """Return ``-log s(chosen - rejected - margin)``, the mean over pairs.

        Args:
            chosen_reward: ``[B]`` or ``[B, 1]`` scores of better responses.
            reject_reward: Scores of worse responses, in the same shape.
            margin: Least difference of the scores. ``None`` is 0.
        """
        gap = chosen_reward - reject_reward
        return smoothed_logistic(gap if margin is None else gap - margin, 0.0).mean()


class PairWiseLoss(LogSigmoidLoss):
    """``LogSigmoidLoss`` under its other name."""


class LogExpLoss(nn.Module):
    """The loss ``log(1 + exp(rejected - chosen))`` (arXiv 2203.02155, eq. 1), without overflow."""

    def forward(
        self,
        chosen_reward: Tensor,
        reject_reward: Tensor,
        margin: Tensor | float | None = None,
    ) -> Tensor:
        """Return the mean over pairs.

        Args:
            chosen_reward: ``[B]`` or ``[B, 1]`` scores of better responses.
            reject_reward: Scores of worse responses, in the same shape.
            margin: No part of this loss. A value leads to a warning.
        """
        _warn_of_margin(self, margin)
        return smoothed_logistic(chosen_reward - reject_reward, 0.0).mean()


class HPSLoss(LogExpLoss):
    """The cross-entropy of two classes with the two scores as logits (HPS, arXiv 2303.14420).

    It is the loss of ``LogExpLoss``. The scores are scaled by the reward model.
    """


class _PairLoss(nn.Module):
    """A loss of pairs of responses, by their log-probs under the policy and the reference."""

    def __init__(self, settings: PreferenceConfig) -> None:
        super().__init__()
        self.beta = settings.beta
        self._settings = settings

    def _losses(self, chosen: Responses, rejected: Responses) -> Tensor:
        """Return the losses, of which the mean is taken."""
        raise NotImplementedError

    def forward(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean loss, and the implicit rewards of chosen and rejected responses ``[B]``.

        Args:
            policy_chosen_logps: ``[B]`` log-probs of chosen responses under the policy.
            policy_rejected_logps: ``[B]`` log-probs of rejected responses under the policy.
            reference_chosen_logps: ``[B]`` log-probs of chosen responses under the reference.
            reference_rejected_logps: ``[B]`` log-probs of rejected responses under the reference.
        """
        chosen = _responses(policy_chosen_logps, reference_chosen_logps)
        rejected = _responses(policy_rejected_logps, reference_rejected_logps)
        losses = self._losses(chosen, rejected)
        return losses.mean(), _rewards(self.beta, chosen), _rewards(self.beta, rejected)


class DPOLoss(_PairLoss):
    """The loss of DPO (arXiv 2305.18290, eq. 7), of conservative DPO, or of IPO.

    Args:
        beta: Scale of the implicit reward. Positive.
        label_smoothing: Share of pairs whose label is taken to be wrong.
        ipo: Compute the loss of IPO (arXiv 2310.12036, eq. 17), on sums of log-probs.

    Raises:
        ConfigError: ``label_smoothing`` is set for IPO, which does not read it.
    """

    def __init__(self, beta: float, label_smoothing: float = 0.0, ipo: bool = False) -> None:
        if ipo and label_smoothing:
            raise ConfigError(
                f"label_smoothing = {label_smoothing} changes nothing with ipo = True; leave one "
                "of them out"
            )
        super().__init__(PreferenceConfig(beta=beta, label_smoothing=label_smoothing))
        self.label_smoothing = label_smoothing
        self.ipo = ipo

    def _losses(self, chosen: Responses, rejected: Responses) -> Tensor:
        loss = PREFERENCE_LOSSES["ipo_sum" if self.ipo else "sigmoid"]
        return loss(Pairs(chosen, rejected), self._settings)


class VanillaKTOLoss(_PairLoss):
    """The loss of KTO for equal numbers of chosen and rejected responses.

    The KL of the rejected responses is the reference point of the chosen ones, and the other way
    round. It carries no gradient, by eq. 7 of KTO (arXiv 2402.01306). LightRFT's does.

    Args:
        beta: Scale of the implicit reward. Positive.
    """

    def __init__(self, beta: float) -> None:
        super().__init__(PreferenceConfig(beta=beta))

    def _losses(self, chosen: Responses, rejected: Responses) -> Tensor:
        return torch.cat(
            [
                _kto(chosen, True, rejected.log_ratio.mean(), self._settings, 1.0),
                _kto(rejected, False, chosen.log_ratio.mean(), self._settings, 1.0),
            ]
        )


class KTOLoss(nn.Module):
    """The loss of KTO (arXiv 2402.01306, eq. 7) for any numbers of good and bad responses.

    The KL is the mean over the mismatched pairs of all ranks. LightRFT takes the mean of the ranks'
    means, which is the same for equal numbers of pairs.

    Args:
        beta: Scale of the implicit reward. Positive.
        desirable_weight: Factor of the losses of chosen responses.
        undesirable_weight: Factor of the losses of rejected responses.
        world_size: Number of ranks.
        device: Device of the rewards.

    Raises:
        ConfigError: ``world_size`` is not the size of the process group.
    """

    def __init__(
        self,
        beta: float,
        desirable_weight: float,
        undesirable_weight: float,
        world_size: int,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        ranks = torch.distributed.get_world_size() if is_distributed else 1
        if world_size != ranks:
            raise ConfigError(
                f"world_size = {world_size}, and the process group has {ranks} ranks; pass {ranks}"
            )
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.world_size = world_size
        self.device = device
        self._settings = PreferenceConfig(beta=beta)

    def forward(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        policy_KL_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_KL_logps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the mean loss, the implicit rewards of both kinds, and the KL.

        Args:
            policy_chosen_logps: ``[C]`` log-probs of chosen responses under the policy.
            policy_rejected_logps: ``[R]`` log-probs of rejected responses under the policy.
            policy_KL_logps: ``[K]`` log-probs of mismatched responses under the policy.
            reference_chosen_logps: ``[C]`` log-probs of chosen responses under the reference.
            reference_rejected_logps: ``[R]`` log-probs of rejected responses under the reference.
            reference_KL_logps: ``[K]`` log-probs of mismatched responses under the reference.
        """
        gaps = (policy_KL_logps - reference_KL_logps).detach()
        sums = torch.stack([gaps.sum(), gaps.new_tensor(float(gaps.numel()))])
        if self.world_size > 1:
            torch.distributed.all_reduce(sums)
        kl = sums[0] / sums[1].clamp(min=1)
        chosen = _responses(policy_chosen_logps, reference_chosen_logps)
        rejected = _responses(policy_rejected_logps, reference_rejected_logps)
        losses = torch.cat(
            [
                _kto(chosen, True, kl, self._settings, self.desirable_weight),
                _kto(rejected, False, kl, self._settings, self.undesirable_weight),
            ]
        )
        chosen_rewards = _rewards(self.beta, chosen).to(self.device)
        rejected_rewards = _rewards(self.beta, rejected).to(self.device)
        return losses.mean(), chosen_rewards, rejected_rewards, kl.clamp(min=0)


class KDLoss(nn.Module):
    """The cross-entropy of the student under the teacher (MiniLLM's code, arXiv 2306.08543).

    It is KL(teacher, student) plus the entropy of the teacher, the mean over the labels that are
    not -100. Labels are not shifted. A token whose student logit is infinite is left out.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def forward(self, logits: Tensor, teacher_logits: Tensor, label: Tensor) -> Tensor:
        """Return the loss, 0-d.

        Args:
            logits: ``[..., V]`` of the student.
            teacher_logits: ``[..., V]``.
            label: ``[...]``. -100 leaves a place out.
        """
        teacher = teacher_logits.softmax(-1, dtype=torch.float32)
        student = logits.log_softmax(-1, dtype=torch.float32)
        # 0 times infinity would be NaN.
        products = (teacher * student).masked_fill(logits.isinf(), 0.0)
        return masked_mean(-products.sum(-1), label != IGNORE_INDEX)


class PRMLoss(nn.Module):
    """The loss of a process reward model at the placeholder tokens of its steps.

    Integer labels are tokens: the loss is the cross-entropy over ``reward_token_ids``, or over the
    vocabulary without them. Other labels are probabilities of the first of two reward tokens
    (Math-Shepherd, arXiv 2312.08935). A label of -100 has no loss. LightRFT counts it as wrong in
    the accuracy, and trains a soft one.

    Args:
        placeholder_token_id: The token at the end of each step.
        reward_token_ids: Tokens that stand for labels. ``None`` means every token.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def __init__(
        self, placeholder_token_id: int, reward_token_ids: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.placeholder_token_id = placeholder_token_id
        self.reward_token_ids = reward_token_ids

    def forward(
        self, inputs: Tensor, logits: Tensor, labels: Tensor, *, return_acc: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the mean loss over labelled steps, 0-d, and the share of right predictions.

        Args:
            inputs: ``[..., L]`` token ids.
            logits: ``[..., L, V]``.
            labels: ``[..., L]``, read at placeholders.
            return_acc: Also return the accuracy.

        Raises:
            ConfigError: Soft labels without two reward tokens.
            DataError: A label is not among the reward tokens.
        """
        steps = (inputs == self.placeholder_token_id) & (labels != IGNORE_INDEX)
        scores, wanted = logits[steps], labels[steps]
        if self.reward_token_ids is not None:
            scores = scores[..., list(self.reward_token_ids)]
        if wanted.is_floating_point():
            losses, classes = self._soft(scores, wanted)
        else:
            classes = self._classes(wanted)
            losses = functional.cross_entropy(scores, classes, reduction="none")
        loss = masked_mean(losses, None) if len(losses) else scores.sum() * 0
        if not return_acc:
            return loss
        hits = (scores.argmax(-1) == classes).float()
        return loss, masked_mean(hits, torch.ones_like(hits))

    def _soft(self, scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and likelier classes ``[S]`` of probabilities ``wanted [S]``."""
        ids = self.reward_token_ids
        if ids is None or len(ids) != 2:
            raise ConfigError(
                f"reward_token_ids = {ids}: labels that are probabilities need two tokens; give "
                "the token of a right step, then the one of a wrong step"
            )
        odds = scores[..., 0] - scores[..., 1]
        of_one = torch.zeros(len(odds), dtype=torch.long, device=odds.device)
        labelled = LabelledSteps(odds, odds.sigmoid(), wanted.to(odds.dtype), of_one)
        return STEP_LOSSES["cross_entropy"](labelled), (wanted < 0.5).long()

    def _classes(self, wanted: Tensor) -> Tensor:
        """Return the places ``[S]`` of the tokens ``wanted [S]`` among the reward tokens."""
        if self.reward_token_ids is None:
            return wanted
        ids = torch.tensor(list(self.reward_token_ids), device=wanted.device)
        matches = wanted[:, None] == ids
        if not bool(matches.any(-1).all()):
            unknown = sorted(set(wanted[~matches.any(-1)].tolist()))
            raise DataError(f"labels {unknown} are not among reward_token_ids = {ids.tolist()}")
        return matches.long().argmax(-1)


def _responses(policy: Tensor, reference: Tensor) -> Responses:
    return Responses(policy, reference, torch.ones_like(policy))


def _rewards(beta: float, responses: Responses) -> Tensor:
    return beta * responses.log_ratio.detach()


def _kto(
    responses: Responses, desirable: bool, kl: Tensor, settings: PreferenceConfig, weight: float
) -> Tensor:
    marks = torch.full_like(responses.logprobs, float(desirable)).bool()
    data = Labelled(responses, marks, kl)
    return weight * PREFERENCE_LOSSES["kto"](data, settings)


def _warn_of_margin(loss: nn.Module, margin: Tensor | float | None) -> None:
    if margin is not None and bool((torch.as_tensor(margin) != 0).any()):
        warnings.warn(
            f"margin is no part of {type(loss).__name__} and changes nothing; LogSigmoidLoss "
            "reads it",
            stacklevel=3,
        )


def rows_of(mask: Tensor) -> TokenRows:
    """Return the rows of ``mask [B, L]``: all places of a row, of which the mask counts some."""
    rows, width = mask.shape
    index = torch.arange(rows, device=mask.device)
    lengths = torch.full_like(index, width)
    return TokenRows(index.repeat_interleave(width), lengths, index, mask.bool().flatten())


def full_mask(like: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``mask`` as bool ``[B, L]``. ``None`` counts every place of ``like [B, L]``."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()


def sequence_mean(losses: Tensor, rows: TokenRows) -> Tensor:
    """Return the mean over rows of the mean of ``losses [N]`` over the counted tokens of a row.

    A row without counted tokens is left out. Without any, the mean is 0.
    """
    weights = AGGREGATIONS["sequence"](rows, 1).to(losses.dtype)
    # Not a product: a loss that is not finite outside of the mask would make it NaN.
    return (losses.where(rows.mask, losses.new_zeros(())) * weights).sum()
