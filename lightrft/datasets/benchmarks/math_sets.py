"""Readers of mathematics: GSM8K (arXiv 2110.14168), MATH (arXiv 2103.03874), AIME and AMC.

The last three are read in the published layouts, and as JSON lists of ``{"prompt": [{"from",
"value"}], "final_answer", "choices"?}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lightrft.datasets.benchmarks.knowledge import gpqa_published
from lightrft.datasets.benchmarks.multiple_choice import format_choices, with_choices
from lightrft.datasets.media.fetch import first_given
from lightrft.datasets.row_tables import READERS, Row
from lightrft.utils.errors import DataError

MARK = re.compile(r"<<[^<>]*>>")
ANSWER = re.compile(r"####\s*(\S.*?)\s*$")


@READERS.register("gsm8k")
def gsm8k(row: Row, *, keep_marks: bool = False) -> Row:
    """Read ``{question, answer}``, where ``answer`` is a worked solution.

    ``question`` is the prompt, and the solution is the response. The label is the number after
    ``####``, without commas. Calculator marks (``<<48/2=24>>``) are removed from the response
    unless ``keep_marks`` is True. Raises ``ValueError`` if there is no ``####`` line.
    """
    solution = str(row["answer"])
    found = ANSWER.search(solution)
    if found is None:
        raise ValueError("the column 'answer' has no '#### number' at its end")
    response = solution if keep_marks else MARK.sub("", solution)
    # Some labels have commas between thousands, which few responses write.
    label = found[1].replace(",", "")
    named = {
        "prompt": row["question"],
        "response": response,
        "label": label,
        "reference": response,
        "data_source": "gsm8k",
    }
    return {**row, **named}


def _reader(name: str) -> Callable[..., Row]:
    def read(row: Row) -> Row:
        """Read ``{problem, answer, solution, ...}``, or ``{prompt, final_answer, choices?}``.

        The names of the columns may be capitalized. Without ``answer``, the label is the boxed
        answer of ``solution``. Choices are shown with letters, and the label is then a letter.
        """
        if "final_answer" not in row:
            return _published(row, name)
        return _conversation(row, name)

    return READERS.register(name)(read)


def _conversation(row: Row, name: str) -> Row:
    """Read ``{prompt, final_answer, choices?}``."""
    prompt, label = row["prompt"], row["final_answer"]
    if row.get("choices"):
        choices = format_choices(row["choices"])
        prompt = with_choices(prompt, choices)
        label = next((letter for letter, text in choices.items() if text == label), label)
    return {**row, "prompt": prompt, "label": label, "data_source": name}


def _published(row: Row, name: str) -> Row:
    """Read ``{problem, answer, solution, ...}``. Raises ``ValueError`` if there is no answer."""
    cells = {column.lower(): value for column, value in row.items()}
    problem = first_given(cells, ("problem", "question"))
    if problem is None:
        raise KeyError("problem")
    answer, solution = cells.get("answer"), cells.get("solution")
    if answer is None:
        answer = boxed(str(solution or ""))
    named = {
        "prompt": problem,
        "label": answer,
        "reference": answer if solution is None else solution,
        "data_source": name,
    }
    identifier = first_given(cells, ("unique_id", "id"))
    return {**row, **named, "id": "" if identifier is None else str(identifier)}


def boxed(solution: str) -> str:
    r"""Return the content of the last ``\boxed{}`` of a solution; TeX allows ``\boxed 5`` too.

    Raises ``ValueError`` if there is none.
    """
    _, mark, rest = solution.rpartition("\\boxed")
    if not mark:
        _, mark, rest = solution.rpartition("\\fbox")
    # Without a mark, the rest is the whole solution.
    rest = rest.lstrip() if mark else ""
    if rest and not rest.startswith("{"):
        return rest.split()[0].rstrip("$.")
    depth = 0
    for end, character in enumerate(rest):
        is_escaped = rest[:end].endswith("\\")
        if character in "{}" and not is_escaped:
            depth += 1 if character == "{" else -1
        if depth == 0:
            return rest[1:end]
    raise ValueError("the row has no 'answer', and its 'solution' has no \\boxed answer")


def math_files(path: str, split: str = "test") -> Iterator[Row]:
    """Yield the problems of the folder that MATH is published as: ``test/algebra/1.json``.

    This is a source function, for the reader ``math``. Each file is ``{problem, level, type,
    solution}``. The id is the path below ``path``.

    Args:
        path: The folder.
        split: Folder of the split below ``path``.

    Raises:
        DataError: If there are no files, or one is not JSON.
    """
    folder = Path(path).expanduser()
    files = list((folder / split).glob("*/*.json"))
    if not files:
        raise DataError(f"data.sources: {folder / split} has no files such as algebra/1.json")
    for file in sorted(files, key=_place):
        try:
            row = json.loads(file.read_bytes())
        except ValueError as error:
            raise DataError(f"data.sources: {file} is not JSON: {error}") from error
        yield {**row, "unique_id": file.relative_to(folder).as_posix()}


def _place(file: Path) -> tuple[str, int, str]:
    """Return the sort key of a file: its subject, then its number."""
    number = int(file.stem) if file.stem.isdecimal() else 0
    return file.parent.name, number, file.stem


def _gpqa_reader(name: str) -> Callable[..., Row]:
    def read(row: Row, *, seed: int = 0) -> Row:
        """Read ``{Question, Correct Answer, Incorrect Answer 1, ..., Record ID}``.

        The four choices are shuffled by ``seed`` and the row, and shown with letters. The label is
        a letter. ``{prompt, final_answer, choices?}`` is read too.
        """
        if "final_answer" in row:
            return _conversation(row, name)
        return gpqa_published(row, name, seed)

    return READERS.register(name)(read)


math = _reader("math")
math500 = _reader("math500")
aime2024 = _reader("aime2024")
aime2025 = _reader("aime2025")
amc = _reader("amc")
gpqa = _gpqa_reader("gpqa")
gpqa_diamond = _gpqa_reader("gpqa_diamond")
