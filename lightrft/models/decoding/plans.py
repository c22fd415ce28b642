"""Attention plans of a decode session: prefill of prompts, and steps of one or more tokens per row.

Keys and values are rectangles: a prompt per slot, and a response per row.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightrft.models.attention.segment_plan import AttentionSpans, SegmentPlan
from lightrft.utils.device_transfer import to_device


class Rectangle:
    """Keys and values ``[rows, H_kv, columns, d]`` of every layer. A layer is allocated at its
    first call.

    Unused places must be finite (zero at first), since a masked value is still multiplied by a
    probability of zero.

    Attributes:
        rows: Number of rows.
        columns: Number of columns.
        moves: How often the arrays got new memory.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self.moves = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arrays of keys and values of a layer.

        Args:
            index: Index of the layer.
            key: ``[..., H_kv, T, d]``. Gives heads, width and type of the keys.
            value: ``[..., H_kv, T, d]``. Gives those of the values.
        """
        found = self._layers.get(index)
        if found is None:
            # key and value heads may differ in width
            new_key = key.new_zeros(self.rows, key.shape[-3], self.columns, key.shape[-1])
            new_value = value.new_zeros(self.rows, value.shape[-3], self.columns, value.shape[-1])
            found = self._layers[index] = (new_key, new_value)
        return found

    def resize(self, rows: int, columns: int, used_rows: int, used_columns: int) -> None:
        """Allocate new memory and copy the used part, layer by layer, so that only one layer exists
        twice.

        Args:
            rows: Number of rows.
            columns: Number of columns.
            used_rows: Number of first rows to copy.
            used_columns: Number of first columns to copy.
        """
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows = rows
        self.columns = columns
        self.moves += 1
        for index, (key, value) in self._layers.items():
            new_key = _resized(key, rows, columns, used_rows, used_columns)
            new_value = _resized(value, rows, columns, used_rows, used_columns)
            self._layers[index] = new_key, new_value

    def read(self, row: int, columns: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return keys and values ``[H_kv, columns, d]`` of a row by layer, without a copy."""
        return {
            index: (key[row, :, :columns], value[row, :, :columns])
            for index, (key, value) in self._layers.items()
        }

    def move(self, dst: np.ndarray, src: np.ndarray, used_columns: int) -> None:
        """Copy rows to other rows.

        Args:
            dst: ``[n]``. Rows to overwrite.
            src: ``[n]``. Rows to copy.
            used_columns: Number of first columns to copy.
        """
        for pair in self._layers.values():
            for x in pair:
                to = to_device(torch.from_numpy(dst), x.device)
                of = to_device(torch.from_numpy(src), x.device)
                # only the used columns: a full copy would move memory that holds nothing yet
                used = x[:, :, :used_columns]
                used[to] = used[of]


