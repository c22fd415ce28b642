import hashlib

import pytest

from lightrft.config.data import SourceConfig
from lightrft.datasets.digits import (
    handwritten,
    readings,
    spoken,
)
from lightrft.datasets.open_source import open_source
from lightrft.utils.errors import ConfigError


def contents(rows, column):
    return {hashlib.sha256(row[column]["bytes"]).hexdigest() for row in rows}


@pytest.mark.parametrize(
    ("rows", "column", "train", "test"),
    [(handwritten, "image", 1437, 360), (spoken, "audio", 1200, 300)],
)
def test_nothing_that_is_held_out_is_trained_on(rows, column, train, test):
    some, held = rows(split="train"), rows(split="test")
    assert (len(some), len(held)) == (train, test)
    assert len({row["id"] for row in [*some, *held]}) == train + test
    assert not contents(some, column) & contents(held, column)
    assert {row["label"] for row in some} == {row["label"] for row in held} == set("0123456789")
    assert all(row["response"] == row["label"] for row in [*some, *held])


def test_guesses_tell_nothing_of_the_label_and_are_drawn_by_their_seed():
    rows = handwritten(guesses=1.0)
    right = sum(row["response"] == row["label"] for row in rows) / len(rows)
    assert abs(right - 0.1) < 0.03  # 1437 draws: three deviations are 0.024
    assert rows == handwritten(guesses=1.0)
    assert rows != handwritten(guesses=1.0, seed=1)
    half = sum(row["response"] == row["label"] for row in handwritten(guesses=0.5)) / len(rows)
    assert abs(half - 0.55) < 0.04


def test_a_source_of_digits_takes_its_split_from_the_source():
    opened = open_source(SourceConfig(path="lightrft.datasets.digits:spoken", split="test"))
    assert len(opened) == 300
    assert opened[0]["audio"]["bytes"][:4] == b"fLaC"


@pytest.mark.parametrize("options", [{"split": "validation"}, {"guesses": 1.5}])
def test_a_split_or_a_share_that_cannot_be_is_refused(options):
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        handwritten(**options)


@pytest.mark.parametrize(
    ("kind", "labelled", "column"),
    [("handwritten", handwritten, "image"), ("spoken", spoken, "audio")],
)
def test_a_right_reading_is_better_than_wrong_ones_and_these_than_malformed_ones(
    kind, labelled, column
):
    rows = readings(kind=kind, split="test", wrong=2, malformed=2)
    assert rows == readings(kind=kind, split="test", wrong=2, malformed=2)
    assert rows != readings(kind=kind, split="test", wrong=2, malformed=2, seed=1)
    for row, known in zip(rows, labelled(split="test"), strict=True):
        assert (row["id"], row[column]) == (known["id"], known[column])
        assert "label" not in row and "response" not in row
        texts = {rank: [] for rank in range(3)}
        for completion in row["completions"]:
            texts[completion["rank"]].append(completion["completion"])
        assert texts[0] == [known["label"]]
        assert len(set(texts[1])) == 2 and known["label"] not in texts[1]
        assert all(len(text) == 1 and text.isdigit() for text in texts[1])
        assert len(set(texts[2])) == 2
        assert not any(len(text) == 1 and text.isdigit() for text in texts[2])


@pytest.mark.parametrize(
    "options", [{"wrong": 0}, {"wrong": 10}, {"malformed": 9}, {"kind": "seen"}]
)
def test_a_number_of_readings_that_cannot_be_is_refused(options):
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        readings(**{"kind": "spoken", **options})
