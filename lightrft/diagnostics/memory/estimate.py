"""Estimate the memory of a run: models on the meta device, and phases of a step, per process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lightrft.algorithms.preference.reference_source import reference_source
from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.algorithms.requirements import Requirements
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import in_worker
from lightrft.config.train import TeacherConfig
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    PRMVerbConfig,
    RLConfig,
    ScoringConfig,
    TrainingConfig,
)
from lightrft.diagnostics.memory.formulas import (
    MemoryPhase,
    ModelMemory,
    gradients,
    held,
    key_value_cache,
    peak,
)
from lightrft.diagnostics.memory.phases import (
    DRAWING,
    Device,
    Lengths,
    Model,
    ProcessProfile,
    generation_phases,
    heads_of,
    passes,
    reading,
)
from lightrft.diagnostics.memory.sent_weights import asks_server, sent_weights
from lightrft.engines.base import ServerKind
from lightrft.models.actor import Actor, Backbone
from lightrft.models.critic import Critic
from lightrft.models.loading.adapter_base import adds_adapters
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.onednn.packed_layers import PACKED_BYTES
from lightrft.models.onednn.products import onednn_available
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.trainer.checks.preflight import generates
from lightrft.utils.cpu import products_bytes
from lightrft.utils.errors import ModelError, path_of
from lightrft.workers.build_remote import most_senders
from lightrft.workers.engine_kinds import kind_of
from lightrft.workers.frozen_models import draft_settings
from lightrft.workers.local import teacher_settings
from lightrft.workers.scoring.model_scorer import model_settings as scoring_settings
from lightrft.workers.weight_sync import WeightSyncConfig

MIB = 2**20
SENT, BUCKETS = "weights for the server", "buckets of weights"
"""Names of what a rank holds to send weights to a server, in CPU memory and on its device."""
ROLES = {"engines": "engine", "references": "reference", "teachers": "teacher"}
"""Roles with a model, by the setting that gives them workers."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of each device: bytes of each model throughout, and of each phase while it lasts.

    ``parameters`` gives the number of parameters of each model and the number of trained ones.
    ``host`` are bytes in CPU memory, where the device has its own. ``problems`` lists quantities
    that could not be computed.
    """

    models: dict[str, ModelMemory]
    phases: list[MemoryPhase]
    parameters: dict[str, tuple[int, int]]
    problems: list[str] = field(default_factory=list)
    host: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """The maximum bytes on a device."""
        return peak(self.models, self.phases)[0]

    @property
    def largest(self) -> MemoryPhase:
        """The phase with the maximum."""
        return peak(self.models, self.phases)[1]


def estimate_memory(
    config: TrainingConfig, lengths: Lengths, device: Device, server: ServerKind | None = None
) -> MemoryEstimate:
    """Return the memory of each of the ``device.processes`` ranks of ``config``.

    Raises ``ModelError`` for a model whose config cannot be used.

    Args:
        config: settings of the run.
        lengths: lengths and number of responses of a step.
        device: device of each process.
        server: kind of the server of ``engine.url``. None if it is unknown.
    """
    config = on_device(config, device)
    place = ProcessProfile(config, lengths, device, config.strategy, device.processes)
    in_workers = roles_in_workers(config)
    models = [model for model in _models(config) if model.name not in in_workers]
    kept = {model.name: place.held(model) for model in models}
    loaded = dict(kept)  # what is added to ``kept`` below does not exist while models are loaded
    # The policy itself then generates no training batch.
    is_elsewhere = _in_copy(config, in_workers) or asks_server(config)
    elsewhere = [*in_workers, "engine"] if is_elsewhere else in_workers
    draft = _draft(config)
    phases = _drawing(place, models, elsewhere, draft)
    if draft is not None and "engine" not in elsewhere:
        # each rank loads all of it, and one more for responses that are generated ahead
        ahead = isinstance(config, RLConfig) and bool(config.rollout.staleness)
        kept[draft.name] = ModelMemory(held(draft.parameters).weights * (2 if ahead else 1))
    for model in models:
        phases += passes(place, model)
    phases = _left_whole(place, models, phases)
    if isinstance(config, RLConfig) and config.rollout.staleness:
        kept["sampling copies"] = _copies(place, models[0], "engine" in elsewhere)
        # Ranks generate the next batch while they train on this one.
        if phases[0].name == DRAWING and "engine" not in elsewhere:
            at_the_same_time = {"generating at the same time": phases[0].total}
            for i, phase in enumerate(phases[1:], 1):
                phases[i] = replace(phase, parts={**phase.parts, **at_the_same_time})
    if _in_copy(config, in_workers):
        ahead = isinstance(config, RLConfig) and bool(config.rollout.staleness)
        assert not isinstance(config, ScoringConfig)
        parts = copy_bytes(config.engine, models[0], device)
        # It frees memory between batches on GPUs alone.
        if ahead or device.kind == "cpu":
            kept |= {name: ModelMemory(size) for name, size in parts.items()}
        else:
            phases.append(MemoryPhase(DRAWING, parts))
    if device.processes > 1:
        phases.append(reading(place, models, loaded))
    if "engine" in in_workers:
        assert isinstance(config, RLConfig)
        kept["weights for engines"] = _for_engines(config, models[0], device)
    if "engine" not in elsewhere and phases and phases[0].name == DRAWING:
        kept |= _packed(models[0], device)
    if isinstance(config, RLConfig):
        kept |= _reward_models(config)
    kept |= _compiled(models, device)
    on_host = _on_host(place, models, phases)
    sent = sent_weights(config, models[0], device, server)
    if device.kind == "cpu":
        kept |= _named(SENT, sent.copies + sent.bucket + sent.device_bucket)
    else:
        kept |= _named(BUCKETS, sent.device_bucket)
        on_host |= {SENT: sent.copies + sent.bucket} if sent.copies + sent.bucket else {}
    return MemoryEstimate(kept, phases, _counts(models), place.problems, on_host)


def _named(name: str, size: float) -> dict[str, ModelMemory]:
    """Return ``size`` bytes by ``name``, or nothing for 0."""
    return {name: ModelMemory(size)} if size else {}


def workers(config: TrainingConfig, lengths: Lengths, device: Device) -> dict[str, MemoryEstimate]:
    """Return the memory of each worker of ``launch.ray`` with a model, by role.

    Args:
        config: settings of the run.
        lengths: lengths and number of responses of a step.
        device: device of each process.
    """
    config = on_device(config, device)
    found: dict[str, MemoryEstimate] = {}
    for role in roles_in_workers(config):
        assert isinstance(config, RLConfig)
        # The number of workers that split the rows of a step.
        among = config.launch.ray.engines if role == "engine" else device.processes
        alone = replace(device, processes=1)
        place = ProcessProfile(config, lengths, alone, in_worker(config.strategy), among)
        name = "policy" if role == "engine" else role
        model = next(model for model in _models(config) if model.name == name)
        if role == "engine":
            # An engine holds no gradients and no optimizer, whatever the ranks train.
            model = replace(model, trained=False)
            on_their_way = ModelMemory(config.launch.ray.bucket_mb * MIB)
            if kind_of(config.engine).copies_weights:
                phases = [MemoryPhase(DRAWING, {})]
                parts = copy_bytes(config.engine, model, device)
                kept = {name: ModelMemory(size) for name, size in parts.items()}
                # whole updates are collected before vLLM loads them
                on_their_way = ModelMemory(on_their_way.weights + place.held(model).weights)
            else:
                draft = _draft(config)
                phases = list(generation_phases(place, model, draft))
                kept = {"policy": place.held(model)}
                if draft is not None:
                    kept[draft.name] = place.held(draft)
                kept |= _packed(model, device)
            kept["weights on their way"] = on_their_way
        else:
            phases = list(passes(place, model))
            kept = {role: place.held(model)}
        kept |= _compiled([model], device)
        on_host = _on_host(place, [model], phases)
        found[role] = MemoryEstimate(kept, phases, _counts([model]), place.problems, on_host)
    return found


def on_device(config: TrainingConfig, device: Device) -> TrainingConfig:
    """Return ``config`` with the bound of logits that its models have on ``device``.

    Passes are traced on the meta device, whose default would be another.
    """
    limit = config.model.logits_limit(device.kind)
    model = config.model.model_copy(update={"logits_mb": limit})
    return config.model_copy(update={"model": model})


def roles_in_workers(config: TrainingConfig) -> list[str]:
    """Return the roles with a model that run in workers."""
    if not isinstance(config, RLConfig):
        return []
    worker_counts = config.launch.ray.worker_counts
    return [role for name, role in ROLES.items() if worker_counts[name]]


def _models(config: TrainingConfig) -> Iterator[Model]:
    """Yield the models that a run loads, the policy first."""
    model = config.model
    if isinstance(config, ScoringConfig):
        yield _scoring_model(config)
        return
    yield _of("policy", model, trained=True)
    if isinstance(config, DPOConfig) and loads_reference(config):
        yield _of("reference", model.at(config.reference), trained=False)
    if isinstance(config, DistillVerbConfig):
        yield from _teachers(config)
    if not isinstance(config, RLConfig):
        return

    requirements = Requirements.of(config.algorithm)
    # A policy with LoRA is its own reference: without the adapters.
    has_base = adds_adapters(model) and config.reference is None
    if requirements.reference and not has_base:
        yield _of("reference", model.at(config.reference), trained=False)
    if config.algorithm.distill.kind != "none":
        yield _teacher("teacher", model, config.teacher)
    if requirements.critic:
        yield _of("critic", model.at(config.critic.path), trained=True, kind=Critic)
    if requirements.cost_critic:
        yield _of("cost critic", model.at(config.cost_critic.path), trained=True, kind=Critic)
    if requirements.prm:
        yield _of("process model", model.at(config.prm.path), trained=True)


def loads_reference(config: DPOConfig) -> bool:
    """Return True if a reference stays in memory next to the policy."""
    source = reference_source(
        config.preference,
        preference_requirements(config.preference),
        adapters=adds_adapters(config.model),
        path=config.reference,
        sees_all=config.train.steps is None and config.train.epochs >= 1,
        sampled=bool(config.online.group_size),
    )
    return source == "step"


def _teachers(config: DistillVerbConfig) -> Iterator[Model]:
    """Yield the teachers of a distillation. A model with LoRA teaches itself without adapters."""
    if config.teacher.path:
        if config.teacher.url is None:
            yield _teacher("teacher", config.model, config.teacher)
    elif not config.teachers and not adds_adapters(config.model):
        yield _of("teacher", config.model, trained=False)
    for source, teacher in config.teachers.items():
        if teacher.url is None:
            yield _teacher(f"teachers.{source}", config.model, teacher)


def _teacher(name: str, policy: ModelConfig, teacher: TeacherConfig) -> Model:
    return _of(name, teacher_settings(policy, teacher), trained=False)


def _scoring_model(config: ScoringConfig) -> Model:
    """Return the reward model that ``config`` trains. No weight of a language model is read."""
    base, inner = config.model, meta_model(config.model)
    model: RewardModel | ProcessRewardModel
    if isinstance(config, PRMVerbConfig):
        name = "process reward model"
        # the ids of the tokens of right and wrong steps do not change the memory
        model = ProcessRewardModel(inner, base, config.process_model, verdicts=(0, 1))
    else:
        name = "reward model"
        model = RewardModel.around(inner, base, config.reward_model, read_form(base.path))
    if base.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    # heads are built on the host
    return Model(name, model.to("meta"), True, base.load_in_4bit)


def _of(name: str, config: ModelConfig, *, trained: bool, kind: type[Backbone] = Actor) -> Model:
    # The policy is read first, so a later problem is one of another path.
    with path_of(_PATHS.get(name, f"{name}.path" if "teacher" in name else "")):
        model = kind(meta_model(config), config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not trained:
        model.requires_grad_(False)
    return Model(name, model, trained, config.load_in_4bit)


_PATHS = {
    "reference": "reference",
    "critic": "critic.path",
    "cost critic": "cost_critic.path",
    "process model": "prm.path",
    "draft model": "engine.speculative.path",
}
"""Setting of the path of a model."""


def _draft(config: TrainingConfig) -> Model | None:
    """Return the draft model of speculative decoding. ``None`` without one."""
    if isinstance(config, ScoringConfig) or not generates(config):
        return None
    settings = config.engine.speculative
    if settings is None or settings.kind != "draft":
        return None
    return _of("draft model", draft_settings(settings, config.model), trained=False)


def _reward_models(config: RLConfig) -> dict[str, ModelMemory]:
    """Return the weights of ``reward.models`` that stay on the device of each rank."""
    found = {}
    for i, term in enumerate(config.reward.models):
        if not term.path or term.offload:
            continue
        settings = scoring_settings(config.model, term.path)
        # one that cannot be loaded is a finding of its own
        with suppress(ModelError):
            # like a critic, it has no output layer for the vocabulary
            model = _of(f"reward model {i}", settings, trained=False, kind=Critic)
            found[model.name] = held(model.parameters)
    return found


def _counts(models: list[Model]) -> dict[str, tuple[int, int]]:
    """Return the number of parameters of each model, and of its trained ones."""
    counts = {}
    for model in models:
        if model.parameters:
            total = sum(p.count for p in model.parameters)
            counts[model.name] = (total, model.trained_count)
    return counts


def _drawing(
    place: ProcessProfile, models: list[Model], in_workers: list[str], draft: Model | None
) -> list[MemoryPhase]:
    """Return the phases in which ranks generate.

    Engines in workers take over generation. With asynchronous generation they are busy, so ranks
    generate the responses to the eval set.

    Args:
        place: The kind of process.
        models: Models of a rank, the policy first.
        in_workers: Roles that run in workers.
        draft: Draft model of speculative decoding.
    """
    config = place.config
    ahead = isinstance(config, RLConfig) and bool(config.rollout.staleness)
    if "engine" in in_workers and not ahead:
        return []
    phases = list(generation_phases(place, models[0], draft, evaluating="engine" in in_workers))
    sleeps = config.strategy.offload_during_generation and place.device.kind != "cpu" and not ahead
    if not sleeps:
        return phases
    resting = 0.0
    for model in models:
        held_by_model = place.held(model)
        # Of a trained model, only masters and moments are offloaded.
        if model.trained:
            resting += held_by_model.masters + held_by_model.moments
        else:
            resting += held_by_model.weights
    return [replace(phase, resting=resting) for phase in phases]


def _in_copy(config: TrainingConfig, in_workers: list[str]) -> bool:
    """Return True if each rank generates with a copy of the weights in vLLM or SGLang.

    ``in_workers`` are the roles in workers.
    """
    if isinstance(config, ScoringConfig) or "engine" in in_workers or not generates(config):
        return False
    return kind_of(config.engine).copies_weights


def copy_bytes(engine: EngineConfig, policy: Model, device: Device) -> dict[str, float]:
    """Return the bytes of an engine's copy of the weights, and of its cache, in one process.

    Args:
        engine: settings of the engine.
        policy: the model that it copies.
        device: device of each process.
    """
    heads, width = heads_of(policy.text)
    among = engine.tensor_parallel
    # processes that share a copy split its heads of keys and values, while there are several
    key_heads = getattr(policy.text, "num_key_value_heads", None) or heads
    widths = [width / max(1, min(among, key_heads))] * policy.text.num_hidden_layers
    cache = key_value_cache(engine.max_cache_tokens, widths, policy.itemsize)
    # the copy is in the compute dtype, whatever the policy is quantised to
    policy = replace(policy, quantised=False)
    weights = held(policy.parameters).weights
    if engine.quantization is not None:
        # a byte per weight of the blocks; the scales and norms are small
        _, blocks = policy.units(1)
        weights -= sum(blocks) * (1 - 1 / policy.itemsize)
    weights /= among
    if engine.gpu_memory_utilization is not None and device.memory:
        cache = max(0.0, engine.gpu_memory_utilization * device.memory - weights)
    name = kind_of(engine).title
    return {f"{name}'s weights": weights, f"{name}'s cache": float(cache)}


def _left_whole(
    place: ProcessProfile, models: list[Model], phases: list[MemoryPhase]
) -> list[MemoryPhase]:
    """Add to ``phases`` the gathered weights of other models, kept until their backward pass.

    Args:
        place: The kind of process.
        models: Models of a rank.
        phases: The phases of a step.
    """
    left: dict[str, float] = {}
    for model in models:
        shares = place.shares(model)
        if shares.kept_between_passes:
            _, blocks = model.units(shares.cut)
            left[model.name] = shares.kept_between_passes * sum(blocks)
    found = []
    for phase in phases:
        # Generation gathers all weights itself, and the phases of a model count their own.
        own = phase.name.partition(":")[0]
        others = sum(size for name, size in left.items() if name != own)
        if others and own != DRAWING:
            phase = replace(phase, parts={**phase.parts, "others left whole": others})
        found.append(phase)
    return found


def _copies(place: ProcessProfile, policy: Model, engines: bool) -> ModelMemory:
    """Return the memory of asynchronous generation while the policy is trained.

    It holds a copy of the trained weights for each pending version. With several processes it also
    holds a model for the other weights.

    Args:
        place: The kind of process.
        policy: The model that generates.
        engines: True if engines in workers generate.
    """
    assert isinstance(place.config, RLConfig)
    trained = _trained_bytes(policy)
    alone = place.device.processes == 1 or engines
    rest = 0.0 if alone else held(policy.parameters).weights - trained
    return ModelMemory((place.config.rollout.staleness + 1) * trained + rest)


def _for_engines(config: RLConfig, policy: Model, device: Device) -> ModelMemory:
    """Return the memory of a rank that sends weights to engines in workers.

    Args:
        config: Settings of the run.
        policy: The policy.
        device: Device of each process.
    """
    asked = config.launch.ray
    transfer = WeightSyncConfig(asked.weights, senders=most_senders(config, device.kind))
    part = _trained_bytes(policy) / len(transfer.ranks_that_send(device.processes))
    # One bucket is filled while the other is sent.
    buckets = 2.0 * asked.bucket_mb * MIB
    if device.kind != "cpu":
        return ModelMemory(buckets)
    # The part of a bucket that is never filled takes no memory. The copies for restarted engines
    # are in the same memory.
    return ModelMemory(min(buckets, part) + part)


def _trained_bytes(model: Model) -> float:
    return sum(p.count * p.itemsize for p in model.parameters if p.trained)


def _packed(policy: Model, device: Device) -> dict[str, ModelMemory]:
    """Return the memory of weights that a CPU holds once more to generate."""
    if device.kind != "cpu" or not onednn_available():
        return {}
    return {"packed weights": ModelMemory(min(PACKED_BYTES, held(policy.parameters).weights))}


def _compiled(models: list[Model], device: Device) -> dict[str, ModelMemory]:
    """Return the memory of half-precision matmuls that a CPU has compiled for the shapes seen."""
    if device.kind != "cpu":
        return {}
    size = max(products_bytes(model.model.base.dtype) for model in models)
    return {"compiled products": ModelMemory(size)} if size else {}


def _on_host(
    place: ProcessProfile,
    models: list[Model],
    phases: list[MemoryPhase],
) -> dict[str, float]:
    """Return the bytes in CPU memory of each model, per process."""
    if place.device.kind == "cpu":
        return {}
    found: dict[str, float] = {}
    for model in models:
        shares = place.shares(model)
        offloaded = held(model.parameters, shares).total - place.held(model).total
        if "gradients" in shares.on_host and model.trained:
            offloaded += gradients(model.parameters, shares)
        found[model.name] = offloaded
    # The same models rest in each phase, so the largest phase has all of them.
    resting = max((phase.resting for phase in phases), default=0.0)
    found["offloaded during generation"] = resting
    return {name: size for name, size in found.items() if size} | place.host