def _resized(old: Tensor, rows: int, columns: int, used_rows: int, used_columns: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
    new[:used_rows, :, :used_columns] = old[:used_rows, :, :used_columns]
    return new


class PrefillPlan:
    """Concatenated prompts. Each attends to itself, and its keys and values are stored in its
    slot."""

    def __init__(
        self,
        store: Rectangle,
        first: int,
        lengths: np.ndarray,
        device: torch.device,
        spans: AttentionSpans | None = None,
    ) -> None:
        self._store = store
        self._first = first
        self._count = len(lengths)
        self._columns = int(lengths.max())
        ends = np.cumsum(lengths)
        starts = ends - lengths
        columns = np.arange(self._columns)
        inside = columns < lengths[:, None]
        # index in the rectangle -> token; padding takes token 0, since every place must be finite
        gather = np.where(inside, starts[:, None] + columns, 0).reshape(-1)
        self._gather = to_device(torch.from_numpy(gather), device)
        places = torch.from_numpy(np.broadcast_to(columns, inside.shape)[inside])
        self.positions = to_device(places, device).unsqueeze(0)
        self.last = to_device(torch.from_numpy(ends - 1), device)
        runs = list(zip(starts.tolist(), lengths.tolist()))
        self._plan = SegmentPlan(runs, [], self.positions[0], spans=spans, places=places)

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
        slots = slice(self._first, self._first + self._count)
        for store, new in zip(self._store.layer(layer, key, value), (key, value)):
            flat = new[0].index_select(1, self._gather)
            rectangle = flat.unflatten(1, (self._count, self._columns)).transpose(0, 1)
            # stored here, inside the layer: the plan sees keys after the rotary embedding
            store[slots, :, : self._columns] = rectangle
        options = {"scale": scale, "softcap": softcap, "window": window}
        return self._plan.attend(layer, query, key, value, **options)


class LaneMaps(NamedTuple):
    """Where the rows and heads of a step are among the lanes of the prompts.

    Lanes are ordered (slot, head, lane). An unused lane repeats row 0, and its result is not read.

    Attributes:
        to_lane: ``[R * H_kv]``. Lane of each row and head. ``None`` if it is the same number.
        from_lane: ``[slots * H_kv * lanes]``. Row and head of each lane. ``None`` with ``to_lane``.
        index: ``[R * H_kv]``. Row and head in the flat responses.
    """

    to_lane: Tensor | None
    from_lane: Tensor | None
    index: Tensor


class StepPlaces(Protocol):
    """The rows of a step, see ``RowPlaces``.

    Attributes:
        count: Number of rows.
        slots: Number of prompts.
        lanes: Most rows of a prompt.
        prompt_columns: Number of columns of the prompts in use.
        longest: Tokens of the longest response.
        prompt_end: ``[R]``. Tokens of each row's prompt.
        positions: ``[R]``. Index of each row's next token in its sequence.
        column: Column of every row's next token in the responses. ``None`` if the host does not
            know it, or rows differ.
    """

    count: int
    slots: int
    lanes: int
    prompt_columns: int
    longest: int
    prompt_end: Tensor
    positions: Tensor

    @property
    def column(self) -> int | None: ...

    def maps(self, kv_heads: int) -> LaneMaps: ...

    def hidden(self, window: int | None) -> Tensor | None: ...


class RowPlaces:
    """The position of each row, and its lane among the rows of its prompt. Rebuilt when rows are
    added or removed."""

    def __init__(
        self,
        slots: np.ndarray,
        prompt_lengths: np.ndarray,
        lengths: np.ndarray,
        device: torch.device,
    ) -> None:
        self.device = device
        self.count = len(slots)
        self.slots = len(prompt_lengths)
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=self.slots)
        self.lanes = int(counts.max())
        lane = np.empty_like(slots)
        # the rows of a slot are numbered 0, 1, 2 ... in their order
        firsts = np.cumsum(counts) - counts
        lane[order] = np.arange(self.count) - np.repeat(firsts, counts)
        self._slot = slots
        self._lane = lane
        own_prompt = prompt_lengths[slots]
        self.prompt_columns = int(prompt_lengths.max())
        self.prompt_end = to_device(torch.from_numpy(own_prompt), device)
        self.positions = to_device(torch.from_numpy(own_prompt + lengths), device)
        self._own_prompt = own_prompt
        self._place(lengths)
        self._maps: dict[int, LaneMaps] = {}

    def _place(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.longest = int(lengths.max())
        # rows of equal shape need no mask
        padded_prompt = (self._own_prompt != self.prompt_columns).any()
        self._equal = bool((lengths == self.longest).all())
        self._ragged = bool(padded_prompt) or not self._equal
        self._last = int((self._own_prompt + lengths).max())

    def advance(self) -> None:
        """Add a token to each row."""
        # in place on the device, so that a step copies nothing from the host
        self.positions += 1
        self.lengths = self.lengths + 1
        self.longest += 1
        self._last += 1

    def move(self, by: np.ndarray) -> None:
        """Add ``by [R]`` tokens to the rows, or remove them."""
        self.positions += to_device(torch.from_numpy(by), self.device)
        self._place(self.lengths + by)

    @property
    def column(self) -> int | None:
        return self.longest if self._equal else None

    def maps(self, kv_heads: int) -> LaneMaps:
        """Return the lanes of rows with ``kv_heads`` heads."""
        found = self._maps.get(kv_heads)
        if found is None:
            head = np.arange(kv_heads)
            lanes = (self._slot[:, None] * kv_heads + head) * self.lanes + self._lane[:, None]
            to_lane, index = lanes.reshape(-1), np.arange(self.count * kv_heads)
            from_lane = np.zeros(self.slots * kv_heads * self.lanes, dtype=np.int64)
            from_lane[to_lane] = index
            there, back, place = (
                to_device(torch.from_numpy(x), self.device) for x in (to_lane, from_lane, index)
            )
            found = LaneMaps(there, back, place)
            if np.array_equal(from_lane, index):
                found = LaneMaps(None, None, place)
            self._maps[kv_heads] = found
        return found

    def hidden(self, window: int | None) -> Tensor | None:
        """Return ``[R, 1, prompt + response columns]``, ``True`` for keys that a row must not
        attend to; ``None`` if there are none."""
        windowed = window is not None and self._last >= window
        if not self._ragged and not windowed:
            return None
        end, at = self.prompt_end.unsqueeze(1), self.positions.unsqueeze(1)
        prompt_at = torch.arange(self.prompt_columns, device=self.device).expand(self.count, -1)
        answer_at = torch.arange(self.longest + 1, device=self.device) + end
        hidden = torch.cat([prompt_at >= end, answer_at > at], dim=1)
        if windowed:
            # a token attends to the last ``window`` keys, itself included
            hidden |= torch.cat([prompt_at, answer_at], dim=1) <= at - window
        return hidden.unsqueeze(1)


class StepPlan:
    """One new token per row, which attends to its prompt, its response so far, and itself."""

    def __init__(self, prompts: Rectangle, answers: Rectangle, rows: StepPlaces) -> None:
        self._prompts, self._answers, self._rows = prompts, answers, rows
        self._hidden: dict[int | None, Tensor | None] = {}
        self._places: dict[int, Tensor] = {}

    def _place(self, kv_heads: int) -> Tensor:
        """Return ``[R * H_kv]``, the index of each row's and head's new key in the flat
        responses."""
        if kv_heads not in self._places:
            index = self._rows.maps(kv_heads).index
            own = (self._rows.positions - self._rows.prompt_end).repeat_interleave(kv_heads)
            self._places[kv_heads] = index * self._answers.columns + own
        return self._places[kv_heads]

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
        rows, kv_heads, repeats = self._rows, key.shape[1], query.shape[1] // key.shape[1]
        stores = self._answers.layer(layer, key, value)
        # written before it is read, since a token attends to itself
        if rows.column is None:
            write(stores, (key, value), self._place(kv_heads))
        else:
            for store, new in zip(stores, (key, value)):
                store[: rows.count, :, rows.column] = new[0].transpose(0, 1)
        # layers with the same window share one mask
        if window not in self._hidden:
            self._hidden[window] = rows.hidden(window)
        # scaling queries costs less than scaling scores, which have a column per key
        flat = (query[0].transpose(0, 1) * scale).reshape(rows.count * kv_heads, repeats, -1)
        prompts = self._prompts.layer(layer, key, value)
        used = rows.longest + 1
        out = attend_by_row(rows, flat, prompts, stores, used, self._hidden[window], softcap)
        return out.view(1, rows.count, query.shape[1], -1)


class FeedPlan:
    """Several new tokens per row, each row with a number of its own.

    A token attends to its prompt, its response, and the new tokens up to itself. Queries are padded
    to a rectangle ``[R, c]`` by copies of each row's last token.

    Args:
        prompts: Keys and values of prompts.
        answers: Keys and values of responses.
        rows: The rows before the new tokens.
        counts: ``[R]``. Number of new tokens of each row, at least 1.
    """

    def __init__(
        self, prompts: Rectangle, answers: Rectangle, rows: RowPlaces, counts: np.ndarray
    ) -> None:
        self._prompts, self._answers, self._rows = prompts, answers, rows
        starts = np.cumsum(counts) - counts
        self._width = int(counts.max())
        row_of = np.repeat(np.arange(rows.count), counts)
        lane = np.arange(int(counts.sum())) - starts[row_of]
        ahead = np.minimum(np.arange(self._width), counts[:, None] - 1)

        def device(array: np.ndarray) -> Tensor:
            return to_device(torch.from_numpy(array), rows.device)

        self._rectangle = device((starts[:, None] + ahead).reshape(-1))
        self._flat = device(row_of * self._width + lane)
        self._row_of = device(row_of)
        self._own = device(rows.lengths[row_of] + lane)
        self._ahead = device(ahead)
        self._used = int((rows.lengths + counts).max())
        self.positions = rows.positions[self._row_of] + device(lane)
        self._hidden: dict[int | None, Tensor] = {}

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
        rows, width, kv_heads = self._rows, self._width, key.shape[1]
        repeats = query.shape[1] // kv_heads
        stores = self._answers.layer(layer, key, value)
        head = torch.arange(kv_heads, device=rows.device)
        place = (self._row_of[:, None] * kv_heads + head) * self._answers.columns
        write(stores, (key, value), (place + self._own[:, None]).reshape(-1))
        if window not in self._hidden:
            self._hidden[window] = self._hide(window)
        padded = (query[0] * scale).index_select(1, self._rectangle)
        padded = padded.view(kv_heads, repeats, rows.count, width, -1).permute(2, 0, 1, 3, 4)
        flat = padded.reshape(rows.count * kv_heads, repeats * width, -1)
        prompts = self._prompts.layer(layer, key, value)
        out = attend_by_row(rows, flat, prompts, stores, self._used, self._hidden[window], softcap)
        out = out.view(rows.count, kv_heads, repeats, width, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows.count * width, query.shape[1], -1)
        return out.index_select(0, self._flat)[None]

    def _hide(self, window: int | None) -> Tensor:
        """Return ``[R, 1, c, prompt + response columns]``, ``True`` for keys that a token must not
        attend to."""
        rows = self._rows
        end = rows.prompt_end[:, None, None]
        at = (rows.positions[:, None] + self._ahead)[:, :, None]
        columns = torch.arange(rows.prompt_columns, device=rows.device)
        prompt_at = columns.expand(rows.count, self._width, -1)
        answer_at = torch.arange(self._used, device=rows.device) + end
        hidden = torch.cat([prompt_at >= end, answer_at > at], dim=-1)
        if window is not None:
            # a token attends to the last ``window`` keys, itself included
            hidden |= torch.cat([prompt_at <= at - window, answer_at <= at - window], dim=-1)
        return hidden[:, None]


def write(stores: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], place: Tensor) -> None:
    """Write keys and values of new tokens.

    Args:
        stores: ``[rows, H_kv, columns, d]`` each.
        new: ``[1, H_kv, T, d]`` each.
        place: ``[T * H_kv]``. Index of each token and head in the flat rows and columns.
    """
    for store, values in zip(stores, new):
        flat = values[0].transpose(0, 1).reshape(-1, values.shape[-1])
        store.view(-1, store.shape[-1]).index_copy_(0, place, flat)


