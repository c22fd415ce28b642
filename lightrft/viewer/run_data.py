"""Reading of a run folder for display.

Any file may be missing, because a run can be viewed before it has finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import yaml

from lightrft.config.base import build, dotted
from lightrft.config.reward import RewardConfig
from lightrft.observability.rollout_writer import read_rollouts
from lightrft.observability.trackers import read_rows
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.yaml_text import parse_yaml
from lightrft.viewer.groups import Extract, Row, Rules, Step, read_steps, text_of

Points = list[tuple[float, float]]
FORMATS = {".json": ("JSON", json.loads), ".yaml": ("YAML", parse_yaml)}
"""Name and parser of each format of the run's files, by suffix."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response to show.

    Args:
        prompt: text of the prompt.
        text: text of the response.
        label: the expected answer.
        correct: verdict of the evaluation. None if only a reward is known.
        reward: the reward. None if only a verdict is known.
        attachments: names of the media files of the prompt.
    """

    prompt: str
    text: str
    label: str = ""
    correct: bool | None = None
    reward: float | None = None
    attachments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunData:
    """The content of a run folder.

    ``rows`` are the metrics of the phase that the report is about. ``warm_up`` are the metrics of
    the supervised steps before it, and ``reward_model`` those of the training of its reward model.
    Attachments are in the folder ``media``. ``judged`` is the content of ``reward_scores.json``:
    how well a reward model orders responses.
    """

    name: str
    rows: Sequence[Row]
    warm_up: Sequence[Row]
    reward_model: Sequence[Row] = ()
    summary: Row = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    before: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    media: Path = Path()
    judged: Row = field(default_factory=dict)

    def points(self, name: str, rows: Sequence[Row] | None = None) -> Points:
        """Return ``(step, value)`` for every row in which metric ``name`` is a finite number.

        Args:
            name: name of the metric.
            rows: rows of another phase. None takes the phase that the report is about.
        """
        rows = self.rows if rows is None else rows
        return [(row["step"], row[name]) for row in rows if is_finite(row.get(name))]

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number of the summary, or ``default`` if it is not there."""
        value = self.summary.get(name)
        return value if is_finite(value) else default

    def total(self, name: str) -> float:
        """Return the sum of a metric over the steps, 0 if it was never written."""
        return sum(y for _, y in self.points(name))

    def names(self, prefix: str) -> list[str]:
        """Return the metrics that begin with ``prefix``, in the order of their first occurrence."""
        every: dict[str, None] = {}
        for row in self.rows:
            every |= dict.fromkeys(row)
        return [name for name in every if name.startswith(prefix)]


def read_run(folder: Path, extract: Extract | None = None) -> RunData:
    """Read a run folder.

    Args:
        folder: the folder.
        extract: returns what rules read from a response. None leaves it out.

    Raises:
        DataError: ``folder`` is not a run folder or has a malformed file.
    """
    if not (folder / "config.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise DataError(
            f"{folder} is not a run's folder: it has neither config.yaml nor metrics.jsonl"
        )
    rows = read_rows(folder / "metrics.jsonl")
    supervised: list[Row] = []
    judged: list[Row] = []
    others: list[Row] = []
    lists = {"sft": supervised, "rm": judged}
    for row in rows:
        lists.get(str(row.get("phase")), others).append(row)
    if not others:  # the run of a reward model alone
        others, judged = judged, []
    before, after = _answers(folder)
    config = _object(folder / "config.yaml")
    return RunData(
        name=folder.resolve().name,
        rows=others or supervised,
        warm_up=supervised if others else [],
        reward_model=judged,
        summary=_object(folder / "summary.json"),
        config=dict(dotted(config)),
        before=before,
        after=after,
        steps=read_steps(folder, Rules() if extract is None else Rules(_reward(config), extract)),
        media=folder / "media",
        judged=_object(folder / "reward_scores.json"),
    )


def _reward(config: Row) -> RewardConfig:
    """Return the reward of a run: that of no term if another version wrote its settings."""
    try:
        return build(RewardConfig, config.get("reward") or {})
    except ConfigError:
        return RewardConfig()


def _answers(folder: Path) -> tuple[list[Answer], list[Answer]]:
    """Return the responses before and after training, from ``samples.json``.

    Without that file, return responses of the first and last training step.
    """
    samples = _object(folder / "samples.json")
    if samples:
        before = [_sample(sample) for sample in samples.get("before", [])]
        after = [_sample(sample) for sample in samples.get("after", [])]
        return before, after
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if len(files) < 2:  # one file is not a comparison
        return [], []
    return _sampled(files[0]), _sampled(files[-1])


def _sample(sample: Row) -> Answer:
    correct = sample.get("correct")
    return Answer(
        text_of(sample.get("prompt")),
        text_of(sample.get("text")),
        text_of(sample.get("label")),
        None if correct is None else bool(correct),
        attachments=_attachments(sample),
    )


def _sampled(path: Path, most: int = 5) -> list[Answer]:
    """Return one response for each of the first ``most`` prompts of a file of rollouts."""
    found: dict[str, Answer] = {}
    for row in read_rollouts(path):
        if len(found) == most:
            break
        prompt = row["prompt"]
        texts = (text_of(prompt["text"]), text_of(row["text"]), text_of(prompt.get("label")))
        answer = Answer(*texts, None, row.get("reward"), _attachments(prompt))
        found.setdefault(prompt["id"], answer)
    return list(found.values())


def _attachments(row: Row) -> tuple[str, ...]:
    return tuple(text_of(name) for name in row.get("attachments") or ())


def _object(path: Path) -> Row:
    """Return the object in a JSON or YAML file, empty if the file is missing or empty."""
    if not path.is_file():
        return {}
    kind, parse = FORMATS[path.suffix]
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} is not {kind}: {error}") from None
    if value is None:  # an empty YAML file
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{path} must hold an object")
    return value


def mean_at_end(points: Points) -> float:
    """Return the mean over the last tenth of ``points``, at least one.

    A page shows this number for a curve.
    """
    return _mean(points[-max(1, len(points) // 10) :])


def mean_at_start(points: Points) -> float:
    """Return the mean over the first tenth of ``points``, at least one."""
    return _mean(points[: max(1, len(points) // 10)])


def _mean(points: Points) -> float:
    return sum(y for _, y in points) / len(points)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Return True for a number that a plot can show.

    Rows have None for a value that was not finite. Files of other programs may have NaN.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
