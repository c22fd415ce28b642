"""Memory of one process in each phase: loading, generation, forward and backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lightrft.algorithms.requirements import Requirements
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DoctorConfig,
    DPOConfig,
    RLConfig,
    ScoringConfig,
    TrainingConfig,
)
from lightrft.diagnostics.memory import meta_trace
from lightrft.diagnostics.memory.formulas import (
    QUANTISED,
    MemoryPhase,
    ModelMemory,
    Parameters,
    ShardingFactors,
    collected,
    generation_phase,
    gradients,
    held,
    inside_blocks,
    kept_by_blocks,
    key_value_cache,
    last_sum,
    layout_check,
    on_device,
    on_their_way,
    recurrent_states,
    shares_of,
    size_of,
    tokens_held,
    unsharded_bytes,
)
from lightrft.diagnostics.memory.meta_trace import Saved, Traced
from lightrft.models.actor import Actor, Backbone
from lightrft.models.attention import varlen_cuda
from lightrft.models.decoding.kinds import decodes_by_plan
from lightrft.models.decoding.kv_decoder import PREFILL_TOKENS, PlanDecodeSession
from lightrft.models.decoding.static_step import padded_shape
from lightrft.models.loading.sharded_read import PIECE, put_together
from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.sampled_distribution import SampledDistribution
from lightrft.strategy.sharding import largest_block, outermost_blocks
from lightrft.strategy.tensor_parallel import cut_names
from lightrft.trainer.checks.preflight import generates
from lightrft.types import Batch
from lightrft.utils.cpu import free_memory
from lightrft.utils.errors import ConfigError, first_line

DRAWING = "generation"
MIB = 2**20
CHECKED_ROWS = 4
"""Number of rows of the first batch on which the layout check runs."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the longest prompt and response in tokens, and the size of a step.

    A step has ``groups`` prompts with ``samples`` responses each. A process reward model scores up
    to ``steps`` steps of a response.
    """

    prompt: int
    answer: int
    groups: int
    samples: int
    steps: int = 1

    @property
    def longest(self) -> int:
        """The length of the longest row, prompt and response, in tokens."""
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``kind`` is ``cpu`` or an accelerator, ``memory`` the bytes per process.

    ``memory`` is 0 if it is not known.
    """

    kind: str
    memory: int
    processes: int = 1
    kernel: bool = True
    """True if attention in half precision runs without materializing its scores."""


@dataclass
class Model:
    """A model on the meta device, and its use in a run."""

    name: str
    model: Backbone
    trained: bool
    quantised: bool = False

    @cached_property
    def parameters(self) -> list[Parameters]:
        """The parameters of the model. A parameter that two modules share counts once."""
        cut = cut_names(self.model)
        found: dict[nn.Parameter, Parameters] = {}
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                itemsize: float = parameter.itemsize
                # bitsandbytes quantizes the weights of linear layers, without biases and the head.
                is_inside = is_plain_linear(module) and "head" not in path.rpartition(".")[2]
                is_frozen = name == "weight" and not parameter.requires_grad
                if self.quantised and is_inside and is_frozen:
                    itemsize = QUANTISED
                found[parameter] = Parameters(
                    parameter.numel(),
                    itemsize,
                    self.trained and parameter.requires_grad,
                    f"{path}.{name}" in cut,
                )
        return list(found.values())

    def units(self, cut: int, *, trained: bool = False) -> tuple[float, list[float]]:
        """Return the bytes of weights outside of blocks, and of each block, in the compute dtype.

        Args:
            cut: number of tensor-parallel ranks.
            trained: True counts trained weights only.
        """
        names = cut_names(self.model) if cut > 1 else frozenset()
        sizes: dict[nn.Parameter, float] = {}
        for name, p in self.model.named_parameters():
            if not trained or (self.trained and p.requires_grad):
                ranks = cut if name in names else 1
                sizes[p] = p.numel() * p.itemsize / ranks
        outside = dict(sizes)
        blocks = []
        for block in outermost_blocks(self.model):
            size = 0.0
            # ``parameters`` yields a parameter that two modules of a block share only once.
            for p in block.parameters():
                size += sizes.get(p, 0.0)
                outside.pop(p, None)
            blocks.append(size)
        return sum(outside.values()), blocks

    @property
    def logits_bytes(self) -> int:
        """The most bytes of logits that exist at once. ``estimate.on_device`` has fixed them."""
        limit = self.model.config.logits_mb
        assert limit is not None
        return limit * MIB

    @property
    def trained_count(self) -> int:
        """The number of trained parameters."""
        return sum(p.count for p in self.parameters if p.trained)

    @property
    def text(self) -> Any:
        """The config of the language model."""
        return self.model.text_config

    @property
    def itemsize(self) -> int:
        """The bytes of a number in the compute dtype."""
        return self.model.base.dtype.itemsize


