"""Memory of one process in each phase: loading, generation, forward and backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from lightrft.algorithms.requirements import needs_of, needs_old_logprobs
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig, SFTConfig
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
    tokens_held,
    unsharded_bytes,
)
from lightrft.diagnostics.memory.meta_trace import Traced
from lightrft.diagnostics.memory.sharding import shares_of
from lightrft.models.actor import Actor, Backbone
from lightrft.models.decoding.kinds import decodes_by_plan
from lightrft.models.decoding.kv_decoder import PREFILL_TOKENS
from lightrft.models.loading.sharded_read import PIECE, put_together
from lightrft.strategy.tensor_parallel import cut_names
from lightrft.strategy.wrap_policy import largest_block, outermost_blocks
from lightrft.types import Batch
from lightrft.utils.errors import first_line

DRAWING = "drawing answers"
CHECKED_ROWS = 4
"""Number of rows of the first batch on which the layout check runs."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the longest prompt and response in tokens, and the size of a step.

    A step has ``groups`` prompts with ``samples`` responses each.
    """

    prompt: int
    answer: int
    groups: int
    samples: int

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
        distinct = {
            p: (module, name, f"{path}.{name}" in cut)
            for path, module in self.model.named_modules()
            for name, p in module.named_parameters(recurse=False)
        }
        return [
            Parameters(
                p.numel(),
                self._itemsize(p, module, name),
                self.trained and p.requires_grad,
                shared_out,
            )
            for p, (module, name, shared_out) in distinct.items()
        ]

    def _itemsize(self, parameter: nn.Parameter, module: nn.Module, name: str) -> float:
        small = self.quantised and type(module) is nn.Linear and "head" not in name and not parameter.requires_grad
        return QUANTISED if small else parameter.itemsize

    def units(self, cut: int, *, trained: bool = False) -> tuple[float, list[float]]:
        """Return the bytes of weights outside of blocks, and of each block, in the compute dtype.

        Args:
            cut: number of tensor-parallel ranks.
            trained: True counts trained weights only.
        """
        names = cut_names(self.model) if cut > 1 else frozenset()
        sizes = {
            p: p.numel() * p.itemsize / (cut if name in names else 1)
            for name, p in self.model.named_parameters()
            if not trained or (self.trained and p.requires_grad)
        }
        blocks = [{p for p in block.parameters() if p in sizes} for block in outermost_blocks(self.model)]
        inside = set().union(*blocks)
        return sum(size for p, size in sizes.items() if p not in inside), [sum(sizes[p] for p in block) for block in blocks]

    @property
    def text(self) -> Any:
        """The config of the language model."""
        return self.model.text_config


@dataclass
class ProcessProfile:
    """One kind of process: its ``device``, its strategy and the processes that split a step's rows.

    ``among`` is the number of these processes. ``problems`` lists quantities that could not be
    computed.
    """

    config: RLConfig | SFTConfig
    lengths: Lengths
    device: Device
    strategy: StrategyConfig
    among: int
    problems: list[str] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)
    """Bytes that passes leave in CPU memory, by model."""

    def shares(self, m: Model) -> ShardingFactors:
        """Return the sharding of ``m``."""
        block = largest_block(m.model)
        return shares_of(self.strategy, self.device.processes, self.device.kind, trained=m.trained, block=block)

    def held(self, m: Model) -> ModelMemory:
        """Return the bytes of ``m`` that stay on the device throughout."""
        return on_device(held(m.parameters, self.shares(m)), self.shares(m))

    @property
    def team(self) -> int:
        """The number of ranks that work on the same rows."""
        return self.strategy.tensor * self.strategy.sequence


def drawing_answers(place: ProcessProfile, policy: Model, *, evaluating: bool = False) -> Iterator[MemoryPhase]:
    """Yield the phase of generation: the cache, plus a prefill or a decoding step of all rows.

    The larger of the two counts. With ``evaluating``, only responses to the eval set are generated.

    Args:
        place: kind of process.
        policy: the model that generates.
        evaluating: True if engines in workers generate the training batches.
    """
    config, text, shares, lengths = place.config, policy.text, place.shares(policy), place.lengths
    engine = config.engine
    if evaluating or isinstance(config, SFTConfig):
        if not config.eval.data.sources:
            return
        answer = config.eval.sampling.max_new_tokens
        lengths = Lengths(
            config.eval.data.max_prompt_tokens,
            answer,
            config.eval.limit or engine.max_rows,
            config.eval.samples,
        )
    heads, width = _heads(text)
    itemsize, answer = policy.model.base.dtype.itemsize, lengths.answer
    groups, samples = math.ceil(lengths.groups * shares.cut / place.among), lengths.samples
    if not decodes_by_plan(policy.model.base.config):  # then each row stores a copy of its prompt
        groups, samples = groups * samples, 1
    tokens, rows, slots = tokens_held(groups, samples, lengths.prompt, answer, engine.token_budget, engine.max_rows)
    cache = key_value_cache(tokens, [width] * text.num_hidden_layers, itemsize) + recurrent_states(rows, text.to_dict())
    at_once = max(1, min(slots, PREFILL_TOKENS // lengths.prompt))
    prefill = meta_trace.largest_batch(at_once, 1, lengths.prompt, 1, at_once * (lengths.prompt + 1), "packed")
    read = traced(place, policy, lambda: meta_trace.forward(policy.model, prefill), prefill, False)
    step = generation_phase(rows, heads, lengths.longest, text.vocab_size)
    parts = {"cache": cache / shares.cut, "prefill or step": float(max(read.peak, step))}
    if shares.by_blocks:
        outside, blocks = policy.units(shares.cut)
        parts["policy made whole"] = outside + sum(blocks)
    yield MemoryPhase(DRAWING, parts)


def passes(place: ProcessProfile, m: Model) -> Iterator[MemoryPhase]:
    """Yield the phases of passes of ``m`` in a step.

    A pass without gradient counts if something reads its result. A trained model also has an
    update.
    """
    config, lengths, model = place.config, place.lengths, m.model
    rl = isinstance(config, RLConfig)
    groups = math.ceil(lengths.groups * place.team / place.among)
    batch = meta_trace.largest_batch(
        groups,
        lengths.samples,
        lengths.prompt,
        lengths.answer,
        config.train.micro_batch_tokens,
        model.layout,
    )
    capped = getattr(m.text, "attn_logit_softcapping", None) is not None
    half = model.base.dtype.itemsize == 2
    written = capped or (place.device.kind != "cpu" and not (place.device.kernel and half))
    entropy = isinstance(config, RLConfig) and m.name == "policy" and (config.log.entropy or config.algorithm.entropy.used)
    options: dict[str, Any] = {"written": written, "entropy": entropy}
    whole = _whole(place, m, backward=False)
    if model.config.check_layout and isinstance(model, Actor):
        tokens = min(CHECKED_ROWS, groups * lengths.samples) * lengths.answer
        logits = layout_check(tokens, m.text.vocab_size, model.base.dtype.itemsize, model.config.logits_mb * 2**20)
        yield MemoryPhase(f"{m.name}: layout check", {"logits": float(logits), **whole})
    if rl and not (m.name == "policy" and not scored(config)):
        found = traced(place, m, lambda: meta_trace.forward(model, batch, **options), batch, False)
        yield MemoryPhase(f"{m.name}: forward", {"activations": found.peak / place.strategy.sequence, **whole})
    if m.trained:
        steps = config.train.mini_batches if isinstance(config, RLConfig) else 1
        yield from _updates(place, m, batch, math.ceil(groups * lengths.samples / (len(batch) * steps)), options)


def _updates(place: ProcessProfile, m: Model, batch: Batch, parts: int, options: dict[str, Any]) -> Iterator[MemoryPhase]:
    """Yield forward and backward passes of ``parts`` micro-batches like ``batch``."""
    shares, strategy = place.shares(m), place.strategy
    if strategy.offload_activations:
        options = {**options, "saved": "same" if place.device.kind == "cpu" else "host"}
    spread = place.device.processes > 1 and shares.gradients > 1

    def trace() -> Traced:
        if spread:
            return meta_trace.spread_update(m.model, batch, **options)
        return meta_trace.update(m.model, batch, parts, **options)

    found = traced(place, m, trace, batch, True)
    if found.away:
        place.host[f"{m.name}: activations"] = found.away / strategy.sequence
    activations = found.activations / strategy.sequence - _cut_activations(m, batch, shares.cut) / strategy.sequence
    summed = gradients(m.parameters, shares) if place.device.processes > 1 else float(found.gradients)
    on_it = {} if "gradients" in shares.on_host else {"gradients": summed}
    extra = _target(place.config) if m.name == "policy" else {}
    yield MemoryPhase(
        f"{m.name}: update",
        {**on_it, "activations": max(0.0, activations), **extra, **_whole(place, m, backward=True)},
    )
    if shares.by_blocks and not shares.bucket:
        sizes = m.units(shares.cut, trained=True)
        yield MemoryPhase(
            f"{m.name}: last gradients",
            {**on_it, "whole": last_sum(*sizes, m.model.base.dtype.itemsize)},
        )


def scored(config: Any) -> bool:
    """Return True if the policy runs over the batch once more, without gradient."""
    return needs_old_logprobs(config) or bool({"entropy", "energy", "current"} & needs_of(config.algorithm))


def _target(config: RLConfig | SFTConfig) -> dict[str, float]:
    """Return the bytes of two chunks of teacher logits, if full vocabularies are compared."""
    if not isinstance(config, RLConfig) or not config.algorithm.distill.whole:
        return {}
    return {"teacher's logits": 2.0 * config.model.logits_mb * 2**20}


def _whole(place: ProcessProfile, m: Model, *, backward: bool) -> dict[str, float]:
    """Return the bytes of gathered weights and unsharded gradients of a sharded model."""
    shares = place.shares(m)
    parts: dict[str, float] = {}
    if shares.by_blocks:
        parts["blocks made whole"] = unsharded_bytes(*m.units(shares.cut), shares.kept_between_passes)
    if backward and shares.bucket:
        trained = sum(p.count for p in m.parameters if p.trained)
        parts["gradients on their way"] = collected(trained, shares.bucket, touched=place.device.kind == "cpu")
    elif backward and shares.by_blocks:
        parts["gradients on their way"] = on_their_way(*m.units(shares.cut, trained=True), m.model.base.dtype.itemsize)
    return parts


def _cut_activations(m: Model, batch: Batch, cut: int) -> float:
    """Return the bytes of activations inside blocks that tensor-parallel ranks do not store."""
    if cut == 1 or m.model.config.gradient_checkpointing:
        return 0.0
    tokens = int(batch.prompts.lengths.sum() + batch.lengths.sum())
    inside = inside_blocks(tokens, m.text.num_hidden_layers, m.model.base.dtype.itemsize, **_widths(m.text))
    return inside * (1 - 1 / cut)


def reading(place: ProcessProfile, models: list[Model], kept: Mapping[str, ModelMemory]) -> MemoryPhase:
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
        shares = place.shares(m)
        once = 0.0
        if shares.by_blocks:
            once = largest_tensor(m, whole=place.strategy.kind == "deepspeed")
        most = max(most, before + kept[m.name].weights + once)
        before += kept[m.name].total
    return MemoryPhase(
        "loading",
        {"weights as they are read": max(0.0, most - sum(k.total for k in kept.values()))},
    )


def largest_tensor(m: Model, *, whole: bool) -> float:
    """Return the bytes to read the largest weight: the full tensor if ``whole``, else one piece.

    A weight that is merged from several tensors counts twice, for them and for the result.
    """
    together = put_together(m.model.base)
    sizes = [(p.numel() * p.itemsize, name in together) for name, p in m.model.base.named_parameters()]
    return max(2 * size if several else size if whole else min(size, PIECE) for size, several in sizes)


def traced(place: ProcessProfile, m: Model, trace: Callable[[], Traced], batch: Batch, trained: bool) -> Traced:
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
            "those of plain blocks, by formula"
        )
        if problem not in place.problems:
            place.problems.append(problem)
    text, itemsize = m.text, m.model.base.dtype.itemsize
    layers = text.num_hidden_layers if trained and not m.model.config.gradient_checkpointing else 1
    tokens = int(batch.prompts.lengths.sum() + batch.lengths.sum())
    inputs = tokens * text.hidden_size * itemsize * text.num_hidden_layers if layers == 1 and trained else 0
    logits = m.model.config.logits_mb * 2**20 * 3
    summed = int(gradients(m.parameters)) if trained else 0
    kept = kept_by_blocks(tokens, layers, itemsize, hidden=text.hidden_size, **_widths(text))
    return Traced(kept + inputs + logits + summed, summed)


def _heads(text: Any) -> tuple[int, int]:
    """Return the number of attention heads and the width of a layer's keys, or 0, 0 without
    attention.
    """
    fields = text.to_dict()
    heads = fields.get("num_attention_heads") or vars(text).get(text.attribute_map.get("num_attention_heads", "")) or 0
    if not heads:
        return 0, 0
    head = fields.get("head_dim") or text.hidden_size // heads
    return heads, head * (fields.get("num_key_value_heads") or heads)


def _widths(text: Any) -> dict[str, int]:
    heads, keys = _heads(text)
    head = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return {"queries": head * heads, "keys": keys, "inner": _inner(text)}


def _inner(text: Any) -> int:
    """Return the width of the MLP that a token passes through, summed over its active experts."""
    experts = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    narrow = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return narrow * experts if experts else narrow
