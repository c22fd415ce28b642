"""RowLayouts of rows whose steps have labels, which are recognised by their columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightrft.config.data import ProcessDataConfig, TrainingColumns
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import MalformedRow, Row, check_unicode
from lightrft.datasets.row_warnings import is_missing
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import GivenRow, Raw, is_texts, mappings, raw_prompt
from lightrft.datasets.rows.row_reader import RowLayouts

Given: TypeAlias = GivenRow[TrainingColumns]

WORDS = {"+": 1.0, "-": 0.0, "good": 1.0, "bad": 0.0, "correct": 1.0, "incorrect": 0.0}
"""Labels of steps that are words."""
PRM800K = {1: 1.0, 0: 1.0, -1: 0.0}
"""Label of each rating. A neutral step counts as a right one, as in arXiv 2305.20050."""
FIRST_STEP = "Step 1:"
QUESTION, SOLUTION = "### Question:\n", "### Solution Process:\n"
"""Text before the question and before the first step of VisualPRM400K (arXiv 2503.10291)."""


@dataclass(frozen=True, slots=True)
class RawSteps:
    """A row before its text and media are read.

    Args:
        prompt: the question.
        steps: the steps of one response.
        labels: label of each step: the probability that it is right. NaN for none.
    """

    prompt: Raw
    steps: list[str]
    labels: list[float]


FORMATS: RowLayouts[RawSteps] = RowLayouts()
"""All layouts. The first that fits is taken.

A reader gets a row, and the setting ``data.placeholder``.
"""


def read_steps(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Return the question, the steps and the labels of a row.

    Args:
        row: the row.
        config: the settings of the data.
        where: location of the row, for messages.

    Raises:
        MalformedRow: no layout fits, a step is empty or no text, the numbers of steps and labels
            differ, a label is not in [0, 1], or no step has a label.
    """
    # Without a record, since a layout that does not fit reads nothing.
    fitting = [one for one in FORMATS.values() if one.matches(unrecorded(row), config.columns)]
    if not fitting:
        known = "; ".join(map(str, FORMATS.values()))
        have = ", ".join(row) or "nothing"
        raise MalformedRow(f"{where}: no labels of steps in the row, which has: {have}. {known}")
    raw = fitting[0].read(GivenRow(row, config.columns, where), config.placeholder)
    if len(raw.steps) != len(raw.labels):
        raise MalformedRow(f"{where}: {len(raw.labels)} labels for {len(raw.steps)} steps")
    for k, (step, label) in enumerate(zip(raw.steps, raw.labels), start=1):
        # a layout takes what its column holds
        if not isinstance(step, str):
            raise MalformedRow(f"{where}: step {k} is {step!r}, not a text")
        if not step.strip():
            raise MalformedRow(f"{where}: step {k} is empty")
        check_unicode(step, f"{where}, step {k}")
        if not math.isnan(label) and not 0 <= label <= 1:
            raise MalformedRow(f"{where}: the label of step {k} is {label:g}, not from 0 to 1")
    if all(map(math.isnan, raw.labels)):
        raise MalformedRow(f"{where}: none of {len(raw.steps)} steps has a label")
    return raw


@FORMATS.add(
    "stepwise",
    "completions (texts), labels",
    lambda row, _: is_texts(row.get("completions")) and isinstance(row.get("labels"), list | tuple),
)
def _read_stepwise(given: Given, placeholder: str) -> RawSteps:
    """Read TRL's ``{prompt, completions: texts, labels: booleans}``."""
    labels = [_label(value, given.where) for value in given.row["labels"]]
    return RawSteps(given.prompt(), list(given.row["completions"]), labels)


def _is_prm800k(row: Row, columns: object) -> bool:
    question, label = row.get("question"), row.get("label")
    return isinstance(question, Mapping) and isinstance(label, Mapping) and "steps" in label


