"""How far a student's next-token distribution is from a teacher's, over the whole vocabulary and without a matrix of all logits.

Logits of both exist for a few rows at a time and are computed again in the backward pass. Only the student gets gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightrft.models.logprobs import Bend, HeadGradient, bend_logits, head_width, rows_per_chunk, wide
from lightrft.models.sequence_parallel import Part
from lightrft.utils.registry import Registry

Divergence = Callable[[Tensor, Tensor, float], Tensor]
DIVERGENCES: Registry[Divergence] = Registry("divergence")
GRADIENTS: dict[str, Divergence] = {}
"""``DIVERGENCES[kind](student, teacher, beta) -> [n]`` from log-probs ``[n, V]``, and ``GRADIENTS[kind]`` of the same arguments
its gradient ``[n, V]`` in the student's logits."""


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


def _expected(weights: Tensor, x: Tensor) -> Tensor:
    """``[n]``: the sum of ``x`` under the distribution whose log-probs are ``weights``; what is impossible counts nothing."""
    return (weights.exp() * x.masked_fill(weights == -torch.inf, 0.0)).sum(-1)


def _centred(student: Tensor, x: Tensor) -> Tensor:
    """``q (x - E_q x)``: the gradient in the logits of ``E_q x``, up to what ``x`` itself changes by."""
    x = x.masked_fill(student == -torch.inf, 0.0)
    q = student.exp()
    return q * (x - (q * x).sum(-1, keepdim=True))


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


@DIVERGENCES.register(
    "reverse_kl",
    formula="D_t = KL(pi, pi_teacher)",
    latex=r"D_t=\operatorname{KL}(\pi_\theta\,\|\,\pi_T)",
    paper="MiniLLM, arXiv 2306.08543; on the student's own answers: GKD, arXiv 2306.13649",
)
def reverse_kl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Seeks a mode of the teacher."""
    return _expected(student, student - teacher)


@DIVERGENCES.register(
    "forward_kl",
    formula="D_t = KL(pi_teacher, pi)",
    latex=r"D_t=\operatorname{KL}(\pi_T\,\|\,\pi_\theta)",
    paper="Hinton et al., arXiv 1503.02531; on the student's own answers: GKD, arXiv 2306.13649",
)
def forward_kl(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Covers all of the teacher."""
    return _expected(teacher, teacher - student)


@DIVERGENCES.register(
    "jsd",
    formula="D_t = beta KL(pi_teacher, m) + (1 - beta) KL(pi, m),  m = beta pi_teacher + (1 - beta) pi",
    latex=r"D_t=\beta\operatorname{KL}(\pi_T\,\|\,m)+(1-\beta)\operatorname{KL}(\pi_\theta\,\|\,m),\quad m=\beta\pi_T+(1-\beta)\pi_\theta",
    paper="generalised Jensen-Shannon divergence: GKD, arXiv 2306.13649, eq. 1",
)
def jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Between the two: over ``beta``, it nears the forward KL as ``beta`` goes to 0."""
    mixture = _mixture(student, teacher, beta)
    return beta * _expected(teacher, teacher - mixture) + (1 - beta) * _expected(student, student - mixture)


def _reverse_kl_gradient(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return _centred(student, student - teacher)


def _forward_kl_gradient(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return student.exp() - teacher.exp()


def _jsd_gradient(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return (1 - beta) * _centred(student, student - _mixture(student, teacher, beta))


GRADIENTS |= {"reverse_kl": _reverse_kl_gradient, "forward_kl": _forward_kl_gradient, "jsd": _jsd_gradient}
