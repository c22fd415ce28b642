"""Manage a training run around its steps: run folder, logs, signals, checkpoints and resume."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shlex
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightrft.config.base import build, to_yaml
from lightrft.config.model import loading_settings
from lightrft.config.run import CheckpointConfig
from lightrft.config.verbs import EvaluateConfig, GivenDataConfig, RLConfig
from lightrft.distributed.process_group import (
    SINGLE_PROCESS,
    KeepAlive,
    ProcessGroup,
    run_on_all_ranks,
    run_with_keepalive,
)
from lightrft.observability.events import CheckpointEvent, Requests, RunEvent, SettingChange
from lightrft.observability.metrics import Metrics, Sum
from lightrft.observability.observer import NullObserver, Observer
from lightrft.observability.run_directory import ReadOnlyRunDirectory, RunDirectory
from lightrft.observability.run_health import STEP_TOKENS
from lightrft.observability.timers import Timers, queued_is_done, tokens_per_second
from lightrft.observability.trackers import ReadRow, Summary
from lightrft.rewards.success import Success
from lightrft.roles import TrainableModel
from lightrft.strategy.base import Strategy
from lightrft.strategy.checkpoint import (
    CheckpointStore,
    DiskFullError,
    load_state,
    save_state,
    verify,
)
from lightrft.strategy.manifest import load_manifest
from lightrft.trainer.hub_pushes import HubPushes
from lightrft.trainer.run_summary import headline, samples
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import HintedRow, LostRankError, RankError, UserError, without_overwrite
from lightrft.utils.seeding import capture_rng, restore_rng, seed_everything
from lightrft.utils.state_io import State
from lightrft.utils.stop_signal import StopFlag
from lightrft.utils.yaml_text import parse_yaml

log = logging.getLogger(__name__)

UNEVALUATED = "is_unevaluated"
"""Key of the state of a step whose weights were not sent, or whose evaluation failed."""
CHANGED = "changes"
"""Key of the state of a run whose settings were changed by callbacks."""
MAY_DIFFER = (
    "run",
    "checkpoint",
    "hub",
    "log",
    "engine",
    "strategy",
    "launch",
    "train.steps",
    "train.epochs",
    "eval",
    "reward.workers",
)
"""Settings that may differ between a resumed run and the run that wrote the folder."""


def _now() -> float:
    """Return the seconds of a monotonic clock."""
    return time.perf_counter()


class Resumable(Protocol):
    """A run whose checkpoints are saved: its models, and the data that the next step reads."""

    step: int

    @property
    def strategy(self) -> Strategy:
        """The strategy that saves the models."""
        ...

    @property
    def trained(self) -> Mapping[str, TrainableModel]:
        """The models to save, by name."""
        ...

    def state(self) -> State:
        """Return the plain data that the next step reads."""
        ...


@dataclass(slots=True)
class RunSession:
    """One run, from opening to closing its folder. ``seconds`` continue over a resume.

    ``applied`` are changed settings, which checkpoints hold. ``pending`` are those of steps that a
    resumed run takes again, and ``originals`` the values before all changes.

    ``environment`` is the code and the hardware, as ``summary.json`` names them.

    ``at_risk`` is the most work that a kill could have cost so far. It is measured in seconds and
    in steps since the last checkpoint or the start.
    """

    folder: RunDirectory
    store: CheckpointStore
    checkpoint: CheckpointConfig
    phase: str
    observer: Observer
    stop: StopFlag = field(default_factory=StopFlag)
    timers: Timers = field(default_factory=lambda: Timers(queued_is_done))
    started_at: float = field(default_factory=_now)
    seconds_before_resume: float = 0.0
    ranks: ProcessGroup = SINGLE_PROCESS
    saved_step: int | None = None
    peak_tflops: float | None = None
    at_risk: tuple[float, int] = (0.0, 0)
    requests: Requests = field(default_factory=Requests)
    applied: list[SettingChange] = field(default_factory=list)
    pending: list[SettingChange] = field(default_factory=list)
    originals: dict[str, Any] = field(default_factory=dict)
    hub: HubPushes | None = None
    environment: Mapping[str, object] = field(default_factory=dict)
    is_judge: bool = False
    _saved_time: float = field(default_factory=_now)
    _tried_time: float = field(default_factory=_now)
    _first_step: int = 0

    @property
    def verb(self) -> str:
        """The verb as it is typed, such as ``grm sft`` for the phase ``sft``."""
        return f"grm {self.phase}" if self.is_judge else self.phase

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def seconds(self) -> float:
        """The wall-clock seconds of this run, including the time before a resume."""
        return self.seconds_before_resume + _now() - self.started_at

    @contextmanager
    def starting(self) -> Generator[None]:
        """Stop at the first signal within this context, before models have changed.

        Several ranks stop together, at the next safe point.
        """
        with self.stop.at_once() if self.ranks.size == 1 else nullcontext():
            yield

    def resume(
        self,
        strategy: Strategy,
        trained: Mapping[str, TrainableModel],
        checkpoint: Path | None = None,
    ) -> tuple[int, State, ReadRow]:
        """Load ``checkpoint``, or the newest intact one of the folder. Repeated steps are logged.

        A fresh start returns step 0 and empty mappings. So does a folder whose run ended before its
        first checkpoint.

        Args:
            strategy: strategy that loads the models.
            trained: models to load, by name.
            checkpoint: folder of a checkpoint. None takes the newest of the run, or the one that
                ``run.resume`` names.

        Returns:
            The step, the plain state, and the metrics of that step.

        Raises:
            CheckpointError: the checkpoint is of another model, or none is intact. A checkpoint
                that the user named must itself be intact.
        """
        about = self._about(trained)
        path, step = run_with_keepalive(
            self.ranks,
            lambda sign: (None, 0) if self.ranks.rank else self._newest(about, sign, checkpoint),
        )[0]
        if path is None:
            again = self.folder.rewind(-1, self.phase)
            if again:
                log.warning(
                    "%s holds no checkpoint: the run starts over. Steps taken again: %d",
                    self.path,
                    again,
                )
            return 0, {}, {}
        state = load_state(path / "trainer")
        for name, role in trained.items():
            role.load(strategy, path / name)
        # After the models: loading one may take random numbers.
        restore_rng(state.pop("rng"), strategy.device)
        self.seconds_before_resume = state.pop("seconds")
        row = state.pop("row", {})
        if self.ranks.rank == 0:  # later steps are repeated, so their checkpoints are stale
            self.store.discard_after(step)
        again = self.folder.rewind(step, self.phase)
        # the metrics of one that is not evaluated are written with those of its evaluation
        if row and not state.get(UNEVALUATED):
            place = {"step": step, "phase": self.phase, "seconds": self.seconds_before_resume}
            self.folder.recall({**row, **place})
        self.saved_step = self._first_step = step
        log.info("resumed from %s", path)
        if again:
            log.warning(
                "the run resumes from the checkpoint of step %d. Steps taken again: %d", step, again
            )
        return step, state, row

    def _newest(
        self, about: Mapping[str, object], sign: Callable[[], None], named: Path | None
    ) -> tuple[Path | None, int]:
        """Return the checkpoint to resume from and its step. One that the user ``named`` is never
        replaced.
        """
        named = named or self.folder.checkpoint
        if named is not None:
            return named, verify(named, about, sign).step
        found = None if self.folder.fresh else self.store.newest_intact(about, sign)
        if found is None:
            return None, 0
        path, manifest = found
        return path, manifest.step

    def best_checkpoint(self, step: int) -> tuple[Path | None, int]:
        """Return the best checkpoint and its step. All ranks must call it.

        The checkpoint is None if the weights of the current ``step`` are the best, or if the run
        names no metric. The step is then the current one.
        """

        def find(sign: Callable[[], None]) -> tuple[Path | None, int]:
            if self.ranks.rank or self.checkpoint.best is None:
                return None, step
            best = self.store.best_intact(sign)
            if best is None:
                log.warning(
                    "checkpoint.best = %r: no checkpoint has this metric; model/ holds the last "
                    "step",
                    self.checkpoint.best,
                )
                return None, step
            # The current weights are those of the newest checkpoint, and need not be read again.
            found = load_manifest(best).step
            return None if found == step else best, found

        # Rank 0 reads every byte of the checkpoints, which may take longer than the timeout.
        return run_with_keepalive(self.ranks, find)[0]

    def fire(self, event: type[RunEvent], number: int, **fields: Any) -> None:
        """Call the callback of an event, and take over its request to stop.

        Args:
            event: The kind of event.
            number: Number of completed steps.
            fields: Further fields of the event.
        """
        if "metrics" in fields:
            fields["metrics"] = HintedRow(fields["metrics"])
        self.observer.event(
            event(number=number, phase=self.phase, requests=self.requests, **fields)
        )
        if self.requests.stop:
            self.stop.request(self.requests.stop)

    def asked(self) -> Requests:
        """Return what callbacks asked for. Rank 0, which calls them, decides for all ranks."""
        asked = self.requests
        if self.ranks.size > 1:
            told = self.ranks.gather((asked.save, asked.evaluate, asked.changes))[0]
            asked.save, asked.evaluate, asked.changes = told
        return asked

    def stopping(self) -> bool:
        """Return True if any rank is asked to stop. Every rank must call it."""
        return self._agreed(due=False)[0]

    def _agreed(self, due: bool) -> tuple[bool, bool]:
        """Return two flags: some rank is asked to stop, and a save is ``due`` on rank 0, whose
        clock counts.

        Every rank must call it.
        """
        # A rank that is asked to stop while it waits here reports it in the next call.
        told = self.ranks.gather((self.stop.reason, due))
        reason = next((reason for reason, _ in told if reason), "")
        if reason:
            self.stop.request(reason)
        return bool(reason), told[0][1]

    def save(self, run: Resumable, values: Mapping[str, float], more: State | None = None) -> None:
        """Write a checkpoint: everything that the next step reads.

        A full disk raises an error on every rank.

        Args:
            run: the run.
            values: metrics of the step.
            more: further state.
        """
        step, strategy, trained = run.step, run.strategy, run.trained
        state = {**run.state(), **(more or {})}
        if self.applied:
            state[CHANGED] = [[one.step, one.name, one.value] for one in self.applied]
        # A leading minus says that less is better. It is no part of the metric's name.
        best = (self.checkpoint.best or "").lstrip("-")
        about = self._about(trained)
        failed: Exception | None = None
        # Rank 0 reads every byte again, so the others must not time out.
        signs = KeepAlive(self.ranks)
        try:
            with self.timers("checkpoint"), ExitStack() as stack:

                def begin() -> Path:
                    if self.ranks.rank:
                        return self.path  # not used
                    # A folder with only a checkpoint would be rejected as foreign on resume.
                    if not self.path.is_dir():
                        raise FileNotFoundError(
                            errno.ENOENT, os.strerror(errno.ENOENT), str(self.path)
                        )
                    return stack.enter_context(
                        self.store.writing(step, about, values.get(best), signs.give)
                    )

                path = run_on_all_ranks(self.ranks, begin)[0]
                for name, role in trained.items():
                    role.save(strategy, path / name)
                if self.ranks.rank == 0:
                    more = {
                        "rng": capture_rng(strategy.device),
                        "seconds": self.seconds,
                        "row": dict(values),
                    }
                    save_state(path / "trainer", {**state, **more})
                    # A copy of the config stays with a checkpoint that is moved.
                    if (config := self.path / "config.yaml").is_file():
                        (path / config.name).write_bytes(config.read_bytes())
                    self.folder.flush()  # a saved step is not repeated, so its logs must be on disk
        except Exception as error:
            failed = error
        # Raises on every rank if any rank failed, so the lines below need a save that succeeded.
        self._agree(failed, signs)
        self.saved_step = step
        self._saved_time = self._tried_time = _now()

    def _agree(self, failed: Exception | None, signs: KeepAlive) -> None:
        """Make a save end on every rank as on rank 0, which verifies what was written."""
        # Without the connection nothing can be agreed on.
        if isinstance(failed, LostRankError):
            raise failed
        signs.wait_for_all()

        def say() -> None:
            if failed is not None and (self.ranks.rank == 0 or not isinstance(failed, RankError)):
                raise failed

        run_on_all_ranks(self.ranks, say)
        if failed is not None:
            raise failed

    def save_if_due(
        self,
        run: Resumable,
        values: Mapping[str, float],
        *,
        last: bool = False,
        asked: bool = False,
        more: State | None = None,
    ) -> Metrics:
        """Save when ``checkpoint`` says so, at the ``last`` step, and when asked to stop.

        A full disk in the middle of a run is counted as a metric. At the end of a run it raises.

        Args:
            run: the run.
            values: metrics of the step.
            last: True at the last step of the run.
            asked: True if a callback asks for it.
            more: further state.
        """
        now, step = _now(), run.step
        unsaved = step - (self._first_step if self.saved_step is None else self.saved_step)
        most_seconds, most_steps = self.at_risk
        self.at_risk = max(most_seconds, now - self._saved_time), max(most_steps, unsaved)
        stop, due = self._agreed(asked or self._is_due(step, now, values))
        if not (due or last or stop) or self.saved_step == step:
            return Metrics()
        try:
            self.save(run, values, more)
        except DiskFullError as error:
            # In the middle of a run, space may be freed before the next checkpoint is due.
            if last or stop:
                raise
            log.warning("%s", error)
            self._tried_time = _now()
            return Metrics({"checkpoint/failed": Sum(1)})
        self.fire(CheckpointEvent, step, path=self.store.path(step))
        return Metrics()

    def _is_due(self, step: int, now: float, values: Mapping[str, float]) -> bool:
        """Return True if this rank's clock, the step number or a new best metric calls for a
        checkpoint.
        """
        asked = self.checkpoint
        if asked.every and step % asked.every == 0:
            return True
        # Since the last attempt and not the last success: a full disk is not tried at every step.
        if asked.every_minutes and now - self._tried_time >= 60 * asked.every_minutes:
            return True
        metric = (asked.best or "").lstrip("-")
        # Only rank 0 has a store with the checkpoints, and its answer counts.
        return self.ranks.rank == 0 and self.store.improves(values.get(metric))

    def record(self, step: int, metrics: Metrics) -> ReadRow:
        """Log the metrics and timers of one step, show them, and return the row."""
        metrics.merge(self.timers.take())
        values = metrics.compute()
        tokens = next((values[name] for name in STEP_TOKENS if name in values), 0.0)
        row: ReadRow = {"step": step, "phase": self.phase, "seconds": self.seconds, **values}
        if tokens:  # an evaluation before the first step has no throughput
            row["tokens_per_second"] = tokens_per_second(tokens, values.get("time/step", 0.0))
        self.folder.log(row)
        if reason := self.observer.update(row):
            self.stop.request(reason)
        return row

    def _about(self, trained: Mapping[str, TrainableModel]) -> dict[str, str]:
        # A checkpoint of other parameters is refused before any of its files is read.
        about = {"phase": self.phase}
        for name, role in trained.items():
            shapes = "\n".join(f"{key} {shape}" for key, shape in role.shapes.items())
            digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
            about[f"{name} parameters"] = digest
        return about


def close_session(
    session: RunSession, success: Success, about: Mapping[str, object], step: int
) -> Summary:
    """Write ``samples.json`` and ``summary.json`` from the run folder, and return the summary.

    Args:
        session: the run.
        success: the rule for right responses to the eval set.
        about: further fields of the summary.
        step: number of completed steps.
    """
    # The samples are read from the files, which a thread may still write.
    session.folder.flush()
    before, after = samples(session.path, success)
    if before or after:
        session.folder.write_samples(before, after)
    seconds, steps = session.at_risk
    summary: Summary = {
        "verb": session.verb,
        "steps": step,
        "seconds": session.seconds,
        **about,
        **headline(session.path, session.phase),
        "environment": session.environment,
        "saved_step": session.saved_step,
        "most_unsaved_seconds": seconds,
        "most_unsaved_steps": steps,
    }
    # Torchrun and the Ray launcher count here how often they have restarted all ranks.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts:
        summary["restarts"] = restarts
    if session.stop and not about.get("finished"):
        summary["stopped_by"] = session.stop.reason
    if about.get("finished"):
        summary["model"] = str(session.path / "model")
        summary["next"] = next_commands(session)
    session.folder.write_summary(summary)
    return summary


def next_commands(session: RunSession) -> list[str]:
    """Return shell commands for the next steps. With an eval set, also write ``eval.yaml``."""
    model = session.path / "model"
    if session.phase == "rm":
        return ["lightrft rl CONFIG " + shlex.quote(f"reward.models={model}")]
    if session.phase == "prm":
        return ["lightrft prm CONFIG " + shlex.quote(f"model.path={model}")]
    commands = ["lightrft chat " + shlex.quote(f"model={model}")]
    if session.phase in ("rl", "distill"):
        commands.append(f"lightrft explain {shlex.quote(str(session.path / 'config.yaml'))}")
    tree = parse_yaml((session.path / "config.yaml").read_text(encoding="utf-8"))
    if tree["eval"]["data"]["sources"]:
        shared = {k: tree[k] for k in ("eval", "engine", "reward", "strategy")}
        name = f"{session.path.name}-eval"
        run = {**tree["run"], "name": name, "resume": "auto", "overwrite": False}
        # ``model/`` holds its own tokenizer, and adapters are merged into its weights.
        own = {"path": model.name, "base": None, "tokenizer": None, "revision": None, "lora": None}
        model_settings = {**loading_settings(tree["model"]), **own}
        evaluation = {**shared, "run": run, "model": model_settings}
        file = session.path / "eval.yaml"
        write_atomic(file, to_yaml(build(EvaluateConfig, evaluation)))
        commands.append(f"lightrft eval {shlex.quote(str(file))}")
    return commands


@contextmanager
def open_session(
    config: RLConfig | GivenDataConfig,
    observer: Observer | None = None,
    ranks: ProcessGroup = SINGLE_PROCESS,
) -> Generator[RunSession]:
    """Open the run folder, seed all random generators, and turn SIGTERM and Ctrl-C into a flag.

    Args:
        config: settings of the run, which the folder records.
        observer: receives the progress on rank 0. None shows none.
        ranks: all ranks of the run.
    """
    run, checkpoint, logs = config.run, config.checkpoint, config.log
    path = run.folder
    # Before anything is loaded: new adapters and heads are initialized at random.
    seed_everything(run.seed)
    made: list[RunDirectory] = []

    # Only rank 0 opens the folder, which locks it. On all ranks at once, since it may fail.
    def take() -> tuple[bool, Path | None]:
        if ranks.rank:
            return False, None
        opened = RunDirectory.open(
            path,
            config,
            resume=run.resume,
            overwrite=run.overwrite,
            trackers=logs,
            ignore=MAY_DIFFER,
        )
        made.append(opened)
        return opened.fresh, opened.checkpoint

    fresh, named = run_on_all_ranks(ranks, take)[0]
    folder = made[0] if made else ReadOnlyRunDirectory(path, fresh=fresh, checkpoint=named)
    store = CheckpointStore(path / "checkpoints", checkpoint.keep, checkpoint.best)
    with folder, StopFlag() as stop:
        session = RunSession(
            folder,
            store,
            checkpoint,
            config.verb,
            observer if observer is not None and ranks.rank == 0 else NullObserver(),
            stop,
            ranks=ranks,
            peak_tflops=logs.peak_tflops,
            is_judge=config.is_judge,
        )
        try:
            yield session
        except UserError as error:
            if run.overwrite and session.saved_step is not None:
                error.args = (without_overwrite(str(error)),)
            raise
        finally:
            session.requests.let_go()
