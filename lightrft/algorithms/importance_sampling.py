"""How far the sampler and the trainer are apart, as a weight on each token's policy loss.

``CORRECTIONS[name](logprobs [N], old [N], behavior [N], advantages [N], rows, **options) -> weights [N]``. All inputs are without
gradient: ``logprobs`` of the policy now, ``old`` the ratio's denominator, ``behavior`` of the sampler. Rows are whole. One that
weighs ``old`` against ``behavior`` says so with ``needs=["old", "behavior"]``. One whose weights depend on the other responses of the
mini-batch says so with ``"batch"`` and ``"current"``. A token of weight 0 stays in the denominator of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from lightrft.algorithms.kl import KL_ESTIMATORS
from lightrft.algorithms.token_ops import LIMIT, Rows, bounded
from lightrft.config.base import Part
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Correction = Callable[..., Tensor]
CORRECTIONS: Registry[Correction] = Registry("correction")

Level = Literal["token", "sequence", "geometric"]
LEVELS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "token": lambda gap, rows: gap,
    "sequence": lambda gap, rows: rows.spread(rows.sum(gap)),
    "geometric": lambda gap, rows: rows.spread(rows.mean(gap)),
}


def weight_of(old: Tensor, behavior: Tensor, rows: Rows, level: Level) -> Tensor:
    """``[N]``: ``exp(old - behavior)`` of each token, or its product (``sequence``) or geometric mean over the response."""
    return torch.exp(bounded(LEVELS[level](old - behavior, rows)))


def inside(weight: Tensor, low: float, high: float) -> Tensor:
    """``[N]`` bool: ``low <= weight <= high``."""
    return (weight >= low) & (weight <= high)


@CORRECTIONS.register(
    "importance",
    formula="w_t = exp( logp_old - logp_sampler )",
    latex=r"w_t=\pi_{old}/\mu",
    paper="decoupled PPO: arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, eq. 5",
    needs=["old", "behavior"],
)
def importance(logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows) -> Tensor:
    """Token weights without a bound: clipped around the old policy, weighed for the sampler."""
    return weight_of(old, behavior, rows, "token")


@CORRECTIONS.register(
    "tis",
    formula="w = clip( pi_old / pi_sampler, low, high ), of a token, or its product or geometric mean over the response (level)",
    latex=r"w=\operatorname{clip}\!\big(\pi_{old}/\mu,\ a,\ C\big)",
    paper="truncated importance sampling: IMPALA, arXiv 1802.01561, eq. 1; Yao et al. 2025, Your efficient RL framework secretly "
    "brings you off-policy training",
    needs=["old", "behavior"],
)
def tis(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: Rows,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weights, truncated."""
    return weight_of(old, behavior, rows, level).clamp(low, high)


