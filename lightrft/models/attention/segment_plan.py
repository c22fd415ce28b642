"""Exact attention over concatenated runs, with shared prompts.

A response attends to its prompt and to itself. Each query's softmax splits into up to three parts.
These are causal attention inside its run, full attention to the run before it, and attention to
later tokens of a span. Every part yields an output and the log of its softmax denominator. The
denominators weight the outputs of the parts (as in arXiv 2310.01889). The backward pass of a part
is exact, given the joined output and denominator. A prompt's keys are never copied per response;
all responses of a group read them in one call. No mask of the full row exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrft.models.attention import varlen_cuda
from lightrft.utils.device_transfer import to_device

Run = tuple[int, int]
"""Start and length of consecutive tokens of the row."""


@dataclass(frozen=True, slots=True)
class SelfSegment:
    """Runs of nearly equal length that each attend to themselves, causally, in one call.

    Attributes:
        start: Start of the single run, if ``index`` is ``None``.
        length: Length of the longest run.
        index: ``[G * L]`` positions of the runs, padded to the longest by position 0. ``None`` for
            a single run.
        real: ``[G, L]``, ``False`` for padding. ``None`` without padding.
        kept: ``[n]`` indices of ``real`` in ``index``. To index by ``real`` itself would make the
            host wait for the device to count them.
        places: ``[n]`` positions at ``kept``.
    """

    start: int
    length: int
    index: Tensor | None
    real: Tensor | None
    kept: Tensor | None = None
    places: Tensor | None = None

    @staticmethod
    def filled(index: Tensor, real: Tensor | None, device: torch.device) -> SelfSegment:
        """Build runs from positions on the host.

        Args:
            index: ``[G, L]`` positions.
            real: ``[G, L]``, ``False`` for padding. ``None`` without padding.
            device: Device of the result.
        """
        flat, length = index.reshape(-1), index.shape[1]
        if real is None:
            return SelfSegment(0, length, to_device(flat, device), None)
        kept = real.reshape(-1).nonzero()[:, 0]
        on_device = [to_device(x, device) for x in (flat, real, kept, flat[kept])]
        return SelfSegment(0, length, *on_device)


@dataclass(frozen=True, slots=True)
class PrefixSegment:
    """Queries that attend to keys of an earlier run.

    Attributes:
        query: A slice of the row, or an index ``[n]``.
        key: A slice of the row.
        mask: ``[n, m]``, ``True`` where a query attends to a key. ``None`` for all.
    """

    query: slice | Tensor
    key: slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SuffixSegment:
    """Queries that attend to later keys.

    Both are in reversed order, in which this is causal attention.
    """

    query: SelfSegment
    key: SelfSegment


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a softmax. ``before`` is joined to ``own``, then ``ahead`` to both."""

    own: list[SelfSegment]
    before: list[PrefixSegment]
    ahead: list[SuffixSegment]


@dataclass(frozen=True, slots=True)
class AttentionSpans:
    """Parts of runs with attention in both directions.

    Attributes:
        runs: Start and length of each.
        windowed: They hold only in layers with a sliding window.
    """

    runs: Sequence[Run] = ()
    windowed: bool = False


