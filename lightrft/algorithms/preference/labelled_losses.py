"""Losses of single responses, each labelled good or bad.

``registry`` explains the symbols in the formulas. Without an index, ``d`` is the log-ratio of one
response.
"""

from __future__ import annotations

from lightrft.algorithms.preference.inputs import Labelled
from lightrft.algorithms.preference.registry import PREFERENCE_LOSSES, log_sigmoid
from lightrft.algorithms.token_ops import require_column
from lightrft.config.preference.sections import PreferenceConfig
from lightrft.utils.lazy_imports import Tensor, torch


@PREFERENCE_LOSSES.register(
    "kto",
    formula="L = lambda_D (1 - s(b (d - z))) if desirable, else lambda_U (1 - s(b (z - d))),  z = "
    "max(0, mean d of mismatched pairs)",
    latex=r"L=\lambda_D\big(1-\sigma(\beta(d-z))\big)\ \text{if desirable, else}\ "
    r"\lambda_U\big(1-\sigma(\beta(z-d))\big)",
    paper="KTO, arXiv 2402.01306, eq. 7",
    needs=["reference", "kl"],
    reads=["beta"],
    kind="labelled",
)
def kto(
    data: Labelled,
    settings: PreferenceConfig,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compare the implicit reward of each response with the KL to the reference.

    Args:
        desirable_weight: Factor of the losses of good responses. Raise it where these are few.
        undesirable_weight: Factor of the losses of bad responses.
    """
    z = require_column(data.kl).detach().clamp(min=0)
    gap = settings.beta * (data.responses.log_ratio - z)
    return _weighted(data, torch.sigmoid(-_signed(data, gap)), desirable_weight, undesirable_weight)


@PREFERENCE_LOSSES.register(
    "apo_zero_unpaired",
    formula="L = lambda_D (1 - s(b d)) if desirable, else lambda_U s(b d)",
    latex=r"L=\lambda_D\big(1-\sigma(\beta d)\big)\ \text{if desirable, else}\ "
    r"\lambda_U\,\sigma(\beta d)",
    paper="APO-zero, arXiv 2408.06266, eq. 7, one response at a time",
    needs=["reference"],
    reads=["beta"],
    kind="labelled",
)
def apo_zero_unpaired(
    data: Labelled,
    settings: PreferenceConfig,
    *,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Raise good responses and lower bad ones.

    Args:
        desirable_weight: Factor of the losses of good responses. Raise it where these are few.
        undesirable_weight: Factor of the losses of bad responses.
    """
    reward = settings.beta * data.responses.log_ratio
    losses = torch.sigmoid(-_signed(data, reward))
    return _weighted(data, losses, desirable_weight, undesirable_weight)


@PREFERENCE_LOSSES.register(
    "bco",
    formula="L = -log s(b d - shift) if desirable, else -log s(-(b d - shift)),  shift: running "
    "mean of b d",
    latex=r"L=-\log\sigma(\beta d-\delta)\ \text{if desirable, else}\ "
    r"-\log\sigma\big(-(\beta d-\delta)\big)",
    paper="BCO, arXiv 2404.04656",
    needs=["reference", "shift"],
    reads=["beta"],
    kind="labelled",
)
def bco(data: Labelled, settings: PreferenceConfig) -> Tensor:
    """Classify each response by its implicit reward, relative to the running mean."""
    reward = settings.beta * data.responses.log_ratio
    shift = reward.new_zeros(()) if data.shift is None else data.shift.detach()
    return -log_sigmoid(_signed(data, reward - shift))


@PREFERENCE_LOSSES.register(
    "implicit_prm",
    formula="L = -log s(b d) if desirable, else -log s(-b d)",
    latex=r"L=-\log\sigma(\beta d)\ \text{if desirable, else}\ -\log\sigma(-\beta d)",
    paper="implicit process rewards by cross-entropy, arXiv 2412.01981",
    needs=["reference"],
    reads=["beta"],
    kind="labelled",
)
def implicit_prm(data: Labelled, settings: PreferenceConfig) -> Tensor:
    """Classify each response by its outcome.

    The log-ratio of each token then is a process reward, as ``prime`` uses it in ``lightrft rl``.
    """
    return -log_sigmoid(_signed(data, settings.beta * data.responses.log_ratio))


def _signed(data: Labelled, x: Tensor) -> Tensor:
    """Return ``x`` of good responses and ``-x`` of bad ones, ``[B]``."""
    return torch.where(data.desirable, x, -x)


def _weighted(data: Labelled, losses: Tensor, desirable: float, undesirable: float) -> Tensor:
    """Multiply the losses of good and of bad responses by their weights.

    Args:
        data: The responses.
        losses: ``[B]``.
        desirable: Weight of good responses.
        undesirable: Weight of bad responses.
    """
    # tensors of the dtype of the losses: torch.where of two numbers would round to float32
    good, bad = losses.new_tensor(desirable), losses.new_tensor(undesirable)
    return losses * torch.where(data.desirable, good, bad)
