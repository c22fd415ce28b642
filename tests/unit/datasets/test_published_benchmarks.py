"""One row of each benchmark as it is published, and the question that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.data import Columns, SourceConfig
from lightrft.datasets.benchmarks.math_sets import boxed
from lightrft.datasets.open_source import open_source
from lightrft.datasets.row_parser import ParsedRow
from lightrft.datasets.row_tables import Row
from lightrft.datasets.rows.row_reader import read_record
from lightrft.rewards import REWARDS
from lightrft.utils.errors import DataError
from tests.unit.rewards.test_rules import answer

MATH = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is \\boxed{\\frac{4}{2}}.",
}
MATH500 = {
    "problem": "What is $1+1$?",
    "solution": "It is $\\boxed{2}$.",
    "answer": "2",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/7.json",
}
AIME = {"ID": "2024-I-1", "Problem": "What?", "Solution": "So 33.", "Answer": 33}
AMC = {"id": 3, "problem": "What?", "answer": 142.0, "url": "https://example.org"}
MMLU = {"question": "Which?", "subject": "anatomy", "choices": ["p", "q", "r", "s"], "answer": 2}
MMLU_PRO = {
    "question_id": 70,
    "question": "Which?",
    "options": list("pqrstuvwxy"),
    "answer": "I",
    "answer_index": 8,
    "cot_content": "",
    "category": "law",
    "src": "x",
}
GPQA = {
    "Record ID": "rec1",
    "Question": "Which one?\n",
    "Correct Answer": "right\n",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "two",
    "Incorrect Answer 3": "three",
    "Subdomain": "Physics",
}
IFEVAL = {
    "key": 1000,
    "prompt": "Write without commas. Say fish twice.",
    "instruction_id_list": ["punctuation:no_comma", "keywords:frequency"],
    "kwargs": [
        {"keyword": None, "frequency": None, "relation": None},
        {"keyword": "fish", "frequency": 2, "relation": "at least"},
    ],
}
MMMU = {
    "id": "validation_Art_1",
    "question": "Compare <image 1> with <image 2>. Which is older, <image 1>?",
    "options": "['<image 1>', 'the second', \"it's equal\"]",
    "explanation": "?",
    "image_1": "one.png",
    "image_2": "two.png",
    **{f"image_{i}": None for i in range(3, 8)},
    "answer": "B",
    "question_type": "multiple-choice",
    "subfield": "Art",
}


def read(tmp_path: Path, row: Row, reader: str, **options: Any) -> Row:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return open_source(SourceConfig(path=str(path), reader=reader, reader_options=options))[0]


def parsed(tmp_path: Path, row: Row, reader: str, **options: Any) -> ParsedRow:
    return read_record(read(tmp_path, row, reader, **options), Columns(), "row")


def test_math_is_read_with_its_boxed_answer(tmp_path: Path) -> None:
    found = parsed(tmp_path, MATH, "math")
    assert (found.prompt, found.label) == ("What is $1+1$?", "\\frac{4}{2}")
    assert (found.reference, found.data_source) == (MATH["solution"], "math")
    assert found.columns["level"] == "Level 1"


@pytest.mark.parametrize(
    ("row", "reader", "prompt", "label", "identifier"),
    [
        (MATH500, "math500", "What is $1+1$?", "2", "test/algebra/7.json"),
        (AIME, "aime2024", "What?", 33, "2024-I-1"),
        ({"id": "0", "problem": "What?", "answer": "70"}, "aime2025", "What?", "70", "0"),
        ({"question": "What?", "answer": "70"}, "aime2025", "What?", "70", ""),
        (AMC, "amc", "What?", 142.0, "3"),
    ],
)
def test_competition_sets_are_read_as_they_are_published(
    tmp_path: Path, row: Row, reader: str, prompt: str, label: object, identifier: str
) -> None:
    found = parsed(tmp_path, row, reader)
    assert (found.prompt, found.label, found.id) == (prompt, label, identifier)
    assert found.data_source == reader


def test_labels_of_competition_sets_are_graded(tmp_path: Path) -> None:
    label = parsed(tmp_path, AMC, "amc").label
    assert REWARDS["math"](answer("\\boxed{142}", label)) == 1.0


@pytest.mark.parametrize(
    ("solution", "found"),
    [
        ("\\boxed{1}, no, \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("so \\fbox{x}", "x"),
        ("so $\\boxed 5$.", "5"),
        ("\\boxed{a} and \\boxed{}", ""),
    ],
)
def test_the_last_box_of_a_solution_is_its_answer(solution: str, found: str) -> None:
    assert boxed(solution) == found


@pytest.mark.parametrize("solution", ["no box", "\\boxed{open", "\\boxed"])
def test_a_solution_without_a_box_is_malformed(tmp_path: Path, solution: str) -> None:
    with pytest.raises(DataError, match="reader 'math' cannot read the row: the row has no"):
        read(tmp_path, {**MATH, "solution": solution}, "math")


def test_the_folder_of_math_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("algebra/10", "algebra/2", "geometry/1"):
        file = tmp_path / "MATH" / "test" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**MATH, "problem": name}))
    source = SourceConfig(
        path="lightrft.datasets.benchmarks.math_sets:math_files",
        options={"path": str(tmp_path / "MATH")},
        split="test",
        reader="math",
    )
    rows = open_source(source)
    found = [read_record(rows[i], Columns(), "row") for i in range(len(rows))]
    assert [row.prompt for row in found] == ["algebra/2", "algebra/10", "geometry/1"]
    assert found[0].id == "test/algebra/2.json"
    with pytest.raises(DataError, match="has no files such as"):
        open_source(source.model_copy(update={"split": "train"}))


def test_mmlu_shows_its_choices_and_its_label_is_a_letter(tmp_path: Path) -> None:
    found = parsed(tmp_path, MMLU, "mmlu")
    assert found.prompt == "Which?\n\nA. p\nB. q\nC. r\nD. s"
    assert (found.label, found.reference, found.data_source) == ("C", "r", "mmlu")
    assert found.response == "C"  # not the position 2, which the prompt does not show
    assert parsed(tmp_path, MMLU, "mmlu", by_subject=True).data_source == "mmlu/anatomy"
    with pytest.raises(DataError, match="the choices are str, not a list"):
        read(tmp_path, {**MMLU, "choices": "p"}, "mmlu")


def test_mmlu_pro_has_ten_choices_and_an_answer_that_must_fit_its_index(tmp_path: Path) -> None:
    found = parsed(tmp_path, MMLU_PRO, "mmlu_pro")
    assert isinstance(found.prompt, str) and found.prompt.endswith("\nJ. y")
    assert (found.label, found.id, found.data_source) == ("I", "70", "mmlu_pro")
    assert parsed(tmp_path, MMLU_PRO, "mmlu_pro", by_category=True).data_source == "mmlu_pro/law"
    graded = REWARDS["multiple_choice"](answer("The answer is (I).", "I"), choices="ABCDEFGHIJ")
    assert graded == 1.0
    with pytest.raises(DataError, match="the answer is 'I', but answer_index 3 is D"):
        read(tmp_path, {**MMLU_PRO, "answer_index": 3}, "mmlu_pro")


def test_choices_of_gpqa_are_shuffled_by_seed_and_question(tmp_path: Path) -> None:
    found = parsed(tmp_path, GPQA, "gpqa_diamond")
    assert isinstance(found.prompt, str)
    question, _, *lines = found.prompt.split("\n")
    assert question == "Which one?"
    assert sorted(line[3:] for line in lines) == ["one", "right", "three", "two"]
    assert f"{found.label}. right" in lines
    assert (found.reference, found.id, found.data_source) == ("right", "rec1", "gpqa_diamond")
    assert parsed(tmp_path, GPQA, "gpqa_diamond").prompt == found.prompt
    letters = {
        parsed(tmp_path, {**GPQA, "Question": f"q{i}"}, "gpqa", seed=seed).label
        for i in range(8)
        for seed in range(2)
    }
    assert letters == set("ABCD")


def test_ifeval_keeps_the_arguments_of_each_instruction(tmp_path: Path) -> None:
    found = parsed(tmp_path, IFEVAL, "ifeval")
    assert (found.prompt, found.id, found.data_source) == (IFEVAL["prompt"], "1000", "ifeval")
    assert found.columns["kwargs"] == [
        {},
        {"keyword": "fish", "frequency": 2, "relation": "at least"},
    ]
    assert found.label is None
    with pytest.raises(DataError, match="2 instructions have 1 tables of arguments"):
        read(tmp_path, {**IFEVAL, "kwargs": [{}]}, "ifeval")


def test_mmmu_places_each_image_where_it_is_mentioned_first(tmp_path: Path) -> None:
    found = read(tmp_path, MMMU, "mmmu")
    assert found["prompt"] == (
        "Compare <image> with <image>. Which is older, image 1?\n\n"
        "A. image 1\nB. the second\nC. it's equal"
    )
    assert (found["images"], found["image_1"]) == (["one.png", "two.png"], None)
    assert (found["label"], found["data_source"]) == ("B", "mmmu/multiple-choice")
    with pytest.raises(DataError, match="shows image 2, but image_2 is empty"):
        read(tmp_path, {**MMMU, "image_2": None}, "mmmu")
    with pytest.raises(DataError, match="is not a list of choices"):
        read(tmp_path, {**MMMU, "options": "__import__('os')"}, "mmmu")


def test_an_open_question_of_mmmu_may_have_several_answers(tmp_path: Path) -> None:
    row = {
        **MMMU,
        "question": "How many?",
        "options": "[]",
        "answer": "['1/2', '0.5']",
        "question_type": "open",
    }
    found = read(tmp_path, row, "mmmu")
    assert found["prompt"] == "<image>\n<image>\nHow many?"
    assert (found["label"], found["data_source"]) == (["1/2", "0.5"], "mmmu/open")


@pytest.mark.parametrize(
    ("row", "source"),
    [
        (MATH, "math"),
        (MATH500, "math"),
        (AIME, "math"),
        (AMC, "math"),
        (MMLU, "mmlu"),
        (MMLU_PRO, "mmlu_pro"),
        (GPQA, "gpqa"),
        (IFEVAL, "ifeval"),
        (MMMU, "mmmu/multiple-choice"),
        ({"question": "q", "answer": "so\n#### 4"}, "gsm8k"),
        (
            {
                "pid": "5",
                "question": "q",
                "image": "a.png",
                "choices": ["a", "b"],
                "answer": "a",
                "question_type": "multi_choice",
            },
            "mathvista/multi_choice",
        ),
    ],
)
def test_the_columns_identify_a_benchmark(tmp_path: Path, row: Row, source: str) -> None:
    assert read(tmp_path, row, "benchmark")["data_source"] == source


def test_columns_of_no_benchmark_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the columns are those of no known benchmark"):
        read(tmp_path, {"question": "q", "answer": "4"}, "benchmark")
