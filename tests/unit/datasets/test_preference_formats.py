"""Rows as their sets publish them, and what is read from them without settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import PreferenceColumns
from lightrft.datasets.benchmarks.media_preferences import audio_alpaca
from lightrft.datasets.media import SupportedMedia
from lightrft.datasets.preference.formats import FORMATS, SCORES, check_format, format_of
from lightrft.datasets.preference.preference_rows import PreferenceRow, read_preference
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.recorded_row import RecordedRow
from lightrft.utils.errors import ConfigError

ROOT = Path(__file__).parents[3]
SEES = SupportedMedia({"image": ("<image>",)})
HEARS = SupportedMedia({"audio": ("<audio>",)})
COLOUR = [{"role": "user", "content": "What color is the sky?"}]
BLUE, GREEN = "It is blue.", "It is green."


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


def read(row: dict[str, Any], reads: SupportedMedia | None = None, **columns: Any) -> PreferenceRow:
    named = PreferenceColumns(**columns)
    return read_preference(row, named, "rows.jsonl, line 7", reads or SupportedMedia())


def answers(row: PreferenceRow) -> list[Any]:
    return [record.response for record in row.responses]


def prompt(row: PreferenceRow) -> Any:
    (first, *others) = [record.prompt for record in row.responses]
    assert all(other == first for other in others)
    return first


PAIRS = {
    "TRL, explicit prompt, plain": {
        "prompt": "The sky is",
        "chosen": " blue.",
        "rejected": " green.",
    },
    "TRL, implicit prompt, plain": {
        "chosen": "The sky is blue.",
        "rejected": "The sky is green.",
    },
    "TRL, explicit prompt, conversational": {
        "prompt": COLOUR,
        "chosen": said(BLUE),
        "rejected": said(GREEN),
    },
    "TRL, implicit prompt, conversational": {
        "chosen": COLOUR + said(BLUE),
        "rejected": COLOUR + said(GREEN),
    },
    "LLaMA-Factory, alpaca": {
        "instruction": "What color is the sky?",
        "input": "",
        "chosen": BLUE,
        "rejected": GREEN,
    },
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "What color is the sky?"}],
        "chosen": gpt(BLUE),
        "rejected": gpt(GREEN),
    },
    "ms-swift, rejected_response": {
        "messages": COLOUR + said(BLUE),
        "rejected_response": GREEN,
    },
    "ms-swift, query and response": {
        "query": "What color is the sky?",
        "response": BLUE,
        "rejected_response": GREEN,
    },
    "ms-swift, rejected_messages": {
        "messages": COLOUR + said(BLUE),
        "rejected_messages": COLOUR + said(GREEN),
    },
    "UltraFeedback, binarized": {
        "prompt": "What color is the sky?",
        "prompt_id": "c1",
        "chosen": COLOUR + said(BLUE),
        "rejected": COLOUR + said(GREEN),
        "messages": COLOUR + said(BLUE),
        "score_chosen": 8.5,
        "score_rejected": 6.0,
    },
    "HH-RLHF": {
        "chosen": f"\n\nHuman: What color is the sky?\n\nAssistant: {BLUE}",
        "rejected": f"\n\nHuman: What color is the sky?\n\nAssistant: {GREEN}",
    },
    "HH-RLHF with a prompt": {
        "prompt": "\n\nHuman: What color is the sky?\n\nAssistant:",
        "chosen": BLUE,
        "rejected": GREEN,
    },
    "HelpSteer3": {
        "domain": "general",
        "language": "english",
        "context": COLOUR,
        "response1": GREEN,
        "response2": BLUE,
        "overall_preference": 2,
        "individual_preference": [{"score": 2, "reasoning": "...", "feedback_1": "..."}],
    },
    "PKU-SafeRLHF": {
        "prompt": "What color is the sky?",
        "response_0": GREEN,
        "response_1": BLUE,
        "better_response_id": 1,
    },
    "NeMo": {
        "context": COLOUR,
        "completions": [
            {"rank": 1, "completion": said(GREEN)},
            {"rank": 0, "completion": said(BLUE)},
        ],
    },
    "Nectar": {
        "prompt": "\n\nHuman: What color is the sky?\n\nAssistant: ",
        "answers": [
            {"answer": GREEN, "model": "gpt-4", "rank": 4.0},
            {"answer": BLUE, "model": "llama", "rank": 1.0},
        ],
        "turns": 1,
        "num_responses": 2,
        "source": ["sharegpt"],
        "good_natured": True,
    },
    "UltraFeedback": {
        "source": "evol_instruct",
        "instruction": "What color is the sky?",
        "models": ["gpt-4", "alpaca-7b"],
        "completions": [
            {
                "annotations": {"helpfulness": {"Rating": "5", "Rationale": "..."}},
                "model": "gpt-4",
                "response": BLUE,
                "overall_score": 1.0,
            },
            {
                "annotations": {
                    "helpfulness": {"Rating": "3"},
                    "honesty": {"Rating": "N/A"},
                    "truthfulness": {"Rating": "2"},
                },
                "model": "alpaca-7b",
                "response": GREEN,
                "overall_score": 10.0,
            },
        ],
        "correct_answers": ["None"],
        "incorrect_answers": ["None"],
    },
}


@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
def test_a_published_row_of_two_responses_is_read_without_settings(row: dict[str, Any]) -> None:
    read_row = read(row)
    best, worst = sorted(zip(read_row.ranks, answers(read_row)))
    assert (best[0], worst[0]) == (0, 1)
    if "sky is" in str(prompt(read_row)) and "color" not in str(prompt(read_row)):
        assert prompt(read_row) == "The sky is"
        assert (best[1], worst[1]) == (" blue.", " green.")
    else:
        assert prompt(read_row) in (COLOUR, COLOUR[0]["content"])
        assert (best[1], worst[1]) == (BLUE, GREEN)


def test_ratings_and_margins_come_from_the_row() -> None:
    binarized = read(PAIRS["UltraFeedback, binarized"])
    assert binarized.ratings == [8.5, 6.0] and binarized.margins == [2.5, 0.0]
    # the mean over the annotations that are numbers, not the wrong overall score of the set
    ultra = read(PAIRS["UltraFeedback"])
    assert ultra.ratings == [5.0, 2.5] and ultra.margins == [2.5, 0.0]
    assert read(PAIRS["HelpSteer3"]).margins == [0.0, 2.0]
    assert read({**PAIRS["ms-swift, rejected_response"], "margin": 0.25}).margins == [0.25, 0.0]
    assert read(PAIRS["TRL, explicit prompt, plain"]).margins is None
    assert read({**PAIRS["HH-RLHF"], "example_weight": 3}).weight == 3.0


def test_equal_scores_and_a_margin_of_0_are_read() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert read({**pair, "margin": 0}).margins == [0.0, 0.0]
    for better, worse in SCORES:
        assert read({**pair, better: 2, worse: 2}).margins == [0.0, 0.0]
        # a score of one response alone says nothing about the order
        assert read({**pair, better: 2}).margins is None


LABELLED = {
    "TRL, unpaired": {"prompt": COLOUR, "completion": said(BLUE), "label": True},
    "TRL, unpaired, plain": {"prompt": COLOUR[0]["content"], "completion": BLUE, "label": True},
    "LLaMA-Factory, alpaca": {
        "instruction": "What color is the sky?",
        "input": "",
        "output": BLUE,
        "kto_tag": True,
    },
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "What color is the sky?"}, gpt(BLUE)],
        "kto_tag": True,
    },
    "ms-swift": {"messages": COLOUR + said(BLUE), "label": True},
    "OpenRLHF": {"input": "What color is the sky?", "output": BLUE, "label": 1},
}


@pytest.mark.parametrize("row", LABELLED.values(), ids=LABELLED)
def test_a_published_labelled_row_is_read_without_settings(row: dict[str, Any]) -> None:
    good = read(row)
    assert prompt(good) in (COLOUR, COLOUR[0]["content"])
    assert answers(good) == [BLUE] and good.desirable == [True] and good.ranks == []
    name = "kto_tag" if "kto_tag" in row else "label"
    assert read({**row, name: False}).desirable == [False]
    with pytest.raises(MalformedRow, match=rf"line 7: {name} is 'yes', not a boolean"):
        read({**row, name: "yes"})


def test_the_label_of_a_conversation_is_that_of_its_last_turn() -> None:
    turns = COLOUR + said(GREEN) + [{"role": "user", "content": "Sure?"}] + said(BLUE)
    good = read({"messages": turns, "label": True})
    assert prompt(good) == turns[:-1] and answers(good) == [BLUE]
    two = read({"messages": turns[:-1] + said("Well.") + said(BLUE), "label": True})
    assert prompt(two) == turns[:-1]
    with pytest.raises(MalformedRow, match="no response"):
        read({"messages": [*turns[:-1]], "response": None, "kto_tag": True})


@pytest.mark.parametrize(
    ("layout", "row", "unread"),
    [
        (
            "UltraFeedback",
            {
                "prompt": "1+1?",
                "completions": [
                    {
                        "annotations": {"honesty": {"Rating": rating, "Rationale": "It is so."}},
                        "response": text,
                        "critique": "Say more.",
                        "custom_system_prompt": "Be brief." if rating == "5" else "",
                    }
                    for rating, text in (("5", "2"), ("1", "3"))
                ],
            },
            {"annotations.honesty.Rationale", "critique", "custom_system_prompt"},
        ),
        (
            "Nectar, as datasets writes it",
            {
                "prompt": "1+1?",
                "answers": {"answer": ["2", "3"], "rank": [1, 2], "model": ["a", ""]},
            },
            {"model"},
        ),
        (
            "NeMo",
            {
                "context": COLOUR,
                "completions": [
                    {"rank": k, "completion": said(c), "images": ["a.png"]}
                    for k, c in enumerate("ab")
                ],
            },
            {"images"},
        ),
    ],
)
def test_text_in_the_records_of_responses_that_nothing_reads_is_named(
    layout: str, row: dict[str, Any], unread: set[str]
) -> None:
    given = RecordedRow(row)
    assert len(read(given).responses) == 2, layout
    (column,) = {"completions", "answers"} & row.keys()
    assert given.unread_columns() == {f"{column}[].{name}" for name in unread}


PICTURES = {
    "RLHF-V": {
        "ds_name": "RLHF-V",
        "image": {"bytes": b"jpeg", "path": None},
        "text": json.dumps({"question": "What?", "chosen": BLUE, "rejected": GREEN}),
        "origin_dataset": "VQAv2",
        "origin_split": "{}",
        "idx": 1,
        "image_path": "a.jpg",
    },
    "RLAIF-V": {
        "ds_name": "RLAIF-V",
        "image": {"bytes": b"jpeg", "path": None},
        "question": "What?",
        "chosen": BLUE,
        "rejected": GREEN,
        "origin_dataset": "VQAv2",
        "idx": 0,
        "image_path": "a.jpg",
    },
    "MMPR": {
        "image": "m3cot/a.png",
        "question": "<image>\nWhat?",
        "chosen": BLUE,
        "rejected": GREEN,
    },
    "VLFeedback": {
        "id": "svit-1",
        "prompt": "What?",
        "image": {"bytes": b"jpeg", "path": "a.jpg"},
        "models": ["gpt4v", "llava"],
        # `datasets` writes a sequence of records as a record of lists
        "completions": {
            "annotations": [
                {"Helpfulness": {"Rating": "5"}, "Visual Faithfulness": {"Rating": "4"}},
                {"Helpfulness": {"Rating": "2"}, "Visual Faithfulness": {"Rating": "1"}},
            ],
            "model": ["gpt4v", "llava"],
            "response": [BLUE, GREEN],
        },
    },
    "SPA-VL": {
        "image": {"bytes": b"jpeg", "path": None},
        "question": "What?",
        "chosen": BLUE,
        "rejected": GREEN,
    },
    "LLaMA-Factory, images": {
        "conversations": [{"from": "human", "value": "<image>What?"}],
        "chosen": gpt(BLUE),
        "rejected": gpt(GREEN),
        "images": ["a.jpg"],
    },
    "ms-swift, images": {
        "messages": [{"role": "user", "content": "<image>What?"}, *said(BLUE)],
        "rejected_response": GREEN,
        "images": ["a.jpg"],
        "rejected_images": ["a.jpg"],
    },
    "TRL, images": {
        "images": ["a.jpg"],
        "prompt": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
        ],
        "chosen": said(BLUE),
        "rejected": said(GREEN),
    },
}


@pytest.mark.parametrize("row", PICTURES.values(), ids=PICTURES)
def test_a_published_row_with_a_picture_has_it_once_in_the_prompt(row: dict[str, Any]) -> None:
    pair = read(row, SEES)
    assert answers(pair) == [BLUE, GREEN] and pair.ranks == [0, 1]
    for record in pair.responses:
        assert [item.kind for item in record.media] == ["image"]
        assert "What?" in str(record.prompt)


def test_a_published_row_with_a_sound_or_a_film_keeps_it_in_the_prompt() -> None:
    row = {"prompt": "<audio>What?", "chosen": BLUE, "rejected": GREEN, "audios": ["a.wav"]}
    assert [i.kind for i in read(row, HEARS).responses[1].media] == ["audio"]
    films = SupportedMedia({"video": ("<video>",)})
    row = {"instruction": "<video>What?", "output": BLUE, "kto_tag": False, "videos": ["a.mp4"]}
    assert [i.kind for i in read(row, films).responses[0].media] == ["video"]


def test_pairs_of_sounds_become_verdicts_through_their_reader() -> None:
    row = {"prompt": "rain", "chosen": {"bytes": b"1"}, "rejected": {"bytes": b"2"}, "strategy": ""}
    with pytest.raises(MalformedRow, match=r"chosen must be text or messages, not dict.*reader"):
        read(row, HEARS)
    judged = audio_alpaca(row)
    pair = read(dict(judged), HEARS)
    right, wrong = ("A", "B") if judged["label"] == "A" else ("B", "A")
    assert answers(pair) == [f"<answer>{right}</answer>", f"<answer>{wrong}</answer>"]
    assert [item.kind for item in pair.responses[0].media] == ["audio", "audio"]


def test_a_tie_of_a_judge_is_preferred_to_both_letters() -> None:
    row = {"prompt": "A or B?", "label": "C", "preference": "C", "chosen": None, "rejected": None}
    assert read(row).ranks == [0, 1, 1]


def test_openrlhf_keys_are_settings_of_the_columns() -> None:
    row = {"ask": "What?", "good": BLUE, "bad": GREEN}
    pair = read(row, prompt="ask", chosen="good", rejected="bad")
    assert (prompt(pair), answers(pair)) == ("What?", [BLUE, GREEN])
    said = "no preference in the row, which has: ask, good, bad. Name .* data.columns.chosen and"
    with pytest.raises(MalformedRow, match=said):
        read(row)
    unlabelled = {"prompt": "What?", "completion": BLUE, "label": None}
    with pytest.raises(MalformedRow, match=r"which has: prompt, completion, label \(empty\)"):
        read(unlabelled)


PKU = {
    "prompt": "How?",
    "response_0": "No.",
    "response_1": "So.",
    "is_response_0_safe": True,
    "is_response_1_safe": False,
    "better_response_id": 1,
    "safer_response_id": 0,
}


def test_a_row_that_fits_several_layouts_names_them_and_the_setting() -> None:
    with pytest.raises(
        MalformedRow,
        match=r"line 7.*pku_better and pku_safer and pku_safe; set data.columns.layout",
    ):
        read(PKU)
    assert read(PKU, layout="pku_better").ranks == [1, 0]
    assert read(PKU, layout="pku_safer").ranks == [0, 1]
    assert read(PKU, layout="pku_safe").desirable == [True, False]
    both = {"messages": COLOUR + said(BLUE), "rejected_response": GREEN, "label": True}
    with pytest.raises(MalformedRow, match="fits rejected_response and labelled"):
        read(both)


def test_the_layout_setting_decides_only_between_layouts_that_fit() -> None:
    assert answers(read(PAIRS["HH-RLHF"], layout="pku_safer")) == [BLUE, GREEN]
    with pytest.raises(ConfigError, match=r"layout = 'pku_saver' is unknown; did you mean"):
        check_format(PreferenceColumns(layout="pku_saver"))


def test_stepwise_rows_are_no_preference() -> None:
    with pytest.raises(MalformedRow, match="no preference in the row"):
        read({"prompt": "1+1?", "completions": ["one", "two"], "labels": [True, False]})


def test_history_and_system_come_before_the_prompt() -> None:
    row = {
        "instruction": "And 2+2?",
        "system": "Be brief.",
        "history": [["1+1?", "2"]],
        "chosen": "4",
        "rejected": "5",
    }
    roles = [m["role"] for m in prompt(read(row))]
    assert roles == ["system", "user", "assistant", "user"]


def test_conversations_may_part_at_any_turn_of_the_assistant() -> None:
    more = [{"role": "user", "content": "Why?"}]
    row = {
        "chosen": COLOUR + said("Blue") + more + said("Air.") + more + said("Light."),
        "rejected": COLOUR + said("Blue") + more + said("Sea.") + more + said("Light."),
    }
    pair = read(row)
    assert prompt(pair) == COLOUR + said("Blue") + more
    assert answers(pair)[0] == said("Air.") + more + said("Light.")


BAD = {
    "chosen equal to rejected": (
        {"prompt": "a", "chosen": "b", "rejected": "b "},
        "chosen is equal to rejected",
    ),
    "equal conversations": (
        {"chosen": COLOUR + said(BLUE), "rejected": COLOUR + said(BLUE)},
        "chosen is equal to rejected",
    ),
    "an empty text": ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
    "a null": ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is empty"),
    "an empty message": (
        {"prompt": COLOUR, "chosen": said(BLUE), "rejected": said("")},
        "rejected is empty",
    ),
    "no message": ({"prompt": COLOUR, "chosen": [], "rejected": said("b")}, "chosen is empty"),
    "an empty transcript": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"},
        "rejected is empty",
    ),
    "a side that ends early": (
        {"chosen": COLOUR + said(BLUE), "rejected": COLOUR},
        "rejected is empty after the messages",
    ),
    "a prompt that is no prefix": (
        {"prompt": "Other?", "chosen": COLOUR + said(BLUE), "rejected": COLOUR + said(GREEN)},
        "the prompt is not a prefix of chosen and rejected",
    ),
    "a prompt in one side only": (
        {"prompt": COLOUR, "chosen": COLOUR + said(BLUE), "rejected": said(GREEN)},
        "chosen begins with the prompt, and rejected does not",
    ),
    "a transcript on one side only": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "c"},
        "the prompt is not a prefix of all responses",
    ),
    "different prompts": (
        {
            "chosen": COLOUR + said(BLUE),
            "rejected": [{"role": "user", "content": "Why?"}, *said(GREEN)],
        },
        "different prompts: message 1 of chosen",
    ),
    "no prompt": ({"chosen": "yes", "rejected": "no"}, "no common beginning.*data.columns.prompt"),
    "no prompt but messages": (
        {"chosen": said("yes"), "rejected": said("no")},
        "no prompt; name the column",
    ),
    "text and messages": (
        {"prompt": "a", "chosen": "b", "rejected": said("c")},
        "chosen is text, rejected is a list of messages",
    ),
    "one rank": (
        {"context": COLOUR, "completions": [{"rank": 2, "completion": said(c)} for c in "ab"]},
        "all 2 responses have the same rank",
    ),
    "a tie": (
        {"context": COLOUR, "response1": "a", "response2": "b", "overall_preference": 0},
        "all 2 responses have the same rank",
    ),
    "one response": (
        {"context": COLOUR, "completions": [{"rank": 2, "completion": said("a")}]},
        "1 response; there is nothing to compare",
    ),
    "a rank that is no number": (
        {"prompt": "a", "answers": [{"rank": "first", "answer": "b"}]},
        "rank is 'first', not a finite number",
    ),
    "a margin that is NaN": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")},
        "margin is nan, not a finite number",
    ),
    "a margin below 0": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -3.0},
        "margin is -3, so that .*; exchange the two responses, or make the margin at least 0",
    ),
    "a margin below 0 of messages": (
        {"messages": COLOUR + said("b"), "rejected_response": "c", "margin": "-0.5"},
        "margin is -0.5",
    ),
    **{
        f"a higher {worse}": (
            {"prompt": "a", "chosen": "b", "rejected": "c", better: 1, worse: 2.5},
            f"{better} is 1, less than {worse}, which is 2.5; exchange the two responses, or",
        )
        for better, worse in SCORES
    },
    "a weight of zero": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "example_weight": 0},
        "example_weight is 0, not above 0",
    ),
    "a prompt that ends with a response, which the next one does not continue": (
        {
            "prompt": COLOUR + said("a"),
            "chosen": [{"role": "user", "content": "b"}, *said("c")],
            "rejected": [{"role": "user", "content": "b"}, *said("d")],
        },
        "the prompt is not a prefix",
    ),
    "other pictures for the worse response": (
        {
            "messages": COLOUR + said("b"),
            "rejected_response": "c",
            "images": ["a.jpg"],
            "rejected_images": ["b.jpg"],
        },
        "rejected_images is not images",
    ),
    "text that is no JSON": ({"text": "{", "origin_dataset": "VQA"}, "text is not JSON"),
    "a PKU choice of a third response": ({**PKU, "better_response_id": 2}, "is 2, not 0 or 1"),
    "a PKU label that is no boolean": (
        {k: v for k, v in PKU.items() if "id" not in k} | {"is_response_0_safe": "safe"},
        "is_response_0_safe is 'safe', not a boolean",
    ),
}


@pytest.mark.parametrize(("row", "problem"), BAD.values(), ids=BAD)
def test_a_bad_row_is_refused_with_its_file_and_line(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedRow, match=rf"^rows\.jsonl, line 7.*{problem}"):
        read(row, SEES, layout="pku_better")


LIKE_MESSAGES = ([{"role": "user"}], [{"from": "me", "value": "a"}], [[1, 2]], [{"role": 1}])
NO_MESSAGES = (None, "", " ", "[]", "[{}]", 0, 2.5, float("inf"), True, [], [None], ["a"], {}, b"a")
JUNK = st.sampled_from((*LIKE_MESSAGES, *NO_MESSAGES, {"response": []}, {"role": 1}))
PUBLISHED = [*PAIRS.values(), *LABELLED.values(), *PICTURES.values(), PKU]


@settings(max_examples=300, deadline=None)
@given(row=st.sampled_from(PUBLISHED), data=st.data())
def test_for_any_damage_of_a_row_it_is_read_or_refused_with_its_location(
    row: dict[str, Any], data: st.DataObject
) -> None:
    names = st.sampled_from([*row, "messages", "rejected_response", "label", "margin", "prompt"])
    damaged = {**row, **data.draw(st.dictionaries(names, JUNK, max_size=3))}
    try:
        found = read(damaged, SEES, layout="pku_better")
    except MalformedRow as error:
        assert str(error).startswith("rows.jsonl, line 7")
    else:
        assert found.desirable or len(set(found.ranks)) > 1
        assert all(record.answer != "" for record in found.responses)


def test_media_on_one_side_only_are_refused() -> None:
    shown = {"type": "image", "image": "a.jpg"}
    turn = {"role": "user", "content": [{"type": "text", "text": "And this?"}, shown]}
    bare = {"role": "user", "content": "And this?"}
    row = {
        "prompt": COLOUR,
        "chosen": [*said("a"), turn, *said("b")],
        "rejected": [*said("c"), bare, *said("d")],
    }
    with pytest.raises(MalformedRow, match="chosen has image, and rejected has no media"):
        read(row, SEES)
    same = {**row, "rejected": [*said("c"), turn, *said("d")]}
    assert [len(r.media) for r in read(same, SEES).responses] == [1, 1]
    other = {**turn, "content": [{"type": "image", "image": "b.jpg"}]}
    with pytest.raises(MalformedRow, match="the media of chosen and rejected are different"):
        read({**row, "rejected": [*said("c"), other, *said("d")]}, SEES)
    picture = [{"role": "assistant", "content": [shown]}]
    with pytest.raises(MalformedRow, match="chosen contains media; only a prompt"):
        read({"prompt": COLOUR, "chosen": picture, "rejected": said("c")}, SEES)


def test_the_docs_show_a_row_of_every_layout_that_is_recognised_as_it() -> None:
    page = (ROOT / "docs" / "preference-data.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\{.*\})` \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(FORMATS)
    for name, text in rows:
        row = json.loads(text)
        found = format_of(row, PreferenceColumns(layout=name), "docs")
        assert found.name == name
        assert read_preference(row, PreferenceColumns(layout=name), "docs", SEES).responses
