"""Layouts of rows whose steps have labels, which are recognised by their columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightrft.config.data import ProcessDataConfig
from lightrft.datasets.preference.raw_preference import mappings
from lightrft.datasets.row_parser import number
from lightrft.datasets.row_tables import MalformedRow, Row, check_unicode
from lightrft.datasets.row_warnings import is_missing
from lightrft.datasets.rows.recorded_row import unrecorded
from lightrft.datasets.rows.row_content import Raw, find_prompt, raw_prompt, with_context

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


@dataclass(frozen=True, slots=True)
class StepFormat:
    """One layout.

    Args:
        name: the name, for messages.
        columns: the columns that a row is recognised by, for messages.
        matches: returns True if a row has these columns.
        read: returns the content of a row at a location. Raises ``MalformedRow``.
    """

    name: str
    columns: str
    matches: Callable[[Row], bool]
    read: Callable[[Row, ProcessDataConfig, str], RawSteps]


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
    fitting = [known for known in FORMATS if known.matches(unrecorded(row))]
    if not fitting:
        known = "; ".join(f"{one.name}: {one.columns}" for one in FORMATS)
        have = ", ".join(row) or "nothing"
        raise MalformedRow(f"{where}: no labels of steps in the row, which has: {have}. {known}")
    raw = fitting[0].read(row, config, where)
    if len(raw.steps) != len(raw.labels):
        problem = f"{len(raw.labels)} labels for {len(raw.steps)} steps"
        raise MalformedRow(f"{where}: {problem}")
    for k, (step, label) in enumerate(zip(raw.steps, raw.labels), start=1):
        # a layout takes what its column holds
        if not isinstance(step, str):
            raise MalformedRow(f"{where}: step {k} is {step!r}, not a text")
        if not step.strip():
            raise MalformedRow(f"{where}: step {k} is empty")
        check_unicode(step, f"{where}, step {k}")
        if not math.isnan(label) and not 0 <= label <= 1:
            problem = f"the label of step {k} is {label:g}, not from 0 to 1"
            raise MalformedRow(f"{where}: {problem}")
    if all(map(math.isnan, raw.labels)):
        raise MalformedRow(f"{where}: none of {len(raw.steps)} steps has a label")
    return raw


def _is_stepwise(row: Row) -> bool:
    return _is_texts(row.get("completions")) and isinstance(row.get("labels"), list | tuple)


def _read_stepwise(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read TRL's ``{prompt, completions: texts, labels: booleans}``."""
    labels = [_label(value, where) for value in row["labels"]]
    return RawSteps(_prompt(row, config, where), list(row["completions"]), labels)


def _is_math_shepherd(row: Row) -> bool:
    return isinstance(row.get("input"), str) and isinstance(row.get("label"), str)


