"""Compute the policy loss of each token: one function and one equation per loss.

``POLICY_LOSSES[name](logprobs, old, advantages, rows, settings, **options) -> (losses, stats)``.
Losses are minimized.

Args:
    logprobs: ``[N]``. Log-probs of the current policy, with gradient.
    old: ``[N]``. Log-probs of the old policy, without gradient.
    advantages: ``[N]``.
    rows: The rows of the micro-batch.
    settings: ``algorithm.loss``, of which ``reads`` names the fields in use.

Returns:
    The losses ``[N]``, and statistics ``[N]`` by name. The mean of each statistic over the trained
    tokens is logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightrft.algorithms.token_ops import LIMIT, TokenRows, clamp_log_ratio, ratio_of
from lightrft.config.algorithm import LossConfig
from lightrft.config.presets import preset_hint
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Stats = dict[str, Tensor]
PolicyLoss = Callable[..., tuple[Tensor, Stats]]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss", preset_hint)
ROUNDING = 1e-4
"""Relative difference of two weights that comes from rounding of log-probs alone."""


def sequence_ratio(logprobs: Tensor, old: Tensor, rows: TokenRows) -> Tensor:
    """Return the geometric mean of a row's token ratios at each of its tokens, ``[N]``.

    See GSPO, arXiv 2507.18071, eq. 7.

    Args:
        logprobs: ``[N]``. Log-probs of the current policy.
        old: ``[N]``. Log-probs of the old policy.
        rows: The rows of the batch.
    """
    return rows.spread(torch.exp(clamp_log_ratio(rows.mean(logprobs - old))))


def sequence_token_ratio(logprobs: Tensor, old: Tensor, rows: TokenRows) -> Tensor:
    """Return the sequence ratio in value, with the gradient of the token ratio, ``[N]``.

    See GSPO-token, arXiv 2507.18071, eq. 14.

    Args:
        logprobs: ``[N]``. Log-probs of the current policy.
        old: ``[N]``. Log-probs of the old policy.
        rows: The rows of the batch.
    """
    # the second factor is 1, and has the gradient of the token's log-prob
    return sequence_ratio(logprobs.detach(), old, rows) * torch.exp(logprobs - logprobs.detach())


def by_sign(up: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return ``yes`` where ``up`` is true and ``no`` elsewhere, ``[N]``, in the dtype of ``like``.

    ``torch.where`` of two Python numbers would round them to float32.

    Args:
        up: ``[N]`` bool.
        yes: Value where ``up`` is true.
        no: Value elsewhere.
        like: Gives dtype and device.
    """
    return torch.where(up, like.new_tensor(yes), like.new_tensor(no))


