"""Estimate the memory of a run: models on the meta device, and phases of a step, per process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lightrft.algorithms.requirements import needs_of, needs_reference
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import in_worker
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.diagnostics.memory.formulas import MemoryPhase, ModelMemory, gradients, held, peak
from lightrft.diagnostics.memory.phases import (
    DRAWING,
    Device,
    Lengths,
    Model,
    ProcessProfile,
    drawing_answers,
    passes,
    reading,
)
from lightrft.models.actor import Actor, Backbone
from lightrft.models.critic import Critic
from lightrft.models.loading.meta_device import meta_model
from lightrft.utils.onednn_cache import products_bytes

MIB = 2**20
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


def estimate_memory(config: RLConfig | SFTConfig, lengths: Lengths, device: Device) -> MemoryEstimate:
    """Return the memory of each of the ``device.processes`` ranks of ``config``.

    Raises ``ModelError`` for a model whose config cannot be used.

    Args:
        config: settings of the run.
        lengths: lengths and number of responses of a step.
        device: device of each process.
    """
    place = ProcessProfile(config, lengths, device, config.strategy, device.processes)
    apart = staffed(config)
    models = [m for m in _models(config) if m.name not in apart]
    kept = {m.name: place.held(m) for m in models}
    phases = _drawing(place, models, apart)
    for m in models:
        phases += passes(place, m)
    phases = _left_whole(place, models, phases)
    if isinstance(config, RLConfig) and config.rollout.staleness:
        kept["sampling copies"] = _copies(place, models[0], "engine" in apart)
        if phases[0].name == DRAWING and "engine" not in apart:
            phases = [phases[0], *(_beside(phases[0], phase) for phase in phases[1:])]
    if device.processes > 1:
        phases.append(reading(place, models, {m.name: kept[m.name] for m in models}))
    if "engine" in apart and isinstance(config, RLConfig):
        kept["weights for engines"] = _handed_over(config, models[0], device)
    kept |= _compiled(models, device)
    return MemoryEstimate(kept, phases, _counts(models), place.problems, _on_host(place, models, phases))


def workers(config: RLConfig | SFTConfig, lengths: Lengths, device: Device) -> dict[str, MemoryEstimate]:
    """Return the memory of each worker of ``launch.ray`` with a model, by role.

    Args:
        config: settings of the run.
        lengths: lengths and number of responses of a step.
        device: device of each process.
    """
    found: dict[str, MemoryEstimate] = {}
    for role in staffed(config):
        assert isinstance(config, RLConfig)
        model = next(m for m in _models(config) if m.name == {"engine": "policy"}.get(role, role))
        among = config.launch.ray.engines if role == "engine" else device.processes
        place = ProcessProfile(config, lengths, replace(device, processes=1), in_worker(config.strategy), among)
        if role == "engine":
            model = replace(model, trained=False)
            phases = list(drawing_answers(place, model))
            kept = {
                "policy": place.held(model),
                "weights on their way": ModelMemory(config.launch.ray.bucket_mb * MIB),
            }
        else:
            phases, kept = list(passes(place, model)), {role: place.held(model)}
        kept |= _compiled([model], device)
        found[role] = MemoryEstimate(kept, phases, _counts([model]), place.problems, _on_host(place, [model], phases))
    return found


def staffed(config: RLConfig | SFTConfig) -> list[str]:
    """Return the roles with a model that run in workers."""
    if not isinstance(config, RLConfig):
        return []
    return [ROLES[name] for name, count in config.launch.ray.staff.items() if count and name in ROLES]


def _models(config: RLConfig | SFTConfig) -> Iterator[Model]:
    """Yield the models that a run loads, the policy first."""
    model = config.model
    yield _of("policy", model, trained=True)
    if not isinstance(config, RLConfig):
        return
    alone = model.model_copy(update={"lora": None})
    if needs_reference(config.algorithm) and (model.lora is None or config.reference is not None):
        yield _of(
            "reference",
            alone.model_copy(update={"path": config.reference or model.path}),
            trained=False,
        )
    if config.algorithm.distill.kind != "none":
        plain = {
            "tokenizer": None,
            "chat_template": None,
            "freeze": (),
            "gradient_checkpointing": False,
        }
        yield _of(
            "teacher",
            alone.model_copy(update={**plain, **config.teacher.model_dump()}),
            trained=False,
        )
    if "critic" in needs_of(config.algorithm):
        yield _of(
            "critic",
            alone.model_copy(update={"path": config.critic.path or model.path}),
            trained=True,
            kind=Critic,
        )
    if "process" in needs_of(config.algorithm):
        yield _of(
            "process model",
            alone.model_copy(update={"path": config.process.path or model.path}),
            trained=True,
        )


def _of(name: str, config: ModelConfig, *, trained: bool, kind: type[Backbone] = Actor) -> Model:
    model = kind(meta_model(config), config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if not trained:
        model.requires_grad_(False)
    return Model(name, model, trained, config.load_in_4bit)


def _counts(models: list[Model]) -> dict[str, tuple[int, int]]:
    return {m.name: (sum(p.count for p in ps), sum(p.count for p in ps if p.trained)) for m in models if (ps := m.parameters)}


def _drawing(place: ProcessProfile, models: list[Model], apart: list[str]) -> list[MemoryPhase]:
    """Return the phases in which ranks generate.

    Engines in workers take over generation. With asynchronous generation they are busy, so ranks
    generate the responses to the eval set.
    """
    config, ahead = (
        place.config,
        isinstance(place.config, RLConfig) and bool(place.config.rollout.staleness),
    )
    if "engine" in apart and not ahead:
        return []
    phases = list(drawing_answers(place, models[0], evaluating="engine" in apart))
    if not config.strategy.sleep or place.device.kind == "cpu" or ahead:
        return phases
    held = {m.name: place.held(m) for m in models}
    resting = sum(held[m.name].masters + held[m.name].moments if m.trained else held[m.name].weights for m in models)
    return [replace(phase, resting=resting) for phase in phases]


def _left_whole(place: ProcessProfile, models: list[Model], phases: list[MemoryPhase]) -> list[MemoryPhase]:
    """Add to ``phases`` the gathered weights of other models, kept until their backward pass."""
    left = {
        m.name: place.shares(m).kept_between_passes * sum(m.units(place.shares(m).cut)[1])
        for m in models
        if place.shares(m).kept_between_passes
    }
    found = []
    for phase in phases:
        others = sum(size for name, size in left.items() if not phase.name.startswith((f"{name}:", DRAWING)))
        found.append(replace(phase, parts={**phase.parts, "others left whole": others}) if others else phase)
    return found


def _copies(place: ProcessProfile, policy: Model, engines: bool) -> ModelMemory:
    """Return the memory of asynchronous generation while the policy is trained.

    It holds a copy of the trained weights for each pending version. With several processes it also
    holds a model for the other weights.
    """
    assert isinstance(place.config, RLConfig)
    trained = sum(p.count * p.itemsize for p in policy.parameters if p.trained)
    alone = place.device.processes == 1 or engines
    rest = 0.0 if alone else held(policy.parameters).weights - trained
    return ModelMemory((place.config.rollout.staleness + 1) * trained + rest)


def _compiled(models: list[Model], device: Device) -> dict[str, ModelMemory]:
    """Return the memory of half-precision matmuls that a CPU has compiled for the shapes seen."""
    size = max(products_bytes(m.model.base.dtype) for m in models) if device.kind == "cpu" else 0.0
    return {"compiled products": ModelMemory(size)} if size else {}


def _handed_over(config: RLConfig, policy: Model, device: Device) -> ModelMemory:
    """Return the memory of a bucket of weights in transfer to engines.

    If the device is a CPU, it includes the copy that rank 0 keeps for restarted engines.
    """
    kept = sum(p.count * p.itemsize for p in policy.parameters if p.trained) if device.kind == "cpu" else 0.0
    return ModelMemory(config.launch.ray.bucket_mb * MIB + kept)


def _on_host(place: ProcessProfile, models: list[Model], phases: list[MemoryPhase]) -> dict[str, float]:
    """Return the bytes in CPU memory of each model, per process."""
    if place.device.kind == "cpu":
        return {}
    found: dict[str, float] = {}
    for m in models:
        shares = place.shares(m)
        size = held(m.parameters, shares).total - place.held(m).total
        found[m.name] = size + (gradients(m.parameters, shares) if "gradients" in shares.on_host and m.trained else 0.0)
    found["asleep while answers are drawn"] = max((phase.resting for phase in phases), default=0.0)
    return {name: size for name, size in found.items() if size} | place.host


def _beside(drawing: MemoryPhase, phase: MemoryPhase) -> MemoryPhase:
    """Return ``phase`` plus the memory of generating a later batch at the same time."""
    return replace(phase, parts={**phase.parts, "drawing meanwhile": drawing.total})
