"""Services that track runs: Weights & Biases, MLflow, Trackio and SwanLab.

Each class wraps the package of a service. ``Follower`` sends each row once, over kills and resumes.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from lightrft.config.base import dotted
from lightrft.config.run import LogConfig
from lightrft.observability.trackers import JsonLinesTracker, Row, Sample, sample_text
from lightrft.utils.atomic_files import write_json
from lightrft.utils.errors import ConfigError, first_line, install_extra

log = logging.getLogger(__name__)

TRACKED = "trackers.json"
"""File of a run folder: the run and the last sent step of each service."""
PAUSE = 60.0
"""Seconds after a failure in which nothing is sent."""


@dataclass(frozen=True, slots=True)
class Tracked:
    """A run, as a service gets it.

    ``identity`` stays over resumes. ``settings`` are by dotted name, without secrets.
    """

    project: str
    name: str
    identity: str
    folder: Path
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrackedStep:
    """A step, as a service gets it.

    ``prefix`` is the phase and a slash, or empty. The names in ``metrics`` begin with it.
    """

    prefix: str
    number: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample]

    def columns(self) -> list[str]:
        """Return the names of the columns of ``samples``."""
        return list(self.samples[0])

    def rows(self) -> list[list[str | float]]:
        """Return the values of each of ``samples``."""
        return [list(sample.values()) for sample in self.samples]


class TrackingService(Protocol):
    """A run of a tracking service, which a resumed run folder continues.

    With ``ignores_repeats``, the service itself keeps the first row of a step. What a killed
    process sent is then sent again, since the package may have kept it in memory.
    """

    ignores_repeats: ClassVar[bool]

    def __init__(self, run: Tracked) -> None: ...

    def send(self, step: TrackedStep) -> None:
        """Send the metrics and samples of one step."""
        ...

    def close(self) -> None:
        """End the run, after everything is sent."""
        ...


class Wandb:
    """A run of Weights & Biases."""

    ignores_repeats: ClassVar[bool] = False

    def __init__(self, run: Tracked) -> None:
        import wandb  # ty: ignore[import-not-found]

        self._table = wandb.Table
        self._prefixes: set[str] = set()
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.settings),
            id=run.identity,
            resume="allow",
            reinit="create_new",
        )

    def send(self, step: TrackedStep) -> None:
        """See ``TrackingService.send``."""
        prefix, row = step.prefix, dict[str, Any](step.metrics)
        if prefix not in self._prefixes:
            self._prefixes.add(prefix)
            self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
        if step.samples:
            row[f"{prefix}samples"] = self._table(columns=step.columns(), data=step.rows())
        self._run.log({f"{prefix}step": step.number, **row})

    def close(self) -> None:
        """See ``TrackingService.close``."""
        self._run.finish()


class MLflow:
    """A run of MLflow. Samples are tables among its artifacts, one per step."""

    ignores_repeats: ClassVar[bool] = False

    def __init__(self, run: Tracked) -> None:
        from mlflow import MlflowClient  # ty: ignore[import-not-found]
        from mlflow.entities import Metric, Param, RunTag  # ty: ignore[import-not-found]

        self._client, self._metric = MlflowClient(), Metric
        found = self._client.get_experiment_by_name(run.project)
        if found is not None:
            experiment = found.experiment_id
        else:
            experiment = self._client.create_experiment(run.project)
        ours = f"tags.`lightrft.id` = '{run.identity}'"
        known = self._client.search_runs([experiment], filter_string=ours)
        tags = {"lightrft.id": run.identity}
        one = known[0] if known else self._client.create_run(experiment, None, tags, run.name)
        self._id = one.info.run_id
        if known:
            self._client.update_run(self._id, status="RUNNING")
        values = {mlflow_name(name): str(value) for name, value in run.settings.items()}
        params = [Param(name, value) for name, value in values.items()]
        if known:
            # A parameter cannot change. A setting that a resume changes becomes a tag.
            before = one.data.params
            changed = {name: value for name, value in values.items() if value != before.get(name)}
            self._client.log_batch(self._id, tags=[RunTag(*pair) for pair in changed.items()])
            return
        for first in range(0, len(params), 100):  # the most of one request
            self._client.log_batch(self._id, params=params[first : first + 100])

    def send(self, step: TrackedStep) -> None:
        """See ``TrackingService.send``."""
        now = int(time.time() * 1000)
        found = [
            self._metric(mlflow_name(name), value, now, step.number)
            for name, value in step.metrics.items()
        ]
        for first in range(0, len(found), 1000):  # the most of one request
            self._client.log_batch(self._id, metrics=found[first : first + 1000])
        if step.samples:
            table = dict(zip(step.columns(), map(list, zip(*step.rows()))))
            file = f"samples/{step.prefix}step_{step.number:06d}.json"
            self._client.log_table(self._id, table, file)

    def close(self) -> None:
        """See ``TrackingService.close``."""
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """Return ``name`` in the characters that MLflow allows: ``pass@8`` is ``pass_at_8``."""
    words = {"@": "_at_", "^": "_all_"}
    return re.sub(r"[^\w\-./ :]", lambda found: words.get(found[0], f"_{ord(found[0]):x}_"), name)


class Trackio:
    """A run of Trackio."""

    ignores_repeats: ClassVar[bool] = False

    def __init__(self, run: Tracked) -> None:
        import trackio  # ty: ignore[import-not-found]

        self._table = trackio.Table
        self._run = trackio.init(
            run.project,
            # Trackio continues a run by its name. Other run folders may have this one's name.
            name=f"{run.name}-{run.identity[:6]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, step: TrackedStep) -> None:
        """See ``TrackingService.send``."""
        row = dict[str, Any](step.metrics)
        if step.samples:
            row[f"{step.prefix}samples"] = self._table(columns=step.columns(), data=step.rows())
        self._run.log(row, step=step.number)

    def close(self) -> None:
        """See ``TrackingService.close``."""
        self._run.finish()


class SwanLab:
    """A run of SwanLab. Samples are texts."""

    ignores_repeats: ClassVar[bool] = True

    def __init__(self, run: Tracked) -> None:
        import swanlab  # ty: ignore[import-not-found]

        self._text = swanlab.Text
        logs = run.folder / "swanlog"
        logs.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.identity,
            resume="allow",
            log_dir=str(logs),
            config=dict(run.settings),
            reinit=True,
        )

    def send(self, step: TrackedStep) -> None:
        """See ``TrackingService.send``."""
        row = dict[str, Any](step.metrics)
        if step.samples:
            row[f"{step.prefix}samples"] = [self._text(sample_text(one)) for one in step.samples]
        self._run.log(row, step=step.number)

    def close(self) -> None:
        """See ``TrackingService.close``."""
        self._run.finish()


SERVICES: dict[str, type[TrackingService]] = {
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}
"""Services by name: of the setting in ``log``, of the package, and of the extra."""


class Follower:
    """Sends the rows of ``metrics.jsonl`` to a service, each once.

    The run folder has the last sent step of each phase. A resumed run sends rows that the service
    lacks, and repeats none. While the service fails, the rows wait.

    Args:
        name: name of the service.
        project: project of the service that gets the run.
        folder: the run folder.
        settings: settings of the run, without secrets.
        metrics: the rows that are written already.
    """

    def __init__(
        self,
        name: str,
        project: str,
        folder: Path,
        settings: Mapping[str, Any],
        metrics: JsonLinesTracker,
    ) -> None:
        self.name = name
        self._file = folder / TRACKED
        known: dict[str, Any] = _read(self._file).get(name, {})
        if known.get("project") != project:
            # The id is ours, so that a run that is killed during its start has it too.
            known = {"project": project, "id": uuid.uuid4().hex[:16], "sent": {}, "closed": {}}
        if SERVICES[name].ignores_repeats:
            known["sent"] = dict(known["closed"])
        self._known = known
        self._remember()
        # The rows before a resume are read later, when it is known which of them stay.
        self._metrics: JsonLinesTracker | None = metrics
        self._waiting: deque[tuple[Row, Sequence[Sample]]] = deque()
        self._next_try = 0.0
        run = Tracked(project, folder.name, known["id"], folder, dict(dotted(dict(settings))))
        try:
            with _quiet():
                self._service = SERVICES[name](run)
        except ImportError as error:
            raise ConfigError(
                f"log.{name} = {project!r} needs the package {name} ({first_line(error)}): "
                f"{install_extra(name)}, or leave log.{name} empty"
            ) from None
        except Exception as error:
            raise ConfigError(
                f"log.{name} = {project!r}: {name} does not start ({first_line(error)}); log in "
                f"to it or set its environment variables, or leave log.{name} empty"
            ) from error

    @property
    def lost(self) -> int:
        """The number of rows that the service did not get."""
        self._send(again=True)
        return len(self._waiting)

    def log(self, row: Row, samples: Sequence[Sample] = ()) -> None:
        """Send one row, after the rows that wait."""
        if self._metrics is not None:
            self._waiting.extend((earlier, ()) for earlier in self._metrics.rows[:-1])
            self._metrics = None
        self._waiting.append((row, samples))
        self._send()

    def _send(self, again: bool = False) -> None:
        """Send the rows that wait. ``again`` does so in the pause after a failure too."""
        while self._waiting and (again or time.monotonic() >= self._next_try):
            row, samples = self._waiting[0]
            phase, step = str(row.get("phase", "")), int(row["step"])
            sent = self._known["sent"].get(phase, -1)
            if step > sent:
                prefix = phase and f"{phase}/"
                numbers = {f"{prefix}{n}": float(v) for n, v in row.items() if _is_metric(n, v)}
                # Before the row: a process that is killed between the two repeats none.
                self._known["sent"][phase] = step
                self._remember()
                try:
                    with _quiet():
                        self._service.send(TrackedStep(prefix, step, numbers, samples))
                except Exception as error:
                    self._known["sent"][phase] = sent
                    self._remember()
                    self._next_try = time.monotonic() + PAUSE
                    log.warning(
                        "log.%s: step %d is not sent (%s); it is tried again, and metrics.jsonl "
                        "has every step",
                        self.name,
                        step,
                        first_line(error),
                    )
                    return
            self._waiting.popleft()

    def _remember(self) -> None:
        write_json(self._file, {**_read(self._file), self.name: self._known})

    def close(self) -> None:
        """Send the rows that wait, and end the run of the service."""
        self._send(again=True)
        try:
            with _quiet():
                self._service.close()
            self._known["closed"] = self._known["sent"]
            self._remember()
        except Exception as error:
            log.warning("log.%s: the run is not ended there (%s)", self.name, first_line(error))


def follow(
    logs: LogConfig, folder: Path, settings: Mapping[str, Any], metrics: JsonLinesTracker
) -> list[Follower]:
    """Return a follower for each service that ``logs`` names.

    Args:
        logs: the settings ``log``.
        folder: the run folder.
        settings: settings of the run, without secrets.
        metrics: the rows that are written already.

    Raises:
        ConfigError: a package is not installed, or a service does not start.
    """
    projects = {
        "wandb": logs.wandb,
        "mlflow": logs.mlflow,
        "trackio": logs.trackio,
        "swanlab": logs.swanlab,
    }
    return [
        Follower(name, project, folder, settings, metrics)
        for name, project in projects.items()
        if project
    ]


def _is_metric(name: str, value: object) -> bool:
    # A metric that is not finite is null in a row that was read.
    return name not in ("step", "phase") and isinstance(value, int | float)


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@contextmanager
def _quiet() -> Generator[None]:
    """Send what packages print to standard error, and keep the handler of Ctrl-C.

    Standard output is for results. SwanLab handles Ctrl-C itself, and would end the process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
