"""Questions about pictures and clips: one row of each public layout, and the row that is expected of it."""

import json

import pytest

from lightrft.config.data import SourceConfig
from lightrft.datasets.open_source import open_source
from lightrft.datasets.row_tables import READERS
from lightrft.utils.errors import DataError


def read(tmp_path, row, reader, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    return open_source(SourceConfig(path=str(path), reader=reader, reader_options=options))[0]


def test_geometry3k_is_read_as_the_hub_has_it(tmp_path):
    row = {"images": ["tri.png"], "problem": "<image>Find $x$.", "answer": "2 \\sqrt { 3 }"}
    named = {
        "prompt": "<image>Find $x$.",
        "label": "2 \\sqrt { 3 }",
        "reference": "2 \\sqrt { 3 }",
        "data_source": "geo3k",
    }
    assert read(tmp_path, row, "geo3k") == {**row, **named}


def test_geometry3k_is_read_as_verl_prepares_it(tmp_path):
    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Think first."}],
        "images": ["tri.png"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 7, "answer": "3", "question": "<image>Find x."},
    }
    named = {"label": "3", "reference": "3", "id": "hiyouga/geometry3k/train/7"}
    assert read(tmp_path, row, "geo3k") == {**row, **named}


MATHVISTA = {
    "pid": "5",
    "question": "How long is the bar?",
    "image": "images/5.jpg",
    "decoded_image": {"bytes": None, "path": "five.jpg"},
    "choices": None,
    "unit": "cm",
    "precision": 1.0,
    "answer": "1.2",
    "question_type": "free_form",
    "answer_type": "float",
}


def test_mathvista_asks_with_the_unit_and_prefers_the_decoded_picture(tmp_path):
    expected = {
        "images": [{"bytes": None, "path": "five.jpg"}],
        "decoded_image": None,
        "prompt": "How long is the bar? (Unit: cm)",
        "label": "1.2",
        "response": "1.2",
        "reference": "1.2",
        "id": "5",
        "data_source": "mathvista/free_form",
    }
    assert read(tmp_path, MATHVISTA, "mathvista") == {**MATHVISTA, **expected}
    assert read(tmp_path, {**MATHVISTA, "decoded_image": None}, "mathvista")["images"] == [
        "images/5.jpg"
    ]


def test_mathvista_shows_choices_and_takes_their_letter_for_the_label(tmp_path):
    row = {
        **MATHVISTA,
        "unit": None,
        "choices": ["long", "short"],
        "answer": "short",
        "question_type": "multi_choice",
    }
    found = read(tmp_path, row, "mathvista")
    assert found["prompt"] == "How long is the bar?\n\nA. long\nB. short"
    assert (found["label"], found["reference"], found["data_source"]) == (
        "B",
        "short",
        "mathvista/multi_choice",
    )
    # The hidden test set.
    assert read(tmp_path, {**row, "answer": None}, "mathvista")["label"] is None
    with pytest.raises(
        DataError,
        match=r"row 1: reader 'mathvista' cannot read the row: the answer 'wide' is none of the choices",
    ):
        read(tmp_path, {**row, "answer": "wide"}, "mathvista")


AVQA = {
    "id": 183,
    "video_name": "-HG3Omg_89c_000030",
    "video_id": 341,
    "question_text": "What happened in the video?",
    "multi_choice": ["motorboat", "Yacht consignment", "Sailboat set sail", "Consignment car"],
    "answer": 1,
    "question_relation": "View",
    "question_type": "Happening",
    "dataset_name": "AVQA",
    "audio_path": "-HG3Omg_89c_30.wav",
}


@pytest.mark.parametrize(
    ("root", "path"), [("", "-HG3Omg_89c_30.wav"), ("wavs/", "wavs/-HG3Omg_89c_30.wav")]
)
def test_avqa_is_read_as_r1_aqa_prepares_it(tmp_path, root, path):
    shown = (
        "What happened in the video?\n\nA. motorboat\nB. Yacht consignment\nC. Sailboat set "
        "sail\nD. Consignment car"
    )
    named = {
        "audios": [path],
        "prompt": shown,
        "label": "B",
        "response": "B",
        "reference": "Yacht consignment",
        "data_source": "aqa",
    }
    assert read(tmp_path, AVQA, "aqa", root=root) == {**AVQA, **named}


def test_avqa_is_read_as_lightrft_prepares_it_whose_label_names_a_rule(tmp_path):
    content = [
        {"type": "audio", "audio_url": "a.wav"},
        {"type": "text", "text": "What is heard? Choose from: a dog, a cat."},
    ]
    row = {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": content}],
        "audio_path": "a.wav",
        "reference": "a dog",
        "label": "avqa_rule",
    }
    asked = [
        row["prompt"][0],
        {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}, content[1]]},
    ]
    assert read(tmp_path, row, "aqa") == {
        **row,
        "prompt": asked,
        "label": "a dog",
        "data_source": "aqa",
    }


def test_mmau_answers_are_texts_of_choices(tmp_path):
    row = {
        "id": "3f",
        "audio_id": "./clips/3f.wav",
        "question": "Who?",
        "choices": ["Man", "Woman"],
        "answer": "Woman",
    }
    named = {
        "audios": ["/x/clips/3f.wav"],
        "prompt": "Who?\n\nA. Man\nB. Woman",
        "label": "B",
        "response": "B",
        "reference": "Woman",
    }
    assert read(tmp_path, row, "mmau", root="/x") == {**row, **named, "data_source": "mmau"}


def test_vermulti_has_its_messages_in_a_string(tmp_path):
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "file:///a.png"},
                {"type": "text", "text": "Which?"},
            ],
        }
    ]
    row = {"message": json.dumps(messages), "answer": "$3$"}
    assert read(tmp_path, row, "vermulti") == {
        **row,
        "prompt": messages,
        "label": "$3$",
        "data_source": "",
    }


@pytest.mark.parametrize(
    ("reader", "row", "lacks"),
    [
        ("geo3k", {"images": [], "answer": "1"}, "problem"),
        (
            "mathvista",
            {k: v for k, v in MATHVISTA.items() if k != "question_type"},
            "question_type",
        ),
        ("aqa", {k: v for k, v in AVQA.items() if k != "audio_path"}, "audio_path"),
        ("aqa", {"prompt": [], "audio_path": "a.wav", "label": "avqa_rule"}, "reference"),
        ("mmau", {"question": "?", "choices": ["a"], "answer": "a"}, "audio_id"),
    ],
)
def test_a_column_that_lacks_is_named(tmp_path, reader, row, lacks):
    with pytest.raises(
        DataError, match=f"row 1: reader {reader!r} needs column {lacks!r}; the row has: "
    ):
        read(tmp_path, row, reader)


def test_every_reader_is_registered_by_opening_a_source():
    assert {
        "geo3k",
        "mathvista",
        "aqa",
        "mmau",
        "lmm_r1",
        "vermulti",
        "verl",
        "gpqa_diamond",
        "aime2025",
    } <= set(READERS)
