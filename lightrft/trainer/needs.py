"""What the run of a config needs in memory: its models on the meta device, and the phases of a step, put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightrft.config import ModelConfig, RLConfig, SFTConfig
from lightrft.models.actor import Actor, Backbone
from lightrft.models.critic import Critic
from lightrft.models.decoding import PREFILL_TOKENS
from lightrft.models.meta import meta_model
from lightrft.strategy.blocks import blocks_of
from lightrft.strategy.settings import StrategyConfig
from lightrft.trainer import tracing
from lightrft.trainer.memory import (
    QUANTISED,
    Held,
    Parameters,
    Phase,
    Shares,
    drawing,
    gradients,
    held,
    kept_by_blocks,
    key_value_cache,
    layout_check,
    made_whole,
    peak,
    tokens_held,
)
from lightrft.trainer.parts import needs_of, needs_old_logprobs, needs_reference
from lightrft.trainer.tracing import Traced
from lightrft.types import Batch

ZERO_BUCKET = 5e8
"""Elements of the bucket in which DeepSpeed collects gradients, unless its configuration says otherwise."""
CHECKED_ROWS = 4
"""Rows of the first batch on which the layout is compared with the model's own forward."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the longest prompt and of the longest answer; ``groups`` prompts of a step with ``samples`` answers each."""

    prompt: int
    answer: int
    groups: int
    samples: int

    @property
    def longest(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class Device:
    """Where it runs: ``kind`` is ``cpu`` or that of an accelerator, ``memory`` the bytes that a process may have, 0 if not known."""

    kind: str
    memory: int
    processes: int = 1
    kernel: bool = True
    """Whether attention in half precision runs without its scores being written out."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes on each device: of each model all the time, of each phase while it lasts. ``parameters`` counts those of each model, and
    those of them that are trained; ``problems`` are what could not be computed."""

    models: dict[str, Held]
    phases: list[Phase]
    parameters: dict[str, tuple[int, int]]
    problems: list[str] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return peak(self.models, self.phases)[0]

    @property
    def largest(self) -> Phase:
        return peak(self.models, self.phases)[1]


@dataclass(slots=True)
class _Model:
    name: str
    model: Backbone
    trained: bool
    quantised: bool = False

    def parameters(self) -> list[Parameters]:
        """Those that two modules share count once."""
        distinct = {p: (module, name) for name, module in self.model.named_modules() for p in module.parameters(recurse=False)}
        return [Parameters(p.numel(), self._itemsize(p, *at), self.trained and p.requires_grad) for p, at in distinct.items()]

    def _itemsize(self, parameter: nn.Parameter, module: nn.Module, name: str) -> float:
        small = self.quantised and type(module) is nn.Linear and "head" not in name and not parameter.requires_grad
        return QUANTISED if small else parameter.itemsize

    @property
    def text(self) -> Any:
        return self.model.text_config


def needs(config: RLConfig | SFTConfig, lengths: Lengths, device: Device) -> Needs:
    """What ``config`` needs on each of ``device.processes`` devices. Raises ``ModelError`` for a model whose config cannot be used."""
    models = list(_models(config))
    policy = models[0]
    spread = {m.name: shares_of(config.strategy, device, trained=m.trained) for m in models}
    kept = {m.name: held(m.parameters(), spread[m.name]) for m in models}
    problems: list[str] = []
    phases = list(_drawing(config, policy, lengths, problems, spread["policy"], device))
    for m in models:
        phases += _passes(config, m, lengths, device, problems, spread[m.name])
    if isinstance(config, RLConfig) and config.rollout.staleness:
        trained = sum(p.count * p.itemsize for p in policy.parameters() if p.trained)
        kept["sampling copies"] = Held((config.rollout.staleness + 1) * trained)
        phases = [phases[0], *(_beside(phases[0], phase) for phase in phases[1:])]
    if device.processes > 1:
        phases.append(_loading(models, kept))
    counts = {m.name: (sum(p.count for p in ps), sum(p.count for p in ps if p.trained)) for m in models if (ps := m.parameters())}
    return Needs(kept, phases, counts, problems)


def shares_of(strategy: StrategyConfig, device: Device, *, trained: bool) -> Shares:
    """How ``strategy`` spreads a model over the processes: fsdp2 all of it, what is whole meanwhile cut by ``strategy.tensor``; ZeRO
    (deepspeed) what is trained by its stage, and what is not trained in stage 3."""
    ranks, stage = device.processes, strategy.stage
    if ranks == 1:
        return Shares()
    if strategy.kind != "deepspeed":
        return Shares(ranks, ranks, ranks, cut=strategy.tensor, summed_whole=True)
    if not trained:
        return Shares(weights=ranks if stage == 3 else 1)
    given = strategy.deepspeed.get("zero_optimization", {})
    collected = float(given.get("reduce_bucket_size", ZERO_BUCKET)) if device.kind != "cpu" else 0.0
    away = given.get("offload_optimizer", {}).get("device", "none") != "none" and device.kind != "cpu"
    weights, spread = (ranks if stage == 3 else 1), (ranks if stage > 1 else 1)
    return Shares(weights, ranks, spread, copied=stage < 3, bucket=4 * collected, state_away=away)


def _models(config: RLConfig | SFTConfig) -> Iterator[_Model]:
    """The models that a run loads, as its launcher does; the policy first."""
    model = config.model
    yield _of("policy", model, trained=True)
    if not isinstance(config, RLConfig):
        return
    alone = model.model_copy(update={"lora": None})
    if needs_reference(config.algorithm) and (model.lora is None or config.reference is not None):
        yield _of("reference", alone.model_copy(update={"path": config.reference or model.path}), trained=False)
    if config.algorithm.distill.kind != "none":
        plain = {"tokenizer": None, "chat_template": None, "freeze": (), "gradient_checkpointing": False}
        yield _of("teacher", alone.model_copy(update={**plain, **config.teacher.model_dump()}), trained=False)
    if "critic" in needs_of(config.algorithm):
        yield _of("critic", alone.model_copy(update={"path": config.critic.path or model.path}), trained=True, kind=Critic)
    if "process" in needs_of(config.algorithm):
        yield _of("process model", alone.model_copy(update={"path": config.process.path or model.path}), trained=True)


def _of(name: str, config: ModelConfig, *, trained: bool, kind: type[Backbone] = Actor) -> _Model:
    model = kind(meta_model(config), config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not trained:
        model.requires_grad_(False)
    return _Model(name, model, trained, config.load_in_4bit)


def _loading(models: list[_Model], kept: dict[str, Held]) -> Phase:
    """Each rank reads a model whole before it keeps its shard: what that takes beyond what all models hold in the end."""
    before, most = 0.0, 0.0
    for m in models:
        most = max(most, before + held(m.parameters()).weights)
        before += kept[m.name].total
    return Phase("loading, one model whole", {"weights": max(0.0, most - sum(k.total for k in kept.values()))})


def _drawing(
    config: RLConfig | SFTConfig, policy: _Model, lengths: Lengths, problems: list[str], shares: Shares, device: Device
) -> Iterator[Phase]:
    """The cache of the engine, and beside it a prefill or the step of all rows, whichever is larger."""
    text, engine = policy.text, config.engine
    if isinstance(config, SFTConfig):  # draws only to evaluate
        if not config.eval.data.sources:
            return
        answer = config.eval.sampling.max_new_tokens
        lengths = Lengths(config.eval.data.max_prompt_tokens, answer, config.eval.limit or engine.max_rows, config.eval.samples)
    heads = text.num_attention_heads
    width = getattr(text, "num_key_value_heads", None) or heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    itemsize, answer = policy.model.base.dtype.itemsize, lengths.answer
    groups = math.ceil(lengths.groups * shares.cut / device.processes)
    tokens, rows, slots = tokens_held(groups, lengths.samples, lengths.prompt, answer, engine.token_budget, engine.max_rows)
    cache = key_value_cache(tokens, [width * head] * text.num_hidden_layers, itemsize)
    at_once = max(1, min(slots, PREFILL_TOKENS // lengths.prompt))
    prefill = tracing.largest_batch(at_once, 1, lengths.prompt, 1, at_once * (lengths.prompt + 1), "packed")
    read = _traced(policy, lambda: tracing.forward(policy.model, prefill), prefill, False, problems)
    step = drawing(rows, heads, lengths.longest, text.vocab_size)
    parts = {"cache": cache / shares.cut, "prefill or step": float(max(read.peak, step))}
    if shares.weights > 1:
        parts["policy made whole"] = held(policy.parameters()).weights * (1 / shares.cut - 1 / shares.weights)
    yield Phase("drawing answers", parts)


def _passes(
    config: RLConfig | SFTConfig, m: _Model, lengths: Lengths, device: Device, problems: list[str], shares: Shares
) -> Iterator[Phase]:
    """What the calls of ``m`` in a step take: without gradient where something reads that, and with it where it is trained."""
    rl, budget, model = isinstance(config, RLConfig), config.train.micro_batch_tokens, m.model
    team = config.strategy.tensor * config.strategy.sequence
    groups = math.ceil(lengths.groups * team / device.processes)
    batch = tracing.largest_batch(groups, lengths.samples, lengths.prompt, lengths.answer, budget, model.layout)
    parts = math.ceil(groups * lengths.samples / (len(batch) * (config.train.mini_batches if rl else 1)))
    capped = getattr(m.text, "attn_logit_softcapping", None) is not None
    half = model.base.dtype.itemsize == 2
    written = capped or (device.kind != "cpu" and not (device.kernel and half))
    entropy = isinstance(config, RLConfig) and m.name == "policy" and (config.log.entropy or config.algorithm.entropy.used)
    options: dict[str, Any] = {"written": written, "entropy": entropy}
    whole = _whole(m, shares, trained=False)
    if model.config.check_layout and isinstance(model, Actor):
        tokens = min(CHECKED_ROWS, groups * lengths.samples) * lengths.answer
        logits = layout_check(tokens, m.text.vocab_size, model.base.dtype.itemsize, model.config.logits_mb * 2**20)
        yield Phase(f"{m.name}: layout check", {"logits": float(logits), **whole})
    if rl and not (m.name == "policy" and not _scored(config)):
        found = _traced(m, lambda: tracing.forward(model, batch, **options), batch, False, problems)
        yield Phase(f"{m.name}: forward", {"activations": found.peak / config.strategy.sequence, **whole})
    if m.trained:
        found = _traced(m, lambda: tracing.update(model, batch, parts, **options), batch, True, problems)
        many = device.processes > 1
        trained = sum(p.count for p in m.parameters() if p.trained)
        summed = gradients(trained, parts, shares) if many else float(found.gradients)
        kept = found.activations / config.strategy.sequence
        extra = _target(config) if m.name == "policy" else {}
        whole = _whole(m, shares, trained=True)
        yield Phase(f"{m.name}: update", {"gradients": summed, "activations": kept, **extra, **whole})


def _scored(config: Any) -> bool:
    """Whether the policy sees the batch once more, without gradient."""
    return needs_old_logprobs(config) or "entropy" in needs_of(config.algorithm) or "current" in needs_of(config.algorithm)


def _target(config: RLConfig | SFTConfig) -> dict[str, float]:
    """Two chunks of a teacher's logits, where the whole vocabulary is compared."""
    if not isinstance(config, RLConfig) or not config.algorithm.distill.whole:
        return {}
    return {"teacher's logits": 2.0 * config.model.logits_mb * 2**20}


def _whole(m: _Model, shares: Shares, *, trained: bool) -> dict[str, float]:
    if shares.weights == 1:
        return {}
    names = blocks_of(m.model)
    sizes = [
        float(sum(p.numel() * p.itemsize for p in module.parameters()))
        for module in m.model.modules()
        if type(module).__name__ in names
    ]
    outside = held(m.parameters()).weights - sum(sizes)
    return {"blocks made whole": made_whole(max(0.0, outside), sizes, m.model.base.dtype.itemsize, trained=trained) / shares.cut}


def _traced(m: _Model, trace: Callable[[], Traced], batch: Batch, trained: bool, problems: list[str]) -> Traced:
    """What ``trace`` finds or, for a model that cannot run without numbers, a formula for plain blocks, which is said."""
    try:
        return trace()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"{m.name}: its passes cannot be traced ({reason[:120]}); activations are those of plain blocks, by formula"
        if problem not in problems:
            problems.append(problem)
    text, itemsize = m.text, m.model.base.dtype.itemsize
    layers = text.num_hidden_layers if trained and not m.model.config.gradient_checkpointing else 1
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    widths = {
        "hidden": text.hidden_size,
        "queries": head * text.num_attention_heads,
        "keys": head * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
        "inner": _inner(text),
    }
    tokens = int(batch.prompts.lengths.sum() + batch.lengths.sum())
    inputs = tokens * text.hidden_size * itemsize * text.num_hidden_layers if layers == 1 and trained else 0
    logits = m.model.config.logits_mb * 2**20 * 3
    gradients = sum(int(p.count * p.itemsize) for p in m.parameters() if p.trained) if trained else 0
    kept = kept_by_blocks(tokens, layers, itemsize, **widths)
    return Traced(kept + inputs + logits + gradients, gradients)


def _inner(text: Any) -> int:
    """Width of what a token passes through between the two halves of a block."""
    experts = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_experts_per_token", None)
    narrow = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return narrow * experts if experts else narrow


def _beside(drawing: Phase, phase: Phase) -> Phase:
    """``phase`` while answers of a later batch are drawn."""
    return Phase(phase.name, {**phase.parts, "drawing meanwhile": drawing.total})