@dataclass
class ProcessProfile:
    """One kind of process: its ``device``, its strategy and the processes that split a step's rows.

    ``among`` is the number of these processes. ``problems`` lists quantities that could not be
    computed.
    """

    config: TrainingConfig
    lengths: Lengths
    device: Device
    strategy: StrategyConfig
    among: int
    problems: list[str] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)
    """Bytes that passes leave in CPU memory, by model."""

    def shares(self, m: Model) -> ShardingFactors:
        """Return the sharding of ``m``."""
        return shares_of(
            self.strategy,
            self.device.processes,
            self.device.kind,
            trained=m.trained,
            block=largest_block(m.model),
        )

    def held(self, m: Model) -> ModelMemory:
        """Return the bytes of ``m`` that stay on the device throughout."""
        shares = self.shares(m)
        return on_device(held(m.parameters, shares), shares)

    @property
    def ranks_per_row(self) -> int:
        """The number of ranks that work on the same rows."""
        return self.strategy.tensor_parallel * self.strategy.sequence_parallel


def compiles_steps(engine: EngineConfig, device: Device, policy: Model) -> bool:
    """Return whether the native engine compiles its decoding steps, which pads the cache.

    Args:
        engine: settings of the engine.
        device: where it runs.
        policy: the model that generates.
    """
    if engine.compile is not None:
        return engine.compile
    alone = device.kind == "cuda" and device.processes == 1
    return alone and engine.speculative is None and decodes_by_plan(policy.model.base.config)


