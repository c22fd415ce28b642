"""Token-by-token decoding through a model's own forward, with a key/value cache that stores each prompt once.

Prompts and answers are two rectangles per layer: ``[slots, H_kv, prompt tokens, d]`` and ``[rows, H_kv, answer tokens, d]``.
A step is a constant number of tensor operations per layer, whatever the number of rows: the queries of a prompt's rows meet
its keys in one batched product, then each row its own keys, and one softmax covers both.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightrft.models import attention
from lightrft.types import Prompt
from lightrft.utils.errors import DataError, ModelError

PREFILL_TOKENS = 8192
"""Prompt tokens (padded) that go through the model in one call; bounds the activations of a prefill."""
QUERY_BLOCK = 256
"""Queries whose scores exist at one time where the fused kernel does not apply (soft-cap, sliding window)."""


class Decoder:
    """Runs any transformers causal language model (adapters included) for sampling; the weights stay the model's own."""

    def __init__(self, model: nn.Module) -> None:
        attention.register()
        self.model = model
        config: Any = model.config
        self._config = config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, of the generation config and of the model's."""
        sources = (getattr(self.model, "generation_config", None), self._config)
        found: list[int] = []
        for eos in (source.eos_token_id for source in sources if source is not None):
            found += [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return tuple(dict.fromkeys(found))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def apart(self) -> Decoder:
        """A decoder whose weights can be replaced by ``load`` without a trace in this one's. Until then, and for frozen ones for
        good, the two share memory; nothing else is shared, so that each may be used in a thread of its own."""
        frozen: dict[int, Any] = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        mine = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self.model.parameters() if p.requires_grad}
        return Decoder(copy.deepcopy(self.model, frozen | mine))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use the tensors of ``weights`` from now on, as they are: a copy is made only where device or type differ.

        Raises ``ModelError`` for a name or a shape that is not the model's.
        """
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            here = parameters.get(name)
            if here is None or here.shape != tensor.shape:
                found = "no such parameter" if here is None else f"shape {list(here.shape)}"
                raise ModelError(f"weights {name!r} of shape {list(tensor.shape)} do not fit the sampling model: it has {found}")
            here.data = tensor.detach().to(device=here.device, dtype=here.dtype)

    def session(self) -> Session:
        """An empty cache over this model. Sessions share nothing but the weights."""
        return Session(self.model)

    @contextmanager
    def running(self) -> Generator[None]:
        """Evaluation mode, no gradients and attention by plan; all put back as they were at the end."""
        training = [module for module in self.model.modules() if module.training]
        before = self._config._attn_implementation
        for module in training:
            module.training = False
        if before != attention.NAME:
            self._config._attn_implementation = attention.NAME
        try:
            with torch.no_grad():
                yield
        finally:
            if before != attention.NAME:
                self._config._attn_implementation = before
            for module in training:
                module.training = True


class Session:
    """Prompts in slots, answers in rows. Every call must be inside ``Decoder.running()``.

    Rows are ``0 .. len(session) - 1``: ``admit`` appends, ``evict`` moves and cuts, ``step`` feeds one token to each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._prompts = _Rectangle()
        self._answers = _Rectangle()
        self._handles: list[int] = []  # slot -> handle
        self._next_handle = 0
        self._prompt_lengths = np.zeros(0, dtype=np.int64)  # by slot
        self._handle_of = np.zeros(0, dtype=np.int64)  # by row
        self._lengths = np.zeros(0, dtype=np.int64)  # by row: answer tokens whose keys are held
        self._room = 0
        self._rows: _Rows | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def held(self) -> int:
        """Tokens whose keys and values have memory now, used or not."""
        return self._prompts.rows * self._prompts.columns + self._answers.rows * self._answers.columns

    def reserve(self, prompts: int, prompt_tokens: int, rows: int, answer_tokens: int, budget: int) -> None:
        """Allow ``prompts`` of up to ``prompt_tokens`` and ``rows`` of up to ``answer_tokens`` tokens, within ``budget`` held tokens.

        Answers take their memory as they grow. Earlier, larger arrays stay unless the budget then could be exceeded.
        """
        shapes = [(prompts, prompt_tokens), (rows, answer_tokens)]
        largest = [(max(x.rows, r), max(x.columns, c)) for x, (r, c) in zip((self._prompts, self._answers), shapes)]
        if sum(r * c for r, c in largest) <= budget:
            shapes = largest
        (prompts, prompt_tokens), (rows, self._room) = shapes
        self._prompts.resize(prompts, prompt_tokens, len(self._handles), int(self._prompt_lengths.max(initial=0)))
        self._answers.resize(rows, min(self._room, self._answers.columns), len(self), int(self._lengths.max(initial=0)))

    def prefill(self, prompts: Sequence[Prompt]) -> tuple[list[int], Tensor]:
        """Compute ``prompts`` into new slots: a handle for each, and the logits ``[P, V]`` of their first answer tokens."""
        for prompt in prompts:
            if not prompt.token_ids:
                raise DataError(f"prompt {prompt.id!r} has no tokens")
            if prompt.media:
                raise ModelError(f"prompt {prompt.id!r} has media ({', '.join(prompt.media)}), which this model cannot take")
        handles = [self._next_handle + i for i in range(len(prompts))]
        self._next_handle += len(prompts)
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        for part in _by_budget([len(p.token_ids) for p in prompts]):
            found = self._prefill([prompts[i].token_ids for i in part], [handles[i] for i in part])
            for i, row in zip(part, found):
                logits[i] = row
        return handles, torch.stack(logits)

    def _prefill(self, rows: list[list[int]], handles: list[int]) -> Tensor:
        first = len(self._handles)
        lengths = np.array([len(r) for r in rows], dtype=np.int64)
        plan = _PrefillPlan(self._prompts, first, lengths, self._device)
        tokens = torch.tensor([[t for r in rows for t in r]], device=self._device)
        logits = self._forward(tokens, plan.positions, plan, plan.last)
        self._handles += handles
        self._prompt_lengths = np.concatenate([self._prompt_lengths, lengths])
        self._rows = None
        return logits

    def admit(self, handles: Sequence[int]) -> None:
        """Append one row, with an empty answer, for each of ``handles``."""
        self._handle_of = np.concatenate([self._handle_of, np.array(handles, dtype=np.int64)])
        self._lengths = np.concatenate([self._lengths, np.zeros(len(handles), dtype=np.int64)])
        self._rows = None

    def step(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [R]``, the last of each row, and return the logits ``[R, V]`` of the next."""
        needed = int(self._lengths.max()) + 1
        if needed > self._answers.columns:
            columns = max(needed, min(self._room, max(64, 2 * self._answers.columns)))
            self._answers.resize(len(self), columns, len(self), needed - 1)
        if self._rows is None:
            slot_of = {handle: slot for slot, handle in enumerate(self._handles)}
            slots = np.array([slot_of[h] for h in self._handle_of.tolist()], dtype=np.int64)
            self._rows = _Rows(slots, self._prompt_lengths, self._lengths, self._device)
        plan = _StepPlan(self._prompts, self._answers, self._rows)
        logits = self._forward(tokens.unsqueeze(0), self._rows.positions.unsqueeze(0), plan, 0)
        self._rows.advance()
        self._lengths += 1
        return logits

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        if moves:
            dst, src = (np.array(side, dtype=np.int64) for side in zip(*moves))
            self._answers.move(dst, src, int(self._lengths.max()))
            self._handle_of[dst], self._lengths[dst] = self._handle_of[src], self._lengths[src]
        self._handle_of, self._lengths = self._handle_of[:rows], self._lengths[:rows]
        self._rows = None

    def release(self, handle: int) -> None:
        """Forget a prompt that no row uses any more."""
        slot, last = self._handles.index(handle), len(self._handles) - 1
        if slot != last:
            self._prompts.move(np.array([slot]), np.array([last]), int(self._prompt_lengths[last]))
            self._handles[slot], self._prompt_lengths[slot] = self._handles[last], self._prompt_lengths[last]
        self._handles.pop()
        self._prompt_lengths = self._prompt_lengths[:-1]
        self._rows = None

    def _forward(self, tokens: Tensor, positions: Tensor, plan: attention.AttentionPlan, keep: Any) -> Tensor:
        out = self._model(
            input_ids=tokens, position_ids=positions, use_cache=False, attention_plan=plan, logits_to_keep=keep, return_dict=True
        )
        return out.logits[0]


def _by_budget(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of ``lengths``, longest first, in parts whose rectangles hold at most ``PREFILL_TOKENS`` (one prompt always fits)."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if part and (len(part) + 1) * lengths[part[0]] > PREFILL_TOKENS:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


class _Rectangle:
    """Keys and values ``[rows, H_kv, columns, d]`` of every layer; layers are made when first seen.

    Unused places are finite (zero at first), since a masked value still meets a probability of zero.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's two arrays, for keys and values shaped and typed like ``key``/``value [.., H_kv, T, d]``."""
        found = self._layers.get(index)
        if found is None:
            new_key, new_value = (x.new_zeros(self.rows, x.shape[-3], self.columns, x.shape[-1]) for x in (key, value))
            found = self._layers[index] = (new_key, new_value)
        return found

    def resize(self, rows: int, columns: int, used_rows: int, used_columns: int) -> None:
        """Take new memory, layer by layer so that only one layer exists twice, and keep what is used."""
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows, self.columns = rows, columns
        for index, (key, value) in self._layers.items():
            larger = _resized(key, rows, columns, used_rows, used_columns)
            self._layers[index] = larger, _resized(value, rows, columns, used_rows, used_columns)

    def move(self, dst: np.ndarray, src: np.ndarray, used_columns: int) -> None:
        for pair in self._layers.values():
            for x in pair:
                used = x[:, :, :used_columns]
                used[torch.from_numpy(dst).to(x.device)] = used[torch.from_numpy(src).to(x.device)]


def _resized(old: Tensor, rows: int, columns: int, used_rows: int, used_columns: int) -> Tensor:
    new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
    new[:used_rows, :, :used_columns] = old[:used_rows, :, :used_columns]
    return new


class _PrefillPlan:
    """Prompts laid end to end; each attends to itself, and its keys and values go to its slot."""

    def __init__(self, store: _Rectangle, first: int, lengths: np.ndarray, device: torch.device) -> None:
        self._store, self._first, self._count, self._columns = store, first, len(lengths), int(lengths.max())
        ends = np.cumsum(lengths)
        columns = np.arange(self._columns)
        inside = columns < lengths[:, None]
        gather = np.where(inside, (ends - lengths)[:, None] + columns, 0).reshape(-1)
        self._gather = torch.from_numpy(gather).to(device)  # place in the rectangle -> token
        self._scatter = torch.from_numpy(np.flatnonzero(inside)).to(device)  # token -> place in the rectangle
        self.positions = torch.from_numpy(np.broadcast_to(columns, inside.shape)[inside]).to(device).unsqueeze(0)
        self.last = torch.from_numpy(ends - 1).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        stored = self._store.layer(layer, key, value)
        query, key, value = (self._rectangle(x) for x in (query, key, value))
        for store, new in zip(stored, (key, value)):
            store[self._first : self._first + self._count, :, : self._columns] = new
        out = causal_attention(query, key, value, scale=scale, softcap=softcap, window=window)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self._scatter).unsqueeze(0)

    def _rectangle(self, x: Tensor) -> Tensor:
        """``[1, H, N, d]`` to ``[P, H, T, d]``."""
        return x[0].index_select(1, self._gather).unflatten(1, (self._count, self._columns)).transpose(0, 1)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """``query [B, H, T, d]`` over ``key``/``value [B, H_kv, T, d]``, each position seeing itself and earlier ones, to ``[B, H, T, d]``."""
    total = query.shape[2]
    if softcap is None and (window is None or window >= total):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    batch, heads, _, _ = query.shape
    kv_heads = key.shape[1]
    blocks = []
    for start in range(0, total, QUERY_BLOCK):
        stop = min(total, start + QUERY_BLOCK)
        first = 0 if window is None else max(0, start - window + 1)
        at = torch.arange(start, stop, device=query.device).unsqueeze(1)
        seen_at = torch.arange(first, stop, device=query.device)
        hidden = seen_at > at
        if window is not None:
            hidden |= seen_at <= at - window
        folded = query[:, :, start:stop].reshape(batch, kv_heads, -1, query.shape[-1])
        scores = _capped(folded @ key[:, :, first:stop].transpose(-1, -2) * scale, softcap)
        scores = scores.unflatten(2, (heads // kv_heads, stop - start)).masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype).flatten(2, 3)
        blocks.append((weights @ value[:, :, first:stop]).reshape(batch, heads, stop - start, value.shape[-1]))
    return torch.cat(blocks, dim=2)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


class _Rows:
    """Where each row stands: its position, and its lane among the rows of its prompt. Rebuilt when rows come or go."""

    def __init__(self, slots: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray, device: torch.device) -> None:
        self.device = device
        self.count, self.slots = len(slots), len(prompt_lengths)
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots, minlength=self.slots)
        self.lanes = int(counts.max())
        lane = np.empty_like(slots)
        lane[order] = np.arange(self.count) - np.repeat(np.cumsum(counts) - counts, counts)
        self._slot, self._lane = slots, lane
        own_prompt = prompt_lengths[slots]
        self.prompt_columns, self.longest = int(prompt_lengths.max()), int(lengths.max())
        self.prompt_end = torch.from_numpy(own_prompt).to(device)
        self.positions = torch.from_numpy(own_prompt + lengths).to(device)
        self._ragged = bool((own_prompt != self.prompt_columns).any() or (lengths != self.longest).any())
        self._last = int((own_prompt + lengths).max())
        self._maps: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def advance(self) -> None:
        self.positions += 1
        self.longest += 1
        self._last += 1

    def maps(self, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """``(row, head) -> lane``, ``lane -> (row, head)`` and ``(row, head) -> first place in the flat answers``, over ``kv_heads``.

        Lanes are ordered (slot, head, lane); a lane that no row has repeats row 0, and nothing reads its result.
        """
        found = self._maps.get(kv_heads)
        if found is None:
            head = np.arange(kv_heads)
            to_lane = (self._slot[:, None] * kv_heads + head) * self.lanes + self._lane[:, None]
            from_lane = np.zeros(self.slots * kv_heads * self.lanes, dtype=np.int64)
            from_lane[to_lane.reshape(-1)] = np.arange(self.count * kv_heads)
            index = np.arange(self.count * kv_heads)
            there, back, place = (torch.from_numpy(x).to(self.device) for x in (to_lane.reshape(-1), from_lane, index))
            found = self._maps[kv_heads] = (there, back, place)
        return found

    def hidden(self, window: int | None) -> Tensor | None:
        """``[R, 1, prompt + answer columns]``: keys that a row must not see; ``None`` when it sees all."""
        windowed = window is not None and self._last >= window
        if not self._ragged and not windowed:
            return None
        end, at = self.prompt_end.unsqueeze(1), self.positions.unsqueeze(1)
        prompt_at = torch.arange(self.prompt_columns, device=self.device).expand(self.count, -1)
        answer_at = torch.arange(self.longest + 1, device=self.device) + end
        hidden = torch.cat([prompt_at >= end, answer_at > at], dim=1)
        if windowed:
            hidden |= torch.cat([prompt_at, answer_at], dim=1) <= at - window
        return hidden.unsqueeze(1)


class _StepPlan:
    """One new token per row, which sees its prompt, its answer so far, and itself."""

    def __init__(self, prompts: _Rectangle, answers: _Rectangle, rows: _Rows) -> None:
        self._prompts, self._answers, self._rows = prompts, answers, rows
        self._hidden: dict[int | None, Tensor | None] = {}
        self._places: dict[int, Tensor] = {}

    def _place(self, kv_heads: int) -> Tensor:
        """``[R * H_kv]`` where the new key of each row and head goes in the flat answers."""
        if kv_heads not in self._places:
            _, _, index = self._rows.maps(kv_heads)
            own = (self._rows.positions - self._rows.prompt_end).repeat_interleave(kv_heads)
            self._places[kv_heads] = index * self._answers.columns + own
        return self._places[kv_heads]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        rows, kv_heads, repeats = self._rows, key.shape[1], query.shape[1] // key.shape[1]
        to_lane, from_lane, _ = rows.maps(kv_heads)
        place = self._place(kv_heads)
        own = []
        for store, new in zip(self._answers.layer(layer, key, value), (key, value)):
            store.view(-1, store.shape[-1]).index_copy_(0, place, new[0].transpose(0, 1).reshape(-1, new.shape[-1]))
            own.append(store[: rows.count, :, : rows.longest + 1].flatten(0, 1))
        shared = [x[: rows.slots, :, : rows.prompt_columns].flatten(0, 1) for x in self._prompts.layer(layer, key, value)]

        flat = (query[0].transpose(0, 1) * scale).reshape(rows.count * kv_heads, -1)
        by_lane = flat.index_select(0, from_lane).view(rows.slots * kv_heads, rows.lanes * repeats, -1)
        on_prompt = (by_lane @ shared[0].transpose(1, 2)).view(-1, repeats * rows.prompt_columns).index_select(0, to_lane)
        on_own = flat.view(rows.count * kv_heads, repeats, -1) @ own[0].transpose(1, 2)
        scores = _capped(torch.cat([on_prompt.view(rows.count * kv_heads, repeats, -1), on_own], dim=-1), softcap)

        if window not in self._hidden:
            self._hidden[window] = rows.hidden(window)
        hidden = self._hidden[window]
        if hidden is not None:
            scores.view(rows.count, kv_heads * repeats, -1).masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        on_prompt, on_own = weights.split([rows.prompt_columns, rows.longest + 1], dim=-1)

        by_lane = on_prompt.reshape(rows.count * kv_heads, -1).index_select(0, from_lane)
        by_lane = by_lane.view(rows.slots * kv_heads, rows.lanes * repeats, -1) @ shared[1]
        out = by_lane.view(-1, repeats * value.shape[-1]).index_select(0, to_lane).view(rows.count * kv_heads, repeats, -1)
        return torch.baddbmm(out, on_own, own[1]).view(1, rows.count, query.shape[1], -1)
