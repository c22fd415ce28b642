"""Repeat phases of a step from its saved batch, to see the effect of other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightrft.algorithms.nonfinite_tokens import readable
from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.base import load_settings
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.distillation import with_teacher
from lightrft.learner.forward_passes import sampled_distribution, verify_layouts
from lightrft.learner.policy_update import update
from lightrft.learner.process_reward import with_process_rewards
from lightrft.learner.reference_update import load_reference_state, update_reference
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics
from lightrft.roles import Roles
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.serialization import load_batch
from lightrft.strategy.checkpoint import CheckpointStore, load_state, verify
from lightrft.trainer.rl_step import (
    update_settings,
    with_advantages,
    with_policy,
    with_reference,
    with_values,
)
from lightrft.types import Batch
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.seeding import restore_rng, seed_everything
from lightrft.utils.state_io import SUFFIX, State
from lightrft.workers.local import local_roles, local_tokenizer

PHASES = ("policy", "reference", "values", "prm", "advantages", "update")


@dataclass(slots=True)
class Replayed:
    """The batch after the repeated phases, and the metrics of the update."""

    batch: Batch
    metrics: Metrics = field(default_factory=Metrics)


def replay(
    folder: Path | str,
    step: int,
    phases: Sequence[str] = PHASES,
    overrides: Sequence[str] = (),
) -> Replayed:
    """Repeat ``phases`` of ``step`` on the batch that the run saved.

    The batch keeps the columns that earlier phases of the run computed. Weights, optimizer and
    coefficients come from the checkpoint before the step, so the same settings give the same
    numbers. The run is not changed. The random generators of this process are seeded.

    Args:
        folder: run folder.
        step: number of the step, from 1.
        phases: some of ``PHASES``. They run in the order of ``PHASES``.
        overrides: settings to change, as ``a.b=value``.

    Raises:
        CheckpointError: the batch or the checkpoint was not saved.
        ConfigError: the settings are invalid.
    """
    for phase in phases:
        if phase not in PHASES:
            raise ConfigError(f"there is no phase {phase!r}; take some of {', '.join(PHASES)}")
    folder = Path(folder)
    config = load_settings(RLConfig, [folder / "config.yaml"], overrides).settings
    check_parts(config.algorithm)
    requirements = Requirements.of(config.algorithm)
    batch = _saved_batch(folder, step)
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, config.data.media)
    prompts = 0
    if not config.train.steps:
        # The learning-rate schedule spans the steps of a run, which the prompts then determine.
        seed = config.run.seed
        prompts = len(PromptStream.of(config.data, tokenizer, seed, processor=processor).dataset)
    steps = config.train.count_steps(prompts, config.rollout.prompts_per_step)
    roles = local_roles(config, requirements, tokenizer, steps, processor)
    try:
        controls = Controllers.of(config.algorithm)
        _take_up(roles, controls, config, folder, step - 1)
        update_reference(roles, config.algorithm.kl, step - 1)
        verify_layouts(roles, batch)
        return _run(roles, controls, config, requirements, step - 1, batch, phases)
    finally:
        roles.close()


def _run(
    roles: Roles,
    controls: Controllers,
    config: RLConfig,
    requirements: Requirements,
    step: int,
    batch: Batch,
    phases: Sequence[str],
) -> Replayed:
    """Run ``phases`` on ``batch``, in the order of a step.

    Args:
        roles: The models.
        controls: Coefficients that change from step to step.
        config: Settings, with overrides.
        requirements: What the algorithm reads.
        step: Number of steps before this one.
        batch: The batch that the run saved.
        phases: Some of ``PHASES``.
    """
    replayed = Replayed(batch)
    max_tokens = config.train.micro_batch_tokens
    temperature = sampled_distribution(roles, config.sampling)
    if "policy" in phases:
        batch = with_policy(batch, roles, config, requirements)
    if "reference" in phases:
        batch = with_reference(batch, roles, config, requirements)
        batch = with_teacher(batch, roles, config.algorithm.distill, max_tokens, temperature)
    if "values" in phases:
        batch = with_values(batch, roles, config, controls)
    if "prm" in phases:
        # As in a step: the model must not learn from tokens that are not finite.
        seen = readable(batch, requirements)
        batch = with_process_rewards(
            seen, roles, config.prm, max_tokens, temperature, replayed.metrics
        )
    if "advantages" in phases:
        batch = with_advantages(batch, config, controls, requirements)
    if "update" in phases:
        settings = update_settings(roles, config, requirements)
        replayed.metrics.merge(update(roles, batch, settings, controls, step))
    replayed.batch = batch
    return replayed


def _saved_batch(folder: Path, step: int) -> Batch:
    """Read the batch of ``step``. Raises ``CheckpointError`` if the run did not save it."""
    file = folder / "batches" / f"step_{step:06d}"
    if file.with_name(file.name + SUFFIX).exists():
        return load_batch(file)
    found = file.parent.glob(f"step_*{SUFFIX}")
    kept = sorted(int(batch.stem.removeprefix("step_")) for batch in found)
    raise CheckpointError(
        f"{folder} kept no batch of step {step}, but of {kept or 'none'}; set log.batches_every "
        "in the run"
    )


def _take_up(
    roles: Roles, controls: Controllers, config: RLConfig, folder: Path, step: int
) -> None:
    """Restore the state after ``step`` steps. Raises ``CheckpointError`` if it was not saved."""
    if step == 0:
        seed_everything(config.run.seed)
        return
    saved = CheckpointStore(folder / "checkpoints", keep=1).steps()
    if step not in saved:
        raise CheckpointError(
            f"{folder} has no checkpoint of step {step}, with whose weights the batch of step "
            f"{step + 1} was trained on; it has {sorted(saved) or 'none'}. Set "
            "checkpoint.every=1 and checkpoint.keep in the run"
        )
    verify(saved[step])
    state: State = load_state(saved[step] / "trainer")
    for name, role in roles.trained.items():
        # Overrides may need a model that the run did not train.
        if (saved[step] / name).exists():
            role.load(roles.strategy, saved[step] / name)
    controls.load_state_dict(state["controls"])
    load_reference_state(roles, state)
    if roles.ptx is not None and "ptx" in state:
        roles.ptx.load_state_dict(state["ptx"])
    # Last: loading a model may take random numbers.
    restore_rng(state["rng"], roles.strategy.device)
