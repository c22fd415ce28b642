"""Layouts that turn a batch into one model call. All three give the same numbers.

The last token of a response is not computed unless ``final`` requests it, since no loss reads the
state after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrft.config.model import Layout
from lightrft.models.attention.embedding_noise import EmbeddingNoise
from lightrft.models.attention.segment_plan import Run, SegmentPlan
from lightrft.types import Batch
from lightrft.utils.device_transfer import to_device


@dataclass(slots=True)
class Packed:
    """One model call, and the positions in its ``[S * T]`` hidden states that are read.

    Attributes:
        input_ids: ``[S, T]``.
        position_ids: ``[S, T]``, or ``[axes, S, T]`` for rotary embeddings of several axes.
        plan: Attention of the flat layouts. ``None`` for one sample per row (``padded``).
        gather: ``[N]`` index of the state that predicts each response token.
        final: ``[B]`` index of the state after each response's last token. ``None`` unless
            requested.
        source: ``[S * T]`` index of each token among the prompts' tokens followed by the
            responses', -1 for padding.
        mask: ``[S, T]``, 0 for padding. ``None`` if rows are padded on the right only, where causal
            attention needs no mask.
        noise: Noise on the token embeddings. ``None`` for none.
        experts: ``[N, layers, k]`` experts to replay for the prompts' tokens followed by the
            responses'. ``None`` replays none.
        counts: ``[S * T]`` number of rows that each token stands for in the loss of routers.
            ``None`` without that loss.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: SegmentPlan | None
    gather: Tensor
    final: Tensor | None
    source: Tensor
    mask: Tensor | None = None
    noise: EmbeddingNoise | None = None
    experts: Tensor | None = None
    counts: Tensor | None = None

    def experts_of(self, source: Tensor) -> Tensor | None:
        """Return the experts to replay for each token of ``source``, see ``Packed.source``."""
        if self.experts is None:
            return None
        found = self.experts[source.clamp(min=0)]
        # the router picks the experts of padding
        return torch.where((source < 0)[:, None, None], -1, found)

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        if self.plan is not None:
            inputs["attention_plan"] = self.plan
        if self.mask is not None:
            inputs["attention_mask"] = self.mask
        return inputs


@dataclass(slots=True)
class _Rows:
    """Lengths as lists: of prompts, of responses, of the computed part of each response, and the
    rows that are computed at all."""

    prompts: list[int]
    answers: list[int]
    run: list[int]
    prompt_of: list[int]
    needed: list[int]


@dataclass(slots=True)
class _Flat:
    """Runs of tokens copied into a flat row: from ``source``, ``length`` long, at position
    ``first`` of their sequence."""

    source: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, source: int, length: int, first: int) -> Run:
        """Append a run. Return its start and length in the row."""
        self.source.append(source)
        self.length.append(length)
        self.first.append(first)
        self.end += length
        return self.end - length, length


def pack(
    batch: Batch,
    layout: Layout,
    *,
    final: bool = False,
    pad: int = 0,
    axes: Tensor | None = None,
) -> Packed:
    """Build one model call from ``batch``.

    Rows of length 0 and empty batches are allowed: nothing is read from them.

    Args:
        batch: Prompts and responses.
        layout: ``prefix_shared``, ``packed`` or ``padded``.
        final: Also compute each response's last token.
        pad: Token id of padding.
        axes: ``[axes, N]`` positions of the prompts' tokens followed by the responses'. ``None``
            uses the index in the sequence.

    Raises:
        ValueError: A prompt has length 0, so nothing predicts the first token of its responses.
    """
    rows = _rows(batch, final)
    empty = [rows.prompt_of[b] for b in rows.needed if rows.prompts[rows.prompt_of[b]] == 0]
    if empty:
        problem = f"prompt {empty[0]} of the batch has no tokens"
        raise ValueError(f"{problem}, so nothing predicts the first token of its responses")
    if not rows.needed:
        return _nothing(batch, layout, final)
    make = {"prefix_shared": _prefix_shared, "packed": _packed, "padded": _padded}[layout]
    packed = make(batch, rows, final, pad)
    packed.noise = EmbeddingNoise.of(batch)
    if batch.prompts.experts is not None and batch.responses.experts is not None:
        packed.experts = torch.cat([batch.prompts.experts, batch.responses.experts])
    if axes is not None:
        # padding (-1) gets the position of the first token; no state of padding is read
        packed.position_ids = axes[:, packed.source.clamp(min=0)].unflatten(
            1, packed.input_ids.shape
        )
    return packed


def _rows(batch: Batch, final: bool) -> _Rows:
    # sizes are lists on the host, so no layout waits for the device
    answers = batch.responses.sizes
    # without ``final``, no state after the last token of a response is read, so it is left out
    run = list(answers) if final else [max(0, n - 1) for n in answers]
    needed = [b for b, n in enumerate(answers) if n or final]
    return _Rows(batch.prompts.sizes, answers, run, batch.groups, needed)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for n in lengths:
        starts.append(total)
        total += n
    return starts


def _nothing(batch: Batch, layout: Layout, final: bool) -> Packed:
    """Build a call of one token that is not read, so that every rank makes its model call and zero
    gradients flow."""
    device = batch.responses.tokens.device
    one = torch.zeros(1, 1, dtype=torch.long, device=device)
    none = torch.zeros(0, dtype=torch.long, device=device)
    plan = None if layout == "padded" else SegmentPlan([(0, 1)], [], one[0])
    return Packed(one, one.clone(), plan, none, none.clone() if final else None, one[0] - 1)


