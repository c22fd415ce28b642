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
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.models.attention import interface
from lightrft.models.decoding.cache_decoder import CachedDecodeSession, RecordedExperts
from lightrft.models.decoding.kinds import decodes_by_plan, length_bound
from lightrft.models.decoding.plans import FeedPlan, PrefillPlan, Rectangle, RowPlaces, StepPlan
from lightrft.models.decoding.prefix_store import Prefix, PrefixStore, ResumedPrefillPlan
from lightrft.models.decoding.static_step import (
    CompileCount,
    StaticPlaces,
    StaticSteps,
    StepCompiler,
    padded_shape,
    power_of_two,
)
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.families import decoder_of, family_of, head_transform
from lightrft.models.loading.save_model import end_list
from lightrft.models.logprobs import transform_logits
from lightrft.models.lora import base_model
from lightrft.models.multimodal.merge_inputs import media_token_ids, merge_multimodal_inputs
from lightrft.models.onednn.packed_layers import PackedLayers
from lightrft.models.onednn.products import onednn_available
from lightrft.types import Prompt, Segments
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ConfigError, DataError, ModelError

PREFILL_TOKENS = 8192
"""Upper bound of prompt tokens (padded) in one model call, which bounds the activations of a
prefill."""


def eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the tokens that end a response, from the generation config and the model's config."""
    config: Any = model.config
    # Some text configs have no such field: the config around them has it.
    sources = (
        getattr(model, "generation_config", None),
        config.get_text_config(decoder=True),
        config,
    )
    found: list[int] = []
    for source in sources:
        found += end_list(getattr(source, "eos_token_id", None))
    return tuple(dict.fromkeys(found))