@CORRECTIONS.register(
    "icepop",
    formula="w_t = exp( logp_old - logp_sampler ) where low <= w_t <= high, else 0",
    latex=r"w_t=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le\tfrac{\pi_{old}}{\mu}\le b\big]",
    paper="IcePop: Ring-1T, arXiv 2510.18855, section 3.2",
    needs=["old", "behavior"],
)
def icepop(
    logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Token weights; a token outside the bounds is left out, not truncated."""
    return mis(logprobs, old, behavior, advantages, rows, level="token", low=low, high=high)


@CORRECTIONS.register(
    "mis",
    formula="w = pi_old / pi_sampler where low <= w <= high, else 0; of a token, or its product or geometric mean (level)",
    latex=r"w=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le\tfrac{\pi_{old}}{\mu}\le C\big]",
    paper="masked importance sampling: Liu et al. 2025, When speed kills stability",
    needs=["old", "behavior"],
)
def mis(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: Rows,
    *,
    level: Level = "sequence",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weights; what is outside the bounds is left out."""
    weight = weight_of(old, behavior, rows, level)
    return torch.where(inside(weight, low, high), weight, torch.zeros_like(weight))


@CORRECTIONS.register(
    "sequence_mask",
    formula="w_t = exp( logp_old - logp_sampler ) in responses with low <= w(level) <= high, else 0; at most cap if that is set",
    latex=r"w_t=\frac{\pi_{old}}{\mu}\,\mathbb 1\big[a\le w_i\le b\big],\quad w_i=\Big(\prod_t\pi_{old}/\mu\Big)^{1/l_i}",
    paper="sequence-masked importance sampling, as frameworks compute it: token weights of kept responses have no bound",
    needs=["old", "behavior"],
)
def sequence_mask(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: Rows,
    *,
    level: Level = "geometric",
    low: float = 0.99,
    high: float = 1.01,
    cap: float | None = None,
) -> Tensor:
    """Token weights of the responses that are kept."""
    token = weight_of(old, behavior, rows, "token")
    token = token if cap is None else token.clamp(max=cap)
    return torch.where(inside(weight_of(old, behavior, rows, level), low, high), token, torch.zeros_like(token))


@CORRECTIONS.register(
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
    rows: Rows,
    *,
    level: Level = "geometric",
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    """Responses are kept or dropped, never weighed."""
    return inside(weight_of(old, behavior, rows, level), low, high).to(old.dtype)


@CORRECTIONS.register(
    "tis_normalized",
    formula="w = v / mean v,  v = clip( pi_old / pi_sampler, low, high ), of a token, or its product or geometric mean over the response "
    "(level); the mean is over the tokens of the mini-batch, or over its responses",
    latex=r"w=\frac{v}{\operatorname{mean}_{batch}v},\quad v=\operatorname{clip}\!\big(\pi_{old}/\mu,\ a,\ C\big)",
    paper="self-normalised importance sampling, Owen 2013, Monte Carlo theory, section 9.2; as verl's rollout_is_batch_normalize",
    needs=["old", "behavior", "batch", "current"],
)
def tis_normalized(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: Rows,
    *,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Truncated weights with mean 1, so that truncation does not make steps smaller. A mean of 0 divides by nothing."""
    weight = weight_of(old, behavior, rows, level).clamp(low, high)
    if level == "token":
        total, count = torch.where(rows.mask, weight, torch.zeros_like(weight)).sum(), rows.mask.sum()
    else:
        total, count = rows.mean(weight).sum(), (rows.count() > 0).sum()  # a row's weight is the same at each of its tokens
    mean = total / count.clamp(min=1)
    return torch.where(mean > 1e-8, weight / mean.clamp(min=1e-8), weight)


def row_maximum(x: Tensor, rows: Rows) -> Tensor:
    """``[N]`` to ``[B]``: the largest ``x`` at a row's tokens that count; ``x`` is not negative, and a row without any has 0."""
    return x.new_zeros(len(rows)).scatter_reduce(0, rows.row_of, torch.where(rows.mask, x, torch.zeros_like(x)), "amax")


DIVERGENCE_LEVELS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "token": lambda far, rows: far,
    "sum": lambda far, rows: rows.spread(rows.sum(far)),
    "mean": lambda far, rows: rows.spread(rows.mean(far)),
    "max": lambda far, rows: rows.spread(row_maximum(far, rows)),
}


@CORRECTIONS.register(
    "divergence_reject",
    formula="w_t = 1 where D <= limit, else 0;  D = k2 or k3 of d_t = logp_sampler - logp_old (estimator), of a token, or its sum, mean or "
    "maximum over the response (level)",
    latex=r"w_t=\mathbb 1[D\le\delta],\quad D\in\big\{k_t,\ \textstyle\sum_tk_t,\ \tfrac1{l_i}\sum_tk_t,\ \max_tk_t\big\},\quad"
    r"k_t\in\{\tfrac12d_t^2,\ e^{-d_t}-1+d_t\},\ d_t=\log\mu-\log\pi_{old}",
    paper="Liu et al. 2025, When speed kills stability; estimators: Schulman 2020; as verl's rollout_rs",
    needs=["old", "behavior"],
)
def divergence_reject(
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    rows: Rows,
    *,
    limit: float,
    estimator: Literal["k2", "k3"] = "k3",
    level: Literal["token", "sum", "mean", "max"] = "token",
) -> Tensor:
    """Tokens or responses are kept or dropped by an estimate of KL(sampler, old policy), never weighed. Dropped tokens stay in the
    denominator of the loss."""
    far = KL_ESTIMATORS[estimator](behavior, old)
    return (DIVERGENCE_LEVELS[level](far, rows) <= limit).to(old.dtype)


@CORRECTIONS.register(
    "opsm",
    formula="w_t = 0 where A_t < 0 and mean_t( logp_sampler - logp ) > delta, else 1",
    latex=r"w_t=1-\mathbb 1\Big[\hat A_t<0\ \wedge\ \frac1{l_i}\sum_t\log\frac{\mu}{\pi_\theta}>\delta\Big]",
    paper="off-policy sequence masking: DeepSeek-V3.2, arXiv 2512.02556, section 3.1",
    needs=["behavior"],
)
def opsm(logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows, *, delta: float) -> Tensor:
    """Responses to move away from are dropped once the policy has left the sampler by more than ``delta`` nats a token."""
    far = rows.spread(rows.mean(behavior - logprobs)) > delta
    return (~(far & (advantages < 0))).to(logprobs.dtype)


def correction_weights(
    parts: Sequence[Part], logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor, rows: Rows
) -> Tensor:
    """``[N]``: the product of every part's weights, which is a number in float32 times any ratio."""
    weights = torch.ones_like(logprobs)
    for part in parts:
        weights = weights * CORRECTIONS[part.name](logprobs, old, behavior, advantages, rows, **part.options)
    return weights.clamp(max=math.exp(LIMIT))


def compares_whole_batch(parts: Sequence[Part]) -> bool:
    """Return whether a weight depends on the other responses of the mini-batch, so that no micro-batch may compute it alone."""
    return any("batch" in CORRECTIONS.about(part.name).needs for part in parts)


def version_share(versions: Tensor, proximal: int, current: int) -> Tensor:
    """``[N]``: how far along the way from the version that drew a token to ``current`` the version ``proximal`` lies, in [0, 1];
    0 for a token of the current version."""
    way = (current - versions).clamp(min=1).double()
    return ((proximal - versions).double() / way).clamp(0, 1)


def interpolated_proximal(logprobs: Tensor, behavior: Tensor, versions: Tensor, proximal: int, current: int) -> Tensor:
    """``[N]``, without gradient: ``logp_sampler + alpha (logp - logp_sampler)``, alpha = ``version_share``: the proximal policy's
    log-probs without a forward of it (AReaL, proximal log-probability approximation)."""
    share = version_share(versions, proximal, current).to(logprobs.dtype)
    return behavior + share * (logprobs.detach() - behavior)