def _prefix_shared(batch: Batch, rows: _Rows, final: bool, pad: int) -> Packed:
    """Lay out each group as its prompt once, then each response. A response's positions continue
    its prompt's."""
    groups: dict[int, list[int]] = {}
    for b in rows.needed:
        groups.setdefault(rows.prompt_of[b], []).append(b)
    prompt_at = _starts(rows.prompts)
    answer_at = _sources(batch, rows)
    flat = _Flat()
    runs: list[Run] = []
    shared: list[tuple[Run, list[Run]]] = []
    heads: list[Run] = []
    last = [0] * len(rows.answers)
    start = [0] * len(rows.answers)
    for p, members in groups.items():
        length = rows.prompts[p]
        head = flat.add(prompt_at[p], length, 0)
        if len(members) == 1:  # nothing to share: prompt and response are one run
            (b,) = members
            last[b] = flat.end - 1
            start[b] = flat.end
            if rows.run[b]:
                flat.add(answer_at[b], rows.run[b], length)
            runs.append((head[0], length + rows.run[b]))
            continue
        heads.append(head)
        answers = []
        for b in members:
            # the last token of the prompt predicts the first of every response
            last[b] = head[0] + length - 1
            if rows.run[b]:
                run = flat.add(answer_at[b], rows.run[b], length)
                answers.append(run)
                start[b] = run[0]
        runs += [head, *answers]
        if answers:
            shared.append((head, answers))
    return _flat_row(batch, rows, flat, runs, shared, last, start, final, heads)


def _packed(batch: Batch, rows: _Rows, final: bool, pad: int) -> Packed:
    """Lay out prompt and response of every sample one after another. Positions restart with each
    sample."""
    prompt_at = _starts(rows.prompts)
    answer_at = _sources(batch, rows)
    flat = _Flat()
    runs: list[Run] = []
    last = [0] * len(rows.answers)
    start = [0] * len(rows.answers)
    for b in rows.needed:
        p = rows.prompt_of[b]
        length = rows.prompts[p]
        head = flat.add(prompt_at[p], length, 0)
        start[b] = head[0] + length
        last[b] = start[b] - 1
        if rows.run[b]:
            flat.add(answer_at[b], rows.run[b], length)
        runs.append((head[0], length + rows.run[b]))
    return _flat_row(batch, rows, flat, runs, [], last, start, final)


def _sources(batch: Batch, rows: _Rows) -> list[int]:
    """Return the start of each response among the prompts' tokens followed by the responses'."""
    offset = batch.prompts.tokens.numel()
    return [offset + s for s in _starts(rows.answers)]


def _flat_row(
    batch: Batch,
    rows: _Rows,
    flat: _Flat,
    runs: list[Run],
    shared: list[tuple[Run, list[Run]]],
    last: list[int],
    start: list[int],
    final: bool,
    heads: Sequence[Run] = (),
) -> Packed:
    device = batch.responses.tokens.device
    # indices are built on the host: on a device, repeat_interleave makes the host wait for lengths
    length = torch.tensor(flat.length)
    begins = length.cumsum(0) - length
    within = torch.arange(int(length.sum())) - torch.repeat_interleave(begins, length)
    source = to_device(torch.repeat_interleave(torch.tensor(flat.source), length) + within, device)
    places = torch.repeat_interleave(torch.tensor(flat.first), length) + within
    positions = to_device(places, device)
    tokens = torch.cat([batch.prompts.tokens, batch.responses.tokens])[source]
    plan = SegmentPlan(runs, shared, positions, heads, places=places)
    gather, after = _reads(rows, torch.tensor(last), torch.tensor(start))
    last_states = to_device(after, device) if final else None
    return Packed(
        tokens[None], positions[None], plan, to_device(gather, device), last_states, source
    )


def _padded(batch: Batch, rows: _Rows, final: bool, pad: int) -> Packed:
    """Build a rectangle padded on the right. Causal attention never reads later tokens, so no mask
    is needed."""
    device = batch.responses.tokens.device
    of, prompt_at, answer_at = rows.prompt_of, _starts(rows.prompts), _sources(batch, rows)
    width = max(rows.prompts[of[b]] + rows.run[b] for b in rows.needed)
    source = torch.full((len(rows.needed), width), -1, dtype=torch.long)
    last = torch.zeros(len(rows.answers), dtype=torch.long)
    start = torch.zeros(len(rows.answers), dtype=torch.long)
    for s, b in enumerate(rows.needed):
        n, p = rows.prompts[of[b]], prompt_at[of[b]]
        source[s, :n] = torch.arange(p, p + n)
        source[s, n : n + rows.run[b]] = torch.arange(answer_at[b], answer_at[b] + rows.run[b])
        last[b], start[b] = s * width + n - 1, s * width + n
    source = to_device(source, device)
    # padding (-1) first takes the last token, which the fill replaces
    tokens = torch.cat([batch.prompts.tokens, batch.responses.tokens])
    ids = tokens[source].masked_fill(source < 0, pad)
    gather, after = _reads(rows, last, start)
    positions = torch.arange(width, device=device).expand(len(rows.needed), -1)
    last_states = to_device(after, device) if final else None
    return Packed(ids, positions, None, to_device(gather, device), last_states, source.flatten())


def _reads(rows: _Rows, last: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the states that predict response tokens, and of the states after the
    last tokens.

    A prompt's ``last [B]`` token predicts the first token of a response; the states from
    ``start [B]`` predict the others.
    """
    length = torch.tensor(rows.answers, dtype=torch.long)
    row = torch.repeat_interleave(torch.arange(len(length)), length)
    step = torch.arange(len(row)) - (length.cumsum(0) - length)[row]
    gather = torch.where(step == 0, last[row], start[row] + step - 1)
    return gather, torch.where(length == 0, last, start + length - 1)
