"""Token-by-token decoding with a key-value cache that stores each prompt once.

It runs through a model's own forward. Prompts and responses are two rectangles per layer:
``[slots, H_kv, prompt tokens, d]`` and ``[rows, H_kv, answer tokens, d]``. A step is a constant
number of tensor operations per layer for any number of rows. One batched product multiplies the
queries of a prompt's rows with its keys, another each row with its response's keys. One softmax
covers both.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.models.attention import interface
from lightrft.models.attention.segment_plan import Run, SegmentPlan
from lightrft.models.decoding.cache_decoder import CachedDecodeSession
from lightrft.models.decoding.kinds import decodes_by_plan
from lightrft.models.decoding.recorded_experts import RecordedExperts
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.families import decoder_of, family_of, head_transform
from lightrft.models.logprobs import transform_logits
from lightrft.models.lora import base_model
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.types import Prompt, Segments
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import DataError, ModelError

PREFILL_TOKENS = 8192
"""Upper bound of prompt tokens (padded) in one model call, which bounds the activations of a
prefill."""


class KVDecoder:
    """Runs a transformers causal language model for sampling, on its own weights.

    Adapters are supported.

    Args:
        model: The model.
        experts: Records the experts of each token. ``None`` records none.
    """

    def __init__(self, model: nn.Module, experts: ExpertReplay | None = None) -> None:
        interface.register()
        self.model = model
        self.experts = experts
        config: Any = model.config
        self._config = config.get_text_config(decoder=True)
        self.by_plan = decodes_by_plan(config)
        loaded = self._config._attn_implementation
        # a model set to attend by plan no longer says which implementation it was loaded with
        self._own_attention = (
            family_of(config).padded_attention if loaded == interface.NAME else loaded
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, from the generation config and from the model's config."""
        sources = (getattr(self.model, "generation_config", None), self._config)
        found: list[int] = []
        for source in sources:
            eos = None if source is None else source.eos_token_id
            if isinstance(eos, int):
                found.append(eos)
            elif eos is not None:
                found += eos
        return tuple(dict.fromkeys(found))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def apart(self) -> KVDecoder:
        """Return a decoder whose weights ``load`` can replace without any effect on this one.

        The two share the memory of frozen weights, and of all others until ``load``. They share
        nothing else, so each may run in a separate thread.
        """
        # frozen weights are shared with this decoder, trained ones get a parameter of their own
        shared: dict[int, nn.Parameter] = {}
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                own = nn.Parameter(parameter.detach(), requires_grad=False)
                shared[id(parameter)] = own
            else:
                shared[id(parameter)] = parameter
        # deepcopy takes these parameters for copies that it has made already
        with nullcontext() if self.experts is None else self.experts.detached():
            model = copy.deepcopy(self.model, shared)
        other = KVDecoder(model, None if self.experts is None else ExpertReplay(model))
        other._own_attention = self._own_attention
        return other

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use the tensors of ``weights`` from now on.

        They are copied only if device or dtype differ.

        Raises ``ModelError`` for a name or a shape that is not the model's.
        """
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            here = parameters.get(name)
            if here is None or here.shape != tensor.shape:
                found = "no such parameter" if here is None else f"shape {list(here.shape)}"
                given = f"weights {name!r} of shape {list(tensor.shape)}"
                raise ModelError(f"{given} do not fit the sampling model: it has {found}")
            here.data = tensor.detach().to(device=here.device, dtype=here.dtype)

    def session(self) -> PlanDecodeSession | CachedDecodeSession:
        """Return an empty cache over this model. Sessions share only the weights."""
        kind = PlanDecodeSession if self.by_plan else CachedDecodeSession
        return kind(self.model, self.experts)

    @contextmanager
    def running(self) -> Generator[None]:
        """Set evaluation mode, no gradients, and the attention that the sessions need.

        All are restored at the end.
        """
        training = [module for module in self.model.modules() if module.training]
        before = self._config._attn_implementation
        wanted = interface.NAME if self.by_plan else self._own_attention
        for module in training:
            # not by train(False): restoring it would also set modules that were in evaluation mode
            module.training = False
        if before != wanted:
            self._config._attn_implementation = wanted
        if self.experts is not None:
            self.experts.record()
        try:
            with torch.no_grad():
                yield
        finally:
            if self.experts is not None:
                self.experts.record(False)
            if before != wanted:
                self._config._attn_implementation = before
            for module in training:
                module.training = True


class PlanDecodeSession:
    """Prompts in slots, responses in rows. Every call must be inside ``KVDecoder.running()``.

    Rows are ``0 .. len(session) - 1``: ``admit`` appends, ``evict`` moves and cuts, ``step`` feeds
    one token to each.

    Args:
        model: The model.
        experts: Records the experts of each token. ``None`` records none.
    """

    def __init__(self, model: nn.Module, experts: ExpertReplay | None = None) -> None:
        self.experts = RecordedExperts.of(experts)
        self._model = base_model(model)
        self._family = family_of(self._model.config)
        self._decoder = decoder_of(self._model, self._family)
        self._device = next(model.parameters()).device
        self._prompts = _Rectangle()
        self._answers = _Rectangle()
        self._handles: list[int] = []  # slot -> handle
        self._next_handle = 0
        self._prompt_lengths = np.zeros(0, dtype=np.int64)  # by slot
        # by slot: offset from the index in the sequence to the rotary position
        self._shifts = np.zeros(0, dtype=np.int64)
        self._handle_of = np.zeros(0, dtype=np.int64)  # by row
        self._lengths = np.zeros(0, dtype=np.int64)  # by row: response tokens whose keys are cached
        self._room = 0
        self._rows: _Rows | None = None
        self._shift: Tensor | None = None  # by row

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def held(self) -> int:
        """Number of tokens for which keys and values are allocated, used or not."""
        return (
            self._prompts.rows * self._prompts.columns + self._answers.rows * self._answers.columns
        )

    @staticmethod
    def tokens(prompts: int, prompt_tokens: int, rows: int, answer_tokens: int) -> int:
        """Return the number of cached tokens for such shapes.

        Both are rectangles, and a prompt is stored once.

        Args:
            prompts: Number of prompts.
            prompt_tokens: Tokens of the longest prompt.
            rows: Number of responses.
            answer_tokens: Tokens that the longest response may reach.
        """
        return prompts * prompt_tokens + rows * answer_tokens

    def reserve(
        self,
        prompts: int,
        prompt_tokens: int,
        rows: int,
        answer_tokens: int,
        budget: int,
    ) -> None:
        """Allow these shapes within a budget.

        Responses allocate memory as they grow. Earlier, larger arrays stay unless they could exceed
        the budget.

        Args:
            prompts: Number of prompts.
            prompt_tokens: Tokens of the longest prompt.
            rows: Number of responses.
            answer_tokens: Tokens that the longest response may reach.
            budget: Upper bound of cached tokens.
        """
        used_columns = int(self._prompt_lengths.max(initial=0))
        used_answers = int(self._lengths.max(initial=0))
        # shrinking would copy the arrays, and the next prompts may need the room again
        held, grown = self._prompts, self._answers
        largest_prompts = max(held.rows, prompts), max(held.columns, prompt_tokens)
        largest_answers = max(grown.rows, rows), max(grown.columns, answer_tokens)
        if math.prod(largest_prompts) + math.prod(largest_answers) <= budget:
            prompts, prompt_tokens = largest_prompts
            rows, answer_tokens = largest_answers
        self._room = answer_tokens
        # prompts get their full size at once, since a prefill fills it
        self._prompts.resize(prompts, prompt_tokens, len(self._handles), used_columns)
        # columns of responses grow in step(), as far as they are needed
        columns = min(answer_tokens, self._answers.columns)
        self._answers.resize(rows, columns, len(self), used_answers)

    def prefill(
        self,
        prompts: Sequence[Prompt],
        begun: Sequence[int] = (),
    ) -> tuple[list[int], Tensor]:
        """Compute ``prompts`` into new slots.

        Return a handle for each, and the logits ``[P, V]`` of their first response tokens.

        The last ``begun[p]`` tokens of prompt ``p`` are a response that is resumed. Raises
        ``DataError`` for an empty prompt.
        """
        for prompt in prompts:
            if not prompt.token_ids:
                raise DataError(f"prompt {prompt.id!r} has no tokens")
        handles = [self._next_handle + i for i in range(len(prompts))]
        self._next_handle += len(prompts)
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        for part in _by_budget([len(p.token_ids) for p in prompts]):
            held = [begun[i] for i in part] if begun else []
            found = self._prefill([prompts[i] for i in part], [handles[i] for i in part], held)
            for i, row in zip(part, found):
                logits[i] = row
        return handles, torch.stack(logits)

    def _prefill(self, prompts: list[Prompt], handles: list[int], begun: Sequence[int]) -> Tensor:
        lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
        runs = Segments.of_prompts(prompts).to(self._device)
        tokens = runs.tokens[None]
        shifts = np.zeros_like(lengths)
        source = torch.arange(tokens.numel(), device=self._device)
        seen = merge_multimodal_inputs(self._model, self._family, runs, begun=begun)
        spans = [] if seen is None else seen.spans(source)
        plan = _PrefillPlan(self._prompts, len(self._handles), lengths, self._device, spans)
        inputs: dict[str, object] = {"input_ids": tokens, "position_ids": plan.positions}
        if seen is not None:
            inputs = seen.inputs(self._model, tokens, source)
            inputs["position_ids"] = plan.positions
            if seen.positions is not None:
                inputs["position_ids"] = seen.positions[:, None]
                # media advance positions by less than their tokens: responses continue from there
                own = seen.positions.split(lengths.tolist(), dim=1)
                ends = [int(positions[:, -1].max()) + 1 for positions in own]
                shifts = np.array(ends, dtype=np.int64) - lengths
        logits = self._logits(inputs, plan, plan.last)
        if self.experts is not None:
            self.experts.read_prompts(handles, lengths.tolist())
        self._handles += handles
        self._prompt_lengths = np.concatenate([self._prompt_lengths, lengths])
        self._shifts = np.concatenate([self._shifts, shifts])
        # step() builds it again: the rows of the new slots are not in it
        self._rows = None
        return logits

    def admit(self, handles: Sequence[int], sealed: Sequence[int] = ()) -> None:
        """Append one row with an empty response for each of ``handles``.

        ``sealed`` has no effect, since rows share their prompt.
        """
        self._handle_of = np.concatenate([self._handle_of, np.array(handles, dtype=np.int64)])
        self._lengths = np.concatenate([self._lengths, np.zeros(len(handles), dtype=np.int64)])
        self._rows = None

    def step(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [R]``, the last token of each row.

        Return the logits ``[R, V]`` of the next.
        """
        needed = int(self._lengths.max()) + 1
        if needed > self._answers.columns:
            # doubling keeps the total cost of copies linear in the length of the responses
            doubled = min(self._room, max(64, 2 * self._answers.columns))
            self._answers.resize(len(self), max(needed, doubled), len(self), needed - 1)
        rows = self._rows
        if rows is None:
            # release() moves prompts between slots, so rows keep handles
            slot_of = {handle: slot for slot, handle in enumerate(self._handles)}
            slots = np.array([slot_of[h] for h in self._handle_of.tolist()], dtype=np.int64)
            rows = self._rows = _Rows(slots, self._prompt_lengths, self._lengths, self._device)
            self._shift = None
            if self._shifts.any():
                self._shift = to_device(torch.from_numpy(self._shifts[slots]), self._device)
        plan = _StepPlan(self._prompts, self._answers, rows)
        positions = rows.positions if self._shift is None else rows.positions + self._shift
        logits = self._logits({"input_ids": tokens[None], "position_ids": positions[None]}, plan)
        if self.experts is not None:
            self.experts.read_rows(range(len(self)))
        rows.advance()
        self._lengths += 1
        return logits

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        if moves:
            dst, src = (np.array(side, dtype=np.int64) for side in zip(*moves))
            self._answers.move(dst, src, int(self._lengths.max()))
            self._handle_of[dst] = self._handle_of[src]
            self._lengths[dst] = self._lengths[src]
        self._handle_of = self._handle_of[:rows]
        self._lengths = self._lengths[:rows]
        self._rows = None

    def release(self, handle: int) -> None:
        """Drop a prompt that no row uses any more. The last slot moves into its place."""
        if self.experts is not None:
            del self.experts.prompts[handle]
        slot = self._handles.index(handle)
        last = len(self._handles) - 1
        if slot != last:
            used_columns = int(self._prompt_lengths[last])
            self._prompts.move(np.array([slot]), np.array([last]), used_columns)
            self._handles[slot] = self._handles[last]
            self._prompt_lengths[slot] = self._prompt_lengths[last]
            self._shifts[slot] = self._shifts[last]
        self._handles.pop()
        self._prompt_lengths = self._prompt_lengths[:-1]
        self._shifts = self._shifts[:-1]
        self._rows = None

    def _logits(
        self,
        inputs: dict[str, object],
        plan: interface.AttentionPlan,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Return the logits ``[T, V]`` of one flat row of tokens, or of its positions ``keep``."""
        states = self._decoder(**inputs, use_cache=False, attention_plan=plan).last_hidden_state
        if keep is not None:
            states = states[:, keep]
        softcap, scale = head_transform(self._model.config, self._family)
        head = self._model.get_output_embeddings()
        return transform_logits(head(states)[0], scale, softcap)


def _by_budget(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of ``lengths``, longest first, in parts of at most ``PREFILL_TOKENS`` padded
    tokens (one prompt always fits)."""
    part: list[int] = []
    # the first prompt of a part is its longest, to which the others are padded
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if part and (len(part) + 1) * lengths[part[0]] > PREFILL_TOKENS:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


class _Rectangle:
    """Keys and values ``[rows, H_kv, columns, d]`` of every layer. A layer is allocated at its
    first call.

    Unused places must be finite (zero at first), since a masked value is still multiplied by a
    probability of zero.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's arrays of keys and values, shaped and typed like
        ``key``/``value [.., H_kv, T, d]``."""
        found = self._layers.get(index)
        if found is None:
            # key and value heads may differ in width
            new_key = key.new_zeros(self.rows, key.shape[-3], self.columns, key.shape[-1])
            new_value = value.new_zeros(self.rows, value.shape[-3], self.columns, value.shape[-1])
            found = self._layers[index] = (new_key, new_value)
        return found

    def resize(self, rows: int, columns: int, used_rows: int, used_columns: int) -> None:
        """Allocate new memory and copy the used part, layer by layer, so that only one layer exists
        twice."""
        if (rows, columns) == (self.rows, self.columns):
            return
        self.rows = rows
        self.columns = columns
        for index, (key, value) in self._layers.items():
            new_key = _resized(key, rows, columns, used_rows, used_columns)
            new_value = _resized(value, rows, columns, used_rows, used_columns)
            self._layers[index] = new_key, new_value

    def move(self, dst: np.ndarray, src: np.ndarray, used_columns: int) -> None:
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


class _PrefillPlan:
    """Concatenated prompts. Each attends to itself, and its keys and values are stored in its
    slot."""

    def __init__(
        self,
        store: _Rectangle,
        first: int,
        lengths: np.ndarray,
        device: torch.device,
        spans: Sequence[Run] = (),
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


class _Rows:
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
        self.longest = int(lengths.max())
        self.prompt_end = to_device(torch.from_numpy(own_prompt), device)
        self.positions = to_device(torch.from_numpy(own_prompt + lengths), device)
        # rows of equal shape need no mask
        padded_prompt = (own_prompt != self.prompt_columns).any()
        padded_answer = (lengths != self.longest).any()
        self._ragged = bool(padded_prompt or padded_answer)
        self._last = int((own_prompt + lengths).max())
        self._maps: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def advance(self) -> None:
        # in place on the device, so that a step copies nothing from the host
        self.positions += 1
        self.longest += 1
        self._last += 1

    def maps(self, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(row, head) -> lane``, ``lane -> (row, head)`` and ``(row, head) -> index`` in
        the flat responses.

        Lanes are ordered (slot, head, lane). An unused lane repeats row 0, and its result is not
        read.
        """
        found = self._maps.get(kv_heads)
        if found is None:
            head = np.arange(kv_heads)
            to_lane = (self._slot[:, None] * kv_heads + head) * self.lanes + self._lane[:, None]
            from_lane = np.zeros(self.slots * kv_heads * self.lanes, dtype=np.int64)
            from_lane[to_lane.reshape(-1)] = np.arange(self.count * kv_heads)
            index = np.arange(self.count * kv_heads)
            arrays = to_lane.reshape(-1), from_lane, index
            there, back, place = (to_device(torch.from_numpy(x), self.device) for x in arrays)
            found = self._maps[kv_heads] = (there, back, place)
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


class _StepPlan:
    """One new token per row, which attends to its prompt, its response so far, and itself."""

    def __init__(self, prompts: _Rectangle, answers: _Rectangle, rows: _Rows) -> None:
        self._prompts, self._answers, self._rows = prompts, answers, rows
        self._hidden: dict[int | None, Tensor | None] = {}
        self._places: dict[int, Tensor] = {}

    def _place(self, kv_heads: int) -> Tensor:
        """Return ``[R * H_kv]``, the index of each row's and head's new key in the flat
        responses."""
        if kv_heads not in self._places:
            _, _, index = self._rows.maps(kv_heads)
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
        to_lane, from_lane, _ = rows.maps(kv_heads)
        place = self._place(kv_heads)
        own = []
        for store, new in zip(self._answers.layer(layer, key, value), (key, value)):
            # written before it is read, since a token attends to itself
            store.view(-1, store.shape[-1]).index_copy_(
                0, place, new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            )
            own.append(store[: rows.count, :, : rows.longest + 1].flatten(0, 1))
        stored = self._prompts.layer(layer, key, value)
        shared = [x[: rows.slots, :, : rows.prompt_columns].flatten(0, 1) for x in stored]

        # scaling queries costs less than scaling scores, which have a column per key
        flat = (query[0].transpose(0, 1) * scale).reshape(rows.count * kv_heads, -1)
        # rows of one prompt become one batch entry, so that its keys are read once
        lanes = rows.slots * kv_heads, rows.lanes * repeats, -1
        by_lane = flat.index_select(0, from_lane).view(lanes) @ shared[0].transpose(1, 2)
        on_prompt = by_lane.view(-1, repeats * rows.prompt_columns).index_select(0, to_lane)
        on_own = flat.view(rows.count * kv_heads, repeats, -1) @ own[0].transpose(1, 2)
        scores = torch.cat([on_prompt.view(rows.count * kv_heads, repeats, -1), on_own], dim=-1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap

        # layers with the same window share one mask
        if window not in self._hidden:
            self._hidden[window] = rows.hidden(window)
        hidden = self._hidden[window]
        if hidden is not None:
            scores.view(rows.count, kv_heads * repeats, -1).masked_fill_(hidden, -torch.inf)
        # one softmax over prompt and response, in float32 as in transformers' own attention
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
        on_prompt, on_own = weights.split([rows.prompt_columns, rows.longest + 1], dim=-1)

        by_lane = on_prompt.reshape(rows.count * kv_heads, -1).index_select(0, from_lane)
        by_lane = by_lane.view(lanes) @ shared[1]
        out = by_lane.view(-1, repeats * value.shape[-1]).index_select(0, to_lane)
        out = out.view(rows.count * kv_heads, repeats, -1)
        # the product with the response's values is added to the prompt's in one call
        return torch.baddbmm(out, on_own, own[1]).view(1, rows.count, query.shape[1], -1)