RATIOS: dict[str, Callable[[Tensor, Tensor, TokenRows], Tensor]] = {
    "token": lambda logprobs, old, rows: ratio_of(logprobs, old),
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
"""``RATIOS[ratio](logprobs, old, rows) -> pi / pi_old``, ``[N]``, by the setting ``loss.ratio``."""


@POLICY_LOSSES.register(
    "ppo_clip",
    formula="L_t = -min( min(rho_t, ratio_cap) A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t ),  "
    "rho_t = exp(logp - logp_old)",
    latex=r"L_{i,t}=-\min\!\big(\rho_t\hat A_t,\ "
    r"\operatorname{clip}(\rho_t,1-\epsilon_l,1+\epsilon_h)\hat A_t\big),\quad "
    r"\rho_t=\pi_\theta/\pi_{old}",
    paper="PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: arXiv "
    "1912.09729, eq. 7",
    needs=["old"],
    reads=["ratio", "clip_low", "clip_high", "dual_clip", "ratio_cap"],
)
def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Compute the clipped surrogate of PPO.

    With ``dual_clip``, the loss of a negative advantage is at most ``dual_clip`` times its size.
    """
    ratio = RATIOS[settings.ratio](logprobs, old, rows)
    capped = ratio if settings.ratio_cap is None else ratio.clamp(max=settings.ratio_cap)
    plain = -capped * advantages
    clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    # the maximum of losses is the minimum of objectives
    losses = torch.maximum(plain, clipped)
    held = clipped > plain
    if settings.dual_clip is not None:
        ceiling = -settings.dual_clip * advantages
        above = (advantages < 0) & (losses > ceiling)
        losses = torch.where(above, ceiling, losses)
        held = held | above
    return losses, {"clip_fraction": held.to(logprobs.dtype), "ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "reinforce",
    formula="L_t = -A_t logp",
    latex=r"L_{i,t}=-\hat A_t\log\pi_\theta",
    paper="REINFORCE, Williams 1992, Machine Learning 8, section 5",
)
def reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Compute the plain policy gradient, without a ratio.

    It is unbiased only for the policy that sampled.
    """
    # the ratio is reported, not used: it shows how far off policy the samples are
    return -advantages * logprobs, {"ratio": ratio_of(logprobs.detach(), old)}


@POLICY_LOSSES.register(
    "importance",
    formula="L_t = -rho_t A_t,  rho_t = exp(logp - logp_old)",
    latex=r"L_{i,t}=-\rho_t\hat A_t,\quad\rho_t=\pi_\theta/\pi_{old}",
    paper="conservative policy iteration, arXiv 1707.06347, eq. 6",
    needs=["old"],
    reads=["ratio"],
)
def importance(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Weight the policy gradient by the ratio, without keeping the ratio near 1."""
    ratio = RATIOS[settings.ratio](logprobs, old, rows)
    return -ratio * advantages, {"ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "gmpo",
    formula="L_t = -A_t exp( mean_t z_t ),  z_t = a min( a d_t, a clip(d_t, -clip_low, clip_high) "
    "),  d_t = logp - logp_old, a = sign A_t",
    latex=r"L_{i,t}=-\hat A_t\exp\!\Big(\frac1{l_i}\sum_t z_t\Big),\quad z_t=a\min\!\big(a\,d_t,\ "
    r"a\operatorname{clip}(d_t,-\epsilon_l,\epsilon_h)\big),\ d_t=\log\rho_t,\ "
    r"a=\operatorname{sign}\hat A_t",
    paper="GMPO, arXiv 2507.20673, eq. 4; bounds in log space",
    needs=["old"],
    reads=["clip_low", "clip_high"],
)
def gmpo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Compute the geometric mean of clipped token ratios.

    Each token carries the gradient of its own ratio. This equals the gradient of the mean if the
    advantage is constant over the response. A token mask can therefore mask a token without
    affecting the others.
    """
    gap = logprobs - old
    sign = advantages.sign()
    clipped = gap.clamp(-settings.clip_low, settings.clip_high)
    held_back = sign * torch.minimum(sign * gap, sign * clipped)
    # detached: the factor below brings the gradient, token by token
    level = rows.spread(torch.exp(clamp_log_ratio(rows.mean(held_back.detach()))))
    held = (held_back != gap) & (sign != 0)
    losses = -advantages * level * torch.exp(held_back - held_back.detach())
    return losses, {"clip_fraction": held.to(logprobs.dtype), "ratio": level}


@POLICY_LOSSES.register(
    "cispo",
    formula="L_t = -sg( clip(rho_t, 1 - clip_low, 1 + clip_high) ) A_t logp,  rho_t = exp(logp - "
    "logp_old)",
    latex=r"L_{i,t}=-\operatorname{sg}\!\big(\operatorname{clip}(\rho_t,1-\epsilon_l,1+\epsilon_h)\big)\hat A_t\log\pi_\theta",
    paper="CISPO: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5",
    needs=["old"],
    reads=["clip_low", "clip_high"],
)
def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Clip the weight on both sides, so that every token keeps its gradient."""
    # detached: a weight is a constant, and the gradient is that of the log-prob
    ratio = ratio_of(logprobs.detach(), old)
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    clipped = (weight != ratio).to(logprobs.dtype)
    return -weight * advantages * logprobs, {"clip_fraction": clipped, "ratio": ratio}


@POLICY_LOSSES.register(
    "cispo_cap",
    formula="L_t = -sg( min(rho_t, cap) ) A_t logp,  rho_t = exp(logp - logp_old)",
    latex=r"L_{i,t}=-\operatorname{sg}\!\big(\min(\rho_t,c)\big)\hat A_t\log\pi_\theta",
    paper="CISPO as in ScaleRL, arXiv 2510.13786, section 3.2: bounded from above alone, by the "
    "number itself",
    needs=["old"],
)
def cispo_cap(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    cap: float = 5.0,
) -> tuple[Tensor, Stats]:
    """Clip the weight from above only, so that every token keeps its gradient.

    Args:
        cap: Largest ratio; not a distance from 1.
    """
    ratio = ratio_of(logprobs.detach(), old)
    weight = ratio.clamp(max=cap)
    return -weight * advantages * logprobs, {
        "clip_fraction": (weight != ratio).to(logprobs.dtype),
        "ratio": ratio,
    }


@POLICY_LOSSES.register(
    "cpgd",
    formula="L_t = -min( d_t A_t, clip(d_t, log(1 - clip_low), log(1 + clip_high)) A_t ),  d_t = "
    "logp - logp_old",
    latex=r"L_{i,t}=-\min\!\big(\log\rho_t\,\hat A_t,\ "
    r"\operatorname{clip}(\log\rho_t,\log(1-\epsilon_l),\log(1+\epsilon_h))\,\hat A_t\big)",
    paper="CPGD, arXiv 2505.12504, section 4; its policy drift is algorithm.policy_drift",
    needs=["old"],
    reads=["clip_low", "clip_high"],
)
def cpgd(
    logprobs: Tensor, old: Tensor, advantages: Tensor, rows: TokenRows, settings: LossConfig
) -> tuple[Tensor, Stats]:
    """Compute the clipped surrogate on the log-ratio.

    A large ratio therefore does not scale the gradient.
    """
    gap = logprobs - old
    # from clip_low = 1 on, no ratio is too small
    low = math.log(1 - settings.clip_low) if settings.clip_low < 1 else -math.inf
    plain = -gap * advantages
    clipped = -gap.clamp(low, math.log(1 + settings.clip_high)) * advantages
    held = (clipped > plain).to(logprobs.dtype)
    return torch.maximum(plain, clipped), {
        "clip_fraction": held,
        "ratio": ratio_of(logprobs.detach(), old),
    }


@POLICY_LOSSES.register(
    "sapo",
    formula="L_t = -A_t (4 / tau) sigmoid( tau (rho_t - 1) ),  tau = tau_pos where A_t > 0, else "
    "tau_neg",
    latex=r"L_{i,t}=-\hat A_t\,\frac4\tau\,\sigma\!\big(\tau(\rho_t-1)\big),\quad\tau=\tau_{pos}\ (\hat A_t>0)\ \text{or}\ \tau_{neg}",
    paper="SAPO, arXiv 2511.20347, eq. 5 and 6",
    needs=["old"],
)
def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, Stats]:
    """Gate the ratio by a sigmoid instead of a clip.

    At ratio 1 the gradient is the plain policy gradient; it decays on both sides.

    Args:
        tau_pos: Temperature of the gate for positive advantages.
        tau_neg: Temperature of the gate for other advantages.
    """
    ratio = ratio_of(logprobs, old)
    tau = by_sign(advantages > 0, tau_pos, tau_neg, ratio)
    # a sigmoid has slope 1 / 4 at 0: by 4 / tau, the slope at ratio 1 is 1
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1)), {"ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "vespo",
    formula="L_t = -sg( phi(w) ) A_t logp,  phi(w) = w^k exp(lam - lam w),  w = exp( sum_t (logp - "
    "logp_old) ); (k, lam) = (k_pos, lam_pos) where A_t >= 0, else (k_neg, lam_neg)",
    latex=r"L_{i,t}=-\operatorname{sg}\!\big(w^k e^{\lambda-\lambda w}\big)\hat A_t\log\pi_\theta,\quad "
    r"w=\prod_t\pi_\theta/\pi_{old}",
    paper="VESPO, arXiv 2602.10693",
    needs=["old"],
)
def vespo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> tuple[Tensor, Stats]:
    """Weight each response by a kernel of its sequence ratio, not normalized by length.

    The kernel is 1 at ``w = 1`` and decays on both sides.

    Args:
        k_pos: Exponent for advantages of 0 or above.
        lam_pos: Decay rate for advantages of 0 or above.
        k_neg: Exponent for negative advantages.
        lam_neg: Decay rate for negative advantages.
    """
    gap = rows.spread(rows.sum(logprobs.detach() - old))
    up = advantages >= 0
    k, lam = by_sign(up, k_pos, k_neg, gap), by_sign(up, lam_pos, lam_neg, gap)
    # bounded from above alone: far below 0 the exponential is 0 without overflow
    weight = torch.exp((lam + k * gap - lam * torch.exp(clamp_log_ratio(gap))).clamp(max=LIMIT))
    return -weight * advantages * logprobs, {
        "weight": weight,
        "ratio": ratio_of(logprobs.detach(), old),
    }


@POLICY_LOSSES.register(
    "dppo",
    formula="L_t = -rho_t A_t; 0 where A_t > 0 and exp(logp) - exp(logp_old) > high, or A_t < 0 and "
    "it is < -low",
    latex=r"L_{i,t}=-M_t\,\rho_t\hat A_t,\quad M_t=0\text{ where }\hat A_t>0,\ "
    r"\pi_\theta-\pi_{old}>\delta_h\ \text{or}\ \hat A_t<0,\ \pi_\theta-\pi_{old}<-\delta_l",
    paper="DPPO, binary total variation, arXiv 2602.04879; its old policy is the sampler",
    needs=["old"],
)
def dppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    low: float = 0.15,
    high: float = 0.15,
) -> tuple[Tensor, Stats]:
    """Mask tokens outside a trust region in probability, not in ratio.

    Rare tokens may change by a larger ratio than frequent ones.

    Args:
        low: Largest decrease of the probability at negative advantages.
        high: Largest increase of the probability at positive advantages.
    """
    ratio = ratio_of(logprobs, old)
    # detached: the mask is a decision, not a part of the loss
    moved = torch.exp(logprobs.detach()) - torch.exp(old)
    held = ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))
    losses = torch.where(held, torch.zeros_like(ratio), -ratio * advantages)
    return losses, {"clip_fraction": held.to(logprobs.dtype), "ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "dppo_kl",
    formula="L_t = -rho_t A_t; 0 where A_t > 0, pi > pi_old and D_t > high, or A_t < 0, pi < pi_old "
    "and D_t > low;  D_t = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - "
    "pi))",
    latex=r"L_{i,t}=-M_t\,\rho_t\hat A_t,\quad "
    r"D_t=\pi_{old}\log\tfrac{\pi_{old}}{\pi_\theta}+(1-\pi_{old})"
    r"\log\tfrac{1-\pi_{old}}{1-\pi_\theta},\quad "
    r"M_t=0\text{ where }D_t>\delta\text{ and }\pi_\theta\text{ moved along }\hat A_t",
    paper="DPPO, binary KL, arXiv 2602.04879; its old policy is the sampler",
    needs=["old"],
)
def dppo_kl(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    low: float = 0.05,
    high: float = 0.05,
) -> tuple[Tensor, Stats]:
    """Mask tokens outside a trust region of the binary KL between old and new policy.

    It compares two Bernoulli distributions: the sampled token against any other token.

    Args:
        low: Largest KL at negative advantages, in nats.
        high: Largest KL at positive advantages, in nats.
    """
    ratio = ratio_of(logprobs, old)
    now = logprobs.detach()
    p = torch.exp(old)
    q = torch.exp(now)
    # 1 - p, exact where p is close to 1. A log-prob may round to above 0, hence the clamp.
    other_p = -torch.expm1(old).clamp(max=0)
    other_q = -torch.expm1(now).clamp(max=0)
    far = p * (old - now) + torch.xlogy(other_p, other_p) - torch.xlogy(other_p, other_q)
    held_above = (advantages > 0) & (q > p) & (far > high)
    held_below = (advantages < 0) & (q < p) & (far > low)
    held = held_above | held_below
    losses = torch.where(held, torch.zeros_like(ratio), -ratio * advantages)
    return losses, {"clip_fraction": held.to(logprobs.dtype), "ratio": ratio.detach()}


@POLICY_LOSSES.register(
    "topr",
    formula="L_t = -sg( clip(w, a, b) ) A_t logp,  w = exp( sum_t (logp - logp_old) ); "
    "(a, b) = (pos_low, pos_high) where A_t >= 0, else (neg_low, neg_high)",
    latex=r"L_{i,t}=-\operatorname{sg}\!\big(\operatorname{clip}(w,a^\pm,b^\pm)\big)\hat A_t\log\pi_\theta,\quad "
    r"w=\prod_t\pi_\theta/\pi_{old}",
    paper="TOPR, arXiv 2503.14286, eq. 8; its old policy is the sampler",
    needs=["old"],
)
def topr(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    rows: TokenRows,
    settings: LossConfig,
    *,
    pos_low: float = 1.0,
    pos_high: float = 1.0,
    neg_low: float = 0.0,
    neg_high: float = 1.0,
) -> tuple[Tensor, Stats]:
    """Imitate good responses at full weight, and weight bad ones by their truncated ratio.

    Args:
        pos_low: Smallest weight at advantages of 0 or above.
        pos_high: Largest weight at advantages of 0 or above.
        neg_low: Smallest weight at negative advantages.
        neg_high: Largest weight at negative advantages.
    """
    weight = rows.spread(torch.exp(clamp_log_ratio(rows.sum(logprobs.detach() - old))))
    up = advantages >= 0
    low, high = by_sign(up, pos_low, neg_low, weight), by_sign(up, pos_high, neg_high, weight)
    held = torch.minimum(torch.maximum(weight, low), high)
    # A weight of constant size is not clipped, and rounding around a bound clips nothing.
    clipped = (low < high) & ((held - weight).abs() > ROUNDING * weight)
    stats = {
        "clip_fraction": clipped.to(logprobs.dtype),
        "weight": held,
        "ratio": ratio_of(logprobs.detach(), old),
    }
    return -held * advantages * logprobs, stats


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error of the critic, ``[N]``.

    With a clip, it is the larger one of the plain and the clipped error, as in the PPO authors'
    code.

    Args:
        values: ``[N]``. New values, with gradient.
        old: ``[N]``. Values before the update.
        returns: ``[N]``. Targets.
        clip: Largest change of a value. ``None`` disables clipping.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        # the larger one, so that clipping never makes an error look smaller
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2