def attend_by_row(
    rows: StepPlaces,
    query: Tensor,
    prompts: tuple[Tensor, Tensor],
    answers: tuple[Tensor, Tensor],
    used: int,
    hidden: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Return the attention output ``[R * H_kv, q, d_v]`` over the prompt and response of each row.

    Args:
        rows: The rows.
        query: ``[R * H_kv, q, d]``, scaled. The q queries of a row share its keys.
        prompts: Keys and values ``[slots, H_kv, columns, d]``.
        answers: Keys and values ``[rows, H_kv, columns, d]``.
        used: Number of columns of the responses that are in use.
        hidden: ``[R, 1, ..., prompt columns + used]`` bool, keys that a query must not attend to.
            ``None`` hides none.
        softcap: Soft-cap of the scores. ``None`` for none.
    """
    count, queries = query.shape[0], query.shape[1]
    kv_heads = count // rows.count
    to_lane, from_lane, _ = rows.maps(kv_heads)
    own = [store[: rows.count, :, :used].flatten(0, 1) for store in answers]
    shared = [x[: rows.slots, :, : rows.prompt_columns].flatten(0, 1) for x in prompts]
    # rows of one prompt become one batch entry, so that its keys are read once
    lanes = rows.slots * kv_heads, rows.lanes * queries, -1
    by_lane = _select(query.reshape(count, -1), from_lane).view(lanes)
    by_lane = by_lane @ shared[0].transpose(1, 2)
    on_prompt = _select(by_lane.view(-1, queries * rows.prompt_columns), to_lane)
    on_own = query @ own[0].transpose(1, 2)
    scores = torch.cat([on_prompt.view(count, queries, -1), on_own], dim=-1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores.view(rows.count, -1, *hidden.shape[2:]).masked_fill_(hidden, -torch.inf)
    # one softmax over prompt and response, in float32 as in transformers' own attention
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(own[1].dtype)
    on_prompt, on_own = weights.split([rows.prompt_columns, used], dim=-1)

    by_lane = _select(on_prompt.reshape(count, -1), from_lane).view(lanes) @ shared[1]
    out = _select(by_lane.view(-1, queries * shared[1].shape[-1]), to_lane)
    # the product with the response's values is added to the prompt's in one call
    return torch.baddbmm(out.view(count, queries, -1), on_own, own[1])


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)