@dataclass(slots=True)
class SegmentPlan:
    """Attention where each run attends to itself and, in ``shared``, also to an earlier run.

    Attributes:
        runs: Start and length of each run.
        shared: Pairs of a key run and the consecutive query runs that attend to all of it.
        positions: ``[T]`` positions of the tokens in their sequence.
        heads: Runs of which only the last token's final state is read. In ``last_layer`` their
            other queries are not computed.
        last_layer: Index of the last layer. ``None`` computes every query of every layer.
        spans: Spans, whose tokens also attend to all later tokens of the span. ``None`` for none.
        places: ``positions`` on the host, if known there.
    """

    runs: Sequence[Run]
    shared: Sequence[tuple[Run, Sequence[Run]]]
    positions: Tensor
    heads: Sequence[Run] = ()
    last_layer: int | None = None
    spans: AttentionSpans | None = None
    places: Tensor | None = None
    _parts: dict[tuple[int | None, bool, bool], Parts] = field(default_factory=dict)
    _varlen: dict[str, varlen_cuda.Keys] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Return the attention output ``[1, T, H, d]`` of one layer.

        Args:
            layer: Index of the layer.
            query: ``[1, H, T, d]``.
            key: ``[1, H_kv, T, d]``.
            value: ``[1, H_kv, T, d]``.
            scale: Factor of the scores.
            softcap: Soft-cap of the scores. ``None`` for none.
            window: Number of keys that a query attends to, itself included. ``None`` is unlimited.
        """
        # the kernel is causal, and tokens of a span also attend to later ones
        if not self._spans(window) and varlen_cuda.usable(query, value, softcap):
            if "keys" not in self._varlen:
                self._varlen["keys"] = varlen_cuda.gather_keys(self.runs, self.shared, query.device)
            return varlen_cuda.attend(query, key, value, self._varlen["keys"], scale, window)
        return _Joined.apply(
            query, key, value, self.parts(window, layer == self.last_layer), scale, softcap
        )

    def _spans(self, window: int | None) -> Sequence[Run]:
        """Return the spans of a layer with a sliding window of ``window`` keys."""
        if self.spans is None or (self.spans.windowed and window is None):
            return ()
        return self.spans.runs

    def parts(self, window: int | None, last: bool = False) -> Parts:
        """Return the parts of the softmax under a sliding window of ``window`` keys.

        They are cached, since layers share them.
        """
        longest = max((length for _, length in self.runs), default=0)
        for (_, length), queries in self.shared:
            longest = max(longest, length + max(n for _, n in queries))
        spans = self._spans(window)
        # a window that hides nothing needs no masks and fewer parts
        if window is not None and window >= longest:
            window = None
        # under a window, the last layer computes all states of a head like the other layers
        last = last and window is None and bool(self.heads)
        key = window, last, bool(spans)
        if key not in self._parts:
            self._parts[key] = self._make_parts(window, last, spans)
        return self._parts[key]

    def _make_parts(self, window: int | None, last: bool, all_spans: Sequence[Run]) -> Parts:
        heads = set(self.heads) if last else set()
        chunks: list[Run] = []
        for run in self.runs:
            if run not in heads:
                chunks += _chunks(run, window)
        device = self.positions.device
        own = [_own(bucket, device) for bucket in _buckets(chunks)]
        spans = []
        for start, length in all_spans:
            # the last layer computes no states inside a head, so no span there either
            unread = any(k <= start < k + m for k, m in heads)
            if length > 1 and not unread:
                spans.append((start, length))
        ahead = [_ahead(bucket, device) for bucket in _buckets(spans)]
        return Parts(own, self._before(window, heads), ahead)

    def _before(self, window: int | None, heads: set[Run]) -> list[PrefixSegment]:
        if window is None:
            return self._before_unlimited(heads)
        reach = window - 1  # number of earlier keys that a query attends to
        before = []
        for run in self.runs:
            for (k, m), (q, n) in itertools.pairwise(_chunks(run, window)):
                query = slice(q, q + min(n, reach))
                # a query sees fewer keys than a chunk holds, so one chunk back is enough
                before.append(self._masked(query, slice(k, k + m), window))
        where = self.positions.device if self.places is None else self.places.device
        for (k, m), runs in self.shared:
            firsts = [torch.arange(q, q + min(n, reach), device=where) for q, n in runs]
            key = slice(k + max(0, m - reach), k + m)
            before.append(self._masked(torch.cat(firsts), key, window))
        # a window of one key reaches no earlier run
        return [part for part in before if part.mask is None or part.mask.numel()]

    def _before_unlimited(self, heads: set[Run]) -> list[PrefixSegment]:
        before = []
        for (k, m), runs in self.shared:
            # the runs of one prompt lie one after another, so a slice covers their queries
            query = slice(runs[0][0], runs[-1][0] + runs[-1][1])
            before.append(PrefixSegment(query, slice(k, k + m), None))
        for k, m in self.runs:
            if (k, m) in heads:
                # only the last state of a head is read
                before.append(PrefixSegment(slice(k + m - 1, k + m), slice(k, k + m), None))
        return before

    def _masked(self, query: slice | Tensor, key: slice, window: int) -> PrefixSegment:
        # on the host if possible: bool() below would wait for the device
        at = self.positions if self.places is None else self.places
        seen = at[key][None, :] > at[query][:, None] - window
        device = self.positions.device
        rows = to_device(query, device) if isinstance(query, Tensor) else query
        # attention without a mask is faster
        sees_all = seen.numel() > 0 and bool(seen.all())
        return PrefixSegment(rows, key, None if sees_all else to_device(seen, device))


def _chunks(run: Run, window: int | None) -> Iterator[Run]:
    """Yield pieces of ``run`` inside which a window of ``window`` hides only future tokens."""
    start, length = run
    step = window or max(length, 1)
    for offset in range(0, length, step):
        yield start + offset, min(step, length - offset)


def _buckets(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs so that padding each run to the longest of its group adds little."""
    buckets: list[list[Run]] = []
    for run in sorted(runs, key=lambda r: (r[1], r[0])):
        _, length = run
        # at most a quarter of padding: each group more is one more kernel call
        if buckets and length <= 8 + buckets[-1][0][1] * 5 // 4:
            buckets[-1].append(run)
        else:
            buckets.append([run])
    return buckets


