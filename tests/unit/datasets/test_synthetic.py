import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import DataConfig, SourceConfig
from lightrft.datasets.open_source import open_source
from lightrft.datasets.synthetic.arithmetic import pairs, rows, work
from lightrft.utils.errors import ConfigError, DataError


def evaluate(problem: str) -> int:
    """Sum of products, read from the text alone."""
    total = 0
    for term in problem.replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return total


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["easy", "medium", "hard"]),
    st.integers(0, 2**32),
    st.sampled_from(["train", "test"]),
    st.booleans(),
)
def test_labels_and_steps_are_right(difficulty, seed, split, steps):
    for row in rows(20, seed, split, difficulty, steps=steps):
        problem = row["prompt"].removesuffix("=?")
        assert row["label"] == str(evaluate(problem))
        *lines, last = row["response"].split("\n")
        assert last == f"#### {row['label']}"
        assert len(lines) == (row["operations"] if steps else 0)
        for line in lines:
            left, right = line.split("=")
            assert evaluate(left) == int(right)


def test_multiplication_comes_first_and_the_rest_from_the_left():
    assert work([12, 34, 2], ["+", "*"]) == [(34, "*", 2, 68), (12, "+", 68, 80)]
    assert work([9, 2, 3], ["-", "+"]) == [(9, "-", 2, 7), (7, "+", 3, 10)]


def test_train_and_held_out_problems_never_meet_whatever_the_seeds():
    train = {r["prompt"] for seed in range(4) for r in rows(200, seed, "train", "medium")}
    test = {r["prompt"] for seed in range(4) for r in rows(100, seed, "test", "medium")}
    assert not train & test
    assert len(train) > 400 and len(test) > 200


def test_rows_are_a_function_of_their_arguments():
    assert list(rows(50, 1)) == list(rows(50, 1)) != list(rows(50, 2))


def test_problems_and_their_ids_are_distinct():
    made = list(rows(300))
    assert len({r["prompt"] for r in made}) == len({r["id"] for r in made}) == 300


def test_the_held_out_share_is_as_asked():
    everything = {split: len(list(_all(split))) for split in ("train", "test")}
    assert everything["test"] / sum(everything.values()) == pytest.approx(0.2, abs=0.03)


def _all(split):
    try:
        yield from rows(10**6, 0, split, operands=(0, 40), operations=1, operators="+")
    except DataError:
        return


def test_knobs_bound_what_is_made():
    made = list(
        rows(
            200,
            operands=(3, 5),
            factors=(2, 2),
            operations=(2, 3),
            operators="+*",
            largest=60,
            distinct=False,
        )
    )
    for row in made:
        terms = row["prompt"].removesuffix("=?").split("+")
        assert all(3 <= int(t) <= 5 for t in terms if "*" not in t)
        assert all(f == "2" for t in terms if "*" in t for f in t.split("*"))
        assert int(row["label"]) <= 60
    assert {r["operations"] for r in made} == {2, 3}
    assert all(int(r["label"]) >= 0 for r in rows(200, operators="-"))
    assert any(int(r["label"]) < 0 for r in rows(200, operators="-", negative=True))


def test_a_poor_teacher_errs_in_its_share_of_responses_and_never_in_labels():
    made = list(rows(600, difficulty="hard", mistakes=0.3))
    wrong = [r for r in made if not r["response"].endswith(f"#### {r['label']}")]
    assert len(wrong) / len(made) == pytest.approx(0.3, abs=0.08)
    assert all(r["label"] == str(evaluate(r["prompt"].removesuffix("=?"))) for r in made)


def test_too_few_problems_is_an_error_that_says_what_to_widen():
    with pytest.raises(
        DataError, match=r"only \d+ of 500 train problems found with operands \(0, 3\)"
    ):
        list(rows(500, operands=(0, 3), operations=1))


@pytest.mark.parametrize(
    "knobs",
    [
        {"operators": "/"},
        {"operands": (5, 2)},
        {"operations": 0},
        {"difficulty": "x"},
        {"heldout": 0},
        {"mistakes": 2},
    ],
)
def test_a_knob_out_of_range_is_an_error(knobs):
    with pytest.raises(ConfigError, match="arithmetic: "):
        rows(5, **knobs)


def test_a_question_changes_the_text_of_the_prompts_alone():
    options = {"operators": "+-*", "operations": 2}
    plain = list(rows(20, **options))
    asked = list(rows(20, **options, question="What is {spaced}? {problem}"))
    for row, other in zip(plain, asked, strict=True):
        problem = row.pop("prompt").removesuffix("=?")
        spaced, _, compact = other.pop("prompt").removeprefix("What is ").partition("? ")
        assert compact == problem == spaced.replace(" ", "")
        assert len(spaced.split()) == 5
        assert row == other
    with pytest.raises(ConfigError, match="has neither"):
        rows(1, question="What is it?")


def test_it_is_a_source_like_any_other():
    path = "lightrft.datasets.synthetic.arithmetic:rows"
    config = DataConfig.model_validate(
        {"sources": [{"path": path, "split": "test", "options": {"count": 7}}]}
    )
    made = open_source(config.sources[0])
    assert [made[i]["prompt"] for i in range(len(made))] == [
        r["prompt"] for r in rows(7, split="test")
    ]
    with pytest.raises(ConfigError, match=r"data\.sources\.options"):
        open_source(SourceConfig(path=path, options={"cuont": 7}))


def test_the_better_solution_of_a_pair_is_right_and_the_other_one_is_wrong() -> None:
    found = list(pairs(60, seed=3))
    labels = {row["id"]: row["label"] for row in rows(60, seed=3)}
    guessed = 0
    for row in found:
        right, wrong = str(row["chosen"]), str(row["rejected"])
        assert right.endswith(f"#### {labels[row['id']]}")
        assert right.rpartition("#### ")[2] != wrong.rpartition("#### ")[2]
        guessed += wrong.startswith("####")
    assert 10 < guessed < 50
    assert found == list(pairs(60, seed=3))
