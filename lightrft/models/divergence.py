"""How far a student's next-token distribution is from a teacher's, over the whole vocabulary and without a matrix of all logits.

Logits of both exist for a few rows at a time and are computed again in the backward pass. Only the student gets gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightrft.models.attention.ulysses import Part
from lightrft.models.divergence_kinds import DIVERGENCES, GRADIENTS
from lightrft.models.logprobs import Bend, HeadGradient, bend_logits, head_width, rows_per_chunk, wide


@dataclass(slots=True)
class Target:
    """The teacher's distributions at N places: its ``states [N, H]`` there, and how its ``head`` makes logits of them. Both
    distributions are taken at ``temperature``; ``beta`` is the teacher's share in the mixture of ``jsd``."""

    states: Tensor
    head: nn.Module
    kind: str
    temperature: float = 1.0
    beta: float = 0.5
    softcap: float | None = None
    scale: float | None = None

    @property
    def width(self) -> int:
        """The number of logits at a place."""
        return head_width(self.head, self.states)

    def of(self, part: Part) -> Target:
        """The distributions at the places of ``part``."""
        return replace(self, states=part.of(self.states))

    @torch.no_grad()
    def logprobs(self, part: slice, width: int, dtype: torch.dtype) -> Tensor:
        """Log-probs ``[n, width]`` of the first ``width`` tokens at the places of ``part``."""
        logits, _ = Bend(self.scale, self.softcap, self.temperature).forward(self.head(self.states[part])[:, :width].to(dtype))
        return logits.sub_(logits.logsumexp(-1, keepdim=True))


def token_divergence(
    hidden: Tensor,
    head: nn.Module,
    target: Target,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    chunk_mb: float = 64,
) -> Tensor:
    """``[N]``: the divergence ``target.kind`` between the student of ``hidden [N, H]`` and ``head``, and ``target``.

    Softmax and sums are in float32 (float64 for float64 states); at most ``chunk_mb`` MiB of logits, those of both, exist at a
    time. Where the heads are not equally wide, as for models that pad their vocabulary differently, what only one of them has
    is left out of both distributions.
    """
    bend = Bend(scale, softcap, target.temperature)
    own = head_width(head, hidden)
    width = min(own, target.width)
    rows = rows_per_chunk(hidden, 2 * width, chunk_mb)
    if type(head) is not nn.Linear:
        return _generic(hidden, head, target, bend, width, rows)
    weight, bias = head.weight, head.bias
    if width < own:
        weight, bias = weight[:width], None if bias is None else bias[:width]
    return _TokenDivergence.apply(hidden, weight, bias, target, bend, rows)


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Target, bend: Bend, rows: int) -> Tensor:
        values = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            student, _ = _logprobs(hidden[part], weight, bias, bend)
            teacher = target.logprobs(part, weight.shape[0], values.dtype)
            values[part] = DIVERGENCES[target.kind](student, teacher, target.beta)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.target, ctx.bend, ctx.rows = target, bend, rows
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        target, (grad,) = ctx.target, grads
        sums = HeadGradient.of(ctx.needs_input_grad, hidden, weight, bias, grad.dtype)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            student, slope = _logprobs(hidden[part], weight, bias, ctx.bend)
            teacher = target.logprobs(part, weight.shape[0], grad.dtype)
            d = GRADIENTS[target.kind](student, teacher, target.beta).mul_(grad[part, None])
            # Where nothing comes in nothing goes out, not even from a divergence that is infinite.
            d = d.masked_fill_(grad[part, None] == 0, 0.0)
            sums.add(part, ctx.bend.backward(d, slope))
        return *sums.inputs(), None, None, None


def _logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, bend: Bend) -> tuple[Tensor, Tensor | None]:
    logits, slope = bend.forward(F.linear(hidden, weight, bias).to(wide(hidden.dtype)))
    return logits.sub_(logits.logsumexp(-1, keepdim=True)), slope


def _generic(hidden: Tensor, head: nn.Module, target: Target, bend: Bend, width: int, rows: int) -> Tensor:
    """Any other head (with adapters, quantised): plain autograd, chunk by chunk, recomputed in the backward pass."""

    def chunk(states: Tensor, part: slice) -> Tensor:
        logits = bend_logits(head(states)[:, :width].to(wide(hidden.dtype)), bend.scale, bend.softcap, bend.temperature)
        teacher = target.logprobs(part, width, logits.dtype)
        return DIVERGENCES[target.kind](logits.log_softmax(-1), teacher, target.beta)

    parts = [slice(start, start + rows) for start in range(0, max(1, hidden.shape[0]), rows)]
    return torch.cat([checkpoint(chunk, hidden[part], part, use_reentrant=False) for part in parts])
