"""Divergence of a student's next-token distribution from a teacher's.

It covers the full vocabulary or the teacher's top k, without a matrix of all logits. Logits of both
models exist for a few rows at a time and are recomputed in the backward pass. Only the student gets
a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightrft.models.divergence.kinds import (
    DIVERGENCES,
    GRADIENTS,
    Tail,
    merge_tail,
    spread_tail,
    uld_slopes,
)
from lightrft.models.logprobs import (
    HeadGradient,
    LogitTransform,
    head_width,
    rows_per_chunk,
    token_logprobs,
    transform_logits,
    wide,
)
from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.onednn.products import linear
from lightrft.types import Batch


class Outcomes(NamedTuple):
    """Log-probs of the compared outcomes at n positions.

    Attributes:
        logprobs: ``[n, V]``, or ``[n, k]`` or ``[n, k + 1]`` for the top k.
        tokens: ``[n, k]``, the top k. ``None`` compares the full vocabulary.
    """

    logprobs: Tensor
    tokens: Tensor | None = None


@dataclass(slots=True)
class Target:
    """The teacher's distributions at N positions.

    Attributes:
        states: ``[N, H]`` hidden states of the teacher.
        head: Maps the states to logits.
        kind: Name of the divergence.
        temperature: Divisor of the logits of both models.
        beta: Weight of the teacher in the mixture of ``jsd``.
        softcap: Soft-cap of the teacher's logits. ``None`` for none.
        scale: Factor of the head's output. ``None`` for 1.
        top_k: Number of the teacher's most probable tokens to compare. ``None`` compares all.
        tail: What becomes of the other tokens.
    """

    states: Tensor
    head: nn.Module
    kind: str
    temperature: float = 1.0
    beta: float = 0.5
    softcap: float | None = None
    scale: float | None = None
    top_k: int | None = None
    tail: Tail = "bucket"

    @torch.no_grad()
    def logprobs(self, part: slice, width: int, dtype: torch.dtype) -> Tensor:
        """Return log-probs ``[n, width]`` at the positions of ``part``.

        The softmax is over the first ``width`` tokens.

        Args:
            part: Positions.
            width: Number of vocabulary entries.
            dtype: Dtype of the softmax.
        """
        logits, _ = LogitTransform(self.scale, self.softcap, self.temperature).forward(
            self.head(self.states[part])[:, :width].to(dtype)
        )
        return logits.sub_(logits.logsumexp(-1, keepdim=True))

    @torch.no_grad()
    def outcomes(self, part: slice, width: int, dtype: torch.dtype) -> Outcomes:
        """Return the log-probs of the outcomes that are compared. See ``logprobs``.

        Args:
            part: Positions.
            width: Number of vocabulary entries.
            dtype: Dtype of the softmax.
        """
        logprobs = self.logprobs(part, width, dtype)
        if self.top_k is None or self.top_k >= width:
            return Outcomes(logprobs)
        tokens = logprobs.topk(self.top_k).indices
        return Outcomes(merge_tail(logprobs, tokens, self.tail), tokens)

    @property
    def width(self) -> int:
        """Return the number of tokens that the teacher knows."""
        return head_width(self.head, self.states)

    def at(self, select: Callable[[Tensor], Tensor]) -> Target:
        """Return the target at the positions that ``select`` takes of a tensor ``[N, ...]``."""
        return replace(self, states=select(self.states))


@dataclass(slots=True)
class TopTarget:
    """The teacher's most probable tokens at N positions, from a teacher that gives no more.

    Attributes:
        tokens: ``[N, k]`` token ids, distinct at each position.
        probs: ``[N, k]`` log-probs of the tokens, at temperature 1.
        kind: Name of the divergence.
        tail: What becomes of the other tokens.
        temperature: Divisor of the logits of both models. 1 with a bucket, whose share at another
            temperature is unknown.
        beta: Weight of the teacher in the mixture of ``jsd``.
    """

    tokens: Tensor
    probs: Tensor
    kind: str
    tail: Tail = "bucket"
    temperature: float = 1.0
    beta: float = 0.5

    @property
    def width(self) -> int:
        """Return a number above every token of the teacher, which may know more tokens."""
        return sys.maxsize

    def at(self, select: Callable[[Tensor], Tensor]) -> TopTarget:
        """Return the target at the positions that ``select`` takes of a tensor ``[N, ...]``."""
        return replace(self, tokens=select(self.tokens), probs=select(self.probs))

    @torch.no_grad()
    def outcomes(self, part: slice, width: int, dtype: torch.dtype) -> Outcomes:
        """Return the log-probs of the outcomes that are compared.

        Args:
            part: Positions.
            width: Number of vocabulary entries. Not used.
            dtype: Dtype of the log-probs.
        """
        tokens, probs = self.tokens[part], self.probs[part].double()
        if self.tail == "renormalised":
            return Outcomes((probs / self.temperature).log_softmax(-1).to(dtype), tokens)
        # Rounding of the server may leave a sum above 1.
        rest = (1 - probs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        return Outcomes(torch.cat([probs, rest], -1).to(dtype), tokens)


class Spans(NamedTuple):
    """Spans of text at whose ends a token of both tokenizers ends.

    Attributes:
        ends: ``[G]``. The last token of each span, among the tokens of the batch.
        earlier: ``[E]``. The tokens of spans before their last one.
        span_of: ``[E]``. The span of each of ``earlier``.
    """

    ends: Tensor
    earlier: Tensor
    span_of: Tensor

    @staticmethod
    def of(batch: Batch) -> Spans:
        """Return the spans of ``batch.aligned``. Tokens after the last span of a row are in none.

        Raises:
            ValueError: If ``batch.aligned`` is missing.
        """
        if batch.aligned is None:
            raise ValueError("spans need batch.aligned")
        ends = batch.aligned.nonzero()[:, 0]
        earlier = (~batch.aligned).nonzero()[:, 0]
        span_of = torch.searchsorted(ends, earlier)
        found = span_of < len(ends)
        earlier, span_of = earlier[found], span_of[found]
        row_of = batch.row_of
        # the next span may be of the next row
        within = row_of[earlier] == row_of[ends[span_of]]
        return Spans(ends, earlier[within], span_of[within])

    def logprobs(self, states: Tensor, head: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
        """Return the log-prob ``[G]`` of the earlier tokens of each span together.

        Args:
            states: ``[N, H]`` states that predict the tokens of the batch.
            head: Maps the states to logits.
            tokens: ``[N]`` tokens of the batch.
            options: Options of ``token_logprobs``.
        """
        read = states.index_select(0, self.earlier)
        single, _ = token_logprobs(read, head, tokens[self.earlier], **options)
        return single.new_zeros(len(self.ends)).index_add(0, self.span_of, single)


@dataclass(slots=True)
class AlignedTarget:
    """The distributions of a teacher with another tokenizer, at the ends of G spans of text.

    A span is compared by the probabilities of its earlier tokens times the distribution of its last
    one, on both sides: GOLD's merge by the chain rule.

    Attributes:
        target: The distributions at the last token of each span, of kind ``uld``.
        shift: ``[G]`` log-prob of the earlier tokens of each span.
    """

    target: Target
    shift: Tensor

    @staticmethod
    def of(target: Target, batch: Batch) -> AlignedTarget:
        """Build the target at the ends of spans from the target at every token.

        Args:
            target: The distributions at the response tokens of ``batch``.
            batch: Prompts and responses in the teacher's tokens, with ``aligned``.
        """
        spans = Spans.of(batch)
        with torch.no_grad():
            shift = spans.logprobs(
                target.states,
                target.head,
                batch.responses.tokens,
                temperature=target.temperature,
                softcap=target.softcap,
                scale=target.scale,
            )
        return AlignedTarget(target.at(lambda x: x.index_select(0, spans.ends)), shift)

    @property
    def kind(self) -> str:
        """Return the name of the divergence."""
        return self.target.kind

    @property
    def tail(self) -> Tail:
        """Return the setting ``tail``, which sorted distributions do not read."""
        return self.target.tail

    @property
    def temperature(self) -> float:
        """Return the divisor of the logits of both models."""
        return self.target.temperature

    @property
    def beta(self) -> float:
        """Return the setting ``beta``, which sorted distributions do not read."""
        return self.target.beta

    @property
    def width(self) -> int:
        """Return a number above every token, since no vocabulary is cut."""
        return sys.maxsize

    @torch.no_grad()
    def outcomes(self, part: slice, width: int, dtype: torch.dtype) -> Outcomes:
        """Return the log-probs ``[n, W]`` over the teacher's vocabulary, with those of the earlier
        tokens added.

        Args:
            part: Spans.
            width: Number of the student's vocabulary entries. Not used.
            dtype: Dtype of the softmax.
        """
        logprobs = self.target.logprobs(part, self.target.width, dtype)
        return Outcomes(logprobs.add_(self.shift[part, None].to(dtype)))


TeacherTarget = Target | TopTarget
"""What a student is compared with, token by token."""

AnyTarget = Target | TopTarget | AlignedTarget
"""What a student is compared with, token by token or span by span."""


def outcome_divergence(target: AnyTarget, student: Tensor, teacher: Outcomes) -> Tensor:
    """Return the divergence ``[n]`` of student log-probs ``[n, V]`` from ``teacher``.

    Args:
        target: Names the divergence.
        student: ``[n, V]`` log-probs.
        teacher: The outcomes of ``target`` at the same positions.
    """
    if teacher.tokens is not None:
        student = merge_tail(student, teacher.tokens, target.tail)
    return DIVERGENCES[target.kind](student, teacher.logprobs, target.beta)


def outcome_gradient(target: AnyTarget, student: Tensor, teacher: Outcomes) -> Tensor:
    """Return the gradient ``[n, V]`` of ``outcome_divergence`` in the student's logits.

    Args:
        target: Names the divergence.
        student: ``[n, V]`` log-probs.
        teacher: The outcomes of ``target`` at the same positions.
    """
    gradient = GRADIENTS[target.kind]
    if teacher.tokens is None:
        return gradient(student, teacher.logprobs, target.beta)
    merged = merge_tail(student, teacher.tokens, target.tail)
    grads = gradient(merged, teacher.logprobs, target.beta)
    return spread_tail(grads, student, teacher.tokens, target.tail)


def token_divergence(
    hidden: Tensor,
    head: nn.Module,
    target: AnyTarget,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    chunk_mb: float = 64,
    shift: Tensor | None = None,
) -> Tensor:
    """Return the divergence ``[N]`` between a student and ``target``.

    The student is given by ``hidden`` and ``head``, the divergence by ``target.kind``. Softmax and
    sums are in float32 (float64 for float64 states). Models may pad their vocabulary to different
    widths. Tokens that only one head has are then left out of both distributions.

    Args:
        hidden: ``[N, H]`` hidden states of the student.
        head: Maps the states to logits.
        target: The teacher's distributions at the same positions.
        softcap: Soft-cap of the student's logits. ``None`` for none.
        scale: Factor of the head's output. ``None`` for 1.
        chunk_mb: Upper bound, in MiB, of the logits of both models that exist at a time.
        shift: ``[N]``, added to the student's log-probs. Only kind ``uld`` reads it. ``None`` adds
            nothing.
    """
    bend = LogitTransform(scale, softcap, target.temperature)
    own = head_width(head, hidden)
    width = min(own, target.width)
    rows = rows_per_chunk(hidden, _columns(target, width), chunk_mb)
    if not is_plain_linear(head):
        return _generic(hidden, head, target, shift, bend, width, rows)
    weight, bias = head.weight, head.bias
    if width < own:
        # a slice, so the gradient of the head's other rows is 0
        weight, bias = weight[:width], None if bias is None else bias[:width]
    return _TokenDivergence.apply(hidden, weight, bias, shift, target, bend, rows)


def _columns(target: AnyTarget, width: int) -> int:
    """Return the numbers in memory for each row of logits. A sort keeps values and places too."""
    if isinstance(target, AlignedTarget):
        return 3 * (width + target.target.width)
    return 6 * width if target.kind == "uld" else 2 * width


def divergence_of(
    hidden: Tensor,
    head: nn.Module,
    target: AnyTarget,
    batch: Batch,
    own: Callable[[Tensor], Tensor],
    **options: Any,
) -> Tensor:
    """Return the divergence ``[n]`` at the states of this rank.

    Args:
        hidden: ``[n, H]`` hidden states of the student.
        head: Maps the states to logits.
        target: The teacher's distributions at all response tokens of ``batch``, or at its spans.
        batch: Prompts and responses.
        own: Takes the entries of this rank from a tensor ``[N, ...]`` over all response tokens.
        options: Options of ``token_divergence``.
    """
    if isinstance(target, AlignedTarget):
        return aligned_divergence(hidden, head, target, batch, **options)
    return token_divergence(hidden, head, target.at(own), **options)


def aligned_divergence(
    hidden: Tensor, head: nn.Module, target: AlignedTarget, batch: Batch, **options: Any
) -> Tensor:
    """Return the divergence of each span at its last token, ``[N]``, and 0 at other tokens.

    Args:
        hidden: ``[N, H]`` hidden states of the student.
        head: Maps the states to logits.
        target: The teacher's distributions at the ends of the same spans.
        batch: Prompts and responses in the student's tokens, with ``aligned``.
        options: Options of ``token_divergence``.
    """
    spans = Spans.of(batch)
    shift = spans.logprobs(
        hidden, head, batch.responses.tokens, temperature=target.temperature, **options
    )
    last = hidden.index_select(0, spans.ends)
    values = token_divergence(last, head, target, shift=shift, **options)
    return values.new_zeros(len(hidden)).index_copy(0, spans.ends, values)


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shift: Tensor | None,
        target: AnyTarget,
        bend: LogitTransform,
        rows: int,
    ) -> Tensor:
        values = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            # the teacher first: of its top k, only these are kept while the student is computed
            teacher = target.outcomes(part, weight.shape[0], values.dtype)
            student, _ = _logprobs(hidden[part], weight, bias, bend)
            student = _shifted(student, shift, part)
            values[part] = outcome_divergence(target, student, teacher)
        ctx.save_for_backward(hidden, weight, bias, shift)
        # as attributes: save_for_backward takes tensors alone, and the teacher gets no gradient
        ctx.target, ctx.bend, ctx.rows = target, bend, rows
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, shift = ctx.saved_tensors
        target, (grad,) = ctx.target, grads
        d_shift = None if shift is None else torch.zeros_like(shift)
        sums = HeadGradient.of(ctx.needs_input_grad, hidden, weight, bias, grad.dtype)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            # logits of both models are computed again: to keep them would take [N, V]
            teacher = target.outcomes(part, weight.shape[0], grad.dtype)
            student, slope = _logprobs(hidden[part], weight, bias, ctx.bend)
            student = _shifted(student, shift, part)
            d = outcome_gradient(target, student, teacher).mul_(grad[part, None])
            # A zero incoming gradient must give zero, even where the divergence is infinite (0 *
            # inf = nan).
            unused = grad[part] == 0
            d = d.masked_fill_(unused[:, None], 0.0)
            sums.add(part, ctx.bend.backward(d, slope))
            if d_shift is not None:
                shifts = uld_slopes(student, teacher.logprobs).sum(-1) * grad[part]
                d_shift[part] = shifts.masked_fill_(unused, 0.0)
        return *sums.inputs(), d_shift, None, None, None


def _shifted(logprobs: Tensor, shift: Tensor | None, part: slice) -> Tensor:
    return logprobs if shift is None else logprobs + shift[part, None].to(logprobs.dtype)


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bend: LogitTransform,
) -> tuple[Tensor, Tensor | None]:
    logits, slope = bend.forward(linear(hidden, weight, bias).to(wide(hidden.dtype)))
    return logits.sub_(logits.logsumexp(-1, keepdim=True)), slope


def _generic(
    hidden: Tensor,
    head: nn.Module,
    target: AnyTarget,
    shift: Tensor | None,
    bend: LogitTransform,
    width: int,
    rows: int,
) -> Tensor:
    """Apply any other head (with adapters, quantised) by plain autograd in chunks, recomputed in
    the backward pass."""

    def chunk(states: Tensor, part: slice) -> Tensor:
        logits = transform_logits(
            head(states)[:, :width].to(wide(hidden.dtype)),
            bend.scale,
            bend.softcap,
            bend.temperature,
        )
        teacher = target.outcomes(part, width, logits.dtype)
        student = _shifted(logits.log_softmax(-1), shift, part)
        return outcome_divergence(target, student, teacher)

    # one chunk even without rows: the head must take part in the graph on every rank
    parts = [slice(start, start + rows) for start in range(0, max(1, hidden.shape[0]), rows)]
    return torch.cat([checkpoint(chunk, hidden[part], part, use_reentrant=False) for part in parts])
