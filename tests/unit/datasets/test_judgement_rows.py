"""Rows of responses as questions to a judge."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.data import DataConfig, PreferenceDataConfig
from lightrft.config.reward_model.judgement import QuestionConfig
from lightrft.datasets.judgement.judgement_rows import JudgementRows
from lightrft.datasets.judgement.question import OPEN, Question, ask, lead, verdict_text
from lightrft.datasets.row_tables import InMemoryRows, MalformedRow
from lightrft.rewards.rules.verdicts import VerdictForm, read_verdict
from lightrft.utils.errors import ConfigError

Row = dict[str, Any]
PAIR: Row = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


def questions(rows: list[Row], kind: type[DataConfig] = DataConfig, **judgement: Any) -> list[Row]:
    config = build(kind, {"sources": ["rows.jsonl"], "judgement": judgement})
    made = JudgementRows(InMemoryRows(rows, "rows.jsonl"), config)
    return [made[i] for i in range(len(made))]


def test_both_orders_show_the_same_responses_and_have_opposite_labels():
    one, other = questions([PAIR], order="both")
    assert {one["label"], other["label"]} == {"A", "B"}
    assert one["judgement"]["shown"] == other["judgement"]["shown"][::-1]
    assert one["judgement"]["key"] == other["judgement"]["key"]
    for question in (one, other):
        place = question["prompt"].index(f"[Response {question['label']}]")
        assert question["prompt"][place:].split("\n")[1] == "2"
        assert question["response"] == f"<answer>{question['label']}</answer>"


def test_the_drawn_order_depends_on_content_and_tells_nothing_of_the_label():
    rows = [{**PAIR, "prompt": f"{i}?"} for i in range(200)]
    labels = [question["label"] for question in questions(rows)]
    # the 99.9 % interval of a fair coin
    assert 77 <= labels.count("A") <= 123
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    opposite = [question["label"] for question in questions(swapped)]
    assert all(a != b for a, b in zip(labels, opposite, strict=True))


def test_rows_of_several_responses_give_pairs_the_best_a_ranking_or_ratings():
    row = {"prompt": "q", "responses": ["x", "y", "z"], "ratings": [2, 5, 2]}
    # the pair of equal ratings is left out
    assert len(questions([row])) == 2
    assert [q["label"] for q in questions([row], ties=True, order="given")] == ["B", "C", "A"]
    (best,) = questions([row], form="best", order="given")
    assert (best["label"], best["judgement"]["choices"]) == ("B", "ABC")
    ranked = {**row, "ratings": [2, 5, 3]}
    (ranking,) = questions([ranked], form="ranking", order="given")
    assert ranking["label"] == "B > C > A"
    rated = questions([row], form="rating", scale=[1, 5])
    assert [q["label"] for q in rated] == [2, 5, 2]
    assert rated[0]["response"] == "<answer>2</answer>"


def test_a_rubric_comes_from_the_row_or_from_the_settings():
    row = {"prompt": "q", "response": "x", "label": [True, False], "reference": "r"}
    own = {**row, "rubric": [{"criterion": "short", "weight": 2}, "right"]}
    (question,) = questions([own], form="rubric")
    assert question["judgement"]["weights"] == [2, 1]
    assert "1. short\n2. right\n" in question["prompt"]
    assert "[Reference answer]\nr" in question["prompt"]
    (given,) = questions([row], form="rubric", rubric=["short"])
    assert given["judgement"]["weights"] == [1]
    with pytest.raises(MalformedRow, match="rubric"):
        questions([row], form="rubric")


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({**PAIR, "rejected": "2 "}, {"order": "given"}, "chosen is equal to rejected, but one is"),
        (
            {"prompt": "q", "responses": ["x", "y", "x"], "ratings": [3, 1, 2]},
            {"form": "best"},
            "response 1 is equal to response 3",
        ),
        (
            {"prompt": "q", "responses": ["x", "x"], "ratings": [3, 1]},
            {"form": "rating"},
            "response 1 is equal to response 2",
        ),
        ({"prompt": "q", "responses": ["x", "y"], "ratings": [1, 1]}, {}, "different rank"),
        ({"prompt": "q", "responses": ["x", "y"], "ratings": [1]}, {}, "2 responses"),
        ({"prompt": "q", "response": "x", "rating": 11}, {"form": "rating"}, "not within"),
        ({"prompt": "q", "responses": ["x", "y"], "label": "C"}, {}, "label"),
        ({"responses": ["x", "y"], "label": 0}, {}, "prompt"),
        ({"prompt": "q", "responses": ["x"], "label": None}, {"form": "best"}, "2 to 26"),
        ({**PAIR, "prompt": OPEN}, {}, "marks media"),
        ({**PAIR, "shown": [0, 0]}, {}, "shown"),
        ({**PAIR, "prompt": [{"role": "user", "content": 5}]}, {}, "content must be text or a li"),
        ({**PAIR, "chosen": [{"role": 5, "content": "2"}]}, {}, "chosen, message 1: role is 5"),
    ],
)
def test_a_row_that_gives_no_question_is_malformed_and_named(row, settings, said):
    with pytest.raises(MalformedRow, match=said) as error:
        questions([row], **settings)
    assert "rows.jsonl, row 1" in str(error.value)


def test_equal_responses_of_one_rank_are_a_tie():
    row = {"prompt": "q", "responses": ["x", "x"], "ratings": [1, 1]}
    assert [q["label"] for q in questions([row], ties=True)] == ["C"]


def test_given_judgements_are_learned_in_the_order_that_they_were_written_for():
    row = {**PAIR, "judgement": "B is wrong. <answer>A</answer>"}
    (question,) = questions([row], order="both")
    assert question["judgement"]["shown"] == [0, 1]
    assert question["response"] == row["judgement"]
    turned = {**row, "shown": [1, 0], "judgement": "A is wrong. <answer>B</answer>"}
    assert questions([turned])[0]["label"] == "B"


def test_preferred_judgements_are_given_or_the_right_and_a_wrong_verdict():
    critiques = {"chosen_judgement": "2. <answer>A</answer>", "rejected_judgement": "3"}
    (given,) = questions([{**PAIR, **critiques}], PreferenceDataConfig)
    assert (given["chosen"], given["rejected"]) == tuple(critiques.values())
    (made,) = questions([PAIR], PreferenceDataConfig, order="given")
    assert (made["chosen"], made["rejected"]) == ("<answer>A</answer>", "<answer>B</answer>")
    rated = {"prompt": "q", "response": "x", "rating": 2}
    with pytest.raises(MalformedRow, match="chosen_judgement"):
        questions([rated], PreferenceDataConfig, form="rating")


def test_media_of_the_request_stay_in_their_place():
    picture = {"type": "image", "image": "x.png"}
    content = [{"type": "text", "text": "before "}, picture, {"type": "text", "text": " after"}]
    row = {**PAIR, "prompt": [{"role": "user", "content": content}]}
    (question,) = questions([row])
    (message,) = question["prompt"]
    first, media, last = message["content"]
    assert media == picture
    assert first["text"].endswith("[Request]\nbefore ") and last["text"].startswith(" after\n")


@pytest.mark.parametrize("verdict", ["answer", "boxed", "brackets", "json"])
def test_a_written_verdict_is_read_again_and_begins_with_its_lead(verdict):
    config = QuestionConfig(verdict=verdict)
    text = verdict_text(config, "B")
    assert read_verdict(text, VerdictForm("pair", verdict, "AB")) == "B"
    assert text.startswith(lead(config) + "B")


def test_a_template_may_be_a_file_which_runs_in_a_sandbox(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ prompt }}|{% for l, r in responses %}{{ l }}={{ r }};{% endfor %}")
    config = QuestionConfig(template=str(file))
    assert ask(Question("q", ["x", "y"]), config) == "q|A=x;B=y;"
    bad = tmp_path / "bad.jinja"
    bad.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="template"):
        ask(Question("q", ["x", "y"]), QuestionConfig(template=str(bad)))
    with pytest.raises(ConfigError, match="cannot be read"):
        ask(Question("q", ["x", "y"]), QuestionConfig(template=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"form": "rating", "ties": True}, "ties"),
        ({"scale": [5, 1]}, "scale"),
        ({"verdict": "number"}, "rating"),
        ({"verdict": "regex"}, "pattern"),
        ({"verdict": "regex", "pattern": "("}, "no regular expression"),
        ({"verdict": "regex", "pattern": "A"}, "one group"),
        ({"rubric": ["short"]}, "rubric"),
        ({"form": "rating", "order": "both"}, "order"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tree, said):
    with pytest.raises(ConfigError, match=said):
        build(DataConfig, {"judgement": tree})
