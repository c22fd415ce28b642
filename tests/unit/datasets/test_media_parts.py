"""Keys of message parts and items, and the places of media in text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrft.config.data import DataConfig
from lightrft.datasets.media.items import listed
from lightrft.datasets.media.parts import SETTINGS, read_part
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.types import Prompt
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import clip, picture


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture(tmp_path / "a.png", seed=1)
    picture(tmp_path / "b.png", 40, 20, seed=2)
    clip(tmp_path / "c.mp4", frames=24, rate=8)
    return tmp_path


def dataset(
    eye: Rig, folder: Path, *rows: dict[str, Any], kind: Any = PromptDataset, **options: Any
) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        sources=[str(folder / "rows.jsonl")],  # type: ignore[arg-type]
        **{"max_prompt_tokens": 100_000, "token_cache": None, "shuffle": False, **options},
    )
    return kind(config, eye.tokenizer, seed=0, processor=eye.processor)


def prompt(eye: Rig, folder: Path, row: dict[str, Any], **options: Any) -> Prompt:
    (found,) = dataset(eye, folder, row, **options)
    return found


def asked(*parts: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(parts)}]}


PAD = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT = {"type": "text", "text": "what?"}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image", "image": "a.png", "max_pixel": 128}, "'max_pixel' .*'max_pixels'"),
        (
            {"type": "image", "image": "a.png", "fps": 2},
            "unknown key 'fps' of a part of type 'image'",
        ),
        ({"type": "video", "video": "c.mp4", "nframe": 4}, "'nframe' .*'nframes'"),
        ({"type": "video", "video": "c.mp4", "video_stat": 4}, "'video_stat' .*'video_start'"),
        ({"type": "image", "image": "a.png", "text": "see"}, "unknown key 'text'"),
        ({"type": "image_url", "image_url": {"url": "a.png", "detial": "auto"}}, "'detial'"),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "detail is 'low'"),
        ({"type": "image", "image": "a.png", "url": "b.png"}, "'image' and 'url' name the content"),
        ({"type": "text", "text": "x", "txet": "y"}, "unknown key 'txet'"),
        ({"type": "video", "video": "c.mp4", "fps": 2, "nframes": 4}, "both fps and nframes"),
        ({"type": "video", "video": "c.mp4", "fps": 2, "sample_fps": 4}, "sample_fps is set twice"),
        ({"type": "image", "image": "a.png", "resized_height": 28}, "belong together"),
        (
            {"type": "video", "video": "c.mp4", "min_frames": 8, "max_frames": 4},
            "more than max_frames",
        ),
        ({"type": "video", "video": "c.mp4", "video_start": 2, "video_end": 1}, "after video_end"),
        ({"type": "video", "video": "c.mp4", "nframes": 400}, "the clip has 24 frames"),
        ({"type": "video", "video": "c.mp4", "video_start": 9}, "the last frame is at"),
        ({"type": "video", "video": "c.mp4", "nframes": True}, "nframes is True, not a number"),
        ({"type": "sound", "sound": "a.wav"}, "content part of type 'sound'"),
    ],
)
def test_a_key_or_value_of_a_part_that_is_unknown_is_refused_by_name(
    part: dict[str, Any], said: str, eye: Rig, folder: Path
) -> None:
    with pytest.raises(MalformedRow, match=rf"line 1.*{said}"):
        dataset(eye, folder, asked(part, TEXT))


@pytest.mark.parametrize("nested", [False, True])
def test_settings_of_a_part_act_wherever_they_stand(nested: bool, eye: Rig, folder: Path) -> None:
    def grid(kind: str, file: str, **keys: Any) -> list[int]:
        part = {"type": kind, kind: {"url": file, **keys} if nested else file}
        found = prompt(eye, folder, asked(part if nested else {**part, **keys}, TEXT))
        return found.media[f"{kind}_grid_thw"].values[0].tolist()

    assert grid("image", "a.png", resized_height=24, resized_width=16) == [1, 6, 4]
    assert grid("image", "a.png", max_pixels=300) == [1, 2, 4]
    assert grid("video", "c.mp4", nframes=10)[0] == 5
    assert grid("video", "c.mp4", num_frames=10)[0] == 5
    # 24 frames in 3 s
    assert grid("video", "c.mp4")[0] == 3
    assert grid("video", "c.mp4", fps=8)[0] == 12
    assert grid("video", "c.mp4", fps=8, max_frames=6)[0] == 3
    assert grid("video", "c.mp4", fps=1, min_frames=8)[0] == 4
    assert grid("video", "c.mp4", fps=8, video_start=1.0, video_end=1.99)[0] == 4
    assert grid("video", "c.mp4", resized_height=16, resized_width=16)[1:] == [4, 4]
    whole, less = grid("video", "c.mp4"), grid("video", "c.mp4", total_pixels=1600)
    assert np.prod(less[1:]) < np.prod(whole[1:])


def test_the_places_of_columns_and_the_items_of_columns_have_settings(
    eye: Rig, folder: Path
) -> None:
    rows = [
        {**asked({"type": "image", "max_pixels": 300}, TEXT), "images": ["a.png"]},
        {"prompt": "<image>what?", "images": [{"image": "a.png", "max_pixels": 300}]},
        {"prompt": "<image>what?", "images": [{"path": "a.png", "bytes": None, "max_pixels": 300}]},
    ]
    for found in dataset(eye, folder, *rows):
        assert found.media["image_grid_thw"].values.tolist() == [[1, 2, 4]]
    with pytest.raises(MalformedRow, match=r"column 'images': unknown key 'max_pixel'.*max_pixels"):
        dataset(eye, folder, {"prompt": "x", "images": [{"image": "a.png", "max_pixel": 300}]})


def raw(folder: Path, name: str) -> dict[str, Any]:
    import base64

    return {"bytes": None, "data": base64.b64encode((folder / name).read_bytes()).decode()}


PART = {"type": "image", "image": "a.png"}
OTHER = {"type": "image", "image": "b.png"}
LIMITED = {"image": "a.png", "max_pixels": 300}


@pytest.mark.parametrize(
    ("parts", "column", "shown"),
    [
        ([PART], ["a.png"], ["a.png"]),
        ([PART], "a.png", ["a.png"]),
        ([PART, OTHER], [["a.png", "b.png"]], ["a.png", "b.png"]),
        ([PART, PART], ["./a.png", {"path": "a.png", "bytes": None}], ["a.png", "a.png"]),
        ([{**PART, "max_pixels": 300}], [LIMITED], ["a.png"]),
        ([PART], [], ["a.png"]),
        ([PART], ["b.png"], None),
        ([PART], ["a.png", "b.png"], None),
        ([PART, OTHER], ["b.png", "a.png"], None),
        ([PART, OTHER], ["a.png"], None),
        ([PART], [LIMITED], None),
        ([PART], ["missing.png"], None),
    ],
)
def test_a_usual_column_beside_parts_with_content_repeats_them_or_is_refused(
    parts: list[Any], column: Any, shown: list[str] | None, eye: Rig, folder: Path
) -> None:
    row = {**asked(*parts, TEXT), "images": column}
    if shown is None:
        said = r"line 1: the messages hold .* in their parts, and column 'images' holds .*not the"
        with pytest.raises(
            MalformedRow, match=said + r" same; set data\.columns\.images: null, or"
        ):
            dataset(eye, folder, row)
        return
    made = dataset(eye, folder, row)
    assert made[0].media["image_grid_thw"].values.shape[0] == len(shown)
    assert not any(made.unread.values())


def test_a_copy_of_a_part_is_told_by_its_bytes(eye: Rig, folder: Path) -> None:
    row = {**asked(PART, TEXT), "image": raw(folder, "a.png")}
    assert prompt(eye, folder, row).token_ids == prompt(eye, folder, asked(PART, TEXT)).token_ids
    with pytest.raises(MalformedRow, match="column 'image' holds 1 image, not the same"):
        dataset(eye, folder, {**row, "image": raw(folder, "b.png")})


def test_a_marker_of_one_turn_takes_the_column_beside_a_part_of_another(
    eye: Rig, folder: Path
) -> None:
    turns = [
        {"role": "user", "content": "<image>and this?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [PART, TEXT]},
    ]
    found = prompt(eye, folder, {"prompt": turns, "images": ["b.png"]})
    size = [prompt(eye, folder, asked({**PART, "image": n})) for n in ("b.png", "a.png")]
    grids = [one.media["image_grid_thw"].values[0].tolist() for one in size]
    assert found.media["image_grid_thw"].values.tolist() == grids


def test_parts_of_other_interfaces_are_read(eye: Rig, folder: Path) -> None:
    import base64

    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts: list[dict[str, Any]] = [
        {"type": "image", "source": source},
        {"type": "image", "source": {"type": "url", "url": "a.png"}},
        {"type": "input_image", "image_url": "a.png", "detail": "auto"},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
        {"image": "a.png"},
        {"type": "image", "image": f"DATA:image/png;BASE64,{data}"},
        {"type": "image", "image": "a.png", "text": None, "video": "", "fps": None},
    ]
    texts = [TEXT, {"type": "input_text", "text": "what?"}, {"text": "what?"}]
    expected = prompt(eye, folder, {"prompt": "<image>what?", "image": "a.png"})
    for part in parts:
        for text in texts:
            found = prompt(eye, folder, asked(part, text))
            assert found.token_ids == expected.token_ids
            assert found.media["pixel_values"].values.equal(expected.media["pixel_values"].values)


def test_the_index_of_a_part_is_its_place_among_the_images_of_the_row(
    eye: Rig, folder: Path
) -> None:
    def row(*parts: dict[str, Any]) -> dict[str, Any]:
        return {**asked({**TEXT, "index": None}, *parts), "images": ["a.png", "b.png"]}

    first, second = ({"type": "image", "text": None, "index": k} for k in (0, 1))
    found = prompt(eye, folder, row(first, second))
    plain = {"type": "image"}
    expected = prompt(eye, folder, row(plain, plain))
    assert found.token_ids == expected.token_ids
    assert found.media["pixel_values"].values.equal(expected.media["pixel_values"].values)
    with pytest.raises(MalformedRow, match="index is 1, and the next image of the row is 0"):
        dataset(eye, folder, row(second, first))
    with pytest.raises(MalformedRow, match="index is 0, and the part has its own image"):
        dataset(eye, folder, row({**first, "image": "a.png"}))


def test_records_of_text_beside_an_image_may_be_its_question(eye: Rig, folder: Path) -> None:
    with pytest.raises(MalformedRow, match=r"no column with a prompt .* texts"):
        dataset(eye, folder, {"images": ["a.png"], "texts": [{"user": "q", "assistant": "a"}]})
    seen = prompt(eye, folder, {"images": ["a.png"], "label": "cat", "choices": ["cat", "dog"]})
    assert seen.media and seen.label == "cat"


@pytest.mark.parametrize(
    "missing",
    [
        [""],
        "",
        [],
        None,
        [None],
        {"bytes": None, "path": None},
        [{"bytes": None, "path": ""}],
        float("nan"),
    ],
)
def test_a_column_that_has_no_image_is_no_image(missing: Any, eye: Rig, folder: Path) -> None:
    found = prompt(eye, folder, {"prompt": "what?", "images": missing})
    assert not found.media and found.token_ids == prompt(eye, folder, {"prompt": "what?"}).token_ids


@pytest.mark.parametrize("images", [[["a.png", "b.png"]], ' ["a.png", "b.png"]'])
def test_a_list_in_a_list_or_in_json_text_has_images(images: Any, eye: Rig, folder: Path) -> None:
    nested = prompt(eye, folder, {"prompt": "what?", "images": images})
    flat = prompt(eye, folder, {"prompt": "what?", "images": ["a.png", "b.png"]})
    assert nested.token_ids == flat.token_ids
    (folder / "[a].png").write_bytes((folder / "a.png").read_bytes())
    assert prompt(eye, folder, {"prompt": "what?", "images": "[a].png"}).media
    frames = [["a.png", "a.png"]]
    assert listed(frames, "video", folder) == frames


def test_an_item_without_content_names_what_it_has(eye: Rig, folder: Path) -> None:
    for item, have in (({}, "nothing"), ({"max_pixels": 300}, "max_pixels")):
        with pytest.raises(MalformedRow, match=f"no content of the image; the item has: {have}"):
            prompt(eye, folder, {"prompt": "what?", "images": [item]})


def test_the_scheme_of_a_file_may_have_capitals(eye: Rig, folder: Path) -> None:
    found = prompt(eye, folder, {"prompt": "what?", "images": f"FILE://{folder}/%61.png"})
    assert found.token_ids == prompt(eye, folder, {"prompt": "what?", "images": "a.png"}).token_ids


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SETTINGS)),
    st.integers(0, 20),
    st.sampled_from(["image", "video", "audio"]),
)
def test_every_misspelt_setting_is_refused_and_every_setting_of_another_kind(
    key: str, cut: int, kind: str
) -> None:
    misspelt = key[:cut] + key[cut + 1 :]
    names = {misspelt} - set(SETTINGS) - {""}
    for name in names | ({key} if kind not in SETTINGS[key].kinds else set()):
        with pytest.raises(MalformedRow, match=f"unknown key {name!r}"):
            read_part({kind: "a", name: 4}, kind, "row 1")


# Marks.


def sft(eye: Rig, folder: Path, row: dict[str, Any], **options: Any) -> Any:
    from lightrft.config.data import SFTDataConfig

    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = SFTDataConfig(
        sources=[str(folder / "rows.jsonl")],  # type: ignore[arg-type]
        **{"token_cache": None, **options},
    )
    (found,) = SFTDataset(
        config, eye.tokenizer, max_tokens=100_000, seed=0, processor=eye.processor
    )
    return found


def test_an_answer_that_spells_a_mark_leaves_the_image_to_the_question(
    eye: Rig, folder: Path
) -> None:
    for question in ("what tag?", "<image>what tag?"):
        talk = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "the tag <image>"},
        ]
        found = sft(eye, folder, {"messages": talk, "images": ["a.png"]})
        assert found.prompt_media and not found.response_media
        assert "<image>" in eye.tokenizer.decode(found.response_ids).replace(" ", "")
        asked_of_it = prompt(eye, folder, {"prompt": talk[:1], "images": ["a.png"]})
        assert found.prompt_ids == asked_of_it.token_ids


def test_an_answer_with_an_image_of_its_own_still_has_it(eye: Rig, folder: Path) -> None:
    talk = [
        {"role": "user", "content": "turn <image>"},
        {"role": "assistant", "content": "here: <image>"},
    ]
    found = sft(eye, folder, {"messages": talk, "images": ["a.png", "b.png"]})
    assert found.prompt_media and found.response_media


@pytest.mark.parametrize("word", ["<image>", "<video>", "<|image_pad|>", PAD])
def test_a_mark_without_media_is_a_word_that_is_counted(word: str, eye: Rig, folder: Path) -> None:
    text = f"what does {word} mean?"
    rows = [{"prompt": text}, {"prompt": [{"role": "user", "content": text}]}, {"prompt": "no"}]
    found = dataset(eye, folder, *rows)
    assert found.counts["media_words"] == 2
    for one in list(found)[:2]:
        assert not one.media and word in one.text
    spoken = sft(eye, folder, {"prompt": text, "response": "yes"})
    assert spoken.prompt_ids == found[0].token_ids
    part = dataset(eye, folder, asked({"type": "text", "text": text}))
    assert part[0].token_ids == found[0].token_ids


def test_a_mark_of_the_template_without_media_is_a_word_that_is_counted(
    eye: Rig, folder: Path
) -> None:
    rows = [
        {"prompt": "what?", "image": "a.png"},
        {"prompt": "<image>what?", "image": "a.png"},
        {"prompt": "what?"},
    ]
    found = dataset(eye, folder, *rows, template="<image>{prompt}")
    assert [one.text.count("<image>") for one in found] == [0, 1, 1]
    assert found.counts["media_words"] == 2


def test_marks_can_be_turned_off(eye: Rig, folder: Path) -> None:
    row = {"prompt": "what does <image> mean?", "images": ["a.png"]}
    found = prompt(eye, folder, row, media={"marks": False})
    assert f"user\n{PAD}what does <image> mean?" in found.text
    read = prompt(eye, folder, row)
    assert f"what does {PAD} mean?" in read.text


@pytest.mark.parametrize("spelled", [PAD, "<|image_pad|>", "<image>"])
def test_a_placeholder_of_the_model_is_the_mark_of_an_image_of_the_row(
    spelled: str, eye: Rig, folder: Path
) -> None:
    expected = prompt(eye, folder, {"prompt": "see <image> now?", "image": "a.png"})
    for options in ({}, {"special_tokens": "control"}):
        row = {"prompt": f"see {spelled} now?", "image": "a.png"}
        found = prompt(eye, folder, row, **options)
        assert found.token_ids == expected.token_ids


def test_marks_that_differ_from_the_items_are_refused_with_the_ways_out(
    eye: Rig, folder: Path
) -> None:
    row = {"prompt": "<image> and <image>", "images": ["a.png"]}
    with pytest.raises(MalformedRow, match=r"2 places for image .* set data\.media\.marks: false"):
        dataset(eye, folder, row)


def test_a_template_has_the_place_of_the_image(eye: Rig, folder: Path) -> None:
    template = "Look: <image>\nQ: {prompt}"
    options = {"template": template, "apply_chat_template": True}
    found = prompt(eye, folder, {"prompt": "what?", "image": "a.png"}, **options)
    assert f"Look: {PAD}\nQ: what?" in found.text
    two = prompt(eye, folder, {"prompt": "what?", "images": ["a.png", "b.png"]}, **options)
    assert f"Look: {PAD}\nQ: {PAD}what?" in two.text
    own = prompt(eye, folder, {"prompt": "see <image>", "image": "a.png"}, **options)
    assert f"Look: <image>\nQ: see {PAD}" in own.text
    none = prompt(eye, folder, {"prompt": "what?"}, **options)
    assert "Look: <image>\nQ: what?" in none.text and not none.media


ROLES = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant", "system"]),
        st.lists(st.sampled_from(["word ", "<image>", PAD, "<video>"]), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(turns=ROLES, count=st.integers(0, 3))
def test_every_image_of_a_row_is_in_its_prompt_or_the_row_is_refused(
    turns: Any, count: int, eye: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from lightrft.datasets.rows.row_reader import read_record

    reads = dataset(eye, shared(tmp_path_factory), {"prompt": "x"}).encoder.reads
    messages = [{"role": role, "content": "".join(text)} for role, text in turns]
    row = {"messages": messages, "images": [f"{k}.png" for k in range(count)]}
    try:
        from lightrft.config.data import Columns

        record = read_record(row, Columns(), "row 1", reads)
    except MalformedRow:
        return
    whole = "".join(message["content"] for message in record.messages)
    marks = [int(k) for k in re.findall("\ufdd2image:(\\d+)\ufdd3", whole)]
    assert sorted(marks) == list(range(count)) == list(range(len(record.media)))
    spelled = sum(
        text.count("<image>") + text.count(PAD) + text.count("<video>") for _, text in turns
    )
    left = whole.count("<image>") + whole.count(PAD) + whole.count("<video>")
    assert record.words == left <= spelled
    assert whole.count("word ") == sum(text.count("word ") for _, text in turns)


_SHARED: list[Path] = []


def shared(factory: pytest.TempPathFactory) -> Path:
    if not _SHARED:
        _SHARED.append(factory.mktemp("shared"))
    return _SHARED[0]


@pytest.mark.parametrize("question", ["what?", "<image>what?"])
@pytest.mark.parametrize("spoken", [False, True])
def test_preferences_read_marks_as_prompts_do(
    question: str, spoken: bool, eye: Rig, folder: Path
) -> None:
    from lightrft.config.data import PreferenceDataConfig
    from lightrft.datasets.preference.preference_dataset import PreferenceDataset

    def said(text: str, role: str) -> Any:
        return [{"role": role, "content": text}] if spoken else text

    row = {
        "prompt": said(question, "user"),
        "chosen": said("the <image> tag", "assistant"),
        "rejected": said("no", "assistant"),
        "images": ["a.png"],
    }
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    config = PreferenceDataConfig(sources=[str(folder / "rows.jsonl")], token_cache=None)  # type: ignore[arg-type]
    (found,) = PreferenceDataset(
        config, eye.tokenizer, kind="pairs", max_tokens=9999, seed=0, processor=eye.processor
    )
    asked_of_it = prompt(eye, folder, {"prompt": question, "images": ["a.png"]})
    assert found.prompt_ids == asked_of_it.token_ids and found.prompt_media
    text = eye.tokenizer.decode(found.responses[0].token_ids).replace(" ", "")
    assert text.startswith("the<image>tag") and not found.responses[0].media


def test_messages_for_another_model_keep_the_settings_of_their_media(
    eye: Rig, folder: Path
) -> None:
    """A scorer with a processor of its own then reads the same pixels and frames."""
    part = {"type": "video", "video": "c.mp4", "num_frames": 6, "max_pixels": 300}
    found = prompt(eye, folder, asked(part, TEXT))
    (video, text) = found.request[0]["content"]
    path = str(folder / "c.mp4")
    assert video == {"type": "video", "video": path, "nframes": 6, "max_pixels": 300}
    assert text == TEXT
    again = prompt(eye, folder, {"prompt": found.request})
    assert again.token_ids == found.token_ids