def _read_math_shepherd(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read Math-Shepherd (arXiv 2312.08935).

    ``label`` is the text of ``input`` with + or - in the place of each placeholder.
    """
    pieces = row["input"].split(config.placeholder)
    rest = row["label"]
    labels: list[float] = []
    for piece in pieces[:-1]:
        if not rest.startswith(piece) or rest[len(piece) : len(piece) + 1] not in ("+", "-"):
            problem = f"label has no + or - in the place of {config.placeholder!r}"
            raise MalformedRow(f"{where}: {problem} number {len(labels) + 1} of input")
        labels.append(WORDS[rest[len(piece)]])
        rest = rest[len(piece) + 1 :]
    return _of_pieces(row, pieces, labels, config, where)


def _is_placeholders(row: Row) -> bool:
    labels = row.get("label", row.get("value"))
    return isinstance(row.get("input"), str) and isinstance(labels, list | tuple)


def _read_placeholders(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read OpenRLHF's ``{input, label | value}``: a text with a placeholder after each step."""
    labels = [_label(value, where) for value in row.get("label", row.get("value"))]
    return _of_pieces(row, row["input"].split(config.placeholder), labels, config, where)


def _of_pieces(
    row: Row, pieces: Sequence[str], labels: list[float], config: ProcessDataConfig, where: str
) -> RawSteps:
    """Return the steps of a text that was split at its placeholders.

    The first piece is the question and the first step.
    """
    if len(pieces) < 2:
        problem = f"input has no {config.placeholder!r}"
        raise MalformedRow(f"{where}: {problem}; set data.placeholder to the text after a step")
    asked, first = _split_question(pieces[0], where)
    # the text after the last placeholder has no label
    steps = [piece.strip() for piece in (first, *pieces[1:-1])]
    return RawSteps(with_context(row, config.columns, asked, where), steps, labels)


def _split_question(text: str, where: str) -> tuple[str, str]:
    """Return a question and the step after it: at ``Step 1:``, or at the last line break."""
    stripped = text.strip()
    at = stripped.rfind(FIRST_STEP)
    if at < 0:
        at = stripped.rfind("\n")
    if at <= 0:
        problem = f"input has neither {FIRST_STEP!r} nor a line break after the question"
        raise MalformedRow(f"{where}: {problem}; write the row as prompt, completions and labels")
    return stripped[:at].strip(), stripped[at:]


def _is_prm800k(row: Row) -> bool:
    question, label = row.get("question"), row.get("label")
    return isinstance(question, Mapping) and isinstance(label, Mapping) and "steps" in label


def _read_prm800k(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read PRM800K (arXiv 2305.20050): the steps that the labellers went on with.

    A last step that nobody went on with is the first of its completions.
    """
    steps: list[str] = []
    labels: list[float] = []
    for k, step in enumerate(mappings(row, "label.steps", where), start=1):
        place = f"{where}, step {k}"
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
    problem_text = row["question"].get("problem")
    prompt = with_context(row, config.columns, raw_prompt(problem_text, where), where)
    return RawSteps(prompt, steps, labels)


def _is_visualprm_raw(row: Row) -> bool:
    return isinstance(row.get("steps_with_score"), list | tuple)


def _read_visualprm_raw(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read VisualPRM400K-Raw: ``{image, question, steps_with_score: [{step, score}]}``."""
    records = mappings(row, "steps_with_score", where)
    steps = [record.get("step", "") for record in records]
    labels = [_label(record.get("score"), where) for record in records]
    return RawSteps(_prompt(row, config, where), steps, labels)


def _is_visualprm(row: Row) -> bool:
    turns = row.get("conversations")
    if not isinstance(turns, list | tuple) or not turns:
        return False
    if not all(isinstance(turn, Mapping) for turn in turns):
        return False
    verdicts = [turn.get("value") for turn in turns if turn.get("from") == "gpt"]
    return bool(verdicts) and all(verdict in ("+", "-") for verdict in verdicts)


def _read_visualprm(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read VisualPRM400K: a turn for each step, which is answered by + or -."""
    asked = [turn.get("value") for turn in row["conversations"] if turn.get("from") == "human"]
    labels = [WORDS[turn["value"]] for turn in row["conversations"] if turn.get("from") == "gpt"]
    question, mark, first = str((asked or [""])[0]).partition(SOLUTION)
    if not mark:
        raise MalformedRow(f"{where}: the first message has no {SOLUTION.strip()!r}")
    prompt = with_context(row, config.columns, question.replace(QUESTION, "").strip(), where)
    return RawSteps(prompt, [first, *asked[1:]], labels)


def _is_visual_process_bench(row: Row) -> bool:
    return _bench_response(row) is not None


def _read_visual_process_bench(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read VisualProcessBench: ``response: {steps, process_correctness}`` of 1, 0 or -1."""
    response = _bench_response(row) or {}
    labels: list[float] = []
    for value in response["process_correctness"]:
        if value not in PRM800K:
            raise MalformedRow(f"{where}: process_correctness has {value!r}, not -1, 0 or 1")
        labels.append(PRM800K[value])
    return RawSteps(_prompt(row, config, where), list(response["steps"]), labels)


def _bench_response(row: Row) -> Row | None:
    """Return the column ``response`` of VisualProcessBench, or None for other rows."""
    response = row.get("response")
    # one of its releases has JSON text
    if isinstance(response, str) and '"process_correctness"' in response:
        try:
            response = json.loads(response)
        except ValueError:
            return None
    if not isinstance(response, Mapping) or not _is_texts(response.get("steps")):
        return None
    return response if isinstance(response.get("process_correctness"), list | tuple) else None


def _is_process_bench(row: Row) -> bool:
    label = row.get("label")
    return _is_texts(row.get("steps")) and isinstance(label, int) and "problem" in row


def _read_process_bench(row: Row, config: ProcessDataConfig, where: str) -> RawSteps:
    """Read ProcessBench (arXiv 2412.06559): ``label`` is the first wrong step, or -1.

    Steps after the first wrong one have no label.
    """
    steps, wrong = list(row["steps"]), row["label"]
    if not -1 <= wrong < len(steps):
        raise MalformedRow(f"{where}: label is {wrong}, and there are {len(steps)} steps")
    labels = [1.0] * len(steps)
    if wrong >= 0:
        labels = [1.0] * wrong + [0.0] + [math.nan] * (len(steps) - wrong - 1)
    return RawSteps(_prompt(row, config, where), steps, labels)


FORMATS = (
    StepFormat("stepwise", "completions (texts), labels", _is_stepwise, _read_stepwise),
    StepFormat("prm800k", "question.problem, label.steps", _is_prm800k, _read_prm800k),
    StepFormat("math_shepherd", "input and label (texts)", _is_math_shepherd, _read_math_shepherd),
    StepFormat(
        "placeholders", "input (text), label or value (list)", _is_placeholders, _read_placeholders
    ),
    StepFormat(
        "visualprm_raw", "question, steps_with_score", _is_visualprm_raw, _read_visualprm_raw
    ),
    StepFormat("visualprm", "conversations of steps and + or -", _is_visualprm, _read_visualprm),
    StepFormat(
        "visual_process_bench",
        "question, response (of steps and process_correctness)",
        _is_visual_process_bench,
        _read_visual_process_bench,
    ),
    StepFormat("process_bench", "problem, steps, label", _is_process_bench, _read_process_bench),
)
"""All layouts. The first that fits is taken."""


def _prompt(row: Row, config: ProcessDataConfig, where: str) -> Raw:
    prompt = find_prompt(row, config.columns, where)
    if prompt is None:
        raise MalformedRow(f"{where}: no column with a prompt; the row has: {', '.join(row)}")
    return prompt


def _label(value: object, where: str) -> float:
    """Return the label of a step, NaN for none. Raises ``MalformedRow``."""
    if isinstance(value, bool):
        return float(value)
    if is_missing(value):
        return math.nan
    if isinstance(value, str) and value.strip().lower() in WORDS:
        return WORDS[value.strip().lower()]
    return number(value, "the label of a step", where)


def _is_texts(value: object) -> bool:
    """Return True for a list of texts that is not empty."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(one, str) for one in value)