@FORMATS.add("prm800k", "question.problem, label.steps", _is_prm800k)
def _read_prm800k(given: Given, placeholder: str) -> RawSteps:
    """Read PRM800K (arXiv 2305.20050): the steps that the labellers went on with.

    A last step that nobody went on with is the first of its completions.
    """
    steps: list[str] = []
    labels: list[float] = []
    for k, step in enumerate(mappings(given.row, "label.steps", given.where), start=1):
        place = f"{given.where}, step {k}"
        completions = mappings(step, "completions", place) if step.get("completions") else []
        chosen, written = step.get("chosen_completion"), step.get("human_completion")
        if chosen is None and isinstance(written, Mapping):
            steps.append(written.get("text", ""))
            labels.append(1.0)
            continue
        # a quality-control row may end with a step without completions
        if not completions:
            break
        at = 0 if chosen is None else int(number(chosen, "chosen_completion", place))
        if not 0 <= at < len(completions):
            problem = f"chosen_completion is {at}, and there are {len(completions)} completions"
            raise MalformedRow(f"{place}: {problem}")
        rating = completions[at].get("rating")
        if rating is not None and rating not in PRM800K:
            raise MalformedRow(f"{place}: rating is {rating!r}, not -1, 0 or 1")
        steps.append(completions[at].get("text", ""))
        labels.append(math.nan if rating is None else PRM800K[rating])
    problem_text = given.row["question"].get("problem")
    prompt = given.with_context(raw_prompt(problem_text, given.where))
    return RawSteps(prompt, steps, labels)


@FORMATS.add(
    "math_shepherd",
    "input and label (texts)",
    lambda row, _: isinstance(row.get("input"), str) and isinstance(row.get("label"), str),
)
def _read_math_shepherd(given: Given, placeholder: str) -> RawSteps:
    """Read Math-Shepherd (arXiv 2312.08935).

    ``label`` is the text of ``input`` with + or - in the place of each placeholder.
    """
    pieces = given.row["input"].split(placeholder)
    rest = given.row["label"]
    labels: list[float] = []
    for piece in pieces[:-1]:
        if not rest.startswith(piece) or rest[len(piece) : len(piece) + 1] not in ("+", "-"):
            problem = f"label has no + or - in the place of {placeholder!r}"
            raise given.malformed(f"{problem} number {len(labels) + 1} of input")
        labels.append(WORDS[rest[len(piece)]])
        rest = rest[len(piece) + 1 :]
    return _of_pieces(given, pieces, labels, placeholder)


def _is_placeholders(row: Row, columns: object) -> bool:
    labels = row.get("label", row.get("value"))
    return isinstance(row.get("input"), str) and isinstance(labels, list | tuple)


@FORMATS.add("placeholders", "input (text), label or value (list)", _is_placeholders)
def _read_placeholders(given: Given, placeholder: str) -> RawSteps:
    """Read OpenRLHF's ``{input, label | value}``: a text with a placeholder after each step."""
    row = given.row
    labels = [_label(value, given.where) for value in row.get("label", row.get("value"))]
    return _of_pieces(given, row["input"].split(placeholder), labels, placeholder)


def _of_pieces(
    given: Given, pieces: Sequence[str], labels: list[float], placeholder: str
) -> RawSteps:
    """Return the steps of a text that was split at its placeholders.

    The first piece is the question and the first step.
    """
    if len(pieces) < 2:
        problem = f"input has no {placeholder!r}"
        raise given.malformed(f"{problem}; set data.placeholder to the text after a step")
    text = pieces[0].strip()
    at = text.rfind(FIRST_STEP)
    if at < 0:
        at = text.rfind("\n")
    if at <= 0:
        problem = f"input has neither {FIRST_STEP!r} nor a line break after the question"
        raise given.malformed(f"{problem}; write the row as prompt, completions and labels")
    # the text after the last placeholder has no label
    steps = [piece.strip() for piece in (text[at:], *pieces[1:-1])]
    return RawSteps(given.with_context(text[:at].strip()), steps, labels)


