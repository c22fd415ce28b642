"""Losses of pairs from the policy's log-probs alone, and likelihood terms.

``registry`` explains the symbols in the formulas.
"""

from __future__ import annotations

from typing import Literal

from lightrft.algorithms.preference.inputs import Pairs, Responses
from lightrft.algorithms.preference.registry import (
    PREFERENCE_LOSSES,
    log_sigmoid,
    logistic,
    negative_log_likelihood,
)
from lightrft.algorithms.token_ops import clamp_log_ratio
from lightrft.config.preference.sections import PreferenceConfig, PreferenceLossConfig
from lightrft.utils.lazy_imports import Tensor, torch

NEAREST_TO_0 = 1e-12
"""Smallest distance from 0 of a mean log-prob in odds, which are infinite at a probability of 1."""


@PREFERENCE_LOSSES.register(
    "simpo",
    formula="L = -(1 - e) log s(z) - e log s(-z),  z = b (p_w / n_w - p_l / n_l) - gamma",
    latex=r"L=-(1-\epsilon)\log\sigma(z)-\epsilon\log\sigma(-z),\quad "
    r"z=\beta\Big(\frac{p_w}{n_w}-\frac{p_l}{n_l}\Big)-\gamma",
    paper="SimPO, arXiv 2405.14734, eq. 6",
    needs=["tokens"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def simpo(data: Pairs, settings: PreferenceConfig, *, gamma: float = 0.5) -> Tensor:
    """Compare mean log-probs, with a target margin.

    Args:
        gamma: Target margin of the rewards. The authors suggest half of ``beta`` to start from.
    """
    return logistic(settings.beta * _mean_gap(data) - gamma, settings)


@PREFERENCE_LOSSES.register(
    "alphapo",
    formula="L = -(1 - e) log s(z) - e log s(-z),  z = b (u_w - u_l) - gamma,  u = (1 - exp(-alpha "
    "p / n)) / alpha",
    latex=r"L=-(1-\epsilon)\log\sigma(z)-\epsilon\log\sigma(-z),\quad z=\beta(u_w-u_l)-\gamma,\ "
    r"u=\frac{1-e^{-\alpha p/n}}{\alpha}",
    paper="AlphaPO, arXiv 2501.03884",
    needs=["tokens"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def alphapo(
    data: Pairs, settings: PreferenceConfig, *, alpha: float = 0.25, gamma: float = 0.5
) -> Tensor:
    """Compare powers of the mean probability of a token instead of logarithms.

    Args:
        alpha: Power; 0 is SimPO. Positive values weigh unlikely responses more.
        gamma: Target margin of the rewards.
    """

    def reward(responses: Responses) -> Tensor:
        mean = responses.mean(responses.logprobs)
        # expm1: 1 - exp(x) would lose every digit at a small alpha
        return mean if alpha == 0 else -torch.expm1(clamp_log_ratio(-alpha * mean)) / alpha

    gap = reward(data.chosen) - reward(data.rejected)
    return logistic(settings.beta * gap - gamma, settings)


@PREFERENCE_LOSSES.register(
    "cpo",
    formula="L = C(b (p_w - p_l)) - alpha p_w / n_w,  C: sigmoid, hinge, or the square of ipo on "
    "means over tokens",
    latex=r"L=C\big(\beta(p_w-p_l)\big)-\alpha\frac{p_w}{n_w}",
    paper="CPO, arXiv 2401.08417, section 3, which prints the sum p_w; the authors' code takes "
    "the mean",
    needs=["tokens"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def cpo(
    data: Pairs,
    settings: PreferenceConfig,
    *,
    form: Literal["sigmoid", "hinge", "ipo"] = "sigmoid",
    alpha: float = 1.0,
    nll: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compare log-probs as DPO with a uniform reference, and keep the chosen response likely.

    Args:
        form: Loss of the gap of log-probs. ``ipo`` takes means over tokens.
        alpha: Factor of the negative log-likelihood; 0 leaves it out. For the mean over all
            tokens of the batch, take 0 and add the loss ``sft``.
        nll: Take the mean or the sum of the likelihood over the tokens of a response.
    """
    contrast = _contrast(data, settings, form)
    return contrast + alpha * negative_log_likelihood(data.chosen, nll)


@PREFERENCE_LOSSES.register(
    "orpo",
    formula="L = -alpha a_w - b log s(o_w - o_l),  a = p / n, o = a - log(1 - exp(a))",
    latex=r"L=-\alpha a_w-\beta\log\sigma(o_w-o_l),\quad a=\frac pn,\ o=\log\frac{e^a}{1-e^a}",
    paper="ORPO, arXiv 2403.07691, eq. 6 and 7",
    needs=["tokens"],
    reads=["beta"],
    kind="pair",
)
def orpo(data: Pairs, settings: PreferenceConfig, *, alpha: float = 1.0) -> Tensor:
    """Compare the odds of both responses, and keep the chosen one likely.

    Args:
        alpha: Factor of the negative log-likelihood; 0 leaves it out. For the mean over all
            tokens of the batch, take 0 and add the loss ``sft``.
    """
    chosen = _log_odds(data.chosen.mean(data.chosen.logprobs))
    rejected = _log_odds(data.rejected.mean(data.rejected.logprobs))
    odds_ratio = -settings.beta * log_sigmoid(chosen - rejected)
    return odds_ratio + alpha * negative_log_likelihood(data.chosen, "mean")


@PREFERENCE_LOSSES.register(
    "tpo",
    formula="L = C(b (p_w - p_l)) - alpha p_g / n_g,  C: sigmoid, hinge, ipo on means over tokens, "
    "or sigmoid on means over tokens less gamma",
    latex=r"L=C\big(\beta(p_w-p_l)\big)-\alpha\frac{p_g}{n_g}",
    paper="TPO and TPO-L, arXiv 2405.16681, section 3, which prints the sum p_g",
    needs=["gold", "tokens"],
    reads=["beta", "label_smoothing"],
    kind="pair",
)
def tpo(
    data: Pairs,
    settings: PreferenceConfig,
    *,
    form: Literal["sigmoid", "hinge", "ipo", "length_normalized"] = "sigmoid",
    gamma: float = 0.5,
    alpha: float = 1.0,
    nll: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compare log-probs of a pair, and keep a third, better response likely.

    Args:
        form: Loss of the gap of log-probs. ``ipo`` and ``length_normalized`` (TPO-L) take means
            over tokens.
        gamma: Target margin of ``length_normalized``. No other form reads it.
        alpha: Factor of the negative log-likelihood; 0 leaves it out. For the mean over all
            tokens of the batch, take 0 and add the loss ``sft_gold``.
        nll: Take the mean or the sum of the likelihood over the tokens of a response.
    """
    if form == "length_normalized":
        contrast = logistic(settings.beta * _mean_gap(data) - gamma, settings)
    else:
        contrast = _contrast(data, settings, form)
    return contrast + alpha * negative_log_likelihood(_gold(data), nll)


@PREFERENCE_LOSSES.register(
    "sft",
    formula="L = -p_w; the batch divides by its n_w, or each loss by its own",
    latex=r"L=-p_w",
    paper="maximum likelihood; in MPO, arXiv 2411.10442, and Iterative RPO, arXiv 2404.19733",
    needs=["tokens"],
    kind="pair",
)
def sft(
    data: Pairs, settings: PreferenceConfig, *, per: Literal["token", "response"] = "token"
) -> Tensor:
    """Compute the negative log-likelihood of the chosen response.

    Args:
        per: ``token`` returns sums, which the batch divides by its number of chosen tokens.
            ``response`` returns means over tokens, which the batch divides by its number of pairs.
    """
    return negative_log_likelihood(data.chosen, "sum" if per == "token" else "mean")


@PREFERENCE_LOSSES.register(
    "sft_gold",
    formula="L = -p_g; the batch divides by its n_g, or each loss by its own",
    latex=r"L=-p_g",
    paper="maximum likelihood; in TPO, arXiv 2405.16681",
    needs=["gold", "tokens"],
    kind="pair",
)
def sft_gold(
    data: Pairs, settings: PreferenceConfig, *, per: Literal["token", "response"] = "token"
) -> Tensor:
    """Compute the negative log-likelihood of the gold response.

    Args:
        per: ``token`` returns sums, which the batch divides by its number of gold tokens.
            ``response`` returns means over tokens, which the batch divides by its number of pairs.
    """
    return negative_log_likelihood(_gold(data), "sum" if per == "token" else "mean")


def compares_means(part: PreferenceLossConfig) -> bool:
    """Return whether a loss without a reference compares means over tokens, and not sums."""
    is_mean_form = part.options.get("form") in ("ipo", "length_normalized")
    return is_mean_form or part.name in ("simpo", "alphapo", "orpo")


def _mean_gap(data: Pairs) -> Tensor:
    """Return ``p_w / n_w - p_l / n_l``, ``[P]``."""
    chosen, rejected = data.chosen, data.rejected
    return chosen.mean(chosen.logprobs) - rejected.mean(rejected.logprobs)


def _contrast(
    data: Pairs, settings: PreferenceConfig, form: Literal["sigmoid", "hinge", "ipo"]
) -> Tensor:
    """Return the loss of the gap of log-probs, ``[P]``."""
    if form == "ipo":
        return (_mean_gap(data) - 1 / (2 * settings.beta)).square()
    z = settings.beta * (data.chosen.logprobs - data.rejected.logprobs)
    return torch.relu(1 - z) if form == "hinge" else logistic(z, settings)


def _log_odds(mean: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of ``p = exp(mean)``, with the gradient at the bound beyond it.

    ``expm1`` keeps the digits of ``1 - p`` near ``p = 1``.
    """
    held = mean + (mean.clamp(max=-NEAREST_TO_0) - mean).detach()
    return held - torch.log(-torch.expm1(held))


def _gold(data: Pairs) -> Responses:
    """Return the gold responses.

    Raises:
        ValueError: If the pairs have none.
    """
    if data.gold is None:
        raise ValueError("the pairs have no gold response, which this loss reads")
    return data.gold
