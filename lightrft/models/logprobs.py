"""Log-probabilities and entropy of tokens from hidden states, without the matrix of all logits.

Logits exist for a few rows at a time and are recomputed in the backward pass. If all logits fit in
the bound, they are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.onednn.products import (
    add_gradient_of_weight,
    linear,
    write_gradient_of_input,
)
from lightrft.utils.token_filters import ban_tokens

BLOCK_BYTES = 2 * 2**20
"""Bytes of logits that go through softmax at a time on a CPU. They fit in a core's cache, so
repeated passes over them are cheap."""


class LogitFilters(Protocol):
    """Temperature and filters of sampling at the tokens of a call."""

    @property
    def banned(self) -> Tensor:
        """Return the tokens that are never sampled, ``[K]``."""
        ...

    @property
    def only_bans(self) -> bool:
        """Return ``True`` if nothing but one temperature and the banned tokens act."""
        ...

    def apply(self, logits: Tensor, part: slice, targets: Tensor) -> Tensor:
        """Return the filtered logits ``[n, V]``.

        Args:
            logits: ``[n, V]`` logits at temperature 1.
            part: Tokens of the call that the rows belong to.
            targets: ``[n]``. The sampled tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The transform from a head's output to logits.

    It is ``softcap * tanh(scale * x / softcap) / temperature``.
    """

    scale: float | None
    softcap: float | None
    temperature: float

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``x`` (changed in place) as logits, and their slope in ``x``.

        The slope is ``None`` if it is constant.
        """
        if self.scale is not None:
            x = x.mul_(self.scale)
        slope = None
        if self.softcap is not None:
            bent = x.div_(self.softcap).tanh_()
            slope = 1 - bent * bent
            x = bent.mul_(self.softcap)
        if self.temperature != 1.0:
            x = x.div_(self.temperature)
        return x, slope

    def backward(self, grad: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient in the head's output.

        ``grad``, the gradient in the logits, is changed in place.
        """
        factor = (1.0 if self.scale is None else self.scale) / self.temperature
        if slope is not None:
            grad = grad.mul_(slope)
        return grad if factor == 1.0 else grad.mul_(factor)


def transform_logits(
    x: Tensor,
    scale: float | None,
    softcap: float | None,
    temperature: float = 1.0,
) -> Tensor:
    """Return a head's output ``x [..., V]`` as logits, by plain autograd.

    ``token_logprobs`` does the same in place for each chunk.

    Args:
        x: ``[..., V]``, output of the head.
        scale: Factor of ``x``. ``None`` for 1.
        softcap: Bound of the logits, by ``softcap * tanh(x / softcap)``. ``None`` for none.
        temperature: Divisor of the result.
    """
    if scale is not None:
        x = x * scale
    if softcap is not None:
        x = softcap * (x / softcap).tanh()
    return x if temperature == 1.0 else x / temperature


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    entropy: bool = False,
    chunk_mb: float = 64,
    filters: LogitFilters | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs ``[N]`` of ``targets`` and the entropy ``[N]`` of the softmax.

    The softmax is ``softmax(logits / temperature)``. Softmax and sums are in float32 (float64 for
    float64 states). Both results are differentiable. The entropy is ``None`` unless requested.

    Args:
        hidden: ``[N, H]`` states that predict the targets.
        head: Maps the states to logits.
        targets: ``[N]`` token ids.
        temperature: Divisor of the logits.
        softcap: Soft-cap of the logits. ``None`` for none.
        scale: Factor of the head's output. ``None`` for 1.
        entropy: Also compute the entropy, in nats.
        chunk_mb: Upper bound, in MiB, of the logits that exist at a time.
        filters: Temperature and filters of sampling. ``temperature`` is read if they only ban
            tokens, and then it must be theirs.
    """
    if is_plain_linear(head) and (filters is None or filters.only_bans):
        bend = LogitTransform(scale, softcap, temperature)
        rows = rows_per_chunk(hidden, head.out_features, chunk_mb)
        banned = None if filters is None else filters.banned
        logprobs, entropies = _TokenLogprobs.apply(
            hidden, head.weight, head.bias, targets, bend, entropy, rows, banned
        )
        return logprobs, entropies if entropy else None
    bend = LogitTransform(scale, softcap, 1.0 if filters is not None else temperature)
    return _generic(hidden, head, targets, bend, entropy, chunk_mb, filters)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and sums of ``dtype`` are computed."""
    return torch.promote_types(dtype, torch.float32)


def rows_per_chunk(hidden: Tensor, vocabulary: int, chunk_mb: float) -> int:
    """Return the number of rows whose logits fit into ``chunk_mb`` MiB, at least one.

    Args:
        hidden: Gives the dtype of the logits.
        vocabulary: Logits per row.
        chunk_mb: Size in MiB.
    """
    return max(1, int(chunk_mb * 2**20) // (vocabulary * wide(hidden.dtype).itemsize))


@dataclass(slots=True)
class HeadGradient:
    """Gradients in ``hidden [N, H]`` and in a linear head, summed over chunks of rows.

    A gradient that is not needed is ``None``.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None

    @staticmethod
    def of(
        needed: Sequence[bool],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> HeadGradient:
        """Return zero gradients.

        Args:
            needed: For hidden, weight and bias: ``True`` if its gradient is needed.
            hidden: ``[N, H]`` states.
            weight: ``[V, H]`` weight of the head.
            bias: ``[V]`` bias of the head, or ``None``.
            dtype: Dtype of the head's sums.
        """
        # add() writes each row once, so there is no need for zeros
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None
        return HeadGradient(hidden, weight, bias, d_hidden, d_weight, d_bias)

    def add(self, part: slice, d: Tensor) -> None:
        """Add ``d [n, V]``, the gradient in the head's output for the rows of ``part``.

        Each row must be added once.
        """
        if self.d_bias is not None:
            # before the cast: the sum over rows keeps the wider dtype
            self.d_bias += d.sum(0)
        # the products run in the model's dtype; only the sums over chunks are wider
        d = d.to(self.hidden.dtype)
        if self.d_hidden is not None:
            write_gradient_of_input(self.d_hidden[part], d, self.weight)
        if self.d_weight is not None:
            add_gradient_of_weight(self.d_weight, d, self.hidden[part])

    def inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in hidden, weight and bias, each in its input's dtype."""
        d_weight = self.d_weight
        if d_weight is not None:
            d_weight = d_weight.to(self.weight.dtype)
        d_bias = self.d_bias
        if d_bias is not None and self.bias is not None:
            d_bias = d_bias.to(self.bias.dtype)
        return self.d_hidden, d_weight, d_bias


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        bend: LogitTransform,
        entropy: bool,
        rows: int,
        banned: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # backward then gets None instead of zeros for an unused output, and skips its terms
        ctx.set_materialize_grads(False)
        n = hidden.shape[0]
        dtype = wide(hidden.dtype)
        logprobs = hidden.new_empty(n, dtype=dtype)
        entropies = hidden.new_empty(n if entropy else 0, dtype=dtype)
        log_sums = hidden.new_empty(n, dtype=dtype)
        kept = None
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            logits, slope = bend.forward(linear(hidden[part], weight, bias).to(dtype))
            if banned is not None:
                ban_tokens(logits, banned, targets[part])
            # a single chunk is kept for backward, which then need not compute the head again
            keep = n <= rows and slope is None and any(ctx.needs_input_grad[:3])
            for block, few in _blocks(logits, start):
                log_sums[block] = few.logsumexp(-1)
                logprobs[block] = few.gather(1, targets[block, None])[:, 0] - log_sums[block]
                if entropy:
                    # changed in place, unless backward reads it
                    logp = torch.sub(few, log_sums[block, None], out=None if keep else few)
                    entropies[block] = -_times_probability(logp, logp.exp()).sum(-1)
            kept = logits if keep else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies, kept, banned)
        ctx.bend = bend
        ctx.rows = rows
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies, kept, banned = ctx.saved_tensors
        on_logprob, on_entropy = grads
        # without entropy, forward returns an empty tensor in its place
        if on_entropy is not None and not on_entropy.numel():
            on_entropy = None
        sums = HeadGradient.of(ctx.needs_input_grad, hidden, weight, bias, log_sums.dtype)
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            if kept is None:
                d, slope = ctx.bend.forward(linear(hidden[part], weight, bias).to(log_sums.dtype))
                if banned is not None:
                    ban_tokens(d, banned, targets[part])
            else:
                # a retained graph may be walked again, so `kept` must not change
                d, slope = torch.empty_like(kept), None
            for block, few in _blocks(d, start):
                torch.sub(few if kept is None else kept[block], log_sums[block, None], out=few)
                of_logprob = None if on_logprob is None else on_logprob[block]
                of_entropy = None if on_entropy is None else (on_entropy[block], entropies[block])
                _logit_gradient(few, targets[block], of_logprob, of_entropy)
            sums.add(part, ctx.bend.backward(d, slope))
        return *sums.inputs(), None, None, None, None, None


def _blocks(logits: Tensor, start: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of a few rows of ``logits``, each with its slice of all rows; ``start`` is the
    first row's index."""
    n, width = logits.shape
    rows = n
    if logits.device.type == "cpu":
        rows = BLOCK_BYTES // max(1, width * logits.itemsize)
    rows = max(1, rows)
    for at in range(0, n, rows):
        yield slice(start + at, start + min(n, at + rows)), logits[at : at + rows]


def _logit_gradient(
    x: Tensor,
    targets: Tensor,
    on_logprob: Tensor | None,
    on_entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Turn log-probs ``x [n, V]`` in place into the gradient in the logits.

    ``d logprob = onehot - p`` and ``d entropy = -p (log p + H)``, each times the incoming gradient.
    """
    if on_entropy is not None:
        grad, entropy = on_entropy
        p = x.exp()
        x.add_(entropy[:, None]).mul_(-grad[:, None])
        if on_logprob is not None:
            x -= on_logprob[:, None]
        _times_probability(x, p)
    elif on_logprob is not None:
        x.exp_().mul_(-on_logprob[:, None])
    else:
        x.zero_()
    if on_logprob is not None:
        x.scatter_add_(1, targets[:, None], on_logprob[:, None])


def _times_probability(x: Tensor, p: Tensor) -> Tensor:
    """Compute ``x *= p``, where an impossible token (log-prob of minus infinity) counts as 0."""
    # minus infinity times 0 would be NaN
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(p)


def _expected_log(p: Tensor, x: Tensor) -> Tensor:
    """Return ``[...]``, the sum of ``p x`` over the last axis, differentiable. An impossible token
    (``x`` of minus infinity) counts as 0."""
    return (p * x.masked_fill(x == -torch.inf, 0.0)).sum(-1)


def _generic(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    bend: LogitTransform,
    entropy: bool,
    chunk_mb: float,
    filters: LogitFilters | None,
) -> tuple[Tensor, Tensor | None]:
    """Apply filters, or any other head (with adapters, quantised), by plain autograd in chunks,
    recomputed in the backward pass."""

    def chunk(h: Tensor, t: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        x = head(h).to(wide(hidden.dtype))
        x = transform_logits(x, bend.scale, bend.softcap, bend.temperature)
        if filters is not None:
            x = filters.apply(x, part, t)
        logp = x.log_softmax(-1)
        entropies = -_expected_log(logp.exp(), logp) if entropy else logp.new_zeros(0)
        return logp.gather(1, t[:, None])[:, 0], entropies

    rows = rows_per_chunk(hidden, head_width(head, hidden), chunk_mb)
    # one chunk even without rows: the head must take part in the graph on every rank
    starts = range(0, max(1, hidden.shape[0]), rows)
    slices = [slice(start, start + rows) for start in starts]
    parts = [checkpoint(chunk, hidden[s], targets[s], s, use_reentrant=False) for s in slices]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]) if entropy else None


@torch.no_grad()
def logit_energy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float | None = None,
    chunk_mb: float = 64,
    filters: LogitFilters | None = None,
) -> Tensor:
    """Return ``[N]``, the squared norm of each log-prob's gradient in its logits.

    It is ``1 - 2 p(target) + sum_v p(v)^2`` (arXiv 2602.07078).

    Args:
        hidden: ``[N, H]`` states that predict the targets.
        head: Maps the states to logits.
        targets: ``[N]`` token ids.
        temperature: Divisor of the logits.
        softcap: Soft-cap of the logits. ``None`` for none.
        scale: Factor of the head's output. ``None`` for 1.
        chunk_mb: Upper bound, in MiB, of the logits that exist at a time.
        filters: Temperature and filters of sampling. ``temperature`` is then not read.
    """
    rows = rows_per_chunk(hidden, head_width(head, hidden), chunk_mb)
    parts = [hidden.new_empty(0, dtype=wide(hidden.dtype))]
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        x = head(hidden[part]).to(wide(hidden.dtype))
        x = transform_logits(x, scale, softcap, 1.0 if filters is not None else temperature)
        if filters is not None:
            x = filters.apply(x, part, targets[part])
        p = x.softmax(-1)
        parts.append(1 - 2 * p.gather(1, targets[part, None])[:, 0] + p.square().sum(-1))
    return torch.cat(parts)


def head_width(head: nn.Module, hidden: Tensor) -> int:
    """Return the number of logits that ``head`` computes for one state."""
    # a head of another class does not have to say its width, but shows it on one state
    known = getattr(head, "out_features", None)
    if isinstance(known, int):
        return known
    with torch.no_grad():
        return head(hidden.new_zeros(1, hidden.shape[-1])).shape[-1]


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    disable_logprobs_flashattn: bool = False,
) -> Tensor:
    """Return log-probs of ``labels`` under the softmax of ``logits``.

    They have the dtype of the logits and are computed in float32 at least. Half-precision logits
    are processed row by row, so no float32 copy of all logits exists.

    Args:
        logits: ``[..., V]``.
        labels: ``[...]`` token ids.
        disable_logprobs_flashattn: Use PyTorch where flash-attn's fused cross entropy would run: on
            CUDA, with flash-attn installed.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    picks = labels.reshape(-1)
    if flat.is_cuda and not disable_logprobs_flashattn:
        fused = _fused_cross_entropy()
        if fused is not None:
            return -fused(flat, picks)[0].to(flat.dtype).reshape(labels.shape)
    if flat.dtype in (torch.bfloat16, torch.float16):
        if not len(flat):
            return flat.new_zeros(labels.shape)
        # row by row, since all logits in float32 take twice the memory of the input
        rows = [row.float().log_softmax(-1)[pick] for row, pick in zip(flat, picks, strict=True)]
        return torch.stack(rows).to(flat.dtype).reshape(labels.shape)
    chosen = flat.gather(1, picks[:, None])[:, 0]
    return (chosen - flat.logsumexp(-1)).reshape(labels.shape)


def _fused_cross_entropy() -> Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None:
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss  # ty: ignore[import-not-found]
    except ImportError:
        return None
    return cross_entropy_loss


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy ``[...]``, in nats, of the softmax of ``logits [..., V]``.

    It is ``logsumexp - sum(p * logits)``.
    """
    precise = logits.to(wide(logits.dtype))
    return precise.logsumexp(-1) - _expected_log(precise.softmax(-1), precise)


@contextmanager
def head_input(head: nn.Module, change: Callable[[Tensor], Tensor]) -> Generator[None]:
    """Make ``head`` read ``change(states)`` instead of ``states``, inside the context."""

    def changed(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(given[0]), *given[1:])

    hook = head.register_forward_pre_hook(changed)
    try:
        yield
    finally:
        hook.remove()
