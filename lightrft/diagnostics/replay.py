"""Repeat phases of a step from its saved batch, to see the effect of other settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.algorithms.requirements import Requirements
from lightrft.algorithms.validate.check_parts import check_parts
from lightrft.config.base import load_settings
from lightrft.config.verbs import RLConfig
from lightrft.learner.controllers import Controllers
from lightrft.learner.forward_passes import verify_layouts
from lightrft.learner.reference_update import load_reference_state, update_reference
from lightrft.models.processors import load_processor
from lightrft.observability.metrics import Metrics
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.rollout.serialization import load_batch
from lightrft.strategy.checkpoint import CheckpointStore, load_state, verify
from lightrft.trainer.phases import PHASES, StepContext, run_phases
from lightrft.types import Batch
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.seeding import restore_rng, seed_everything
from lightrft.utils.state_io import SUFFIX, State
from lightrft.workers.local import local_roles, local_tokenizer

NAMES = tuple(phase.name for phase in PHASES)
"""Names of the phases of a step, in order."""


@dataclass(slots=True)
class Replayed:
    """The batch after the repeated phases, and their metrics."""

    batch: Batch
    metrics: Metrics


def replay(
    folder: Path | str,
    step: int,
    phases: Sequence[str] = NAMES,
    overrides: Sequence[str] = (),
) -> Replayed:
    """Repeat ``phases`` of ``step`` on the batch that the run saved.

    The batch keeps the columns that earlier phases of the run computed. Weights, optimizer and
    coefficients come from the checkpoint before the step, so the same settings give the same
    numbers. Tokens that were not finite are left out of the saved batch, so
    ``policy/nonfinite_tokens`` is 0. The run is not changed. The random generators of this process
    are seeded.

    Args:
        folder: run folder.
        step: number of the step, from 1.
        phases: names of some of ``PHASES``. They run in the order of a step.
        overrides: settings to change, as ``a.b=value``.

    Raises:
        CheckpointError: the batch or the checkpoint was not saved.
        ConfigError: the settings are invalid.
    """
    for name in phases:
        if name not in NAMES:
            raise ConfigError(f"there is no phase {name!r}; take some of {', '.join(NAMES)}")
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
        context = StepContext(
            roles=roles,
            config=config,
            requirements=requirements,
            controllers=Controllers.of(config.algorithm),
            step=step - 1,
        )
        _take_up(context, folder)
        update_reference(roles, config.algorithm.kl, context.step)
        verify_layouts(roles, batch)
        chosen = [phase for phase in PHASES if phase.name in phases]
        return Replayed(run_phases(batch, context, chosen), context.metrics)
    finally:
        roles.close()


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


def _take_up(context: StepContext, folder: Path) -> None:
    """Restore the state before the step. Raises ``CheckpointError`` if it was not saved."""
    roles, step = context.roles, context.step
    if step == 0:
        seed_everything(context.config.run.seed)
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
    context.controllers.load_state_dict(state["controls"])
    load_reference_state(roles, state)
    if roles.ptx is not None and "ptx" in state:
        roles.ptx.load_state_dict(state["ptx"])
    # Last: loading a model may take random numbers.
    restore_rng(state["rng"], roles.strategy.device)