class KVDecoder:
    """Runs a transformers causal language model for sampling, on its own weights.

    Adapters are supported.

    Args:
        model: The model.
        experts: Records the experts of each token. ``None`` records none.

    Attributes:
        prefixes: Keys and values of finished sequences, of all sessions. ``None`` keeps none.
        compiler: Compiles the steps of sessions that decode by a plan. ``None`` compiles none.
        compiled: What was compiled so far.
    """

    def __init__(self, model: nn.Module, experts: ExpertReplay | None = None) -> None:
        interface.register()
        self.model = model
        self.experts = experts
        self.prefixes: PrefixStore | None = None
        self.compiler: StepCompiler | None = None
        self.compiled = CompileCount()
        self._static: weakref.WeakSet[StaticSteps] = weakref.WeakSet()
        self._products = PackedLayers(model) if onednn_available() else None
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
        return eos_token_ids(self.model)

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that the model reads as media, which sampling bans."""
        config: Any = self.model.config
        return media_token_ids(config, family_of(config))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_parameters()

    def with_own_weights(self) -> KVDecoder:
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
        self.forget()
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            here = parameters.get(name)
            if here is None or here.shape != tensor.shape:
                found = "no such parameter" if here is None else f"shape {list(here.shape)}"
                given = f"weights {name!r} of shape {list(tensor.shape)}"
                raise ModelError(f"{given} do not fit the sampling model: it has {found}")
            here.data = tensor.detach().to(device=here.device, dtype=here.dtype)
        for steps in self._static:
            # a captured step reads the memory of the weights before
            steps.forget()

    def session(self) -> PlanDecodeSession | CachedDecodeSession:
        """Return an empty cache over this model. Sessions share only the weights."""
        # a write through ``.data`` since the last session leaves no trace
        self._forget_packed()
        if not self.by_plan:
            return CachedDecodeSession(self.model, self.experts)
        steps = None
        if self.compiler is not None:
            steps = StaticSteps(self.compiler, self.compiled)
            self._static.add(steps)
        return PlanDecodeSession(self.model, self.experts, self.prefixes, steps)

    def compile_steps(self, compiler: StepCompiler) -> None:
        """Compile the decoding steps of sessions that are made from now on.

        Raises ``ConfigError`` for a model whose steps cannot be compiled.

        Args:
            compiler: Returns a faster form of a step that has run before.
        """
        kind, reason = self._config.model_type, None
        if not self.by_plan:
            reason = f"model type {kind!r} decodes by its own cache"
        elif (bound := length_bound(self._config)) is not None:
            reason = f"model type {kind!r} depends on the length of the sequence ({bound.reason})"
        elif self.experts is not None:
            reason = "the experts of each token are recorded, which the host reads in each step"
        if reason is not None:
            raise ConfigError(f"engine.compile = true: {reason}; leave out engine.compile")
        self.compiler = compiler

    def keep_prefixes(self) -> bool:
        """Keep keys and values of finished sequences, where ``reserve`` leaves room for them.

        Return ``False`` where they cannot be reused: for a model that decodes with its own cache,
        one whose keys depend on the whole sequence, and if experts are recorded.
        """
        config: Any = self.model.config
        is_prefix_lm = family_of(config).is_prefix_lm
        keys_change = is_prefix_lm or length_bound(self._config) is not None
        if not self.by_plan or keys_change or self.experts is not None:
            return False
        self.prefixes = PrefixStore()
        return True

    def forget(self) -> None:
        """Drop kept sequences and packed weights, since the weights change or others need the
        memory."""
        if self.prefixes is not None:
            self.prefixes.clear()
        self._forget_packed()

    def _forget_packed(self) -> None:
        if self._products is not None:
            self._products.forget()

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
        products = nullcontext()
        # compiled steps have products of their own
        if self._products is not None and self.compiler is None and self.device.type == "cpu":
            products = self._products.running()
        try:
            # cheaper than no_grad: operations keep no version counters
            with torch.inference_mode(), products:
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
        prefixes: Keys and values of finished sequences. ``None`` reuses none.
        static: Padded steps, which are compiled. ``None`` pads and compiles nothing.

    Attributes:
        reused: By handle, the number of tokens of a prompt that were not computed again.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: ExpertReplay | None = None,
        prefixes: PrefixStore | None = None,
        static: StaticSteps | None = None,
    ) -> None:
        self.experts = RecordedExperts.of(experts)
        self.reused: dict[int, int] = {}
        self._prefixes = prefixes
        self._static = static
        self._model = base_model(model)
        self._family = family_of(self._model.config)
        self._decoder = decoder_of(self._model, self._family)
        self._softcap, self._scale = head_transform(self._model.config, self._family)
        self._device = next(model.parameters()).device
        self._prompts = Rectangle()
        self._answers = Rectangle()
        self._handles: list[int] = []  # slot -> handle
        self._next_handle = 0
        self._prompt_lengths = np.zeros(0, dtype=np.int64)  # by slot
        # by slot: offset from the index in the sequence to the rotary position
        self._shifts = np.zeros(0, dtype=np.int64)
        self._handle_of = np.zeros(0, dtype=np.int64)  # by row
        self._lengths = np.zeros(0, dtype=np.int64)  # by row: response tokens whose keys are cached
        self._room = 0
        self._budget = 0
        self._reserved = 0
        self._rows: RowPlaces | None = None
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
        if self._static is not None:
            padded = padded_shape(prompts, prompt_tokens, rows, answer_tokens, budget)
            prompts, prompt_tokens, rows, answer_tokens = padded
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
        self._budget = budget
        if self._prefixes is not None:
            # kept sequences give way to requests, and never the other way round
            self._reserved = prompts * prompt_tokens + rows * answer_tokens
            self._prefixes.shrink(budget - self._reserved)
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
        prefixes = [self._prefix_of(prompt) for prompt in prompts]
        for part in _by_budget([len(p.token_ids) for p in prompts]):
            for resumes in (True, False):
                chosen = [i for i in part if (prefixes[i] is not None) == resumes]
                if not chosen:
                    continue
                some, names = [prompts[i] for i in chosen], [handles[i] for i in chosen]
                if resumes:
                    known = [prefix for i in chosen if (prefix := prefixes[i]) is not None]
                    found = self._resume(some, names, known)
                else:
                    found = self._prefill(some, names, [begun[i] for i in chosen] if begun else [])
                for i, row in zip(chosen, found):
                    logits[i] = row
        return handles, torch.stack(logits)

    def _prefix_of(self, prompt: Prompt) -> Prefix | None:
        # placeholder tokens do not identify media
        if self._prefixes is None or prompt.media:
            return None
        return self._prefixes.longest(prompt.token_ids)

    def _resume(self, prompts: list[Prompt], handles: list[int], prefixes: list[Prefix]) -> Tensor:
        """Compute the rests of ``prompts`` into new slots. Return the logits ``[P, V]``."""
        lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
        slot = len(self._handles)
        plan = ResumedPrefillPlan(self._prompts, slot, prefixes, lengths, self._device)
        rests = [p.token_ids[prefix.length :] for p, prefix in zip(prompts, prefixes)]
        tokens = to_device(torch.tensor([t for rest in rests for t in rest]), self._device)
        inputs: dict[str, object] = {"input_ids": tokens[None], "position_ids": plan.positions}
        logits = self._logits(inputs, plan, plan.last)
        self.reused |= {handle: prefix.length for handle, prefix in zip(handles, prefixes)}
        self._fill_slots(handles, lengths, np.zeros_like(lengths))
        return logits

    def _fill_slots(self, handles: list[int], lengths: np.ndarray, shifts: np.ndarray) -> None:
        self._handles += handles
        self._prompt_lengths = np.concatenate([self._prompt_lengths, lengths])
        self._shifts = np.concatenate([self._shifts, shifts])
        # step() builds it again: the rows of the new slots are not in it
        self._forget_places()

    def remember(self, row: int, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Keep the keys and values of a row, for later prompts that begin with its tokens.

        Args:
            row: The row.
            prompt: Its prompt.
            token_ids: Its response. Keys and values of tokens that were not fed do not exist.
        """
        if self._prefixes is None or prompt.media:
            return
        slot = self._handles.index(int(self._handle_of[row]))
        asked = int(self._prompt_lengths[slot])
        # a response may end before the last of several tokens that were fed in one step
        fed = min(int(self._lengths[row]), len(token_ids))
        layers = {}
        of_row = self._answers.read(row, fed)
        for index, pair in self._prompts.read(slot, asked).items():
            both = zip(pair, of_row[index]) if fed else ((x, x[:, :0]) for x in pair)
            key, value = (torch.cat([mine, more], dim=1) for mine, more in both)
            layers[index] = (key, value)
        ids = [*prompt.token_ids, *token_ids][: asked + fed]
        self._prefixes.put(ids, layers, self._budget - self._reserved)

    def _prefill(self, prompts: list[Prompt], handles: list[int], begun: Sequence[int]) -> Tensor:
        lengths = np.array([len(prompt.token_ids) for prompt in prompts], dtype=np.int64)
        runs = Segments.of_prompts(prompts).to(self._device)
        tokens = runs.tokens[None]
        shifts = np.zeros_like(lengths)
        source = torch.arange(tokens.numel(), device=self._device)
        seen = merge_multimodal_inputs(self._model, self._family, runs, begun=begun)
        spans = None if seen is None else seen.spans(source)
        plan = PrefillPlan(self._prompts, len(self._handles), lengths, self._device, spans)
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
        self._fill_slots(handles, lengths, shifts)
        return logits

    def admit(self, handles: Sequence[int], sealed: Sequence[int] = ()) -> None:
        """Append one row with an empty response for each of ``handles``.

        ``sealed`` has no effect, since rows share their prompt.
        """
        self._handle_of = np.concatenate([self._handle_of, np.array(handles, dtype=np.int64)])
        self._lengths = np.concatenate([self._lengths, np.zeros(len(handles), dtype=np.int64)])
        self._forget_places()

    def step(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [R]``, the last token of each row.

        Return the logits ``[R, V]`` of the next.
        """
        if self._static is not None:
            return self._padded_step(self._static, tokens)
        rows = self._placed(int(self._lengths.max()) + 1)
        plan = StepPlan(self._prompts, self._answers, rows)
        positions = rows.positions if self._shift is None else rows.positions + self._shift
        logits = self._logits({"input_ids": tokens[None], "position_ids": positions[None]}, plan)
        if self.experts is not None:
            self.experts.read_rows(range(len(self)))
        rows.advance()
        self._lengths += 1
        return logits

    def _padded_step(self, static: StaticSteps, tokens: Tensor) -> Tensor:
        self._grow(int(self._lengths.max()) + 1)
        if not static.placed:
            arrays = self._prompts, self._answers
            lengths = self._prompt_lengths, self._lengths
            static.place(arrays, self._slots(), *lengths, self._shifts, self._device)
        logits = static.run(tokens, self._padded_logits)
        self._lengths += 1
        return logits

    def _padded_logits(self, places: StaticPlaces) -> Tensor:
        plan = StepPlan(self._prompts, self._answers, places)
        inputs: dict[str, object] = {"input_ids": places.tokens[None]}
        return self._logits(inputs | {"position_ids": places.rotary[None]}, plan)

    def _forget_places(self) -> None:
        self._rows = None
        if self._static is not None:
            self._static.changed()

    def feed(self, tokens: Tensor, counts: np.ndarray) -> Tensor:
        """Feed ``tokens [T]``: the next ``counts [R]`` tokens of each row, row after row.

        Return the logits ``[T, V]`` after each of them.
        """
        rows = self._placed(int((self._lengths + counts).max()))
        plan = FeedPlan(self._prompts, self._answers, rows, counts)
        positions = plan.positions
        if self._shift is not None:
            row_of = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
            positions = positions + self._shift[to_device(row_of, self._device)]
        logits = self._logits({"input_ids": tokens[None], "position_ids": positions[None]}, plan)
        if self.experts is not None:
            self.experts.read_runs(counts.tolist())
        rows.move(counts)
        self._lengths = self._lengths + counts
        return logits

    def roll_back(self, counts: np.ndarray) -> None:
        """Remove the last ``counts [R]`` fed tokens of each row."""
        if not counts.any():
            return
        self._lengths = self._lengths - counts
        if self._rows is not None:
            # their keys stay, hidden, until the next tokens overwrite them
            self._rows.move(-counts)

    def _placed(self, needed: int) -> RowPlaces:
        """Return the places of the rows, with room for responses of ``needed`` tokens."""
        self._grow(needed)
        if self._rows is None:
            slots = self._slots()
            lengths = self._lengths.copy()
            self._rows = RowPlaces(slots, self._prompt_lengths, lengths, self._device)
            self._shift = None
            if self._shifts.any():
                self._shift = to_device(torch.from_numpy(self._shifts[slots]), self._device)
        return self._rows

    def _grow(self, needed: int) -> None:
        if needed <= self._answers.columns:
            return
        # doubling keeps the total cost of copies linear in the length of the responses
        doubled = min(self._room, max(64, 2 * self._answers.columns))
        used, rows = int(self._lengths.max()), len(self)
        if self._static is not None:
            self._static.changed()
            rows = min(power_of_two(rows), self._answers.rows)
        self._answers.resize(rows, max(needed, doubled), len(self), used)

    def _slots(self) -> np.ndarray:
        """Return ``[R]``, the slot of each row's prompt."""
        # release() moves prompts between slots, so rows keep handles
        slot_of = {handle: slot for slot, handle in enumerate(self._handles)}
        return np.array([slot_of[h] for h in self._handle_of.tolist()], dtype=np.int64)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        if moves:
            dst, src = (np.array(side, dtype=np.int64) for side in zip(*moves))
            self._answers.move(dst, src, int(self._lengths.max()))
            self._handle_of[dst] = self._handle_of[src]
            self._lengths[dst] = self._lengths[src]
        self._handle_of = self._handle_of[:rows]
        self._lengths = self._lengths[:rows]
        self._forget_places()

    def release(self, handle: int) -> None:
        """Drop a prompt that no row uses any more. The last slot moves into its place."""
        if self.experts is not None:
            del self.experts.prompts[handle]
        self.reused.pop(handle, None)
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
        self._forget_places()

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
        head = self._model.get_output_embeddings()
        return transform_logits(head(states)[0], self._scale, self._softcap)


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