def _own(runs: Sequence[Run], device: torch.device) -> SelfSegment:
    if len(runs) == 1:
        start, length = runs[0]
        return SelfSegment(start, length, None, None)
    # runs come sorted by length, so the last is the longest
    longest = runs[-1][1]
    starts, lengths = torch.tensor(runs).unbind(1)
    steps = torch.arange(longest)
    real = steps[None, :] < lengths[:, None]
    index = torch.where(real, starts[:, None] + steps[None, :], 0)
    equal = runs[0][1] == longest
    return SelfSegment.filled(index, None if equal else real, device)


def _ahead(spans: Sequence[Run], device: torch.device) -> SuffixSegment:
    """Build the part of later keys: all but the last token of each span as queries, all but the
    first as keys."""
    longest = spans[-1][1] - 1
    starts, lengths = torch.tensor([(s, n - 1) for s, n in spans]).unbind(1)
    steps = torch.arange(longest)
    real = steps[None, :] < lengths[:, None]
    # in reverse order, so that the later keys of a query become the earlier ones of a causal mask
    last = (starts + lengths)[:, None] - 1
    index = torch.where(real, last - steps[None, :], 0)
    equal = spans[0][1] - 1 == longest
    kept = None if equal else real
    query = SelfSegment.filled(index, kept, device)
    return SuffixSegment(query, SelfSegment.filled(index + 1, kept, device))


class _Joined(torch.autograd.Function):
    """Attention in parts, each with a separate kernel call, joined by the logs of their
    denominators."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Parts,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        q, k, v = query[0], key[0], value[0]  # [H, T, d], [H_kv, T, d]
        heads, tokens, _ = q.shape
        repeat = heads // k.shape[0]
        out = q.new_zeros(heads, tokens, v.shape[-1])  # stays 0 for queries that are not computed
        wide = torch.promote_types(q.dtype, torch.float32)
        # minus infinity: a query that no part has computed yet gives _join the weight 0
        lse = q.new_full((heads, tokens), -torch.inf, dtype=wide)
        for part in parts.own:
            keys = _repeat(_take(k, part), repeat)
            values = _repeat(_take(v, part), repeat)
            o, log = _forward(_take(q, part), keys, values, None, True, scale, softcap)
            _put(out, part, o)
            _put(lse.unsqueeze(-1), part, log.unsqueeze(-1))
        for part in parts.before:
            at = part.query
            keys = k[None, :, part.key]
            values = v[None, :, part.key]
            # queries of several heads are folded into one, so the shared keys are read without a copy
            queries = _fold(q[:, at], repeat)
            o, log = _forward(
                queries, keys, values, _tile(part.mask, repeat), False, scale, softcap
            )
            o = _unfold(o, heads)
            out[:, at], lse[:, at] = _join(out[:, at], lse[:, at], o, _unfold(log, heads))
        for part in parts.ahead:
            at = part.query
            keys = _repeat(_take(k, part.key), repeat)
            values = _repeat(_take(v, part.key), repeat)
            o, log = _forward(_take(q, at), keys, values, None, True, scale, softcap)
            before = _take(lse.unsqueeze(-1), at).squeeze(-1)
            o, log = _join(_take(out, at), before, o, log)
            _put(out, at, o)
            _put(lse.unsqueeze(-1), at, log.unsqueeze(-1))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts = parts, scale, softcap
        return out.transpose(0, 1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        parts, scale, softcap = ctx.parts
        q, k, v = query[0], key[0], value[0]
        grad = grads[0][0].transpose(0, 1)
        heads = q.shape[0]
        repeat = heads // k.shape[0]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # the softmax runs over all parts, so each part takes the joined output and denominators
        pairs = [(part, part) for part in parts.own]
        pairs += [(part.query, part.key) for part in parts.ahead]
        for at, keys in pairs:
            inputs = _take(q, at), _repeat(_take(k, keys), repeat), _repeat(_take(v, keys), repeat)
            log = _take(lse.unsqueeze(-1), at).squeeze(-1)
            g = _take(grad, at)
            if at.real is not None:
                # padding has no gradient and must not overflow: its probabilities become 0
                log = log.masked_fill(~at.real[:, None], 1e30)
                g = g * at.real[:, None, :, None]
            a, b, c = _backward(g, *inputs, _take(out, at), log, None, True, scale, softcap)
            _add(dq, at, a)
            _add(dk, keys, _collect(b, repeat))
            _add(dv, keys, _collect(c, repeat))
        for part in parts.before:
            at = part.query
            inputs = _fold(q[:, at], repeat), k[None, :, part.key], v[None, :, part.key]
            g = _fold(grad[:, at], repeat)
            sums = _fold(out[:, at], repeat), _fold(lse[:, at], repeat)
            a, b, c = _backward(g, *inputs, *sums, _tile(part.mask, repeat), False, scale, softcap)
            dq[:, at] += _unfold(a, heads)
            dk[:, part.key] += b[0]
            dv[:, part.key] += c[0]
        return dq[None], dk[None], dv[None], None, None, None


def _join(out: Tensor, log: Tensor, more: Tensor, more_log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax output ``[..., n, d]`` and log denominators ``[..., n]`` over two disjoint
    sets of keys."""
    # from the logs, since the denominators themselves may overflow
    joined = torch.logaddexp(log, more_log)
    own_share = (log - joined).exp().unsqueeze(-1)
    more_share = (more_log - joined).exp().unsqueeze(-1)
    return (out * own_share + more * more_share).to(out.dtype), joined


