"""Mask tokens of the policy loss depending on the other tokens of the mini-batch.

``TOKEN_MASKS[name](batch, settings, generator, **options) -> TokenMask``. Neither micro-batches nor
the order of responses may change a choice.

Args:
    batch: The whole mini-batch, with advantages and old log-probs. ``logprobs`` holds the policy's
        log-probs at the start of the optimizer step if the token mask needs ``current``.
        ``entropy`` is filled in if the token mask needs it.
    settings: ``algorithm.loss``.
    generator: Source of random choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightrft.algorithms.token_ops import TokenRows, require_column
from lightrft.config.algorithm import LossConfig
from lightrft.config.base import ComponentConfig
from lightrft.types import Batch
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry


@dataclass(slots=True)
class TokenMask:
    """Effect of a token mask on each token.

    Attributes:
        weight: ``[N]``, multiplies the policy loss.
        kl_pull_coef: ``[N]``, coefficient of ``|logp - logp_old|``, which is added to the
            loss. ``None`` adds nothing.
    """

    weight: Tensor
    kl_pull_coef: Tensor | None = None


TokenMaskFunction = Callable[..., TokenMask]
TOKEN_MASKS: Registry[TokenMaskFunction] = Registry("token mask")


@TOKEN_MASKS.register(
    "high_entropy",
    formula="keep tokens with H_t >= the (1 - rho) quantile of H over the mini-batch",
    latex=r"\mathbb 1\big[H_t\ge\tau_\rho\big],\quad\tau_\rho=Q_{1-\rho}(H)\text{ over the mini-batch}",
    paper="Beyond the 80/20 rule, arXiv 2506.01939, eq. 6",
    needs=["entropy"],
)
def high_entropy(
    batch: Batch, settings: LossConfig, generator: torch.Generator, *, rho: float = 0.2
) -> TokenMask:
    """Keep the tokens of the mini-batch at which the policy has the highest entropy.

    Tokens equal to the threshold are all kept.

    Args:
        rho: Fraction of tokens that is kept.
    """
    # one group: the quantile is over the whole mini-batch
    one = torch.zeros_like(batch.row_of)
    return TokenMask(_top(require_column(batch.entropy), one, batch.mask, rho))


@TOKEN_MASKS.register(
    "high_entropy_per_answer",
    formula="keep tokens with H_t >= the (1 - rho) quantile of H over their response",
    latex=r"\mathbb 1\big[H_t\ge\tau_{\rho,i}\big],\quad\tau_{\rho,i}=Q_{1-\rho}(H)\text{ over response }i",
    paper="a variant of Beyond the 80/20 rule, arXiv 2506.01939: the quantile of each response, "
    "not of the batch",
    needs=["entropy"],
)
def high_entropy_per_answer(
    batch: Batch, settings: LossConfig, generator: torch.Generator, *, rho: float = 0.2
) -> TokenMask:
    """Keep the tokens of each response at which the policy has the highest entropy.

    Args:
        rho: Fraction of tokens of a response that is kept.
    """
    return TokenMask(_top(require_column(batch.entropy), batch.row_of, batch.mask, rho))


@TOKEN_MASKS.register(
    "clip_cov",
    formula="leave out share * tokens of the mini-batch, sampled from the tokens with low < (A_t - "
    "mean A)(logp_t - mean logp) < high that the clip does not hold already",
    latex=r"\text{leave out }\rho N\text{ tokens of }\{t:\ a<(\hat A_t-\bar A)(\log\pi_t-\overline{\log\pi})<b\}",
    paper="Clip-Cov: The entropy mechanism of RL for reasoning models, arXiv 2505.22617, eq. 10 "
    "and 11",
    needs=["current", "old"],
    reads=["clip_low", "clip_high"],
)
def clip_cov(
    batch: Batch,
    settings: LossConfig,
    generator: torch.Generator,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> TokenMask:
    """Mask a few tokens that would reduce entropy most; ``generator`` chooses among the candidates.

    Args:
        share: Fraction of the tokens of the mini-batch that is masked.
        low: Smallest covariance of a candidate.
        high: Largest covariance of a candidate.
    """
    cov = _covariance(batch)
    log_ratio = require_column(batch.logprobs) - require_column(batch.old_logprobs)
    ratio = torch.exp(log_ratio.double())
    advantages = require_column(batch.advantages)
    clipped_above = (advantages > 0) & (ratio > 1 + settings.clip_high)
    clipped_below = (advantages < 0) & (ratio < 1 - settings.clip_low)
    held = clipped_above | clipped_below
    eligible = (batch.mask & (cov > low) & (cov < high) & ~held).nonzero()[:, 0]
    ranked = _by_content(eligible, torch.zeros_like(cov), batch)
    # Sampled on the CPU, where `generator` is: every device chooses the same tokens.
    shuffled = torch.randperm(len(ranked), generator=generator).to(ranked.device)
    drawn = shuffled[: _count(batch, share)]
    keep = batch.mask.clone()
    keep[ranked[drawn]] = False
    return TokenMask(keep)


@TOKEN_MASKS.register(
    "kl_cov",
    formula="add coef |logp - logp_old| at the share * tokens of the mini-batch with the largest "
    "(A_t - mean A)(logp_t - mean logp)",
    latex=r"L_{i,t}\mathrel{+}=\beta\,\big|\log\pi_\theta-\log\pi_{old}\big|\ "
    r"\text{at the }\rho N\text{ largest }(\hat A_t-\bar A)(\log\pi_t-\overline{\log\pi})",
    paper="KL-Cov: The entropy mechanism of RL for reasoning models, arXiv 2505.22617, eq. 12 and "
    "13",
    needs=["current", "old"],
)
def kl_cov(
    batch: Batch,
    settings: LossConfig,
    generator: torch.Generator,
    *,
    share: float = 2e-4,
    coef: float = 1.0,
) -> TokenMask:
    """Pull the tokens that would reduce entropy most back to the old policy.

    All tokens keep their policy loss.

    Args:
        share: Fraction of the tokens of the mini-batch that is pulled.
        coef: Coefficient of ``|logp - logp_old|``.
    """
    # Negated, so that the largest covariances come first.
    ranked = _by_content(batch.mask.nonzero()[:, 0], -_covariance(batch), batch)
    pull = torch.zeros(batch.tokens, device=batch.mask.device)
    pull[ranked[: _count(batch, share)]] = coef
    return TokenMask(batch.mask.clone(), pull)


@TOKEN_MASKS.register(
    "m2po",
    formula="leave out the tokens with the largest (logp - logp_sampler)^2, as few as bring the mean "
    "of the rest to tau",
    latex=r"\text{keep the smallest }(\log\pi_\theta-\log\mu)^2\text{ whose mean is }\le\tau",
    paper="M2PO, arXiv 2510.01161, section 4",
    needs=["current", "behavior"],
)
def m2po(
    batch: Batch, settings: LossConfig, generator: torch.Generator, *, tau: float = 0.04
) -> TokenMask:
    """Mask tokens with a large squared log-ratio until the mean of the rest is at most ``tau``.

    This is a trust region on the second moment of the log-ratio. Equal tokens are masked together.
    If even the smallest value exceeds ``tau``, all tokens are masked.

    Args:
        tau: Largest mean of the squared log-ratio.
    """
    log_ratio = require_column(batch.logprobs) - require_column(batch.behavior_logprobs)
    moment = log_ratio.double().square()
    ordered = moment[batch.mask].sort().values
    mean = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = int((mean <= tau).sum())
    if kept == len(ordered):
        return TokenMask(batch.mask.clone())
    # strictly below, so that tokens equal to the first masked one are masked too
    return TokenMask(batch.mask & (moment < ordered[kept]))


@TOKEN_MASKS.register(
    "m2po_released",
    formula="leave out A_t > 0 with rho_t > max(1 + floor_high, e^c) and A_t < 0 with rho_t < min(1 "
    "- floor_low, e^-c),  rho_t = pi / pi_sampler;  c^2 is the largest d_t^2 of the tokens "
    "with A_t d_t > 0, d_t = log rho_t, at which mean min(d_t^2, c^2) < tau over them; none "
    "where their mean d_t^2 <= tau",
    latex=r"\text{leave out }\hat A_t>0,\ \rho_t>\max(1+\epsilon_h,e^{c})\ \text{and}\ \hat A_t<0,\ "
    r"\rho_t<\min(1-\epsilon_l,e^{-c}),\quad "
    r"\operatorname{mean}_{\hat A_td_t>0}\min(d_t^2,c^2)<\tau",
    paper="M2PO, arXiv 2510.01161, as its authors' released code has it",
    needs=["current", "behavior"],
)
def m2po_released(
    batch: Batch,
    settings: LossConfig,
    generator: torch.Generator,
    *,
    tau: float = 0.04,
    floor_low: float = 0.3,
    floor_high: float = 0.5,
) -> TokenMask:
    """Clip so that the second moment of the log-ratio is at most ``tau``.

    The moment is taken over the tokens where clipping can act. The clip range is never narrower
    than the floors.

    Args:
        tau: Largest mean of the squared log-ratio.
        floor_low: Smallest distance of the lower bound from ratio 1.
        floor_high: Smallest distance of the upper bound from ratio 1.
    """
    gap = (require_column(batch.logprobs) - require_column(batch.behavior_logprobs)).double()
    sign = require_column(batch.advantages).double().sign()
    acting = batch.mask & (sign * gap > 0)
    ordered = gap[acting].square().sort().values
    n = len(ordered)
    if n == 0 or float(ordered.mean()) <= tau:
        return TokenMask(batch.mask.clone())
    # The sum of squares if every larger value were clipped to this one.
    larger = torch.arange(n - 1, -1, -1, device=ordered.device)
    clipped_sum = ordered * larger + ordered.cumsum(0)
    # The sum grows along the sorted values, so a count is an index.
    reached = int((clipped_sum < tau * n).sum())
    width = float(ordered[reached - 1].sqrt()) if reached else 0.0
    highest = max(width, math.log1p(floor_high))
    # a floor of 1 or more reaches down to a ratio of 0
    lowest = min(-width, math.log1p(-floor_low) if floor_low < 1 else -math.inf)
    held = (sign > 0) & (gap > highest) | (sign < 0) & (gap < lowest)
    return TokenMask(batch.mask & ~held)


def with_token_masks(
    batch: Batch,
    parts: Sequence[ComponentConfig],
    settings: LossConfig,
    generator: torch.Generator,
) -> Batch:
    """Apply all token masks to a whole mini-batch.

    Args:
        batch: A whole mini-batch.
        parts: The token masks with their options.
        settings: ``algorithm.loss``.
        generator: Source of random choices.

    Returns:
        ``batch`` with ``token_mask``, the product of all weights, and ``pull``, the sum of all
        pulls.
    """
    for part in parts:
        found = TOKEN_MASKS[part.name](batch, settings, generator, **part.options)
        keep = found.weight.to(torch.float32)
        batch = batch.replace(
            token_mask=keep if batch.token_mask is None else batch.token_mask * keep
        )
        if found.kl_pull_coef is not None:
            pull = found.kl_pull_coef if batch.pull is None else batch.pull + found.kl_pull_coef
            batch = batch.replace(pull=pull)
    return batch


def _top(x: Tensor, group: Tensor, mask: Tensor, rho: float) -> Tensor:
    """Return a mask ``[N]`` of counted tokens at or above the (1 - rho) quantile of their group.

    The quantile is interpolated as in NumPy.
    """
    places = mask.nonzero()[:, 0]
    values, of = x[places].double(), group[places]
    order = values.argsort(stable=True)
    # sorted by group, and by value within a group, since the second sort is stable
    order = order[of[order].argsort(stable=True)]
    ordered = values[order]
    groups = int(group.max()) + 1 if group.numel() else 0
    size = torch.bincount(of, minlength=groups)
    start = torch.cumsum(size, 0) - size
    at = (1 - rho) * (size - 1).clamp(min=0).double()
    below = at.floor().long()
    above = torch.minimum(below + 1, (size - 1).clamp(min=0))
    some = size > 0
    # groups without counted tokens have no quantile, and no token that would be compared with it
    floor = torch.zeros(groups, dtype=torch.float64, device=x.device)
    ceiling = torch.zeros_like(floor)
    floor[some] = ordered[(start + below)[some]]
    ceiling[some] = ordered[(start + above)[some]]
    threshold = floor + (at - below) * (ceiling - floor)
    kept = torch.zeros_like(mask)
    kept[places] = values >= threshold[of]
    return kept


def _covariance(batch: Batch) -> Tensor:
    """Return ``(A - mean A)(logp - mean logp)``, ``[N]`` float64, with means over counted tokens.

    The result does not depend on the order of rows.
    """
    advantages = _centred(require_column(batch.advantages), batch.mask)
    logprobs = _centred(require_column(batch.logprobs), batch.mask)
    # Equal covariances differ by 1e-16 in another order of rows, which must not rank them.
    return (advantages * logprobs).round(decimals=9)


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    # Sorted, so that the sum does not depend on the order of rows.
    inside = x[mask].double().sort().values
    return x.double() - inside.sum() / max(1, len(inside))


def _count(batch: Batch, share: float) -> int:
    """Return ``share`` of the number of counted tokens, at least one."""
    tokens = int(batch.mask.sum())
    return min(tokens, max(1, math.floor(share * tokens)))


def _by_content(places: Tensor, x: Tensor, batch: Batch) -> Tensor:
    """Sort the token indices ``places [K]`` by ``x [N]``, ascending.

    Ties are broken by the content of the tokens, so that the order of rows decides nothing visible.
    """
    start = torch.cumsum(batch.lengths, 0) - batch.lengths
    position = torch.arange(batch.tokens, device=x.device) - start[batch.row_of]
    length = TokenRows.of(batch).spread(batch.lengths)
    # The last key ranks first. Advantages come first in the list: means over rows were subtracted
    # from them, so that equal ones may differ by rounding.
    content = (require_column(batch.advantages), length, batch.responses.tokens, position)
    for key in (*content, require_column(batch.logprobs), x):
        places = places[key[places].argsort(stable=True)]
    return places