def generation_phases(
    place: ProcessProfile,
    policy: Model,
    draft: Model | None = None,
    *,
    evaluating: bool = False,
) -> Iterator[MemoryPhase]:
    """Yield the phase of generation: the cache, plus a prefill or a decoding step of all rows.

    The larger of the two counts. With ``evaluating``, only responses to the eval set are generated.

    Args:
        place: kind of process.
        policy: the model that generates.
        draft: draft model of speculative decoding. It caches the same tokens.
        evaluating: True if engines in workers generate the training batches.
    """
    config = place.config
    lengths = place.lengths
    if isinstance(config, ScoringConfig):
        return
    if evaluating or not generates(config):
        if not config.eval.data.sources:
            return
        lengths = Lengths(
            config.eval.data.max_prompt_tokens,
            config.eval.sampling.max_new_tokens,
            config.eval.limit or config.engine.max_num_seqs,
            config.eval.samples,
        )
    shares = place.shares(policy)
    # Tensor-parallel ranks generate the same rows together.
    groups = math.ceil(lengths.groups * shares.cut / place.among)
    samples = lengths.samples
    if not decodes_by_plan(policy.model.base.config):  # then each row stores a copy of its prompt
        groups *= samples
        samples = 1
    engine = config.engine
    tokens, rows, slots = tokens_held(
        groups,
        samples,
        lengths.prompt,
        lengths.answer,
        engine.max_cache_tokens,
        engine.max_num_seqs,
    )
    if compiles_steps(engine, place.device, policy):
        shape = padded_shape(slots, lengths.prompt, rows, lengths.answer, engine.max_cache_tokens)
        slots, _, rows, _ = shape
        tokens = PlanDecodeSession.tokens(*shape)
    text = policy.text
    heads, width = heads_of(text)
    keys = key_value_cache(tokens, [width] * text.num_hidden_layers, policy.itemsize)
    cache = keys + recurrent_states(rows, text.to_dict())
    at_once = max(1, min(slots, PREFILL_TOKENS // lengths.prompt))
    # Each prompt of this batch has one response token.
    budget = at_once * (lengths.prompt + 1)
    prefill = meta_trace.largest_batch(at_once, 1, lengths.prompt, 1, budget, "packed")
    forward = partial(meta_trace.forward, policy.model, prefill)
    read = traced(place, policy, forward, prefill, False)
    step = generation_phase(rows, heads, lengths.longest, text.vocab_size)
    # Each tensor-parallel rank caches the keys of its own heads.
    parts = {"cache": cache / shares.cut, "prefill or step": float(max(read.peak, step))}
    if draft is not None:
        widths = [heads_of(draft.text)[1]] * draft.text.num_hidden_layers
        parts["draft model's cache"] = float(key_value_cache(tokens, widths, draft.itemsize))
    if shares.by_blocks:
        outside, blocks = policy.units(shares.cut)
        # Gathered once for all tokens: gathering per token would take most of the time.
        parts["policy made whole"] = outside + sum(blocks)
    yield MemoryPhase(DRAWING, parts)


def passes(place: ProcessProfile, m: Model) -> Iterator[MemoryPhase]:
    """Yield the phases of passes of ``m`` in a step.

    A pass without gradient counts if something reads its result. A trained model also has an
    update.
    """
    config = place.config
    lengths = place.lengths
    model = m.model
    groups = math.ceil(lengths.groups * place.ranks_per_row / place.among)
    answers = groups * lengths.samples
    batch = meta_trace.largest_batch(
        groups,
        lengths.samples,
        lengths.prompt,
        lengths.answer,
        config.train.micro_batch_tokens,
        model.layout,
        lengths.steps,
    )
    options = _trace_options(place, m)
    whole = _whole(place, m, backward=False)
    if model.config.check_layout and isinstance(model, Actor):
        tokens = min(CHECKED_ROWS, answers) * lengths.answer
        logits = layout_check(tokens, m.text.vocab_size, m.itemsize, m.logits_bytes)
        yield MemoryPhase(f"{m.name}: layout check", {"logits": float(logits), **whole})
    if m.name != "policy" or scored(config):
        forward = partial(meta_trace.forward, model, batch, **options)
        found = traced(place, m, forward, batch, False)
        activations = found.peak / place.strategy.sequence_parallel
        yield MemoryPhase(f"{m.name}: forward", {"activations": activations, **whole})
    if m.trained:
        steps = config.train.num_mini_batches if isinstance(config, RLConfig) else 1
        parts = math.ceil(answers / (len(batch) * steps))
        yield from _updates(place, m, batch, parts, options)


def _trace_options(place: ProcessProfile, m: Model) -> dict[str, bool]:
    """Return what a pass of ``m`` computes: attention scores in full, and the entropy."""
    config = place.config
    # Scores are materialized where no kernel applies: with a cap, and on a GPU in float32.
    capped = getattr(m.text, "attn_logit_softcapping", None) is not None
    has_kernel = place.device.kind == "cpu" or (place.device.kernel and m.itemsize == 2)
    entropy = False
    if isinstance(config, RLConfig) and m.name == "policy":
        entropy = config.log.entropy or config.algorithm.entropy.used
    return {"written": capped or not has_kernel, "entropy": entropy}


def _updates(
    place: ProcessProfile,
    m: Model,
    batch: Batch,
    parts: int,
    options: dict[str, bool],
) -> Iterator[MemoryPhase]:
    """Yield forward and backward passes of ``parts`` micro-batches like ``batch``.

    Args:
        place: The kind of process.
        m: A trained model.
        batch: The largest micro-batch.
        parts: Number of micro-batches of an optimizer step.
        options: Options of ``meta_trace.update`` that give what a pass computes.
    """
    shares = place.shares(m)
    sequence = place.strategy.sequence_parallel
    saved: Saved = "device"
    if place.strategy.offload_activations:
        saved = "same" if place.device.kind == "cpu" else "host"
    spread = place.device.processes > 1 and shares.gradients > 1

    def trace() -> Traced:
        if spread:
            return meta_trace.spread_update(m.model, batch, saved=saved, **options)
        return meta_trace.update(m.model, batch, parts, saved=saved, **options)

    found = traced(place, m, trace, batch, True)
    if found.away:
        place.host[f"{m.name}: activations"] = found.away / sequence
    cut_away = _cut_activations(m, batch, shares.cut)
    activations = found.activations / sequence - cut_away / sequence
    summed = float(found.gradients)
    # The trace has the gradients of one process, which holds all of them.
    if place.device.processes > 1:
        summed = gradients(m.parameters, shares)
    on_it = {} if "gradients" in shares.on_host else {"gradients": summed}
    # What is cut away is from a formula, which may give more than the trace has.
    update = {**on_it, "activations": max(0.0, activations)}
    config = place.config
    if m.name == "policy" and compares_distributions(config):
        # Full vocabularies are compared, in chunks of which two exist at a time.
        update["teacher's logits"] = 2.0 * m.logits_bytes
    if m.name == "policy" and isinstance(config, RLConfig) and is_filtered(config):
        whole = int(batch.lengths.sum()) * m.text.vocab_size * 4
        update["filtered logits"] = FILTERED * min(m.logits_bytes, whole)
    update |= _whole(place, m, backward=True)
    yield MemoryPhase(f"{m.name}: update", update)
    if shares.by_blocks and not shares.bucket:
        outside, blocks = m.units(shares.cut, trained=True)
        last = {**on_it, "whole": last_sum(outside, blocks, m.itemsize)}
        yield MemoryPhase(f"{m.name}: last gradients", last)


FILTERED = 4.0
"""Chunks of logits that exist at once where filters are applied, in addition to two."""


def is_filtered(config: RLConfig) -> bool:
    """Return True if log-probs are of the distribution that filters of sampling leave."""
    some_end = (0,)
    return SampledDistribution(config.sampling, some_end).depends_on_tokens


def compares_distributions(config: TrainingConfig) -> bool:
    """Return True if a loss compares the policy with a teacher over the vocabulary."""
    if isinstance(config, RLConfig):
        return config.algorithm.distill.whole
    return isinstance(config, DistillVerbConfig)


def scored(config: TrainingConfig) -> bool:
    """Return True if the policy runs over the batch once more, without gradient."""
    if isinstance(config, DPOConfig):
        # Losses that couple the batch compute all log-probs first, and so does the reference of
        # adapters.
        return True
    if not isinstance(config, RLConfig):
        return False
    requirements = Requirements.of(config.algorithm)
    if requirements.old_logprobs(config.train.ppo_epochs * config.train.num_mini_batches):
        return True
    return requirements.entropy or requirements.energy or requirements.current


def _whole(place: ProcessProfile, m: Model, *, backward: bool) -> dict[str, float]:
    """Return the bytes of gathered weights and unsharded gradients of a sharded model."""
    shares = place.shares(m)
    parts: dict[str, float] = {}
    if shares.by_blocks:
        outside, blocks = m.units(shares.cut)
        parts["blocks made whole"] = unsharded_bytes(outside, blocks, shares.kept_between_passes)
    if not backward:
        return parts
    if shares.bucket:
        touched = place.device.kind == "cpu"
        parts["gradients on their way"] = collected(m.trained_count, shares.bucket, touched=touched)
    elif shares.by_blocks:
        outside, blocks = m.units(shares.cut, trained=True)
        parts["gradients on their way"] = on_their_way(outside, blocks, m.itemsize)
    return parts


def _cut_activations(m: Model, batch: Batch, cut: int) -> float:
    """Return the bytes of activations inside blocks that tensor-parallel ranks do not store."""
    if cut == 1 or m.model.config.gradient_checkpointing:
        return 0.0
    tokens = int(batch.prompts.lengths.sum() + batch.lengths.sum())
    layers = m.text.num_hidden_layers
    inside = inside_blocks(tokens, layers, m.itemsize, **_widths(m.text))
    return inside * (1 - 1 / cut)


def reading(
    place: ProcessProfile,
    models: list[Model],
    kept: Mapping[str, ModelMemory],
) -> MemoryPhase:
    """Return the phase of loading, one model after the other, beyond the memory of loaded models.

    Sharded models load a piece of one tensor at a time. ZeRO holds one full tensor while it shards
    it.

    Args:
        place: kind of process.
        models: models in the order of loading.
        kept: bytes of each loaded model.
    """
    before = most = 0.0
    for m in models:
        once = 0.0
        if place.shares(m).by_blocks:
            once = largest_tensor(m, whole=place.strategy.kind == "deepspeed")
        most = max(most, before + kept[m.name].weights + once)
        before += kept[m.name].total
    # Phases count in addition to all models, of which only some are loaded at the maximum.
    beyond = most - sum(memory.total for memory in kept.values())
    return MemoryPhase("loading", {"weights as they are read": max(0.0, beyond)})


def largest_tensor(m: Model, *, whole: bool) -> float:
    """Return the bytes to read the largest weight: the full tensor if ``whole``, else one piece.

    A weight that is merged from several tensors counts twice, for them and for the result.
    """
    merged = put_together(m.model.base)
    sizes = []
    for name, p in m.model.base.named_parameters():
        size = p.numel() * p.itemsize
        if name in merged:
            size *= 2
        elif not whole:
            size = min(size, PIECE)
        sizes.append(size)
    return max(sizes)


def traced(
    place: ProcessProfile,
    m: Model,
    trace: Callable[[], Traced],
    batch: Batch,
    trained: bool,
) -> Traced:
    """Return the result of ``trace``. If tracing fails, use a formula for plain blocks.

    A model that needs real numbers cannot run on the meta device. The failure is recorded in
    ``place.problems``.

    Args:
        place: kind of process.
        m: the model.
        trace: runs the pass on the meta device.
        batch: the micro-batch of the pass.
        trained: True for a pass with gradient.
    """
    # The errors that code of a model may raise for a tensor without values.
    try:
        return trace()
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
    ) as error:
        problem = (
            f"{m.name}: its passes cannot be traced ({first_line(error)[:120]}); activations are "
            "estimated by the formula of plain blocks"
        )
        if problem not in place.problems:
            place.problems.append(problem)
    return _by_formula(m, batch, trained)


def _by_formula(m: Model, batch: Batch, trained: bool) -> Traced:
    """Return the memory of a pass through plain blocks.

    Args:
        m: The model.
        batch: The micro-batch of the pass.
        trained: True for a pass with gradient.
    """
    text = m.text
    tokens = int(batch.prompts.lengths.sum() + batch.lengths.sum())
    keeps_all = trained and not m.model.config.gradient_checkpointing
    layers = text.num_hidden_layers if keeps_all else 1
    inputs = 0
    if layers == 1 and trained:
        # Gradient checkpointing keeps the input of each block.
        inputs = tokens * text.hidden_size * m.itemsize * text.num_hidden_layers
    logits = m.logits_bytes * 3
    summed = int(gradients(m.parameters)) if trained else 0
    widths = _widths(text)
    kept = kept_by_blocks(tokens, layers, m.itemsize, hidden=text.hidden_size, **widths)
    return Traced(kept + inputs + logits + summed, summed)


def heads_of(text: Any) -> tuple[int, int]:
    """Return the number of attention heads and the width of a layer's keys.

    Both are 0 for a model without attention.
    """
    fields = text.to_dict()
    heads = fields.get("num_attention_heads")
    # ``to_dict`` has the names of the config file, such as ``n_head`` of GPT-2.
    if not heads:
        own_name = text.attribute_map.get("num_attention_heads", "")
        heads = vars(text).get(own_name)
    if not heads:
        return 0, 0
    width = fields.get("head_dim") or text.hidden_size // heads
    return heads, width * (fields.get("num_key_value_heads") or heads)


def _widths(text: Any) -> dict[str, int]:
    heads, keys = heads_of(text)
    head = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    # GPT-2 leaves the width of the MLP empty, which means four times the hidden size.
    inner = _first(text, "moe_intermediate_size", "intermediate_size") or 4 * text.hidden_size
    # A token passes through each of its active experts.
    experts = _first(text, "num_experts_per_tok", "num_experts_per_token") or 1
    return {"queries": head * heads, "keys": keys, "inner": inner * experts}


def _first(text: Any, *names: str) -> int | None:
    """Return the first of these fields that is set and not 0."""
    for name in names:
        value = getattr(text, name, None)
        if value:
            return value
    return None


def device_of(config: TrainingConfig, options: DoctorConfig) -> Device:
    """Return the device of each process, as given or as found on this machine.

    Raises ``ConfigError`` for an invalid memory size.
    """
    processes = config.launch.processes
    kind = options.device
    if kind == "auto":
        kind = config.strategy.device
        if kind == "auto":
            kind = str(torch.accelerator.current_accelerator() or "cpu")
        kind = kind.partition(":")[0]
    if options.device_memory != "auto":
        try:
            return Device(kind, size_of(options.device_memory), processes, _kernel())
        except ValueError as error:
            raise ConfigError(f"doctor.device_memory = {error}") from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and kind == accelerator.type:
        memory = _free_on_device()
    elif kind == "cpu":
        memory = free_memory() // processes  # ranks on a CPU share its memory
    else:
        memory = 0
    return Device(kind, memory, processes, _kernel())


def _kernel() -> bool:
    """Return True if torch has the GPU kernel for sequences of different lengths."""
    return varlen_cuda.kernel() is not None


def _free_on_device() -> int:
    """Return the free bytes of the current accelerator, or 0 if torch cannot tell."""
    try:
        return torch.accelerator.get_memory_info()[0]
    except (NotImplementedError, RuntimeError):  # not every backend reports its memory
        return 0