def _take(x: Tensor, part: SelfSegment) -> Tensor:
    """Return the runs of ``part`` from ``x [H, T, d]`` as ``[G, H, L, d]``."""
    if part.index is None:
        return x[None, :, part.start : part.start + part.length]
    rows = x.index_select(1, part.index)
    return rows.reshape(x.shape[0], -1, part.length, x.shape[-1]).transpose(0, 1)


def _put(x: Tensor, part: SelfSegment, rows: Tensor) -> None:
    """Write ``rows [G, H, L, d]`` at the positions of ``part`` in ``x [H, T, d]``. Padding is
    dropped."""
    if part.index is None:
        x[:, part.start : part.start + part.length] = rows[0]
        return
    flat = rows.transpose(0, 1).reshape(x.shape[0], -1, x.shape[-1])
    places = part.index if part.places is None else part.places
    # padding shares index 0 with a real token, so it must not be written
    x[:, places] = flat if part.kept is None else flat[:, part.kept]


def _add(x: Tensor, part: SelfSegment, rows: Tensor) -> None:
    """Add ``rows [G, H, L, d]`` at the positions of ``part``. Padding must be exactly zero."""
    if part.index is None:
        x[:, part.start : part.start + part.length] += rows[0]
    else:
        # index_add_ sums repeated indices: padding adds zeros to token 0
        x.index_add_(1, part.index, rows.transpose(0, 1).reshape(x.shape[0], -1, x.shape[-1]))


def _repeat(x: Tensor, times: int) -> Tensor:
    """Repeat key heads ``[G, H_kv, L, d]`` once for every query head that reads them."""
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _collect(x: Tensor, times: int) -> Tensor:
    # the gradient of a key head is the sum over the query heads that read it
    return x if times == 1 else x.unflatten(1, (-1, times)).sum(2)


def _fold(x: Tensor, times: int) -> Tensor:
    """Concatenate the query heads ``[H, n, ...]`` that read one key head, as more queries:
    ``[1, H_kv, times * n, ...]``."""
    return x.unflatten(0, (-1, times)).flatten(1, 2).unsqueeze(0)


def _unfold(x: Tensor, heads: int) -> Tensor:
    return x[0].unflatten(1, (heads // x.shape[1], -1)).flatten(0, 1)


def _tile(mask: Tensor | None, times: int) -> Tensor | None:
    # folded heads repeat the queries, hence the rows of the mask
    return mask if mask is None or times == 1 else mask.repeat(times, 1)


def _fused(q: Tensor, v: Tensor, softcap: float | None) -> bool:
    """Return ``True`` if the CPU's fused kernel computes a part."""
    # the kernel knows no soft-cap and requires equal head widths of queries and values
    return softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return output ``[G, H, n, d]`` and log denominators ``[G, H, n]`` of one part."""
    if _fused(q, v, softcap):
        added = _additive(mask, q.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=added, scale=scale
        )
    scores, _ = _scores(q, k, mask, causal, scale, softcap)
    log = scores.logsumexp(-1)
    p = (scores - log.unsqueeze(-1)).exp()
    return (p @ v.to(scores.dtype)).to(q.dtype), log


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one part, given the joined output and log denominators."""
    if _fused(q, v, softcap):
        added = _additive(mask, q.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log, 0.0, causal, attn_mask=added, scale=scale
        )
    scores, slope = _scores(q, k, mask, causal, scale, softcap)
    p = (scores - log.unsqueeze(-1)).exp()
    wide = p.dtype
    wide_grad = grad.to(wide)
    # the gradient of a softmax: p (dp - sum p dp), where the sum equals grad . out
    centre = (wide_grad * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (wide_grad @ v.to(wide).transpose(-1, -2) - centre) * scale
    if slope is not None:
        ds = ds * slope
    dq = ds @ k.to(wide)
    dk = ds.transpose(-1, -2) @ q.to(wide)
    dv = p.transpose(-1, -2) @ wide_grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return scaled, capped and masked scores ``[G, H, n, m]``, and the slope of the cap."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-1, -2)).to(wide) * scale
    slope = None
    if softcap is not None:
        bent = (scores / softcap).tanh()
        scores = softcap * bent
        slope = 1 - bent * bent
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores, slope


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    # the kernel adds its mask to the scores
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, -torch.inf)
