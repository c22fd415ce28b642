"""Losses of pairs that add a term, a weight or another input to DPO.

``registry`` explains the symbols in the formulas.
"""

from __future__ import annotations

from typing import Literal

from lightrft.algorithms.preference.inputs import Pairs
from lightrft.algorithms.preference.registry import (
    PREFERENCE_LOSSES,
    log_sigmoid,
)
from lightrft.algorithms.token_ops import require_column
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import DataError
from lightrft.utils.lazy_imports import Tensor, torch

SMALLEST_BETA = 1e-3
"""Smallest ``beta`` of ``beta_dpo``, as in the authors' code."""


@PREFERENCE_LOSSES.register(
    "dpop",
    formula="L = -log s(b (d - lam max(0, -d_w)))",
    latex=r"L=-\log\sigma\Big(\beta\big(d-\lambda\max(0,-d_w)\big)\Big)",
    paper="DPO-Positive, arXiv 2402.13228",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def dpop(data: Pairs, settings: PreferenceConfig, *, lam: float = 50.0) -> Tensor:
    """Penalise a chosen response that becomes less likely than under the reference.

    Args:
        lam: Factor of the penalty; 0 is DPO.
    """
    penalty = torch.relu(-data.chosen.log_ratio)
    return -log_sigmoid(settings.beta * (data.log_ratio - lam * penalty))


@PREFERENCE_LOSSES.register(
    "beta_dpo",
    formula="L_i = -w_i log s(b' d_i),  b' = b (1 + alpha (sum_i w_i M_i / P - M_0)), w_i = P g_i "
    "/ sum_j g_j, g_i = exp(-(M_i - M_0)^2 / (2 sigma^2)), M = b d or d",
    latex=r"L_i=-w_i\log\sigma(\beta'd_i),\quad "
    r"\beta'=\beta\Big(1+\alpha\big(\tfrac1P\textstyle\sum_iw_iM_i-M_0\big)\Big),\ "
    r"w_i\propto\exp\Big(-\frac{(M_i-M_0)^2}{2\sigma^2}\Big)",
    paper="beta-DPO, arXiv 2407.08639; the filter keeps pairs with a probability in proportion to "
    "g, for which w stands here",
    needs=["reference", "whole_batch", "margin_stats"],
    reads=["beta"],
    kind="pair",
)
def beta_dpo(
    data: Pairs,
    settings: PreferenceConfig,
    *,
    alpha: float = 0.6,
    margin: Literal["reward", "log_ratio"] = "reward",
    filtered: bool = True,
) -> Tensor:
    """Set ``beta`` of a batch by its margins, and weigh pairs with an unusual margin less.

    ``beta`` and the weights carry no gradient. ``beta`` is at least 0.001.

    Args:
        alpha: Change of ``beta`` per unit of margin; 0 keeps it fixed.
        margin: Unit of margins and of their running mean: the ``reward`` ``b d`` as in the paper,
            or the ``log_ratio`` ``d`` as in the authors' code.
        filtered: Weigh pairs by the likelihood of their margin; otherwise all alike.
    """
    gap = data.log_ratio
    margins = gap.detach() * (settings.beta if margin == "reward" else 1)
    typical = require_column(data.margin_mean).detach()
    weights = torch.ones_like(margins)
    if filtered:
        # the weights of equal margins are 1, however small their deviation is
        spread = require_column(data.margin_std).detach().clamp(min=1e-6)
        # softmax: every likelihood may underflow, and their ratios must not
        likelihood = torch.softmax(-((margins - typical) / spread).square() / 2, dim=0)
        weights = likelihood * len(margins)
    batch_margin = (weights * margins).sum() / max(1, len(margins))
    beta = settings.beta * (1 + alpha * (batch_margin - typical))
    return -weights * log_sigmoid(beta.clamp(min=SMALLEST_BETA) * gap)


@PREFERENCE_LOSSES.register(
    "tdpo",
    formula="L = -log s(b (d - (K_l - K_w))),  K: sum over tokens of KL(reference, policy)",
    latex=r"L=-\log\sigma\big(\beta(d-(K_l-K_w))\big),\quad "
    r"K=\textstyle\sum_t D_{KL}(\pi_{ref}\Vert\pi_\theta)",
    paper="TDPO1, arXiv 2404.11999",
    needs=["reference", "sequence_kl"],
    reads=["beta"],
    kind="pair",
)
def tdpo(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Take the gap of token-level KLs off the margin, with gradient through both."""
    chosen = require_column(data.chosen.sequence_kl)
    rejected = require_column(data.rejected.sequence_kl)
    return -log_sigmoid(settings.beta * (data.log_ratio - (rejected - chosen)))


@PREFERENCE_LOSSES.register(
    "tdpo2",
    formula="L = -log s(b (d - alpha (K_l - sg(K_w)))),  K: sum over tokens of KL(reference, "
    "policy)",
    latex=r"L=-\log\sigma\big(\beta(d-\alpha(K_l-\operatorname{sg}(K_w)))\big),\quad "
    r"K=\textstyle\sum_t D_{KL}(\pi_{ref}\Vert\pi_\theta)",
    paper="TDPO2, arXiv 2404.11999",
    needs=["reference", "sequence_kl"],
    reads=["beta"],
    kind="pair",
)
def tdpo2(data: Pairs, settings: PreferenceConfig, *, alpha: float = 0.5) -> Tensor:
    """Take part of the gap of token-level KLs off the margin, with gradient through one KL.

    Args:
        alpha: Factor of the gap; 0 is DPO.
    """
    chosen = require_column(data.chosen.sequence_kl).detach()
    rejected = require_column(data.rejected.sequence_kl)
    return -log_sigmoid(settings.beta * (data.log_ratio - alpha * (rejected - chosen)))


@PREFERENCE_LOSSES.register(
    "cal_dpo",
    formula="L = -log s(d) + weight ((d_w - 1 / (2 b))^2 + (d_l + 1 / (2 b))^2)",
    latex=r"L=-\log\sigma(d)+w\Big(\big(d_w-\tfrac1{2\beta}\big)^2"
    r"+\big(d_l+\tfrac1{2\beta}\big)^2\Big)",
    paper="Cal-DPO, arXiv 2412.14516; the authors' code has a weight of 0.5",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def cal_dpo(data: Pairs, settings: PreferenceConfig, *, weight: float = 1.0) -> Tensor:
    """Calibrate the scale of the implicit rewards by two squares.

    Args:
        weight: Factor of the squares.
    """
    target = 1 / (2 * settings.beta)
    calibration = (data.chosen.log_ratio - target).square()
    calibration = calibration + (data.rejected.log_ratio + target).square()
    return -log_sigmoid(data.log_ratio) + weight * calibration


@PREFERENCE_LOSSES.register(
    "r_dpo",
    formula="L = -log s(b d + alpha (n_w - n_l))",
    latex=r"L=-\log\sigma\big(\beta d+\alpha(n_w-n_l)\big)",
    paper="R-DPO, arXiv 2403.19159",
    needs=["reference", "tokens"],
    reads=["beta"],
    kind="pair",
)
def r_dpo(data: Pairs, settings: PreferenceConfig, *, alpha: float) -> Tensor:
    """Explain part of a preference by length, so that the policy learns less from it.

    Args:
        alpha: Logits per token of difference.
    """
    longer = data.chosen.tokens - data.rejected.tokens
    return -log_sigmoid(settings.beta * data.log_ratio + alpha * longer)


@PREFERENCE_LOSSES.register(
    "odpo",
    formula="L = -log s(b d - alpha log(margin)); with scale: linear, margin in place of its "
    "logarithm",
    latex=r"L=-\log\sigma\big(\beta d-\alpha\log m\big)",
    paper="ODPO, arXiv 2402.10571",
    needs=["reference", "margin"],
    reads=["beta"],
    kind="pair",
)
def odpo(
    data: Pairs,
    settings: PreferenceConfig,
    *,
    alpha: float = 1.0,
    scale: Literal["log", "linear"] = "log",
) -> Tensor:
    """Ask for a larger implicit reward margin where the chosen response is much better.

    Args:
        alpha: Factor of the offset; 0 is DPO.
        scale: Offset by the logarithm of the margin, or by the margin. ``log`` needs positive
            margins.
    """
    margin = require_column(data.margin)
    if scale == "log":
        if not bool((margin > 0).all()):
            smallest = float(margin.min())
            raise DataError(
                f"preference loss odpo takes the logarithm of margins, and one is {smallest:g}; "
                "drop pairs without a positive margin, or set options.scale: linear"
            )
        margin = torch.log(margin)
    return -log_sigmoid(settings.beta * data.log_ratio - alpha * margin)


@PREFERENCE_LOSSES.register(
    "mdpo",
    formula="L = -log s(b (d_w - d_l)) - log s(b (d_w - d_c)) - log s(b d_w - anchor),  c: chosen "
    "response after corrupted media",
    latex=r"L=-\log\sigma\big(\beta(d_w-d_l)\big)-\log\sigma\big(\beta(d_w-d_c)\big)"
    r"-\log\sigma(\beta d_w-\delta)",
    paper="mDPO, arXiv 2406.11839",
    needs=["reference", "corrupted"],
    reads=["beta"],
    kind="pair",
)
def mdpo(data: Pairs, settings: PreferenceConfig, *, anchor: float = 0.0) -> Tensor:
    """Prefer the chosen response also to itself after corrupted media, and keep it likely.

    Args:
        anchor: Implicit reward that the chosen response should exceed.
    """
    if data.corrupted is None:
        raise ValueError("the pairs have no corrupted media, which loss mdpo reads")
    chosen = settings.beta * data.chosen.log_ratio
    conditional = chosen - settings.beta * data.corrupted.log_ratio
    return (
        -log_sigmoid(settings.beta * data.log_ratio)
        - log_sigmoid(conditional)
        - log_sigmoid(chosen - anchor)
    )
