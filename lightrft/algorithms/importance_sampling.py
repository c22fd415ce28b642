"""Correct for the mismatch between the sampler and the trainer, with one weight per token.

``IS_CORRECTIONS[name](logprobs, old, behavior, advantages, rows, **options) -> weights [N]``. The
weights multiply the policy loss. A token of weight 0 stays in the denominator of the loss.

Args:
    logprobs: ``[N]``, without gradient. Log-probs of the current policy.
    old: ``[N]``. Log-probs in the denominator of the ratio.
    behavior: ``[N]``. Log-probs of the sampler.
    advantages: ``[N]``.
    rows: Whole responses, never a part of one.

A correction that compares ``old`` with ``behavior`` is registered with ``needs=["old",
"behavior"]``. A correction whose weights depend on other responses of the mini-batch adds
``"batch"`` and ``"current"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.token_ops import LIMIT, TokenRows, clamp_log_ratio
from lightrft.config.base import ComponentConfig
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Correction = Callable[..., Tensor]
IS_CORRECTIONS: Registry[Correction] = Registry("correction")

Level = Literal["token", "sequence", "geometric"]
LEVELS: dict[str, Callable[[Tensor, TokenRows], Tensor]] = {
    "token": lambda gap, rows: gap,
    "sequence": lambda gap, rows: rows.spread(rows.sum(gap)),
    "geometric": lambda gap, rows: rows.spread(rows.mean(gap)),
}


def weight_of(old: Tensor, behavior: Tensor, rows: TokenRows, level: Level) -> Tensor:
    """Return ``exp(old - behavior)``, ``[N]``, per token or aggregated over the response.

    Args:
        old: ``[N]``. Log-probs of the old policy.
        behavior: ``[N]``. Log-probs of the sampler.
        rows: The rows of the batch.
        level: ``token``, or for the whole response ``sequence`` (product of the token weights) or
            ``geometric`` (their geometric mean).
    """
    return torch.exp(clamp_log_ratio(LEVELS[level](old - behavior, rows)))


def inside(weight: Tensor, low: float, high: float) -> Tensor:
    """Return ``low <= weight <= high`` as bool ``[N]``.

    Args:
        weight: ``[N]``.
        low: Smallest weight inside.
        high: Largest weight inside.
    """
    return (weight >= low) & (weight <= high)


@IS_CORRECTIONS.register(
    "importance",
    formula="w_t = exp( logp_old - logp_sampler )",
    latex=r"w_t=\pi_{old}/\mu",
    paper="decoupled PPO: arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, eq. 5",
    needs=["old", "behavior"],
)
def importance(
    logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: TokenRows
) -> Tensor:
    """Weight each token by its unbounded importance ratio (decoupled PPO).

    The loss clips around the old policy; the weight corrects for the sampler.
    """
    return weight_of(old, behavior, rows, "token")


@IS_CORRECTIONS.register(
    "tis",
    formula="w = clip( pi_old / pi_sampler, low, high ), of a token, or its product or geometric "
    "mean over the response (level)",
    latex=r"w=\operatorname{clip}\!\big(\pi_{old}/\mu,\ a,\ C\big)",
    paper="truncated importance sampling: IMPALA, arXiv 1802.01561, eq. 1; Yao et al. 2025, Your "
    "efficient RL framework secretly brings you off-policy training",
    needs=["old", "behavior"],
)
def tis(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Truncate the importance weights to ``[low, high]``.

    Args:
        level: Unit of the weight: a token, or the product or geometric mean over a response.
        low: Smallest weight.
        high: Largest weight.
    """
    return weight_of(old, behavior, rows, level).clamp(low, high)


