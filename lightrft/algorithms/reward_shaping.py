"""Shape outcome rewards and place them on tokens.

``SHAPINGS[name](batch, rewards, max_new_tokens=..., **options) -> rewards``, applied in the order
given.

Args:
    batch: The global batch.
    rewards: ``[B]``. The rewards so far.
    max_new_tokens: Length limit of a response, in tokens.

Returns:
    The shaped rewards, ``[B]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lightrft.algorithms.group_ops import GroupStats
from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.running_stats import RUNNING, RunningStats
from lightrft.algorithms.token_ops import TokenRows, last_sampled
from lightrft.config.algorithm import AlgorithmConfig
from lightrft.config.base import ComponentConfig
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Shaping = Callable[..., Tensor]
SHAPINGS: Registry[Shaping] = Registry("shaping")


@SHAPINGS.register(
    "reward_clip",
    formula="R <- clip(R, low, high)",
    latex=r"R\leftarrow\operatorname{clip}(R,a,b)",
    paper="arXiv 1707.06347",
)
def reward_clip(
    batch: Batch, rewards: Tensor, *, max_new_tokens: int, low: float = -10.0, high: float = 10.0
) -> Tensor:
    """Clip rewards to ``[low, high]``.

    Args:
        low: Smallest reward.
        high: Largest reward.
    """
    return rewards.clamp(low, high)


@SHAPINGS.register(
    "reward_scale", formula="R <- scale R + shift", latex=r"R\leftarrow aR+b", paper=""
)
def reward_scale(
    batch: Batch, rewards: Tensor, *, max_new_tokens: int, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """Scale and shift rewards.

    Args:
        scale: Factor, applied first.
        shift: Constant that is added.
    """
    return rewards * scale + shift


@SHAPINGS.register(
    "overlong",
    formula="R <- R + penalty * clip((L_max - buffer - l) / buffer, -1, 0)",
    latex=r"R\leftarrow R+c\,\operatorname{clip}\!\Big(\frac{L_{\max}-b-l}{b},-1,0\Big)",
    paper="DAPO, arXiv 2503.14476, eq. 13",
)
def overlong(
    batch: Batch, rewards: Tensor, *, max_new_tokens: int, buffer: float = 0.2, penalty: float = 1.0
) -> Tensor:
    """Penalize responses linearly over the last tokens before the length limit.

    Args:
        buffer: Length of the penalized range in tokens. Below 1 it is a fraction of the length
            limit, but at least one token.
        penalty: Size of the penalty at the length limit.

    Raises:
        ConfigError: If ``buffer`` is not positive.
    """
    if buffer <= 0:
        raise ConfigError(
            f"shaping overlong: options.buffer is {buffer}; give a number of tokens, or a share "
            "of the limit above 0"
        )
    # below 1 it is a fraction of the limit
    tokens = buffer if buffer >= 1 else max(1, round(buffer * max_new_tokens))
    over = (max_new_tokens - tokens - batch.lengths.to(rewards.dtype)) / tokens
    return rewards + penalty * over.clamp(-1, 0)


@SHAPINGS.register(
    "truncated",
    formula="R <- factor R, or value, if the length limit cut the response",
    latex=r"R\leftarrow fR\ (\text{or }v)\ \text{if the length limit cut the response}",
    paper="ProRL v2, stop-properly penalty of OpenRLHF",
)
def truncated(
    batch: Batch,
    rewards: Tensor,
    *,
    max_new_tokens: int,
    factor: float = 0.0,
    value: float | None = None,
) -> Tensor:
    """Scale or replace the rewards of responses that were cut at the length limit.

    Args:
        factor: Factor of these rewards, from 0 to 1.
        value: Reward in their place. ``None`` scales them.

    Raises:
        ConfigError: If ``factor`` is outside of [0, 1], or given next to ``value``.
    """
    if not 0 <= factor <= 1 or (value is not None and factor):
        raise ConfigError(
            f"shaping truncated: options.factor is {factor} and options.value {value}; give a "
            "factor from 0 to 1, or a value alone"
        )
    if batch.truncated is None:
        raise ValueError("shaping truncated needs batch.truncated")
    shaped = factor * rewards if value is None else torch.full_like(rewards, value)
    return torch.where(batch.truncated, shaped, rewards)


@SHAPINGS.register(
    "cosine",
    formula="R <- end + (start - end) (1 + cos(pi l / L_max)) / 2, start and end as R >= threshold "
    "or not; exceed from L_max on",
    latex=r"R\leftarrow R_L+\tfrac12(R_0-R_L)\big(1+\cos\tfrac{\pi l}{L_{\max}}\big)",
    paper="Demystifying long chain-of-thought, arXiv 2502.03373, section 4.2",
)
def cosine(
    batch: Batch,
    rewards: Tensor,
    *,
    max_new_tokens: int,
    right_start: float = 2.0,
    right_end: float = 1.0,
    wrong_start: float = -10.0,
    wrong_end: float = 0.0,
    exceed: float = -10.0,
    threshold: float = 1.0,
) -> Tensor:
    """Replace the reward by a cosine schedule over the response length.

    A response is correct if its outcome, as scored, reaches ``threshold``.

    Args:
        right_start: Reward of a correct response at length 0.
        right_end: Reward of a correct response at the length limit.
        wrong_start: Reward of a wrong response at length 0.
        wrong_end: Reward of a wrong response at the length limit.
        exceed: Reward of a response that reaches the length limit.
        threshold: Smallest outcome of a correct response.
    """
    right = _right(batch, threshold)
    length = batch.lengths.to(rewards.dtype)
    start = torch.where(right, rewards.new_tensor(right_start), rewards.new_tensor(wrong_start))
    end = torch.where(right, rewards.new_tensor(right_end), rewards.new_tensor(wrong_end))
    curve = end + (start - end) * (1 + torch.cos(torch.pi * length / max_new_tokens)) / 2
    return torch.where(length >= max_new_tokens, exceed, curve)


@SHAPINGS.register(
    "kimi_length",
    formula="R <- R + weight * (lam if R >= threshold else min(0, lam)), lam = 1/2 - (l - shortest) "
    "/ (longest - shortest) in the group",
    latex=r"R\leftarrow R+w\lambda_i\ (\text{wrong: }\min(0,\lambda_i)),\quad \lambda_i=\tfrac12-\tfrac{l_i-\min l}{\max l-\min l}",
    paper="Kimi k1.5, arXiv 2501.12599, section 2.3.3",
)
def kimi_length(
    batch: Batch,
    rewards: Tensor,
    *,
    max_new_tokens: int,
    weight: float = 1.0,
    threshold: float = 1.0,
) -> Tensor:
    """Favor short responses of a group over long ones.

    Lengths count sampled tokens. A wrong response never gets a bonus. Nothing is added if all
    responses of the group are equally long. A response is correct if its outcome, as scored,
    reaches ``threshold``.

    Args:
        weight: Factor of the bonus.
        threshold: Smallest outcome of a correct response.
    """
    lengths = TokenRows.of(batch).count().to(rewards.dtype)
    groups = GroupStats(lengths, batch.prompt_of, len(batch.prompts))
    shortest = -groups.highest(-lengths)
    # clamped: groups of equal lengths get no bonus below, but must not divide by 0 here
    lam = 0.5 - (lengths - shortest) / (groups.highest() - shortest).clamp(min=1)
    bonus = torch.where(_right(batch, threshold), lam, lam.clamp(max=0))
    return rewards + weight * torch.where(groups.uneven(), bonus, torch.zeros_like(bonus))


def _right(batch: Batch, threshold: float) -> Tensor:
    # by the outcome as scored: an earlier shaping must not change what counts as correct
    return _rewards_of(batch) >= threshold


def _rewards_of(batch: Batch) -> Tensor:
    if batch.rewards is None:
        raise ValueError("shaping needs batch.rewards")
    return batch.rewards


def with_rewards(
    batch: Batch,
    algorithm: AlgorithmConfig,
    max_new_tokens: int,
    seen: RunningStats,
    seen_terms: Mapping[str, RunningStats] = MappingProxyType({}),
) -> Batch:
    """Return ``batch`` with normalized and shaped rewards in float64.

    ``batch.outcomes`` keeps the outcomes as they were scored.

    Args:
        batch: The global batch.
        algorithm: Gives the normalization and the shapings.
        max_new_tokens: Length limit of a response, in tokens.
        seen: Statistics of the outcomes of earlier steps.
        seen_terms: Statistics of each term of the reward in earlier steps, by name.
    """
    settings = algorithm.normalize
    outcomes = _rewards_of(batch).double()
    if settings.rewards != "none":
        # the batch counts for its own normalization, so the first step has statistics too
        seen = seen.including(outcomes)
    if settings.terms == "running":
        # as above, with the terms of this batch
        seen_terms = including_terms(seen_terms, batch)
    terms = TERMS[settings.terms](batch, settings.eps, seen_terms)
    scaled = RUNNING[settings.rewards](seen, terms, settings.eps)
    rewards = shape(batch, algorithm.shaping, max_new_tokens, scaled)
    return batch.replace(outcomes=outcomes, rewards=rewards)


Seen = Mapping[str, RunningStats]
"""Statistics of the terms of a reward, by name."""


def _by_group(batch: Batch, eps: float, seen: Seen) -> Tensor:
    prompts = len(batch.prompts)
    return normalized_terms(
        batch,
        lambda name, x, there: GroupStats(x, batch.prompt_of[there], prompts).standardised(eps),
    )


TERMS: dict[str, Callable[[Batch, float, Seen], Tensor]] = {
    "none": lambda batch, eps, seen: _rewards_of(batch).double(),
    "group": _by_group,
    "batch": lambda batch, eps, seen: normalized_terms(
        batch, lambda name, x, there: GroupStats.whole(x).standardised(eps)
    ),
    "running": lambda batch, eps, seen: normalized_terms(
        batch, lambda name, x, there: seen[name].standardised(x, eps)
    ),
}
"""Term normalizations: ``TERMS[mode](batch, eps, seen) -> outcome rewards [B]``, in float64.