@FORMATS.add(
    "visualprm_raw",
    "question, steps_with_score",
    lambda row, _: isinstance(row.get("steps_with_score"), list | tuple),
)
def _read_visualprm_raw(given: Given, placeholder: str) -> RawSteps:
    """Read VisualPRM400K-Raw: ``{image, question, steps_with_score: [{step, score}]}``."""
    records = mappings(given.row, "steps_with_score", given.where)
    steps = [record.get("step", "") for record in records]
    labels = [_label(record.get("score"), given.where) for record in records]
    return RawSteps(given.prompt(), steps, labels)


def _is_visualprm(row: Row, columns: object) -> bool:
    turns = row.get("conversations")
    if not isinstance(turns, list | tuple) or not turns:
        return False
    if not all(isinstance(turn, Mapping) for turn in turns):
        return False
    verdicts = [turn.get("value") for turn in turns if turn.get("from") == "gpt"]
    return bool(verdicts) and all(verdict in ("+", "-") for verdict in verdicts)


@FORMATS.add("visualprm", "conversations of steps and + or -", _is_visualprm)
def _read_visualprm(given: Given, placeholder: str) -> RawSteps:
    """Read VisualPRM400K: a turn for each step, which is answered by + or -."""
    turns = given.row["conversations"]
    asked = [turn.get("value") for turn in turns if turn.get("from") == "human"]
    labels = [WORDS[turn["value"]] for turn in turns if turn.get("from") == "gpt"]
    question, mark, first = str((asked or [""])[0]).partition(SOLUTION)
    if not mark:
        raise given.malformed(f"the first message has no {SOLUTION.strip()!r}")
    prompt = given.with_context(question.replace(QUESTION, "").strip())
    return RawSteps(prompt, [first, *asked[1:]], labels)


@FORMATS.add(
    "visual_process_bench",
    "question, response (of steps and process_correctness)",
    lambda row, _: _bench_response(row) is not None,
)
def _read_visual_process_bench(given: Given, placeholder: str) -> RawSteps:
    """Read VisualProcessBench: ``response: {steps, process_correctness}`` of 1, 0 or -1."""
    response = _bench_response(given.row) or {}
    labels: list[float] = []
    for value in response["process_correctness"]:
        if value not in PRM800K:
            raise given.malformed(f"process_correctness has {value!r}, not -1, 0 or 1")
        labels.append(PRM800K[value])
    return RawSteps(given.prompt(), list(response["steps"]), labels)


def _bench_response(row: Row) -> Row | None:
    """Return the column ``response`` of VisualProcessBench, or None for other rows."""
    response = row.get("response")
    # one of its releases has JSON text
    if isinstance(response, str) and '"process_correctness"' in response:
        try:
            response = json.loads(response)
        except ValueError:
            return None
    if not isinstance(response, Mapping) or not is_texts(response.get("steps")):
        return None
    return response if isinstance(response.get("process_correctness"), list | tuple) else None


def _is_process_bench(row: Row, columns: object) -> bool:
    label = row.get("label")
    return is_texts(row.get("steps")) and isinstance(label, int) and "problem" in row


@FORMATS.add("process_bench", "problem, steps, label", _is_process_bench)
def _read_process_bench(given: Given, placeholder: str) -> RawSteps:
    """Read ProcessBench (arXiv 2412.06559): ``label`` is the first wrong step, or -1.

    Steps after the first wrong one have no label.
    """
    steps, wrong = list(given.row["steps"]), given.row["label"]
    if not -1 <= wrong < len(steps):
        raise given.malformed(f"label is {wrong}, and there are {len(steps)} steps")
    labels = [1.0] * len(steps)
    if wrong >= 0:
        labels = [1.0] * wrong + [0.0] + [math.nan] * (len(steps) - wrong - 1)
    return RawSteps(given.prompt(), steps, labels)


def _label(value: object, where: str) -> float:
    """Return the label of a step, NaN for none. Raises ``MalformedRow``."""
    if isinstance(value, bool):
        return float(value)
    if is_missing(value):
        return math.nan
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    return number(value, "the label of a step", where)
