"""Losses of pairs from the two log-ratios of policy to reference.

``registry`` explains the symbols in the formulas.
"""

from __future__ import annotations

import math

from lightrft.algorithms.preference.inputs import Pairs
from lightrft.algorithms.preference.registry import (
    PREFERENCE_LOSSES,
    log_sigmoid,
    logistic,
    mean_score_gap,
    require_range,
    score_gap,
)
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import Tensor, torch


@PREFERENCE_LOSSES.register(
    "sigmoid",
    formula="L = -(1 - e) log s(b (f_w - f_l)) - e log s(-b (f_w - f_l)),  f = f(d)",
    latex=r"L=-(1-\epsilon)\log\sigma\big(\beta(f_w-f_l)\big)"
    r"-\epsilon\log\sigma\big(-\beta(f_w-f_l)\big)",
    paper="DPO, arXiv 2305.18290, eq. 7; smoothed labels: cDPO, Mitchell 2023, eq. 3; f: arXiv "
    "2309.16240",
    needs=["reference"],
    reads=["beta", "label_smoothing", "f_divergence"],
    kind="pair",
)
def sigmoid(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compute the logistic loss of DPO; with ``label_smoothing``, that of conservative DPO."""
    return logistic(settings.beta * score_gap(data, settings), settings)


@PREFERENCE_LOSSES.register(
    "sigmoid_norm",
    formula="L = -(1 - e) log s(z) - e log s(-z),  z = b (f_w / n_w - f_l / n_l)",
    latex=r"L=-(1-\epsilon)\log\sigma(z)-\epsilon\log\sigma(-z),\quad "
    r"z=\beta\Big(\frac{f_w}{n_w}-\frac{f_l}{n_l}\Big)",
    paper="length-normalised DPO: SimPO, arXiv 2405.14734, appendix; Tulu 3, arXiv 2411.15124",
    needs=["reference", "tokens"],
    reads=["beta", "label_smoothing", "f_divergence"],
    kind="pair",
)
def sigmoid_norm(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compute the loss of DPO on means over tokens instead of sums."""
    return logistic(settings.beta * mean_score_gap(data, settings), settings)


@PREFERENCE_LOSSES.register(
    "robust",
    formula="L = (-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e),  z = b (f_w - f_l)",
    latex=r"L=\frac{-(1-\epsilon)\log\sigma(z)+\epsilon\log\sigma(-z)}{1-2\epsilon},\quad "
    r"z=\beta(f_w-f_l)",
    paper="rDPO, arXiv 2403.00409",
    needs=["reference"],
    reads=["beta", "label_smoothing", "f_divergence"],
    kind="pair",
)
def robust(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Estimate the loss of DPO without bias if a share ``label_smoothing`` of labels is wrong."""
    e = settings.label_smoothing
    if e >= 0.5:
        raise ConfigError(
            f"preference.label_smoothing = {e}: loss 'robust' divides by 1 - 2 label_smoothing; "
            "take less than 0.5"
        )
    z = settings.beta * score_gap(data, settings)
    return (-(1 - e) * log_sigmoid(z) + e * log_sigmoid(-z)) / (1 - 2 * e)


@PREFERENCE_LOSSES.register(
    "hinge",
    formula="L = max(0, 1 - b (f_w - f_l))",
    latex=r"L=\max\big(0,\ 1-\beta(f_w-f_l)\big)",
    paper="SLiC-HF, arXiv 2305.10425, section 2; on the log-ratio: RSO, arXiv 2309.06657",
    needs=["reference"],
    reads=["beta", "f_divergence"],
    kind="pair",
)
def hinge(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compute the hinge loss of the implicit reward margin."""
    return torch.relu(1 - settings.beta * score_gap(data, settings))


@PREFERENCE_LOSSES.register(
    "ipo",
    formula="L = (f_w / n_w - f_l / n_l - 1 / (2 b))^2",
    latex=r"L=\Big(\frac{f_w}{n_w}-\frac{f_l}{n_l}-\frac1{2\beta}\Big)^2",
    paper="IPO, arXiv 2310.12036, eq. 17; means over tokens as in the authors' experiments",
    needs=["reference", "tokens"],
    reads=["beta", "f_divergence"],
    kind="pair",
)
def ipo(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Regress the gap of mean log-ratios to ``1 / (2 beta)``."""
    return (mean_score_gap(data, settings) - 1 / (2 * settings.beta)).square()


@PREFERENCE_LOSSES.register(
    "ipo_sum",
    formula="L = (f_w - f_l - 1 / (2 b))^2",
    latex=r"L=\Big(f_w-f_l-\frac1{2\beta}\Big)^2",
    paper="IPO, arXiv 2310.12036, eq. 17 as printed",
    needs=["reference"],
    reads=["beta", "f_divergence"],
    kind="pair",
)
def ipo_sum(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Regress the gap of summed log-ratios to ``1 / (2 beta)``."""
    return (score_gap(data, settings) - 1 / (2 * settings.beta)).square()


@PREFERENCE_LOSSES.register(
    "exo",
    formula="L = s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e),  z = b (f_w - f_l)",
    latex=r"L=\sigma(z)\log\frac{\sigma(z)}{1-\epsilon}+\sigma(-z)\log\frac{\sigma(-z)}{\epsilon},"
    r"\quad z=\beta(f_w-f_l)",
    paper="EXO-pref, arXiv 2402.00856, eq. 16",
    needs=["reference"],
    reads=["beta", "label_smoothing", "f_divergence"],
    kind="pair",
)
def exo(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compute the reverse KL from the policy's preference to the smoothed labels."""
    e = settings.label_smoothing
    if e == 0:
        raise ConfigError(
            "preference.label_smoothing = 0: loss 'exo' takes its logarithm; take a small share, "
            "e.g. 0.001"
        )
    z = settings.beta * score_gap(data, settings)
    right = torch.sigmoid(z) * (log_sigmoid(z) - math.log1p(-e))
    wrong = torch.sigmoid(-z) * (log_sigmoid(-z) - math.log(e))
    return right + wrong


@PREFERENCE_LOSSES.register(
    "nca",
    formula="L = -log s(b d_w) - log s(-b d_w) / 2 - log s(-b d_l) / 2",
    latex=r"L=-\log\sigma(\beta d_w)-\tfrac12\log\sigma(-\beta d_w)-\tfrac12\log\sigma(-\beta d_l)",
    paper="NCA, arXiv 2402.05369, with two responses",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def nca(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Contrast each implicit reward with 0, so that the chosen response stays likely."""
    chosen = settings.beta * data.chosen.log_ratio
    rejected = settings.beta * data.rejected.log_ratio
    return -log_sigmoid(chosen) - (log_sigmoid(-chosen) + log_sigmoid(-rejected)) / 2


@PREFERENCE_LOSSES.register(
    "bco_pair",
    formula="L = -log s(b d_w - shift) - log s(-(b d_l - shift)),  shift: running mean of b d",
    latex=r"L=-\log\sigma(\beta d_w-\delta)-\log\sigma\big(-(\beta d_l-\delta)\big)",
    paper="BCO, arXiv 2404.04656, on pairs",
    needs=["reference", "shift"],
    reads=["beta"],
    kind="pair",
)
def bco_pair(data: Pairs, settings: PreferenceConfig, *, shifted: bool = True) -> Tensor:
    """Classify each response by its implicit reward.

    Args:
        shifted: Compare the reward with its running mean; otherwise with 0, as TRL does.
    """
    chosen = settings.beta * data.chosen.log_ratio
    rejected = settings.beta * data.rejected.log_ratio
    if shifted and data.shift is not None:
        shift = data.shift.detach()
        return -log_sigmoid(chosen - shift) - log_sigmoid(shift - rejected)
    return -log_sigmoid(chosen) - log_sigmoid(-rejected)


@PREFERENCE_LOSSES.register(
    "sppo_hard",
    formula="L = (d_w - 1 / (2 b))^2 + (d_l + 1 / (2 b))^2",
    latex=r"L=\Big(d_w-\frac1{2\beta}\Big)^2+\Big(d_l+\frac1{2\beta}\Big)^2",
    paper="SPPO, arXiv 2405.00675, eq. 4.7 with winning probabilities of 1 and 0",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def sppo_hard(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Regress each log-ratio to its own target, of opposite signs."""
    target = 1 / (2 * settings.beta)
    return (data.chosen.log_ratio - target).square() + (data.rejected.log_ratio + target).square()


@PREFERENCE_LOSSES.register(
    "aot",
    formula="L_(i) = -(1 - e) log s(b z_(i)) - e log s(-b z_(i)),  z_(i) = (p_w - p_l)_(i) - "
    "(r_w - r_l)_(i), each sorted over the batch",
    latex=r"L_{(i)}=-(1-\epsilon)\log\sigma(\beta z_{(i)})"
    r"-\epsilon\log\sigma(-\beta z_{(i)}),\quad "
    r"z_{(i)}=(p_w-p_l)_{(i)}-(r_w-r_l)_{(i)}",
    paper="AOT, arXiv 2406.05882, paired",
    needs=["reference", "whole_batch"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def aot(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compare the policy's margins with the reference's as distributions over the batch.

    The losses are those of quantiles, in ascending order, not those of pairs.
    """
    policy = data.chosen.logprobs - data.rejected.logprobs
    reference = data.chosen.ref_logprobs - data.rejected.ref_logprobs
    return logistic(settings.beta * (policy.sort().values - reference.sort().values), settings)


@PREFERENCE_LOSSES.register(
    "aot_unpaired",
    formula="L_(i) = -(1 - e) log s(b z_(i)) - e log s(-b z_(i)),  z_(i) = (d_w)_(i) - (d_l)_(i), "
    "each sorted over the batch",
    latex=r"L_{(i)}=-(1-\epsilon)\log\sigma(\beta z_{(i)})"
    r"-\epsilon\log\sigma(-\beta z_{(i)}),\quad "
    r"z_{(i)}=(d_w)_{(i)}-(d_l)_{(i)}",
    paper="AOT, arXiv 2406.05882, unpaired",
    needs=["reference", "whole_batch"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def aot_unpaired(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Compare chosen log-ratios with rejected ones as distributions over the batch.

    The losses are those of quantiles, in ascending order, not those of pairs.
    """
    chosen, rejected = data.chosen.log_ratio, data.rejected.log_ratio
    return logistic(settings.beta * (chosen.sort().values - rejected.sort().values), settings)


@PREFERENCE_LOSSES.register(
    "apo_zero",
    formula="L = 1 - s(b d_w) + s(b d_l)",
    latex=r"L=1-\sigma(\beta d_w)+\sigma(\beta d_l)",
    paper="APO-zero, arXiv 2408.06266, eq. 7",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def apo_zero(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Raise the chosen response and lower the rejected one.

    It suits chosen responses that are better than the model's own.
    """
    # 1 - s(x) as s(-x), which keeps its digits where s(x) rounds to 1
    chosen = torch.sigmoid(-settings.beta * data.chosen.log_ratio)
    return chosen + torch.sigmoid(settings.beta * data.rejected.log_ratio)


@PREFERENCE_LOSSES.register(
    "apo_down",
    formula="L = s(b d_w) + 1 - s(b (d_w - d_l))",
    latex=r"L=\sigma(\beta d_w)+1-\sigma\big(\beta(d_w-d_l)\big)",
    paper="APO-down, arXiv 2408.06266, eq. 8",
    needs=["reference"],
    reads=["beta"],
    kind="pair",
)
def apo_down(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Lower both responses, the rejected one more.

    It suits chosen responses that are worse than the model's own.
    """
    chosen = torch.sigmoid(settings.beta * data.chosen.log_ratio)
    return chosen + torch.sigmoid(-settings.beta * data.log_ratio)


@PREFERENCE_LOSSES.register(
    "discopop",
    formula="L = -(1 - m) log s(z) + m exp(-z),  z = b (f_w - f_l), m = s(z / tau)",
    latex=r"L=-(1-m)\log\sigma(z)+m\,e^{-z},\quad z=\beta(f_w-f_l),\ m=\sigma(z/\tau)",
    paper="DiscoPOP, arXiv 2406.08414, eq. 5",
    needs=["reference"],
    reads=["beta", "f_divergence"],
    kind="pair",
)
def discopop(data: Pairs, settings: PreferenceConfig, *, tau: float = 0.05) -> Tensor:
    """Blend the logistic and the exponential loss by the margin.

    Args:
        tau: Temperature of the blend, above 0 and at most 1.
    """
    require_range("discopop", "tau", tau, 0 < tau <= 1, "above 0 and at most 1")
    z = settings.beta * score_gap(data, settings)
    # One exponent, never above 0 for tau <= 1: exp(-z) alone overflows where m is 0.
    exponential = torch.exp(log_sigmoid(z / tau) - z)
    return -torch.sigmoid(-z / tau) * log_sigmoid(z) + exponential
