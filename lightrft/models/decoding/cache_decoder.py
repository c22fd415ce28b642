"""Token-by-token decoding through a model's own forward and cache.

It serves models that cannot decode by an attention plan. The cache is the object that the model
returns: keys and values, recurrent states, convolution states. Rows of equal length share one
cache, so no row is ever padded: left padding would enter a recurrent state. A prompt is computed
once, and its cache is copied for each of its responses. A model that returns no usable cache runs
over the whole prefix for each token.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from lightrft.models.decoding.kinds import LONE_FAMILIES, rereads_prefix
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.families import decoder_of, family_of, head_transform
from lightrft.models.logprobs import head_input, transform_logits
from lightrft.models.lora import base_model
from lightrft.models.multimodal.merge_inputs import (
    MergedInputs,
    has_media,
    merge_multimodal_inputs,
    own_keywords,
)
from lightrft.models.multimodal.towers import OwnForward
from lightrft.types import Media, Prompt, Segments
from lightrft.utils.errors import DataError, ModelError

CACHE_NAMES = ("past_key_values", "cache_params", "state")
"""Names under which transformers' models return their cache and accept it."""


@dataclass(slots=True)
class _Cache:
    """The cache of ``rows`` sequences of ``length`` tokens each.

    ``name`` is the keyword of the model's forward that takes ``state``. ``state`` is ``None`` for a
    model without a usable cache; ``tokens [rows, length]`` are then kept instead. ``shift`` is the
    offset from a token's index to its rotary position. ``steps`` are keywords of each step.
    """

    rows: int
    length: int
    shift: int
    name: str = ""
    state: object = None
    tokens: Tensor | None = None
    steps: dict[str, Tensor] = field(default_factory=dict)

    @property
    def kind(self) -> object:
        """Caches of one kind can be joined."""
        shapes = {name: value.shape[1:] for name, value in self.steps.items()}
        return self.length, self.shift, self.name, shapes

    def select(self, index: Sequence[int]) -> _Cache:
        """Copy the rows ``index``, each as often as it occurs."""

        def pick(tensor: Tensor) -> Tensor:
            self._check(tensor)
            return tensor.index_select(0, torch.tensor(index, device=tensor.device))

        tokens = None if self.tokens is None else pick(self.tokens)
        state, steps = _mapped(pick, self.state), _mapped(pick, self.steps)
        return _Cache(len(index), self.length, self.shift, self.name, state, tokens, steps)

    def join(self, other: _Cache) -> _Cache:
        """Append the rows of ``other``."""

        def cat(*parts: Tensor) -> Tensor:
            self._check(parts[0])
            return torch.cat(parts)

        tokens = None
        if self.tokens is not None and other.tokens is not None:
            tokens = cat(self.tokens, other.tokens)
        state = _mapped(cat, self.state, other.state)
        steps = _mapped(cat, self.steps, other.steps)
        rows = self.rows + other.rows
        return _Cache(rows, self.length, self.shift, self.name, state, tokens, steps)

    def _check(self, tensor: Tensor) -> None:
        if tensor.shape[0] != self.rows:
            raise ModelError(
                f"the model's cache holds a tensor of shape {list(tensor.shape)} for {self.rows} "
                "rows: how to share it "
                "out to responses is not known, so this model cannot be sampled from"
            )


@dataclass(slots=True)
class _Block:
    """Rows of the session that share one cache. ``rows[i]`` is the session's row at index ``i`` of
    the cache."""

    cache: _Cache
    rows: list[int]


@dataclass(slots=True)
class _Prompt:
    """A prompt of the session. ``cache`` is ``None`` once no further row needs it, or if the budget
    cannot hold it."""

    prompt: Prompt
    begun: int
    cache: _Cache | None = None


