"""The training loop that all verbs share: steps, evaluations, checkpoints, resume and summary.

``run_training`` calls a ``TrainingRun`` in this order::

    prepare()                data and models, at step 0
    begin()                  checks of data and models
    check_evaluation()       checks of the eval set
    load_state(state)        of a checkpoint, if there is one
    publish()                the weights, to the engine
    evaluate()               before the first step; measures validate() and responses
    start()                  background work
    +-> train_step()
    |   publish_update()     the new weights, to an engine that samples
    |   evaluate()           if it is due
    |   state()              if a checkpoint is due
    |   write_model(path)    if a push to the hub is due
    +-- reached(values)      until the last step, or until an evaluation is good enough
    export()                 model/
    summary_fields()         summary.json
    close()                  also after an error
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from lightrft.config.base import below, build, deep_merge, dotted
from lightrft.config.verbs import GivenDataConfig, RLConfig
from lightrft.distributed.process_group import (
    broadcast_failure,
    init_process_group,
    run_on_all_ranks,
)
from lightrft.models.training_mode import evaluation_mode
from lightrft.observability.events import (
    EndEvent,
    EvalEvent,
    RolloutsEvent,
    SettingChange,
    StartEvent,
    StepEvent,
)
from lightrft.observability.metrics import Last, Metrics
from lightrft.observability.observer import Observer
from lightrft.observability.run_health import Health
from lightrft.observability.trackers import ReadRow, Summary
from lightrft.rewards.success import Success
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import change_lr
from lightrft.trainer.checks.context_limits import check_examples
from lightrft.trainer.checks.preflight import check_best
from lightrft.trainer.environment import DeviceUse, environment, watched
from lightrft.trainer.hub_pushes import HubPushes
from lightrft.trainer.run_session import (
    CHANGED,
    UNEVALUATED,
    RunSession,
    close_session,
    open_session,
)
from lightrft.utils.errors import (
    RESUMES,
    ConfigError,
    GenerationInterrupted,
    ModelError,
    RankError,
    ResourceError,
    RewardError,
    UserError,
)
from lightrft.utils.seeding import derive_seed, seed_everything
from lightrft.utils.state_io import State

log = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)

STEP_ERRORS = (RewardError, ConfigError, ModelError, ResourceError)
"""Errors of rewards, engine and disk, which end a run and leave its weights as they are."""


class EvaluationTimes(Protocol):
    """When a run is evaluated."""

    @property
    def every(self) -> int:
        """Steps between two evaluations; 0 evaluates only after the last step."""
        ...

    @property
    def at_start(self) -> bool:
        """Evaluate before the first step."""
        ...


@dataclass(slots=True, kw_only=True)
class TrainingRun(ABC):
    """A run and its progress: ``step`` of ``steps``, and the metrics of the step it resumed from.

    A subclass defines the models, a step and the state that the next step reads.

    Attributes:
        dataset: The rows that steps take in the order of ``sampler``, if the run has them.
        validation: The rows held out from training, if there are any.
        is_unevaluated: The run has resumed from a step whose weights the engine did not get, or
            whose evaluation failed.
        use: Measures the use of the device.
    """

    session: RunSession
    config: Any
    steps: int
    step: int = 0
    values: ReadRow = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    is_unevaluated: bool = False
    use: DeviceUse | None = None
    dataset: Any = None
    validation: Any = None
    sampler: Any = None
    changeable: ClassVar[tuple[str, ...]] = ("optimizer.lr",)
    """Settings that callbacks may change."""

    @property
    @abstractmethod
    def strategy(self) -> Strategy:
        """The strategy that places and updates the models."""

    @property
    @abstractmethod
    def trained(self) -> dict[str, TrainableModel]:
        """The models that a checkpoint saves, by name."""

    @property
    def seed(self) -> int:
        """The setting ``run.seed``."""
        return self.config.run.seed

    @property
    def times(self) -> EvaluationTimes:
        """When the run is evaluated."""
        return self.config.eval

    @abstractmethod
    def train_step(self) -> Metrics:
        """Take one step. Raises ``GenerationInterrupted`` if it stopped halfway, with its state
        unchanged."""

    def state(self) -> State:
        """Return the plain data that the next step reads, except weights, optimizer and random
        state.
        """
        return {"sampler": self.sampler.state_dict()}

    def load_state(self, state: State) -> None:
        """Restore the result of ``state``."""
        self.sampler.load_state_dict(state["sampler"])

    @abstractmethod
    def export(self) -> int:
        """Write the trained model as a Hugging Face folder ``model/`` and return its step."""

    @abstractmethod
    def write_model(self, path: Path) -> None:
        """Write the current model as the folder ``path``, with nothing of the run changed."""

    def begin(self) -> None:
        """Check lengths, and compute what must be known before a checkpoint replaces the
        weights."""
        model = next(iter(self.trained.values())).model
        for rows in (self.dataset, self.validation):
            if rows is not None:
                check_examples(model, rows.longest, self.config.max_tokens)

    def check_evaluation(self) -> None:
        """Raise an error if the run cannot be evaluated as configured."""
        return

    def close(self) -> None:
        """Cancel background work, such as reads of media, and close the roles."""
        for rows in (self.dataset, self.validation):
            if rows is not None:
                rows.prefetch(())

    def publish(self) -> None:
        """Send the weights to whatever reads them besides training."""
        return

    def publish_update(self) -> Metrics:
        """Send the weights of a step to an engine that samples the next one."""
        return Metrics()

    def start(self) -> None:
        """Start background work. Called once, when weights and state are loaded."""
        return

    @property
    def samples(self) -> bool:
        """The engine samples responses to train on."""
        return False

    @property
    def validates(self) -> bool:
        """There are examples held out from training, which ``validate`` measures."""
        return self.validation is not None

    def validate(self) -> Metrics:
        """Return metrics of ``validation``."""
        raise NotImplementedError

    @property
    def evaluates(self) -> bool:
        """Evaluations have something to measure."""
        return self.validates

    def evaluate(self) -> Metrics:
        """Return metrics of an evaluation."""
        # Adapters may be in training mode before the first step: dropout would take random numbers.
        with ExitStack() as modes:
            for role in self.trained.values():
                modes.enter_context(evaluation_mode(role.model))
            return self.validate() if self.validates else Metrics()

    def with_change(self, name: str, value: Any) -> Any:
        """Return the config with another value of a setting.

        Raises ``ConfigError`` if it cannot change in this run, or not to this value.
        """
        if name not in self.changeable:
            raise ConfigError(
                f"{name} cannot change during a run of {self.session.phase}; what can is "
                f"{', '.join(self.changeable)}"
            )
        if name == "optimizer.lr" and self.config.optimizer.lr_of:
            raise ConfigError(
                "optimizer.lr cannot change with optimizer.lr_of, which sets the rates of parts; "
                "leave one of them out"
            )
        given = self.config.model_dump(exclude_unset=True)
        return build(type(self.config), deep_merge(given, below(name, value)))

    def change(self, change: SettingChange, *, is_new: bool) -> None:
        """Change a setting from the next step on.

        Args:
            change: The setting and its value.
            is_new: The loaded state does not have the effect of this change yet.
        """
        self.config = self.with_change(change.name, change.value)
        if change.name == "optimizer.lr":
            main = next(iter(self.trained.values()))
            if not isinstance(main, TrainableModel):
                raise ConfigError(
                    f"optimizer.lr was changed after step {change.step} (changes.jsonl), which a "
                    "model in workers cannot take over; resume the run without launch.ray workers"
                )
            change_lr(main.state, self.config.optimizer.lr)

    def reached(self, values: Mapping[str, float]) -> bool:
        """Return whether ``values`` end the run early."""
        return False

    @property
    def success(self) -> Success:
        """The rule for right responses to the eval set."""
        return Success()

    def summary_fields(self) -> Summary:
        """Return further fields of the summary."""
        return {}


def run_training(
    config: RLConfig | GivenDataConfig,
    observer: Observer | None,
    prepare: Callable[[RunSession], TrainingRun],
) -> Summary:
    """Train as configured and return the content of ``summary.json``.

    Args:
        config: Settings of the run.
        observer: Shows the progress. None shows none.
        prepare: Loads data and roles of the run, at step 0.
    """
    with (
        init_process_group(config.strategy.timeout_minutes, config.strategy.device) as ranks,
        open_session(config, observer, ranks) as session,
    ):
        with session.starting():
            # Before data and models are loaded: a hub may refuse.
            session.hub = HubPushes(config.hub, session)
            run = prepare(session)
            if ranks.rank == 0:
                session.environment = environment(run.strategy.device, ranks.size)
        try:
            run.begin()
            resume_from_checkpoint(run)
            return run_steps(run)
        except BaseException as error:
            # Before ``close``, which may take long: other ranks need not wait until the timeout.
            broadcast_failure(error)
            raise
        finally:
            session.hub.close()
            run.close()


def resume_from_checkpoint(run: TrainingRun, checkpoint: Path | None = None) -> None:
    """Resume from a checkpoint, if there is one, and send the weights to the engine.

    Args:
        run: The run.
        checkpoint: Its folder. None takes the newest of the run.
    """
    run.check_evaluation()
    run.step, state, run.values = run.session.resume(run.strategy, run.trained, checkpoint)
    run.health.resume(run.values)
    run.is_unevaluated = bool(state.pop(UNEVALUATED, False))
    recall_changes(run, [SettingChange(*one) for one in state.pop(CHANGED, [])])
    if state:
        run.load_state(state)
    # After a resume too: an engine has loaded the start model.
    run.publish()


def run_steps(run: TrainingRun) -> Summary:
    """Take all remaining steps, write the summary and return it."""
    with watched(run.trained, run.strategy.device, run.session.peak_tflops) as run.use:
        return _run_steps(run)


def _run_steps(run: TrainingRun) -> Summary:
    session = run.session
    values = begin_steps(run)
    first = run.step + 1
    while run.step < run.steps and not session.stopping() and not run.reached(values):
        try:
            seed_step(run)
            metrics = run.train_step()
        except GenerationInterrupted:
            # The half step is thrown away. The state is that of the last whole step.
            session.save_if_due(run, values)
            break
        except UserError as error:
            save_after_error(run, values, error)
            raise
        run.step += 1
        values = finish_step(run, metrics, is_first=run.step == first)
    return end_steps(run, values, is_saved=run.step < first)


def begin_steps(run: TrainingRun) -> ReadRow:
    """Evaluate before the first step, or after the step that the run resumed from, if it is due.

    Return the metrics of the last step.
    """
    session = run.session
    session.observer.begin(session.phase, run.steps, run.step)
    values = run.values
    requests = session.requests
    requests.check, requests.settings = partial(check_request, run), partial(changeable, run)
    requests.missing = missing_events(run)
    session.fire(StartEvent, run.step, steps=run.steps)
    do_requests(run)
    # A checkpoint of step 0 has values: its evaluation is not repeated.
    is_new = run.step == 0 and not values
    if is_new and run.times.at_start and run.evaluates and not session.stopping():
        metrics = run.evaluate()
        session.fire(EvalEvent, 0, metrics=metrics.compute())
        if do_requests(run):
            metrics.merge(session.save_if_due(run, metrics.compute(), asked=True))
        values = session.record(0, metrics)
        warn(run, values)
    run.start()
    if run.is_unevaluated and not session.stopping():
        values = finish_step(run, Metrics({name: Last(value) for name, value in values.items()}))
    return values


def seed_step(run: TrainingRun) -> None:
    """Seed the random generators for the next step."""
    # By its place in the run: dropout is then the same after a resume, on every rank.
    place = run.strategy.data_parallel_group.rank
    seed_everything(derive_seed(run.seed, "step", run.step, place))


def save_after_error(run: TrainingRun, values: ReadRow, error: UserError) -> None:
    """Save the last whole step after an ``error`` of a step that has not changed the weights.

    Args:
        run: The run.
        values: Metrics of the last whole step.
        error: The error, which gets the step that the run resumes from.
    """
    if not isinstance(error, (*STEP_ERRORS, RankError)):
        return
    if isinstance(error, RewardError) or (error.is_before_update and is_shared(run, error)):
        save_before_exit(run, values, error)


def end_steps(run: TrainingRun, values: ReadRow, *, is_saved: bool) -> Summary:
    """Save and export as the run ended, write its summary and return it.

    Args:
        run: The run.
        values: Metrics of the last step.
        is_saved: No step was taken since the run resumed.
    """
    session = run.session
    if not is_saved:
        # The request to stop may have come after the checkpoint of this step was due.
        session.save_if_due(run, values)
    # A run that was asked to stop resumes later, and writes no ``model/`` now.
    finished = not run.is_unevaluated and (run.step >= run.steps or run.reached(values))
    written = {"model_step": export_or_say(run)} if finished else {}
    about = {**run.summary_fields(), "finished": finished, **written}

    def close() -> Summary:
        if session.ranks.rank:
            return {}
        summary = close_session(session, run.success, about, run.step)
        if finished and session.hub is not None and (pushed := session.hub.push_last(summary)):
            summary |= pushed
            session.folder.write_summary(summary)
        return summary

    summary = run_on_all_ranks(session.ranks, close)[0]
    session.fire(EndEvent, run.step, summary=summary)
    return summary


def export_or_say(run: TrainingRun) -> int:
    """Write ``model/`` and return its step.

    An error ends the run, whose last checkpoint holds the trained weights. Its message says so.
    """
    try:
        return run.export()
    except Exception as error:
        kept = (
            f"the trained weights are kept in {run.session.path / 'checkpoints'}: write them by "
            f"lightrft export {run.session.path}"
        )
        if isinstance(error, UserError):
            error.args = (f"model/ could not be written: {error}; {kept}",)
        else:
            error.add_note(kept)
        raise


def with_whole_weights(run: TrainingRun, load: Callable[[], M], write: Callable[[M], None]) -> None:
    """Call ``write`` with the first model that is trained, on rank 0.

    Args:
        run: The run.
        load: Loads a copy of the model, which gets the weights if they are sharded.
        write: Writes the model.
    """
    ranks, trained = run.session.ranks, next(iter(run.trained.values()))
    if ranks.size == 1:
        write(trained.model)
        return
    copy = load() if ranks.rank == 0 else None
    parameters = {} if copy is None else dict(copy.named_parameters())
    # Every rank iterates, since gathering a parameter is a collective call.
    for name, tensor in run.strategy.full_parameters(trained.state):
        if copy is not None:
            parameters[name].data.copy_(tensor)
    # On all ranks, so that a full disk on rank 0 ends the run everywhere.
    run_on_all_ranks(ranks, lambda: None if copy is None else write(copy))


def finish_step(run: TrainingRun, metrics: Metrics, *, is_first: bool = False) -> ReadRow:
    """Send the weights, evaluate and save if due, and log the metrics of the step.

    Args:
        run: The run.
        metrics: Metrics of the step.
        is_first: It is the first step of this process.
    """
    session = run.session
    last = run.step >= run.steps
    eval_is_due = last or bool(run.times.every and run.step % run.times.every == 0)
    evaluates = run.evaluates and (eval_is_due or session.asked().evaluate)
    found = rest_of_step(run, metrics, evaluates, run.publish_update)
    # The names of metrics are known only now. An error after hours would be worse.
    if is_first:
        check_best(session.checkpoint.best, metrics.compute())
    # Once a step, since a streak counts steps.
    for name, count in run.health.count(metrics.compute()).items():
        metrics.add(name, Last(count))
    values = metrics.compute()
    warn(run, values)
    if evaluates:
        session.fire(EvalEvent, run.step, metrics=found)
    session.fire(StepEvent, run.step, metrics=values)
    if session.asked().evaluate and not evaluates:
        found = rest_of_step(run, metrics, True, Metrics)
        values = metrics.compute()
        session.fire(EvalEvent, run.step, metrics=found)
    saves = do_requests(run)
    last = last or run.reached(values) or run.is_unevaluated
    if run.is_unevaluated:
        # Its checkpoint is replaced, or the next resume would evaluate it again.
        session.saved_step, run.is_unevaluated = None, False
    # Before the row is written: a step in ``metrics.jsonl`` without a checkpoint is repeated, but
    # a checkpoint whose row is missing carries the row itself (``RunDirectory.recall``).
    metrics.merge(session.save_if_due(run, values, last=last, asked=saves))
    if session.hub is not None and not last:
        metrics.merge(session.hub.push_if_due(run.step, run.write_model))
    if run.use is not None:
        metrics.merge(run.use.take(session.timers.seconds("update")))
    return session.record(run.step, metrics)


def rest_of_step(
    run: TrainingRun, metrics: Metrics, evaluates: bool, publish: Callable[[], Metrics]
) -> dict[str, float]:
    """Send the weights, and evaluate. Return the metrics of the evaluation.

    Args:
        run: The run.
        metrics: Metrics of the step, to which the new ones are added.
        evaluates: The run is evaluated.
        publish: Sends the weights, and returns metrics.
    """
    try:
        rest, found = publish(), Metrics()
        if evaluates:
            with run.session.timers("eval"):
                found = run.evaluate()
            rest.merge(found)
    except (*STEP_ERRORS, RankError) as error:
        # The step itself is complete. The resumed run does the rest of it.
        if isinstance(error, RewardError) or is_shared(run, error):
            values = {**metrics.compute(), **run.health.streaks}
            save_before_exit(run, values, error, is_unevaluated=True)
        raise
    metrics.merge(rest)
    return found.compute()


UNMEASURED = (
    "there is nothing to measure; name an eval set by eval.data.sources, or rows that are held out "
    "by validation"
)
"""The reason why a run is never evaluated, and what to do."""
SAMPLED_BY = {
    "dpo": "online.group_size",
    "kto": "online.group_size",
    "distill": "distill.on_policy",
}
"""Setting by which a verb that trains on given responses samples its own."""


def missing_events(run: TrainingRun) -> dict[str, str]:
    """Return the events that the run does not have, with the reason."""
    found = {} if run.evaluates else {EvalEvent.name: UNMEASURED}
    if not run.samples:
        sampling = SAMPLED_BY.get(run.config.verb)
        found[RolloutsEvent.name] = "the run samples no responses to train on; leave it out" + (
            f", or set {sampling}" if sampling else ""
        )
    return found


def check_request(run: TrainingRun, action: str, *arguments: Any) -> None:
    """Raise ``ConfigError`` if the run cannot do what a callback asks for."""
    if action == "evaluate" and not run.evaluates:
        raise ConfigError(f"evaluate() cannot be done: {UNMEASURED}")
    if action == "change":
        run.with_change(*arguments)


def changeable(run: TrainingRun) -> dict[str, Any]:
    """Return the current value of each setting that callbacks may change, by name."""
    values = dict(dotted(run.config.model_dump()))
    return {name: values[name] for name in run.changeable}


def do_requests(run: TrainingRun) -> bool:
    """Change settings as callbacks asked for, or as the run did before a resume.

    Return whether a checkpoint is asked for.
    """
    session, asked = run.session, run.session.asked()
    due = [one for one in session.pending if one.step <= run.step]
    session.pending = [one for one in session.pending if one.step > run.step]
    new = [SettingChange(run.step, name, value) for name, value in asked.changes.items()]
    for one in [*due, *new]:
        if changeable(run)[one.name] == one.value:
            continue
        session.originals.setdefault(one.name, changeable(run)[one.name])
        run.change(one, is_new=True)
        session.applied.append(one)
        again = "again " if one in due else ""
        log.info("step %d: %s = %r %sfrom the next step on", run.step, one.name, one.value, again)
        if one not in due:
            session.folder.record_change(one)
    saves = asked.save
    asked.clear()
    return saves


def recall_changes(run: TrainingRun, applied: Sequence[SettingChange]) -> None:
    """Take over the changed settings of a checkpoint, and those of steps that are taken again.

    Args:
        run: The run, with the settings of its config.
        applied: The changes that the checkpoint has.
    """
    session = run.session
    first = [SettingChange(0, name, value) for name, value in session.originals.items()]
    for one in [*first, *applied]:
        session.originals.setdefault(one.name, changeable(run)[one.name])
        run.change(one, is_new=False)
    recorded = run_on_all_ranks(session.ranks, session.folder.changes)[0]
    session.applied = list(applied)
    session.pending = [one for one in recorded if one not in applied]


def warn(run: TrainingRun, values: Mapping[str, float]) -> None:
    """Log warnings if the metrics of the step show that the run learns nothing or too little."""
    for message in run.health.warnings(values):
        log.warning("step %d: %s", run.step, message)


def is_shared(run: TrainingRun, error: UserError) -> bool:
    """Return True if all ranks left the same work because of ``STEP_ERRORS``, so all can save."""
    classes = (type(error),) if run.session.ranks.size == 1 else error.of_ranks
    return bool(classes) and all(issubclass(one, STEP_ERRORS) for one in classes)


def save_before_exit(
    run: TrainingRun,
    values: Mapping[str, float],
    error: UserError,
    *,
    is_unevaluated: bool = False,
) -> None:
    """Save a checkpoint of the last whole step before ``error`` ends the run, and say so in it.

    All ranks must raise ``error``, since all of them save. Nothing is saved before the first step.

    Args:
        run: The run.
        values: Metrics of the last whole step.
        error: The error. Its message gets the step that the run resumes from.
        is_unevaluated: The resumed run sends the weights of that step, and evaluates it.
    """
    if not run.step:
        return
    more: State = {UNEVALUATED: True} if is_unevaluated else {}
    try:
        run.session.save_if_due(run, values, last=True, more=more)
    except UserError as second:
        error.args = (f"{error}; and then: {second}",)
        return
    resumes = f"resumes from step {run.step}, which is saved"
    text = str(error)
    if RESUMES in text:
        text = text.replace(RESUMES, f"The same command {resumes}")
    else:
        text += f"; the same command then {resumes}"
    error.args = (text,)
