"""Repeat generation, selection and training in rounds, and resume where a run was interrupted."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrft.config.base import dotted
from lightrft.config.verbs import DPOConfig, IterateConfig
from lightrft.observability.events import EvalEvent, RolloutsEvent, RunEvent
from lightrft.observability.observer import NullObserver, Observer
from lightrft.observability.run_directory import RunDirectory, check_same_settings
from lightrft.observability.trackers import Row, Summary
from lightrft.rollout.shown_samples import table
from lightrft.trainer.hub_pushes import reached
from lightrft.trainer.pipelines.generate import run_generate
from lightrft.trainer.pipelines.rounds import RoundPlan, check_iterate
from lightrft.trainer.pipelines.training_rows import summary_of
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.run_summary import finished_summary
from lightrft.trainer.sft import run_sft
from lightrft.trainer.training_loop import UNMEASURED
from lightrft.utils.atomic_files import write_json
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)
PHASE = "iterate"
SECONDS = "generation_seconds"
"""Time of a generation in the numbers of its round, without that of interrupted parts."""

MAY_DIFFER = (
    "run.name",
    "run.dir",
    "run.resume",
    "run.overwrite",
    "run.threads",
    "run.progress",
    "rounds",
    "engine",
    "strategy",
    "reward.workers",
    "select",
    "eval",
    "hub",
    "log",
    "sft",
    "dpo",
    "kto",
)
"""Settings that may differ between a resumed run and the run that wrote the folder.