class CachedDecodeSession:
    """Prompts by handle, responses in rows ``0 .. len(session) - 1``.

    Every call must be inside ``Decoder.running()``.

    It implements ``engines.native.Session``, and gives the same tokens as an attention plan for
    models that support both.

    Args:
        model: The model.
        experts: Records the experts of each token. ``None`` records none.
    """

    def __init__(self, model: nn.Module, experts: ExpertReplay | None = None) -> None:
        self.experts = RecordedExperts.of(experts)
        self._model = base_model(model)
        self._family = family_of(self._model.config)
        self._device = next(model.parameters()).device
        self._rereads = rereads_prefix(self._model.config)
        text = self._model.config.get_text_config(decoder=True)
        self._alone = text.model_type in LONE_FAMILIES
        self._needs_cache = False
        self._takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._prompts: dict[int, _Prompt] = {}
        self._next_handle = 0
        self._blocks: list[_Block] = []
        self._count = 0
        # tokens of the budget that the admitted rows cannot grow to
        self._spare = 0

    def __len__(self) -> int:
        return self._count

    @property
    def held(self) -> int:
        """Number of tokens in the caches of prompts and rows."""
        tokens = 0
        for prompt in self._prompts.values():
            if prompt.cache is not None:
                tokens += prompt.cache.length
        for block in self._blocks:
            tokens += block.cache.rows * block.cache.length
        return tokens

    @staticmethod
    def tokens(prompts: int, prompt_tokens: int, rows: int, response_tokens: int) -> int:
        """Return the number of cached tokens for such shapes. Each row has a copy of its prompt.

        Args:
            prompts: Number of prompts.
            prompt_tokens: Tokens of the longest prompt.
            rows: Number of responses.
            response_tokens: Tokens that the longest response may reach.
        """
        return rows * (prompt_tokens + response_tokens)

    def reserve(
        self,
        prompts: int,
        prompt_tokens: int,
        rows: int,
        response_tokens: int,
        budget: int,
    ) -> None:
        """Allow these shapes within a budget. Caches allocate memory as they grow.

        Args:
            prompts: Number of prompts.
            prompt_tokens: Tokens of the longest prompt.
            rows: Number of responses.
            response_tokens: Tokens that the longest response may reach.
            budget: Upper bound of cached tokens.
        """
        self._spare = budget - self.tokens(prompts, prompt_tokens, rows, response_tokens)

    def prefill(
        self,
        prompts: Sequence[Prompt],
        begun: Sequence[int] = (),
    ) -> tuple[list[int], Tensor]:
        """Compute ``prompts``.

        Return a handle for each, and the logits ``[P, V]`` of their first response tokens.

        The last ``begun[p]`` tokens of prompt ``p`` are a response that is resumed. Raises
        ``DataError`` for an empty prompt.
        """
        handles, logits = [], []
        for number, prompt in enumerate(prompts):
            if not prompt.token_ids:
                raise DataError(f"prompt {prompt.id!r} has no tokens")
            handle, entry = self._next_handle, _Prompt(prompt, begun[number] if begun else 0)
            entry.cache, first = self._read(entry)
            if self.experts is not None:
                self.experts.read_prompts([handle], [len(prompt.token_ids)])
            self._next_handle += 1
            self._prompts[handle] = entry
            handles.append(handle)
            logits.append(first)
        return handles, torch.cat(logits)

    def admit(self, handles: Sequence[int], sealed: Sequence[int] = ()) -> None:
        """Append one row with an empty response for each of ``handles``.

        Prompts in ``sealed`` get no further rows.
        """
        first = self._count
        self._count += len(handles)
        for handle, count in Counter(handles).items():
            entry = self._prompts[handle]
            # a prompt that the budget could not hold is computed again
            cache = entry.cache if entry.cache is not None else self._read(entry)[0]
            rows = [first + i for i, own in enumerate(handles) if own == handle]
            keeps = handle not in sealed and cache.length <= self._spare
            entry.cache = cache if keeps else None
            if self._alone:
                self._blocks += [_Block(cache.select([0]), [row]) for row in rows]
            elif count == 1 and not keeps:
                # no other row reads this cache, so the row takes it without a copy
                self._place(_Block(cache, rows))
            else:
                self._place(_Block(cache.select([0] * count), rows))

    def step(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [R]``, the last token of each row.

        Return the logits ``[R, V]`` of the next.
        """
        parts = [self._advance(block, tokens) for block in self._blocks]
        rows: list[int] = []
        for block in self._blocks:
            rows += block.rows
        # blocks group rows by length, so their order differs from the session's
        order = torch.tensor(rows, device=self._device)
        logits = torch.cat(parts)
        return torch.empty_like(logits).index_copy_(0, order, logits)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        new_row = {row: row for row in range(rows)}
        for dst, src in moves:
            # the row that was at ``dst`` has finished
            new_row[src] = dst
            del new_row[dst]
        self._count = rows
        left = []
        for block in self._blocks:
            kept = [place for place, row in enumerate(block.rows) if row in new_row]
            if not kept:
                continue
            # selecting rows copies the cache
            if len(kept) < len(block.rows):
                block.cache = block.cache.select(kept)
            block.rows = [new_row[block.rows[place]] for place in kept]
            left.append(block)
        self._blocks = left

    def release(self, handle: int) -> None:
        """Drop a prompt that no row uses any more."""
        del self._prompts[handle]
        if self.experts is not None:
            del self.experts.prompts[handle]

    def _place(self, block: _Block) -> None:
        """Add ``block``, merged into a block of equal length if there is one, so that both run in
        one call."""
        # a step costs one model call per block
        for other in self._blocks:
            if block.cache.kind == other.cache.kind:
                other.cache, other.rows = other.cache.join(block.cache), other.rows + block.rows
                return
        self._blocks.append(block)

    def _advance(self, block: _Block, tokens: Tensor) -> Tensor:
        """Feed one token to each row of ``block``. Return the logits ``[n, V]`` of the next."""
        cache = block.cache
        ids = tokens[torch.tensor(block.rows, device=self._device)][:, None]
        if cache.tokens is not None:
            cache.tokens = torch.cat([cache.tokens, ids], dim=1)
            # the whole prefix again: this model has no cache that could be used
            prefix = {"input_ids": cache.tokens}
            logits, _ = self._call(prefix, 0, cache.length + 1, use_cache=False)
        else:
            inputs = {"input_ids": ids, cache.name: cache.state, **cache.steps}
            logits, output = self._call(inputs, cache.length + cache.shift, 1)
            cache.state = output[cache.name]
        if self.experts is not None:
            self.experts.read_rows(block.rows)
        cache.length += 1
        return logits

    def _read(self, entry: _Prompt) -> tuple[_Cache, Tensor]:
        """Run the model over a prompt. Return its cache and the logits ``[1, V]`` after its last
        token."""
        ids = torch.tensor([entry.prompt.token_ids], device=self._device)
        runs = Segments.of_prompts([entry.prompt]).to(self._device)
        own = self._family.own_forward
        if own is not None and has_media(runs):
            return self._read_by_own_forward(ids, own, runs.media)
        seen = merge_multimodal_inputs(self._model, self._family, runs, begun=[entry.begun])
        if seen is not None:
            return self._read_media(ids, seen)
        length = ids.shape[1]
        logits, output = self._call({"input_ids": ids}, 0, length, use_cache=not self._rereads)
        for name in CACHE_NAMES:
            state = None if self._rereads else output.get(name)
            if state is not None:
                return _Cache(1, length, 0, name, state), logits
        return _Cache(1, length, 0, tokens=ids), logits

    def _read_media(self, ids: Tensor, seen: MergedInputs) -> tuple[_Cache, Tensor]:
        """Run ``_read`` for a prompt whose placeholders stand for features of media."""
        length = ids.shape[1]
        source = torch.arange(length, device=self._device)
        inputs = seen.inputs(self._model, ids, source)
        text = self._model.config.get_text_config(decoder=True)
        embeddings = inputs["inputs_embeds"]
        assert isinstance(embeddings, Tensor)
        inputs |= seen.masks(text, embeddings, source, None)
        positions = source if seen.positions is None else seen.positions
        # media advance positions by less than their tokens: the response continues from there
        shift = 0 if seen.positions is None else int(seen.positions.max()) + 1 - length
        inputs["position_ids"] = positions[None] if positions.ndim == 1 else positions[:, None]
        decoder = decoder_of(self._model, self._family)
        # the decoder, since the model's own forward would encode the media again
        if self._needs_cache:
            inputs["past_key_values"] = DynamicCache(config=text)
        output = decoder(**inputs, use_cache=True)
        if output.get("past_key_values") is None and not self._needs_cache:
            # In some families, only the model around the decoder makes a cache.
            self._needs_cache = True
            return self._read_media(ids, seen)
        softcap, scale = head_transform(self._model.config, self._family)
        head: Any = self._model.get_output_embeddings()
        state = output.get("past_key_values")
        if state is None:
            problem = f"model type {self._model.config.model_type!r} returns no cache"
            raise ModelError(f"{problem}, so it cannot sample with media")
        logits = transform_logits(head(output.last_hidden_state[:, -1]), scale, softcap)
        return _Cache(1, length, shift, "past_key_values", state), logits

    def _read_by_own_forward(
        self, ids: Tensor, own: OwnForward, media: Media
    ) -> tuple[_Cache, Tensor]:
        """Run ``_read`` for a prompt whose media only the model's own forward reads."""
        reader = self._family.reader
        assert reader is not None
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= own_keywords(self._model, reader, ids, media)
        steps = {name: inputs[name][:, -1:] for name in own.steps}
        length = ids.shape[1]
        logits, output = self._call(inputs, 0, length)
        state = output.past_key_values
        return _Cache(1, length, 0, "past_key_values", state, steps=steps), logits

    def _call(
        self,
        inputs: dict[str, Any],
        first: int,
        width: int,
        use_cache: bool = True,
    ) -> tuple[Tensor, Any]:
        """Run the model's own forward over ``width`` tokens from position ``first``.

        Return the logits ``[n, V]`` after the last token, and the full output.
        """
        if self._takes_positions:
            # Pass positions: models whose first layer keeps no keys take the cache's length, hence
            # the position, for 0.
            positions = torch.arange(first, first + width, device=self._device)
            inputs["position_ids"] = positions.expand(len(inputs["input_ids"]), -1)
        # a prompt of many tokens would otherwise get logits of the full vocabulary for each
        with head_input(self._model.get_output_embeddings(), lambda states: states[:, -1:]):
            output = self._model(**inputs, use_cache=use_cache)
        return output.logits[:, -1], output


def _mapped(change: Callable[..., Tensor], *trees: Any) -> Any:
    """Apply ``change`` to the tensors at each place of ``trees``, which have the same structure.
    The first tree is not changed.

    Tensors of fewer than two axes are settings of a layer, not states of rows. They are kept, as
    are all other objects.
    """
    first = trees[0]
    if isinstance(first, Tensor):
        return change(*trees) if first.ndim > 1 else first
    if isinstance(first, dict):
        return type(first)((key, _mapped(change, *(tree[key] for tree in trees))) for key in first)
    if isinstance(first, list | tuple):
        return type(first)(_mapped(change, *parts) for parts in zip(*trees, strict=True))
    # a cache of transformers or a layer of one; anything else is a setting
    ours = type(first).__module__.partition(".")[0] == "transformers"
    if not ours or isinstance(first, type | PreTrainedConfig) or not hasattr(first, "__dict__"):
        return first
    made = copy.copy(first)
    for name in vars(first):
        setattr(made, name, _mapped(change, *(vars(tree)[name] for tree in trees)))
    return made


@dataclass(slots=True)
class RecordedExperts:
    """The experts of the prompts of a session, and of the last token of each row, on the host.

    Attributes:
        replay: Records the calls of the model.
        prompts: By handle, the experts ``[T, layers, k]`` of the tokens of a prompt.
        rows: By row, the experts ``[layers, k]`` of the token of the last step.
        runs: Of each row, the experts ``[c, layers, k]`` of the tokens of the last ``feed``.
    """

    replay: ExpertReplay
    prompts: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)
    runs: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(replay: ExpertReplay | None) -> RecordedExperts | None:
        """Return an empty record, or ``None`` if nothing is recorded."""
        return None if replay is None else RecordedExperts(replay)

    def read_prompts(self, handles: Sequence[int], lengths: Sequence[int]) -> None:
        """Read the experts of a call over prompts of these ``lengths``, one after another."""
        parts = self.replay.recorded().cpu().split(list(lengths))
        self.prompts.update(zip(handles, parts, strict=True))

    def read_rows(self, rows: Sequence[int]) -> None:
        """Read the experts of a call over ``rows``, each with the same number of tokens."""
        found = self.replay.recorded().cpu().unflatten(0, (len(rows), -1))[:, -1]
        self.rows.update(zip(rows, found.unbind(), strict=True))

    def read_runs(self, counts: Sequence[int]) -> None:
        """Read the experts of a call over ``counts`` tokens of each row, row after row."""
        self.runs = list(self.replay.recorded().cpu().split(list(counts)))
