"""Log-ratios of two policies to ratios that stay numbers."""

from __future__ import annotations

from lightrft.utils.lazy import Tensor, torch

LIMIT = 40.0
"""Nats. ``exp`` of it, squared, is a float32: a ratio may meet another one, as in a weighted KL or under a correction."""
ROUNDING = 16 * 2.0**-23
"""Relative difference of a log-prob that two splits of a batch into micro-batches explain: 16 times the eps of float32."""


def bounded(gap: Tensor) -> Tensor:
    """``gap``, held inside ``[-LIMIT, LIMIT]``, with the gradient of ``gap`` wherever it is finite: what is too far away must still be
    pulled the right way, and where a clip has taken the gradient away, 0 times it is 0 and not nan.

    An infinite gap becomes the bound, without a gradient. NaN stays NaN.
    """
    held = gap.clamp(-LIMIT, LIMIT)
    finite = torch.where(gap.isinf(), held.detach(), gap)  # infinity less infinity would be NaN, also on its way back
    return finite + (held - finite).detach()


def absolute_gap(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return ``|logprobs - old| [N]``, with gradient 0 where the two differ by rounding alone.

    The slope of ``|x|`` jumps at 0. Without this, the micro-batches that computed ``old`` would decide its sign.
    """
    gap = logprobs - old
    rounding = ROUNDING * old.detach().abs().clamp(min=1)
    return torch.where(gap.detach().abs() > rounding, gap.abs(), gap.detach().abs())


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """``pi / pi_old``, between ``exp(-LIMIT)`` and ``exp(LIMIT)``."""
    return torch.exp(bounded(logprobs - old))
