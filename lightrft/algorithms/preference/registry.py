"""The table of preference losses, and the terms that several of them share.

``PREFERENCE_LOSSES[name](data, settings, **options) -> losses``. Losses are minimized. There is one
loss per pair, labelled response or group of ranked responses. ``kind`` of a row tells which.

Import ``PREFERENCE_LOSSES`` from ``lightrft.algorithms.preference.losses``, which fills it.

Symbols in the formulas, for chosen (w) and rejected (l) responses:

* ``p``: sum of the policy's log-probs, ``r``: sum of the reference's, ``n``: number of tokens
* ``d_w = p_w - r_w``, ``d_l = p_l - r_l``, ``d = d_w - d_l``
* ``s``: the logistic function, ``b``: ``beta``, ``e``: ``label_smoothing``
* ``f``: the score of a log-ratio under ``f_divergence``, the log-ratio itself by default
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from lightrft.algorithms.preference.inputs import Pairs, Responses
from lightrft.algorithms.token_ops import clamp_log_ratio
from lightrft.config.preference.sections import FDivergenceConfig, PreferenceConfig
from lightrft.utils.errors import ConfigError
from lightrft.utils.lazy_imports import Tensor, torch
from lightrft.utils.registry import Registry

Kind = Literal["pair", "labelled", "ranked"]
PreferenceLoss = Callable[..., Tensor]
PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry("preference loss")


def log_sigmoid(x: Tensor) -> Tensor:
    """Return ``log s(x)`` without overflow."""
    return torch.nn.functional.logsigmoid(x)


def logistic(x: Tensor, settings: PreferenceConfig) -> Tensor:
    """Return ``-(1 - e) log s(x) - e log s(-x)``: the logistic loss of smoothed labels.

    Args:
        x: ``[P]``. Logits that the chosen response is better.
        settings: Gives ``label_smoothing``.
    """
    return smoothed_logistic(x, settings.label_smoothing)


def smoothed_logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """Return ``-(1 - e) log s(x) - e log s(-x)`` for the share ``e`` of wrong labels."""
    e = label_smoothing
    if e == 0:
        return -log_sigmoid(x)
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def f_score(log_ratio: Tensor, divergence: FDivergenceConfig) -> Tensor:
    """Return the derivative of the divergence's generator at a ratio, less that at a ratio of 1.

    See f-DPO, arXiv 2309.16240, table 1. The score is 0 where policy and reference agree. Exponents
    are clamped to 40 nats, which keeps the square of a score finite in float32; the gradient beyond
    is that at the bound.

    Args:
        log_ratio: Log-ratio of policy to reference.
        divergence: The setting ``f_divergence``.
    """
    # A constant cancels in a difference of sums, but not in one of means over unequal lengths.
    if divergence.kind == "forward_kl":
        return -torch.expm1(clamp_log_ratio(-log_ratio))
    if divergence.kind == "js":
        return math.log(2) + log_sigmoid(log_ratio)
    if divergence.kind == "alpha" and divergence.alpha != 1:
        power = divergence.alpha - 1
        return torch.expm1(clamp_log_ratio(power * log_ratio)) / power
    # alpha = 1 is the limit, the reverse KL
    return log_ratio


def score_gap(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Return ``f(d_w) - f(d_l)``, ``[P]``."""
    divergence = settings.f_divergence
    chosen = f_score(data.chosen.log_ratio, divergence)
    return chosen - f_score(data.rejected.log_ratio, divergence)


def mean_score_gap(data: Pairs, settings: PreferenceConfig) -> Tensor:
    """Return ``f(d_w) / n_w - f(d_l) / n_l``, ``[P]``."""
    divergence = settings.f_divergence
    chosen = data.chosen.mean(f_score(data.chosen.log_ratio, divergence))
    return chosen - data.rejected.mean(f_score(data.rejected.log_ratio, divergence))


def negative_log_likelihood(responses: Responses, how: Literal["mean", "sum"]) -> Tensor:
    """Return ``-p``, or ``-p / n`` for ``mean``, ``[K]``."""
    total = -responses.logprobs
    return responses.mean(total) if how == "mean" else total


def require_range(loss: str, option: str, value: float, held: bool, allowed: str) -> None:
    """Raise ``ConfigError`` unless an option is in its range.

    Args:
        loss: Name of the loss.
        option: Name of the option.
        value: Its value.
        held: Whether the value is allowed.
        allowed: The allowed values, for the message.
    """
    if not held:
        raise ConfigError(
            f"preference loss {loss}: options.{option} is {value}; it must be {allowed}"
        )