@IS_CORRECTIONS.register(
    "icepop",
    formula="w_t = exp( logp_old - logp_sampler ) where low <= w_t <= high, else 0",
    latex=r"w_t=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le\tfrac{\pi_{old}}{\mu}\le b\big]",
    paper="IcePop: Ring-1T, arXiv 2510.18855, section 3.2",
    needs=["old", "behavior"],
)
def icepop(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """Weight each token by its importance ratio and mask tokens outside ``[low, high]``.

    Masked tokens get weight 0; they are not truncated.

    Args:
        low: Smallest weight that is kept.
        high: Largest weight that is kept.
    """
    return mis(logprobs, old, behavior, advantages, rows, level="token", low=low, high=high)


@IS_CORRECTIONS.register(
    "mis",
    formula="w = pi_old / pi_sampler where low <= w <= high, else 0; of a token, or its product or "
    "geometric mean (level)",
    latex=r"w=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le\tfrac{\pi_{old}}{\mu}\le C\big]",
    paper="masked importance sampling: Liu et al. 2025, When speed kills stability",
    needs=["old", "behavior"],
)
def mis(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    level: Level = "sequence",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weight by the importance ratio and mask weights outside ``[low, high]``.

    Args:
        level: Unit of the weight: a token, or the product or geometric mean over a response.
        low: Smallest weight that is kept.
        high: Largest weight that is kept.
    """
    weight = weight_of(old, behavior, rows, level)
    return torch.where(inside(weight, low, high), weight, torch.zeros_like(weight))


@IS_CORRECTIONS.register(
    "sequence_mask",
    formula="w_t = exp( logp_old - logp_sampler ) in responses with low <= w(level) <= high, else 0; "
    "at most cap if that is set",
    latex=r"w_t=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le w_i\le b\big],\quad w_i=\Big(\prod_t\pi_{old}/\mu\Big)^{1/l_i}",
    paper="sequence-masked importance sampling, as frameworks compute it: token weights of kept "
    "responses have no bound",
    needs=["old", "behavior"],
)
def sequence_mask(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    level: Level = "geometric",
    low: float = 0.99,
    high: float = 1.01,
    cap: float | None = None,
) -> Tensor:
    """Weight the tokens of a response if the response's weight is inside ``[low, high]``.

    Tokens of other responses get weight 0.

    Args:
        level: Unit of the weight that decides.
        low: Smallest weight of a kept response.
        high: Largest weight of a kept response.
        cap: Largest token weight. ``None`` leaves token weights unbounded.
    """
    token = weight_of(old, behavior, rows, "token")
    token = token if cap is None else token.clamp(max=cap)
    kept = inside(weight_of(old, behavior, rows, level), low, high)
    return torch.where(kept, token, torch.zeros_like(token))


@IS_CORRECTIONS.register(
    "sequence_reject",
    formula="w_t = 1 in responses with low <= w(level) <= high, else 0",
    latex=r"w_t=\mathbb 1\big[a\le w_i\le b\big],\quad w_i=\Big(\prod_t\pi_{old}/\mu\Big)^{1/l_i}",
    paper="geometric rejection: Liu et al. 2025, When speed kills stability",
    needs=["old", "behavior"],
)
def sequence_reject(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    level: Level = "geometric",
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    """Drop responses whose weight is outside ``[low, high]``; kept tokens have weight 1.

    Args:
        level: Unit of the weight that decides.
        low: Smallest weight of a kept response.
        high: Largest weight of a kept response.
    """
    return inside(weight_of(old, behavior, rows, level), low, high).to(old.dtype)


@IS_CORRECTIONS.register(
    "tis_normalized",
    formula="w = v / mean v,  v = clip( pi_old / pi_sampler, low, high ), of a token, or its product "
    "or geometric mean over the response (level); the mean is over the tokens of the "
    "mini-batch, or over its responses",
    latex=r"w=\frac{v}{\operatorname{mean}_{batch}v},\quad "
    r"v=\operatorname{clip}\!\big(\pi_{old}/\mu,\ a,\ C\big)",
    paper="self-normalised importance sampling, Owen 2013, Monte Carlo theory, section 9.2; as "
    "verl's rollout_is_batch_normalize",
    needs=["old", "behavior", "batch", "current"],
)
def tis_normalized(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Truncate the importance weights and normalize them to mean 1.

    Truncation therefore does not make the steps smaller. If the mean is 0, the weights are not
    divided.

    Args:
        level: Unit of the weight: a token, or the product or geometric mean over a response.
        low: Smallest weight before normalization.
        high: Largest weight before normalization.
    """
    weight = weight_of(old, behavior, rows, level).clamp(low, high)
    if level == "token":
        total = torch.where(rows.mask, weight, torch.zeros_like(weight)).sum()
        count = rows.mask.sum()
    else:
        # Every token of a response has the response's weight, so the mean of the row is the weight.
        total = rows.mean(weight).sum()
        count = (rows.count() > 0).sum()
    mean = total / count.clamp(min=1)
    # clamped too, since where() computes both of its arguments
    return torch.where(mean > 1e-8, weight / mean.clamp(min=1e-8), weight)


def row_maximum(x: Tensor, rows: TokenRows) -> Tensor:
    """Return the largest ``x [N]`` over the counted tokens of each row, ``[B]``.

    ``x`` must not be negative. A row without counted tokens gets 0.
    """
    counted = torch.where(rows.mask, x, torch.zeros_like(x))
    # the initial 0 is the result of a row without tokens
    return x.new_zeros(len(rows)).scatter_reduce(0, rows.row_of, counted, "amax")


DIVERGENCE_LEVELS: dict[str, Callable[[Tensor, TokenRows], Tensor]] = {
    "token": lambda far, rows: far,
    "sum": lambda far, rows: rows.spread(rows.sum(far)),
    "mean": lambda far, rows: rows.spread(rows.mean(far)),
    "max": lambda far, rows: rows.spread(row_maximum(far, rows)),
}


@IS_CORRECTIONS.register(
    "divergence_reject",
    formula="w_t = 1 where D <= limit, else 0;  D = k2 or k3 of d_t = logp_sampler - logp_old "
    "(estimator), of a token, or its sum, mean or maximum over the response (level)",
    latex=r"w_t=\mathbb 1[D\le\delta],\quad "
    r"D\in\big\{k_t,\ \textstyle\sum_tk_t,\ \tfrac1{l_i}\sum_tk_t,\ \max_tk_t\big\},\quad "
    r"k_t\in\{\tfrac12d_t^2,\ e^{-d_t}-1+d_t\},\ d_t=\log\mu-\log\pi_{old}",
    paper="Liu et al. 2025, When speed kills stability; estimators: Schulman 2020; as verl's "
    "rollout_rs",
    needs=["old", "behavior"],
)
def divergence_reject(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    limit: float,
    estimator: Literal["k2", "k3"] = "k3",
    level: Literal["token", "sum", "mean", "max"] = "token",
) -> Tensor:
    """Drop tokens or responses by an estimate of KL(sampler, old policy).

    Kept tokens have weight 1. Dropped tokens stay in the denominator of the loss.

    Args:
        limit: Largest divergence that is kept, in nats.
        estimator: ``k2`` or ``k3``.
        level: Unit of the divergence: a token, or the sum, mean or maximum over a response.
    """
    # the tokens come from the sampler, so this estimates KL(sampler, old policy)
    far = KL_ESTIMATORS[estimator](behavior, old)
    return (DIVERGENCE_LEVELS[level](far, rows) <= limit).to(old.dtype)


@IS_CORRECTIONS.register(
    "opsm",
    formula="w_t = 0 where A_t < 0 and mean_t( logp_sampler - logp ) > delta, else 1",
    latex=r"w_t=1-\mathbb 1\Big[\hat A_t<0\ \wedge\ \frac1{l_i}\sum_t\log\frac{\mu}{\pi_\theta}>\delta\Big]",
    paper="off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556, section 3.1",
    needs=["behavior"],
)
def opsm(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    *,
    delta: float,
) -> Tensor:
    """Drop off-policy responses with negative advantage.

    Args:
        delta: Largest mean log-ratio of sampler to policy that is kept, in nats per token.
    """
    # against the current policy: the mask follows the policy from one optimizer step to the next
    far = rows.spread(rows.mean(behavior - logprobs)) > delta
    return (~(far & (advantages < 0))).to(logprobs.dtype)


def correction_weights(
    parts: Sequence[ComponentConfig],
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: TokenRows,
) -> Tensor:
    """Return the product of the weights of all corrections, ``[N]``.

    The product is capped at ``exp(LIMIT)``, so that it stays finite in float32 when multiplied by
    any ratio.

    Args:
        parts: The corrections with their options.
        logprobs: ``[N]``. Log-probs of the current policy.
        old: ``[N]``. Log-probs in the denominator of the ratio.
        behavior: ``[N]``. Log-probs of the sampler.
        advantages: ``[N]``.
        rows: The rows of the batch.
    """
    weights = torch.ones_like(logprobs)
    for part in parts:
        correction = IS_CORRECTIONS[part.name]
        weights = weights * correction(logprobs, old, behavior, advantages, rows, **part.options)
    return weights.clamp(max=math.exp(LIMIT))


def compares_whole_batch(parts: Sequence[ComponentConfig]) -> bool:
    """Return whether a weight depends on other responses of the mini-batch.

    If so, a micro-batch alone cannot compute it.
    """
    return any("batch" in IS_CORRECTIONS.about(part.name).needs for part in parts)


def version_share(versions: Tensor, proximal: int, current: int) -> Tensor:
    """Return the relative position of version ``proximal`` between sampling and now, ``[N]``.

    The result is 0 if ``proximal`` is the version that sampled the token and 1 if it is
    ``current``. It is clamped to [0, 1], and 0 for a token of the current version.

    Args:
        versions: ``[N]``. Policy version that sampled each token.
        proximal: Version of the proximal policy.
        current: Version of the current policy.
    """
    # a token of the current version is at distance 0, which cannot divide
    way = (current - versions).clamp(min=1).double()
    return ((proximal - versions).double() / way).clamp(0, 1)


def interpolated_proximal(
    logprobs: Tensor, behavior: Tensor, versions: Tensor, proximal: int, current: int
) -> Tensor:
    """Approximate the log-probs of the proximal policy without a forward pass, ``[N]``.

    The result has no gradient: ``logp_sampler + alpha (logp - logp_sampler)``, with alpha from
    ``version_share`` (AReaL, proximal log-probability approximation).

    Args:
        logprobs: ``[N]``. Log-probs of the current policy.
        behavior: ``[N]``. Log-probs of the sampler.
        versions: ``[N]``. Policy version that sampled each token.
        proximal: Version of the proximal policy.
        current: Version of the current policy.
    """
    share = version_share(versions, proximal, current).to(logprobs.dtype)
    return behavior + share * (logprobs.detach() - behavior)