Those of the selection may differ until the first rows are written, and those of training until the
first training has begun. ``generate_rows`` and ``train`` refuse other ones later.
"""

MEASURED = (
    "heldout_before",
    "heldout_after",
    "pair_accuracy",
    "seconds",
    "model",
    "hub",
    "hub_failed",
)
"""Fields of the summary of a training that the entry of its round has."""

FINISHED_MAY_DIFFER = ("run", "checkpoint", "hub", "log", "engine", "strategy", "eval", "reward")
"""Settings that may differ from those of a training that is complete."""


@dataclass(slots=True)
class RoundObserver:
    """Reports the progress of a round to ``observer``, with the number of the round.

    Args:
        observer: receives the progress.
        number: number of the round.
        missing: events that no part of the round has, with the reason.
        samples: number of prompts whose best and worst response are shown.
    """

    observer: Observer
    number: int
    missing: Mapping[str, str]
    samples: int = 0

    def begin(self, title: str, total: int, done: int) -> None:
        """Start a phase.

        Args:
            title: name of the phase.
            total: number of steps of the phase.
            done: number of steps that are already done.
        """
        self.observer.begin(f"round {self.number}: {title}", total, done)

    def update(self, row: Row) -> str | None:
        """Report a step."""
        return self.observer.update(row)

    def note(self, text: str) -> None:
        """Show lines of text."""
        self.observer.note(text)

    def event(self, event: RunEvent) -> None:
        """Call the callback of an event of the round, and show sampled responses."""
        event.requests.missing = self.missing
        if self.samples and isinstance(event, RolloutsEvent):
            self.samples -= 1
            self.note(table(self.number, event.rollouts, 1, unit="round"))
        self.observer.event(event)


def run_iterate(config: IterateConfig, observer: Observer | None = None) -> Summary:
    """Run the remaining rounds, write ``summary.json`` and return it.

    An interrupted run resumes where it stopped, and rounds that are complete are skipped.

    Raises:
        ConfigError: the settings cannot work, or the folder has a run with others.
    """
    check_iterate(config)
    if finished_summary(RoundPlan(config, config.rounds).run) is None:
        reached(config.hub)  # before the first generation: a hub may refuse
    observer = observer or NullObserver()
    path = config.run.folder
    folder = RunDirectory.open(
        path,
        config,
        resume=config.run.resume,
        overwrite=config.run.overwrite,
        ignore=MAY_DIFFER,
    )
    with folder:
        # The rows of all rounds are written again, from the files of the rounds.
        folder.rewind(-1, PHASE)
        results: list[dict[str, Any]] = []
        seconds = 0.0
        for number in range(1, config.rounds + 1):
            part = RoundPlan(config, number)
            watching = RoundObserver(observer, number, missing_in(part), config.log.samples)
            counts = generate_rows(part, watching)
            trained = train(part, watching)
            seconds += counts.get(SECONDS, 0.0) + trained["seconds"]
            if not trained.get("finished"):
                stopped = {**trained, "verb": PHASE, "seconds": seconds, "rounds": results}
                folder.write_summary(stopped)
                return stopped
            results.append(result_of(part, counts, trained))
            log_round(folder, results, seconds)
        write_samples(folder, config)
        summary = sum_up(config, results, seconds)
        summary["environment"] = trained.get("environment", {})
        folder.write_summary(summary)
    return summary


def missing_in(part: RoundPlan) -> dict[str, str]:
    """Return the events that no part of a round has, with the reason."""
    settings = part.training()
    is_measured = settings.eval.data.sources or settings.validation.sources
    return {} if is_measured else {EvalEvent.name: UNMEASURED}


def generate_rows(part: RoundPlan, observer: Observer) -> dict[str, Any]:
    """Generate the rows of a round, unless they are there, and return their numbers.

    Raises ``ConfigError`` if the rows were selected by other settings.
    """
    if not part.rows.exists():
        part.folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        run_generate(part.generation(), part.indices, part.reader(), observer)
        numbers = {**_counts(part.rows), SECONDS: time.monotonic() - begun}
        write_json(summary_of(part.rows), numbers)
        # Training needs the memory of the model that has generated.
        gc.collect()
    counts = _counts(part.rows)
    before = dict(dotted(counts.pop("select")))
    now = dict(dotted(part.config.select.model_dump(mode="json")))
    differing = [name for name, value in now.items() if before.get(name) != value]
    if differing:
        names = ", ".join(f"select.{name}" for name in differing)
        raise ConfigError(
            f"{part.rows} was selected by other settings ({names}); give the same settings, set "
            "another run.name, or run.overwrite=true to start over"
        )
    return counts


def _counts(rows: Path) -> dict[str, Any]:
    """Return the numbers of the generation that wrote ``rows``."""
    return json.loads(summary_of(rows).read_text(encoding="utf-8"))


def train(part: RoundPlan, observer: Observer) -> Summary:
    """Train on the rows of a round, unless that is done, and return the summary of the training."""
    settings = part.training()
    kept = sum(_counts(Path(source.path))["rows"] for source in settings.data.sources)
    wanted = settings.batch_size
    settings = settings.model_copy(update={"batch_size": min(wanted, kept)})
    done = finished_summary(part.run)
    if done is not None:
        problem = (
            "holds the training of an earlier round with other settings, which cannot change any "
            "more; set another run.name, "
        )
        check_same_settings(part.run / "config.yaml", settings, FINISHED_MAY_DIFFER, problem)
        return done
    if kept < wanted:
        log.warning(
            "round %d has %d rows, and %s.batch_size = %d: its optimizer steps take %d rows each",
            *(part.number, kept, settings.verb, wanted, kept),
        )
    if isinstance(settings, DPOConfig):
        return run_preference(settings, observer)
    return run_sft(settings, observer)


def result_of(part: RoundPlan, counts: dict[str, Any], trained: Summary) -> dict[str, Any]:
    """Return the entry of a round in the summary.

    Args:
        part: the round.
        counts: numbers of its generation.
        trained: summary of its training.
    """
    measured = {name: trained[name] for name in MEASURED if name in trained}
    return {
        "round": part.number,
        **counts,
        "steps": trained["steps"],
        "steps_trained": trained["steps_trained"],
        **measured,
    }


def log_round(folder: RunDirectory, results: list[dict[str, Any]], seconds: float) -> None:
    """Write the metrics of the last round, and before the first one those of the start model.

    Args:
        folder: the run folder of all rounds.
        results: the entries of the rounds so far.
        seconds: time of all rounds so far.
    """
    last = results[-1]
    if len(results) == 1 and "heldout_before" in last:
        before = {"eval/accuracy": last["heldout_before"]}
        folder.log({"step": 0, "phase": PHASE, "seconds": 0.0, **before})
    names = {"heldout_after": "eval/accuracy", "mean_reward": "reward/mean"}
    measured = {names[name]: last[name] for name in names if name in last}
    numbers = {f"iterate/{name}": last[name] for name in ("prompts", "responses", "rows")}
    folder.log({"step": last["round"], "phase": PHASE, "seconds": seconds, **numbers, **measured})


def write_samples(folder: RunDirectory, config: IterateConfig) -> None:
    """Write the responses to eval prompts before the first round and after the last one."""
    read: list[dict[str, Any]] = []
    for number in (1, config.rounds):
        file = RoundPlan(config, number).run / "samples.json"
        if not file.exists():
            return
        read.append(json.loads(file.read_text(encoding="utf-8")))
    folder.write_samples(read[0]["before"], read[1]["after"])


def sum_up(config: IterateConfig, results: list[dict[str, Any]], seconds: float) -> Summary:
    """Return the summary of all rounds.

    Args:
        config: settings of the run.
        results: the entries of the rounds.
        seconds: time of all rounds.
    """
    first, last = results[0], results[-1]
    measured = {}
    if "heldout_before" in first:
        measured["heldout_before"] = first["heldout_before"]
    for name in ("heldout_after", "hub", "hub_failed"):
        if name in last:
            measured[name] = last[name]
    return {
        "verb": PHASE,
        "finished": True,
        "steps": sum(result["steps"] for result in results),
        "steps_trained": sum(result["steps_trained"] for result in results),
        "seconds": seconds,
        **measured,
        "rounds": results,
        "model": last["model"],
        "next": [f"lightrft chat model={last['model']}"],
    }