``seen`` are the statistics of all values of each term, those of the batch included.
"""


def normalized_terms(batch: Batch, standardise: Callable[[str, Tensor, Tensor], Tensor]) -> Tensor:
    """Return the weighted sum of the standardized reward terms, ``[B]``.

    Each term is standardized over the responses that have it.

    Args:
        batch: Has ``terms [B, T]``, with NaN where a response lacks a term, and ``term_weights [B,
            T]``.
        standardise: Called as ``standardise(name, x, which)``. Standardises the values ``x`` of the
            responses ``which [B]`` (bool).

    Raises:
        ValueError: If ``batch.terms`` or ``batch.term_weights`` is missing.
    """
    if batch.terms is None or batch.term_weights is None:
        raise ValueError("normalize.terms needs batch.terms and batch.term_weights")
    total = torch.zeros(len(batch), dtype=torch.float64, device=batch.terms.device)
    weights = batch.term_weights.double().unbind(1)
    for (name, x), weight in zip(_columns(batch), weights, strict=True):
        # a term that a response lacks must neither count as 0 nor enter the mean
        there = ~x.isnan()
        total[there] += weight[there] * standardise(name, x[there], there)
    return total


def including_terms(seen: Seen, batch: Batch) -> dict[str, RunningStats]:
    """Return the statistics of each term with the values of ``batch`` added."""
    found = dict(seen)
    for name, x in _columns(batch):
        found[name] = found.get(name, RunningStats()).including(x[~x.isnan()])
    return found


def _columns(batch: Batch) -> list[tuple[str, Tensor]]:
    """Return the name and the values ``[B]`` of each term, in float64."""
    if batch.terms is None:
        return []
    columns = batch.terms.double().unbind(1)
    # only running statistics read the names
    names = batch.term_names or tuple(str(k) for k in range(len(columns)))
    return list(zip(names, columns, strict=True))


def shape(
    batch: Batch,
    parts: Sequence[ComponentConfig],
    max_new_tokens: int,
    start: Tensor | None = None,
) -> Tensor:
    """Apply the shapings in order and return the rewards, ``[B]``.

    Args:
        batch: The global batch.
        parts: The shapings with their options.
        max_new_tokens: Length limit of a response, in tokens.
        start: ``[B]``, the rewards to start from. ``None`` uses ``batch.rewards``.
    """
    rewards = _rewards_of(batch) if start is None else start
    for part in parts:
        shaping = SHAPINGS[part.name]
        rewards = shaping(batch, rewards, max_new_tokens=max_new_tokens, **part.options)
    return rewards


def token_rewards(batch: Batch, estimator: str, kl_coef: float) -> Tensor:
    """Place the outcome reward on the last sampled token of each row, ``[N]``.

    Every sampled token also gets ``-kl_coef`` times the KL estimate at that token. A token that
    ends a step also gets the reward of the step.

    Args:
        batch: Has ``rewards [B]``, and maybe ``step_rewards [N]``. It has the log-probs of old
            policy and reference if ``kl_coef`` is not 0.
        estimator: Name of a KL estimator.
        kl_coef: Coefficient of the KL penalty.

    Raises:
        ValueError: If a column is missing.
    """
    if batch.rewards is None:
        raise ValueError("token rewards need batch.rewards")
    rows = TokenRows.of(batch)
    last = last_sampled(rows)
    rewards = torch.zeros(rows.mask.numel(), dtype=batch.rewards.dtype, device=last.device)
    # a row without sampled tokens has no token to place its reward on
    rewards[last[last >= 0]] = batch.rewards[last >= 0]
    if batch.step_rewards is not None:
        rewards = rewards + torch.where(rows.mask, batch.step_rewards.to(rewards.dtype), 0.0)
    if kl_coef:
        if batch.old_logprobs is None or batch.ref_logprobs is None:
            raise ValueError("a KL penalty in the reward needs old_logprobs and ref_logprobs")
        kl = KL_ESTIMATORS[estimator](batch.old_logprobs, batch.ref_logprobs)
        # Not kl * mask: an infinite estimate outside the mask would become NaN.
        sampled_kl = torch.where(rows.mask, kl, torch.zeros_like(kl))
        rewards = rewards - kl_coef * sampled_kl.to(rewards.dtype)
    return rewards
