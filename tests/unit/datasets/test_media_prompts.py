"""Rows with media to prompts: where each stands, what the model gets, and what is said of rows that cannot be used."""

from __future__ import annotations

import base64
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.data import Columns, DataConfig, MediaConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.media.items import listed
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.models.tiny import ALL_MEDIA_FAMILIES
from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError, DataError
from tests.media_helpers import Rig, mixed_batch, rig
from tests.unit.datasets.media_files import (
    clip,
    config_of,
    encoded,
    picture,
    pixels,
    sound,
    tone,
    written,
)

HERE = Path(__file__)


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Reads pictures and clips."""
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Reads sound."""
    return rig("qwen2_audio", tmp_path_factory.mktemp("ear"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the pictures a.png (20 x 30) and b.png (32 x 16), the clip c.mp4 and the sound s.wav."""
    picture(tmp_path / "a.png", 20, 30, seed=1)
    picture(tmp_path / "b.png", 32, 16, seed=2)
    clip(tmp_path / "c.mp4")
    sound(tmp_path / "s.wav")
    return tmp_path


def prompts(reader: Rig, folder: Path, *rows: dict[str, Any], **settings: Any) -> list[Prompt]:
    dataset = PromptDataset(
        config_of(written(folder, rows), **settings),
        reader.tokenizer,
        seed=0,
        processor=reader.processor,
    )
    return list(dataset)


def by_hand(reader: Rig, *pieces: str | np.ndarray) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens and inputs of a user's message of texts and pictures, put together without the code under test."""
    part = reader.processor.parts["image"]
    parts = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in pieces
    ]
    text = reader.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    made: list[dict[str, torch.Tensor]] = []
    first, *others = text.split(part.written)
    for array, after in zip([p for p in pieces if not isinstance(p, str)], others, strict=True):
        made.append(part.inputs(array, extent_of(array)))
        first += "<|image_pad|>" * part.count(made[-1]) + after
    joined = {name: torch.cat([m[name] for m in made]) for name in made[0]}
    return reader.tokenizer(first, add_special_tokens=False)["input_ids"], joined


def by_template(reader: Rig, kind: str) -> str:
    """What the family's chat template writes for one item; not for clips of Qwen3, whose pairs of frames bring marks of their own."""
    if kind == "video" and reader.actor.model.config.model_type.startswith(("qwen3_vl", "qwen3_5")):
        return "<|video_pad|>"
    text = reader.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": kind}]}], tokenize=False
    )
    own = reader.actor.family.own
    start = "<|im_end|>" if own is not None and own.adds_start else ""
    return text.removeprefix(f"{start}<|im_start|>user\n").removesuffix("<|im_end|>\n")


def extent_of(array: np.ndarray) -> Any:
    from lightrft.types import Extent

    return Extent(array.shape)


def expect_same(prompt: Prompt, ids: list[int], inputs: dict[str, torch.Tensor]) -> None:
    assert prompt.token_ids == ids
    assert {k: r.lengths.tolist() for k, r in prompt.media.items()} == {
        k: [len(v)] for k, v in inputs.items()
    }
    for name, tensor in inputs.items():
        assert torch.equal(prompt.media[name].values, tensor)


def test_a_marker_an_openai_part_and_a_column_alone_give_the_same_prompt(
    eye: Rig, folder: Path
) -> None:
    a = np.asarray(Image.open(folder / "a.png"))
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    text = {"type": "text", "text": "what is it?"}
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>what is it?", "images": ["a.png"]},
        {"prompt": "what is it?", "image": "a.png"},
        {"prompt": [{"role": "user", "content": "what is it?"}], "images": "a.png"},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, text]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text]}]},
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": f"data:image/png;base64,{data}"}, text],
                }
            ]
        },
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": (folder / "a.png").as_uri()}},
                        text,
                    ],
                }
            ]
        },
        {
            "prompt": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "a.png"}, text]}
            ]
        },
        {
            "prompt": '[{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": '
            '"text", "text": "what is it?"}]}]'
        },
    ]
    expected = by_hand(eye, a, "what is it?")
    for prompt in prompts(eye, folder, *rows):
        expect_same(prompt, *expected)


def test_several_pictures_stand_where_their_markers_are(eye: Rig, folder: Path) -> None:
    a, b = (np.asarray(Image.open(folder / f"{n}.png")) for n in "ab")
    rows = [
        {"prompt": "one <image>, two <image>!", "images": ["a.png", "b.png"]},
        {"prompt": "look", "images": ["b.png", "a.png"]},
    ]
    first, second = prompts(eye, folder, *rows)
    expect_same(first, *by_hand(eye, "one ", a, ", two ", b, "!"))
    expect_same(second, *by_hand(eye, b, a, "look"))


def test_media_of_any_turn_are_found_and_those_without_a_marker_go_to_the_first_user_message(
    eye: Rig, folder: Path
) -> None:
    talk = [
        {
            "role": "user",
            "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "first"}],
        },
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second"},
    ]
    plain = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "first"},
        *talk[1:],
    ]
    (named,), (front,) = (
        prompts(eye, folder, {"prompt": talk}),
        prompts(eye, folder, {"prompt": plain, "image": "a.png"}),
    )
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"user\n{pad}first" in named.text and "user\nsecond" in named.text
    assert f"user\n{pad}first" in front.text and "user\nsecond" in front.text
    assert all(torch.equal(named.media[k].values, front.media[k].values) for k in named.media)


def test_a_spelled_placeholder_is_plain_text_and_moves_no_picture(eye: Rig, folder: Path) -> None:
    row = {"prompt": "no <|image_pad|> here <image> but there", "images": ["a.png"]}
    (prompt,) = prompts(eye, folder, row)
    pad = eye.processor.tokens["image"]
    part = eye.processor.parts["image"]
    assert prompt.token_ids.count(pad) == part.count({k: r.values for k, r in prompt.media.items()})
    first = prompt.token_ids.index(pad)
    shown = eye.tokenizer.decode(prompt.token_ids[:first])
    assert "no <|image_pad|> here" in shown.replace("< |", "<|")


def test_rows_rendered_beforehand_name_places_as_the_template_would(eye: Rig, folder: Path) -> None:
    row = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>what?", "images": ["a.png"]}
    (raw,) = prompts(eye, folder, row, special_tokens="control", apply_chat_template=False)
    (plain,) = prompts(eye, folder, {"prompt": "what?", "images": ["a.png"]})
    assert raw.text == row["prompt"]
    inside = lambda p: p.token_ids.count(eye.processor.tokens["image"])  # noqa: E731
    assert inside(raw) == inside(plain) > 0
    assert torch.equal(raw.media["pixel_values"].values, plain.media["pixel_values"].values)


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_every_family_reads_what_rows_name(
    family: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = rig(family, tmp_path_factory.mktemp(family))
    # Shorter than the time from one frame to the next at data.media.fps.
    clip(folder / "short.mp4", frames=6, rate=30)
    files = {
        "image": ["a.png", "b.png"],
        "video": ["c.mp4", ["a.png", "a.png", "a.png"], "short.mp4"],
        "audio": ["s.wav"],
    }
    rows: list[dict[str, Any]] = [{"prompt": "nothing to see"}]
    for kind in reader.processor.parts:
        rows.append(
            {"prompt": f"before <{kind}> and <{kind}>, behind", f"{kind}s": (files[kind] * 2)[:2]}
        )
        rows.append({"prompt": "front", kind: files[kind][0]})
    rows.append(
        {"prompt": "all of it", **{kind: files[kind][-1] for kind in reader.processor.parts}}
    )
    found = prompts(reader, folder, *rows)
    assert [bool(p.media) for p in found] == [False] + [True] * (len(rows) - 1)
    assert [len(p.attachments) for p in found[1:]] == [
        n for _ in reader.processor.parts for n in (2, 1)
    ] + [len(reader.processor.parts)]
    twice = [{"prompt": "x", f"{kind}s": (files[kind] * 2)[:2]} for kind in reader.processor.parts]
    raw = prompts(reader, folder, *twice, template="{prompt} y", apply_chat_template=False)
    assert [p.text for p in raw] == [
        f"{by_template(reader, kind) * 2}x y" for kind in reader.processor.parts
    ]
    scored = reader.actor.score(
        mixed_batch([*found, *raw])
    ).logprobs  # raises unless every placeholder has its feature
    assert torch.isfinite(scored).all()


def test_a_text_only_family_takes_markers_as_words_and_refuses_media(
    eye: Rig, folder: Path
) -> None:
    def alone(*rows: dict[str, Any], **settings: Any) -> list[Prompt]:
        return list(
            PromptDataset(config_of(written(folder, rows), **settings), eye.tokenizer, seed=0)
        )

    (prompt,) = alone({"prompt": "an <image> tag", "images": [], "video": None})
    assert "an <image> tag" in prompt.text and prompt.media == {} and prompt.attachments == ()
    with pytest.raises(
        MalformedRow,
        match=r"line 1: column 'image' holds 1 image, but the model reads text alone.*data\.columns\.images: null",
    ):
        alone({"prompt": "x", "image": "a.png"})
    with pytest.raises(
        MalformedRow,
        match=r"line 1, message 1: a content part of type 'image', but the model reads text alone",
    ):
        alone({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]})
    (out,) = alone({"prompt": "x", "image": "a.png"}, columns=Columns(images=None))
    assert out.columns == {"image": "a.png"}


def test_a_kind_that_the_model_does_not_read_is_refused(eye: Rig, folder: Path) -> None:
    with pytest.raises(
        MalformedRow,
        match=r"column 'audio_path' holds 1 audio, but the model reads text and image, video",
    ):
        prompts(eye, folder, {"prompt": "x", "audio_path": "s.wav"})
    (prompt,) = prompts(eye, folder, {"prompt": "an <audio> tag"})
    assert "<audio>" in prompt.text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"prompt": "<image> and <image>", "images": ["a.png"]},
            r"2 places for image .*, but the row has 1 image in column 'images'",
        ),
        (
            {"prompt": "<image>", "picture": "a.png"},
            r"1 place for image .*, and column 'picture', which may have them, is not read; "
            r"set data\.columns\.images: picture",
        ),
        (
            {"prompt": "x", "images": ["a.png", "gone.png"]},
            r"column 'images', item 2: 'gone\.png': there is no file .*gone\.png",
        ),
        ({"prompt": "x", "image": "s.wav"}, r"column 'image': 's\.wav': not a picture"),
        ({"prompt": "x", "video": "s.wav"}, r"column 'video': 's\.wav': no video in the file"),
        (
            {"prompt": "x", "image": {"bytes": None, "sampling": 3}},
            "unknown key 'sampling' of a part of type 'image'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}]},
            r"message 1, image: 'gone\.png'",
        ),
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": "a.png", "max_pixels": -1}],
                    }
                ]
            },
            "max_pixels is -1",
        ),
        ({"prompt": "\ufdd2image:0\ufdd3", "image": "a.png"}, r"holds U\+FDD2"),
        ({"prompt": "x", "image": "thin.png"}, r"thin\.png.*aspect ratio"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error_or_a_counted_skip(
    row: dict[str, Any], problem: str, eye: Rig, folder: Path
) -> None:
    Image.new("RGB", (4000, 4)).save(folder / "thin.png")
    rows = [
        {"prompt": "fine", "id": "one"},
        row,
        {"prompt": "fine too", "image": "b.png", "id": "two"},
    ]
    with pytest.raises(MalformedRow, match=rf"rows\.jsonl, line 2.*{problem}"):
        prompts(eye, folder, *rows)
    dataset = PromptDataset(
        config_of(written(folder, rows), bad_rows="skip"),
        eye.tokenizer,
        seed=0,
        processor=eye.processor,
    )
    assert list(dataset.ids) == ["one", "two"]
    assert dataset.counts["malformed"] == 1 and "line 2" in dataset.first_problem


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *[
            ("fps", value, f"{value!r}, not a number of frames")
            for value in ("auto", 0, -1, float("nan"), float("inf"))
        ],
        ("fps", [2], r"\[2\], not a number of frames"),
        *[
            (f"{side}_pixels", value, f"{value!r}, not a number of pixels")
            for side in ("min", "max")
            for value in (1.5, float("inf"))
        ],
    ],
)
def test_a_number_of_a_part_that_is_none_makes_a_malformed_row(
    name: str, value: Any, said: str, eye: Rig, folder: Path
) -> None:
    row = {
        "prompt": [{"role": "user", "content": [{"type": "video", "video": "c.mp4", name: value}]}]
    }
    rows = [{"prompt": "fine"}, row]
    with pytest.raises(MalformedRow, match=f"line 2, message 1: {name} is {said}"):
        prompts(eye, folder, *rows)
    dataset = PromptDataset(
        config_of(written(folder, rows), bad_rows="skip"),
        eye.tokenizer,
        seed=0,
        processor=eye.processor,
    )
    assert (len(dataset), dataset.counts["malformed"]) == (1, 1)


def test_limits_of_pixels_and_of_a_part_act(eye: Rig, folder: Path) -> None:
    def count(row: dict[str, Any], **media: Any) -> int:
        (prompt,) = prompts(eye, folder, row, media=media)
        return prompt.token_ids.count(eye.processor.tokens["image"])

    row = {"prompt": "x", "image": "a.png"}
    part = {"type": "image", "image": "a.png"}
    assert count(row) > count(row, max_pixels=300) >= 1
    assert count(row, min_pixels=1024) > count(row)
    assert count({"prompt": [{"role": "user", "content": [{**part, "max_pixels": 300}]}]}) == count(
        row, max_pixels=300
    )
    assert count(
        {"prompt": [{"role": "user", "content": [{**part, "min_pixels": 1024}]}]}
    ) == count(row, min_pixels=1024)


def test_frames_of_a_clip_follow_the_settings(eye: Rig, folder: Path) -> None:
    def frames(row: dict[str, Any], **media: Any) -> int:
        (prompt,) = prompts(eye, folder, row, media=media)
        return int(prompt.media["video_grid_thw"].values[0, 0])

    # 12 frames in 1.5 s; the model looks at two at a time.
    row = {
        "prompt": "<video>x",
        "video": "c.mp4",
    }
    assert frames(row) == 2
    assert frames(row, fps=8.0) == 6
    assert frames(row, fps=None, max_frames=4) == 2
    part = {"type": "video", "video": "c.mp4", "fps": 8}
    assert frames({"prompt": [{"role": "user", "content": [part]}]}) == 6


def test_sound_comes_at_the_rate_of_the_model(ear: Rig, folder: Path) -> None:
    sound(folder / "low.wav", seconds=0.5, rate=8000)
    given = {"array": tone(0.5, 8000).tolist(), "sampling_rate": 8000}
    file, array = prompts(
        ear, folder, {"prompt": "x", "audio": "low.wav"}, {"prompt": "x", "audios": [given]}
    )
    assert file.token_ids == array.token_ids
    torch.testing.assert_close(
        file.media["input_features"].values, array.media["input_features"].values, atol=1e-3, rtol=0
    )
    told = {"path": "low.wav", "sampling_rate": 8000}
    (same,) = prompts(ear, folder, {"prompt": "x", "audio": told})
    assert same.token_ids == file.token_ids
    with pytest.raises(MalformedRow, match="rate is 44100, and the sound has 8000 samples"):
        prompts(ear, folder, {"prompt": "x", "audio": {**told, "sampling_rate": 44100}})
    with pytest.raises(
        MalformedRow, match=r"low\.wav.*8000 samples a second, the model takes 16000"
    ):
        prompts(ear, folder, {"prompt": "x", "audio": "low.wav"}, media={"resample": False})


def test_a_question_that_names_its_sound_twice_hears_it_once(ear: Rig, folder: Path) -> None:
    content = [{"type": "audio", "audio_url": "s.wav"}, {"type": "text", "text": "who?"}]
    row = {
        "prompt": [{"role": "user", "content": content}],
        "audio_path": "s.wav",
        "reference": "me",
        "label": "rule",
    }
    (prompt,) = prompts(ear, folder, row)
    assert prompt.media["feature_lengths"].lengths.tolist() == [1]
    assert prompt.columns == {"audio_path": "s.wav"}
    spoken = {
        "type": "input_audio",
        "input_audio": {
            "data": base64.b64encode((folder / "s.wav").read_bytes()).decode(),
            "format": "wav",
        },
    }
    (again,) = prompts(ear, folder, {"prompt": [{"role": "user", "content": [spoken, content[1]]}]})
    assert again.token_ids == prompt.token_ids


def test_features_of_a_parquet_file_are_read_without_a_decoder(
    eye: Rig, ear: Rig, folder: Path
) -> None:
    digits = datasets.Dataset.from_dict(
        {
            "image": [{"bytes": encoded(pixels(8, 8, k)), "path": None} for k in range(3)],
            "label": [0, 1, 2],
        },
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    digits.to_parquet(folder / "digits.parquet")
    several = datasets.Dataset.from_dict(
        {"prompt": ["x"], "images": [[str(folder / "a.png"), str(folder / "b.png")]]},
        features=datasets.Features(
            {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
        ),
    )
    several.save_to_disk(folder / "saved")
    frames = datasets.Dataset.from_dict(
        {
            "prompt": ["x"],
            "video": [[{"bytes": encoded(pixels(8, 8, k)), "path": None} for k in range(2)]],
        },
        features=datasets.Features(
            {"prompt": datasets.Value("string"), "video": datasets.List(datasets.Image())}
        ),
    )
    frames.to_parquet(folder / "frames.parquet")
    wave = (folder / "s.wav").read_bytes()
    spoken = datasets.Dataset.from_dict({"audio": [{"bytes": wave, "path": "s.wav"}], "label": [1]})
    spoken = spoken.cast_column("audio", datasets.Audio())
    spoken.to_parquet(folder / "spoken.parquet")

    def read(reader: Rig, source: str, **settings: Any) -> list[Prompt]:
        return list(
            PromptDataset(
                config_of(source, **settings), reader.tokenizer, seed=0, processor=reader.processor
            )
        )

    path, options = str(folder / "digits.parquet"), {"apply_chat_template": False}
    found = read(eye, path, template="Which digit?", **options)
    assert [p.label for p in found] == [0, 1, 2] and all(p.columns == {} for p in found)
    assert found[0].text == "<|vision_start|><|image_pad|><|vision_end|>Which digit?"
    (both,) = read(eye, str(folder / "saved"))
    assert both.media["image_grid_thw"].lengths.tolist() == [2]
    (moved,) = read(eye, str(folder / "frames.parquet"))
    assert moved.media["video_grid_thw"].lengths.tolist() == [1]
    (heard,) = read(
        ear, str(folder / "spoken.parquet"), template="Which digit?", apply_chat_template=True
    )
    assert heard.media["feature_lengths"].lengths.tolist() == [1]
    assert "torchcodec" not in sys.modules and "torchvision" not in sys.modules


def test_still_pictures_in_a_row_are_one_video_and_animations_are_each_their_own(
    folder: Path,
) -> None:
    still = Image.fromarray(pixels(8, 8))
    shades = [Image.fromarray(np.full((8, 8, 3), k, np.uint8)) for k in (9, 99)]
    for form in ("png", "jpg", "gif", "webp"):
        still.save(folder / f"still.{form}")
        if form != "jpg":
            shades[0].save(folder / f"moving.{form}", save_all=True, append_images=shades[1:])
    data = {path.name: path.read_bytes() for path in folder.glob("*.*")}
    text = {name: base64.b64encode(held).decode() for name, held in data.items()}
    stills: list[Any] = [
        *(data[f"still.{form}"] for form in ("png", "jpg", "gif", "webp")),
        *({"bytes": data[f"still.{form}"], "path": None} for form in ("png", "webp")),
        {"bytes": data["still.png"], "path": "elsewhere.mp4"},
        f"data:image/webp;base64,{text['still.webp']}",
        text["still.png"],
        {"image_url": {"url": f"data:image/png;base64,{text['still.png']}"}},
        {"base64": text["still.jpg"]},
        *(
            "still.png",
            "still.gif",
            "still.webp",
            folder / "still.png",
            {"path": "still.jpg", "bytes": None},
        ),
        "https://x.test/0.png?size=1",
        still,
        pixels(8, 8),
    ]
    assert listed(stills, "video", folder) == [stills]
    moving: list[Any] = [
        *(data[f"moving.{form}"] for form in ("png", "gif", "webp")),
        {"bytes": data["moving.png"], "path": "moving.png"},
        f"data:image/gif;base64,{text['moving.gif']}",
        *(
            "moving.gif",
            "moving.webp",
            "c.mp4",
            data["c.mp4"],
            {"bytes": data["c.mp4"], "path": "c.mp4"},
        ),
        *(
            "https://x.test/0.webp",
            "gone.webp",
            "http://[",
            b"",
            {},
            ["still.png"],
            np.zeros((2, 8, 8, 3), np.uint8),
        ),
        Image.open(folder / "moving.gif"),
    ]
    for one in moving:
        (first, second) = listed([one, one], "video", folder)
        assert first is one and second is one, one
    assert listed([still, still], "image", folder) == [still, still]


def pictures_at_hand() -> list[dict[str, Any]]:
    """Rows with a PIL image, an array and bytes."""
    array = pixels(20, 30, 5)
    return [
        {"prompt": "x", "image": image} for image in (Image.fromarray(array), array, encoded(array))
    ]


def test_a_function_may_yield_pictures_and_arrays(eye: Rig) -> None:
    dataset = PromptDataset(
        config_of(f"{HERE}:pictures_at_hand"), eye.tokenizer, seed=0, processor=eye.processor
    )
    first, *others = dataset
    for prompt in others:
        assert torch.equal(prompt.media["pixel_values"].values, first.media["pixel_values"].values)
        assert prompt.columns == {}


def test_results_do_not_depend_on_the_workers_nor_on_the_cache(eye: Rig, folder: Path) -> None:
    rows = [{"prompt": f"{k}<image>", "image": f"{'ab'[k % 2]}.png"} for k in range(9)]
    found = []
    for media in ({"workers": 0, "cache_mb": 0}, {"workers": 1}, {"workers": 5, "cache_mb": 0}):
        dataset = PromptDataset(
            config_of(written(folder, rows), media=media),
            eye.tokenizer,
            seed=0,
            processor=eye.processor,
        )
        dataset.prefetch([3, 4, 3])
        found.append(dataset.fetch([4, 3, 8, 0, 4]) + dataset.fetch([1, 2]))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert isinstance(one, Prompt) and isinstance(two, Prompt)
            assert (one.id, one.token_ids, one.attachments) == (
                two.id,
                two.token_ids,
                two.attachments,
            )
            assert torch.equal(one.media["pixel_values"].values, two.media["pixel_values"].values)


def test_what_is_equal_is_decoded_once_while_there_is_room(
    eye: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    rows = [{"prompt": "x", "image": name} for name in ("a.png", "copy.png", "b.png", "a.png")]
    made = []
    kind = type(eye.processor.parts["image"])
    real = kind.inputs
    monkeypatch.setattr(
        kind,
        "inputs",
        lambda self, value, extent: made.append(extent.shape) or real(self, value, extent),
    )
    for cache, decoded in ((64, 2), (0, 8)):
        made.clear()
        media = {"cache_mb": cache, "workers": 0}
        dataset = PromptDataset(
            config_of(written(folder, rows), media=media),
            eye.tokenizer,
            seed=0,
            processor=eye.processor,
        )
        assert made == []
        assert len([*dataset.fetch(range(4)), *dataset.fetch(range(4))]) == 8
        assert len(made) == decoded


def test_a_data_set_with_media_pickles_after_it_has_worked(eye: Rig, folder: Path) -> None:
    rows = [{"prompt": "x", "image": "a.png"}, {"prompt": "y", "image": "b.png"}]
    dataset = PromptDataset(
        config_of(written(folder, rows)), eye.tokenizer, seed=0, processor=eye.processor
    )
    before = dataset.fetch([0, 1])
    dataset.prefetch([1])
    twin = pickle.loads(pickle.dumps(dataset))
    for one, two in zip(before, twin.fetch([0, 1]), strict=True):
        assert isinstance(one, Prompt) and one.attachments == two.attachments


def test_a_file_that_changes_later_is_told_when_its_prompt_is_drawn(eye: Rig, folder: Path) -> None:
    rows = [{"prompt": "x", "image": "a.png"}, {"prompt": "y", "image": "b.png"}]
    dataset = PromptDataset(
        config_of(written(folder, rows)), eye.tokenizer, seed=0, processor=eye.processor
    )
    picture(folder / "a.png", 8, 8)
    whole = (folder / "b.png").read_bytes()
    (folder / "b.png").write_bytes(whole[: len(whole) // 2])
    changed, damaged = dataset.fetch([0, 1])
    assert (
        isinstance(changed, MalformedRow)
        and "line 1: " in str(changed)
        and "placeholders for" in str(changed)
    )
    assert isinstance(
        damaged, MalformedRow
    ) and "line 2, column 'image': 'b.png': the picture is damaged" in str(damaged)
    with pytest.raises(MalformedRow, match="has a file changed since the data was opened"):
        dataset[0]
    assert dataset.prompt(0, media=False).media == {}


def test_a_prompt_with_media_is_never_cut(eye: Rig, folder: Path) -> None:
    rows = [{"prompt": "x" * 200, "image": "a.png"}, {"prompt": "y" * 200}]
    dataset = PromptDataset(
        config_of(written(folder, rows), overlong_prompts="truncate", max_prompt_tokens=64),
        eye.tokenizer,
        seed=0,
        processor=eye.processor,
    )
    assert (dataset.counts["overlong"], dataset.counts["truncated"], len(dataset)) == (1, 1, 1)
    with pytest.raises(
        DataError, match=r"line 1: \d+ tokens, more than data\.max_prompt_tokens = 64"
    ):
        prompts(eye, folder, *rows, overlong_prompts="error", max_prompt_tokens=64)


def test_raw_media_stay_out_of_the_columns(eye: Rig, folder: Path) -> None:
    data = base64.b64encode((folder / "a.png").read_bytes()).decode()
    row = {
        "prompt": "x",
        "image": "a.png",
        "images": [],
        "video": f"data:video/mp4;base64,{data}",
        "kind": "k",
    }
    (prompt,) = prompts(eye, folder, {**row, "video": None})
    assert prompt.columns == {"image": "a.png", "kind": "k"}


def test_relative_paths_start_from_the_file_or_from_the_root_that_is_set(
    eye: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "rows").mkdir()
    path = written(folder / "rows", [{"prompt": "x", "image": "a.png"}])
    with pytest.raises(MalformedRow, match=r"there is no file .*rows/a\.png"):
        PromptDataset(config_of(path), eye.tokenizer, seed=0, processor=eye.processor)
    found = PromptDataset(
        config_of(path, media={"root": str(folder)}), eye.tokenizer, seed=0, processor=eye.processor
    )
    assert found[0].media


def test_columns_that_the_settings_name_are_read_and_must_exist(eye: Rig, folder: Path) -> None:
    row = {"prompt": "x", "photo": "a.png", "image": "gone.png"}
    (prompt,) = prompts(eye, folder, row, columns=Columns(images="photo"))
    assert prompt.media and prompt.columns["image"] == "gone.png"
    (nested,) = prompts(
        eye,
        folder,
        {"prompt": "x", "extra": {"photos": ["a.png"]}},
        columns=Columns(images="extra.photos"),
    )
    assert nested.token_ids == prompt.token_ids
    with pytest.raises(
        MalformedRow, match=r"no column 'foto' \(data\.columns\.images\).*did you mean 'photo'"
    ):
        prompts(eye, folder, row, columns=Columns(images="foto"))


def test_messages_are_asked_with_media_as_a_row_would_be(eye: Rig, folder: Path) -> None:
    encoder = ChatEncoder(DataConfig(apply_chat_template=True), eye.tokenizer, eye.processor)
    content = [
        {"type": "image", "image": Image.open(folder / "a.png")},
        {"type": "text", "text": "what?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    asked = encoder.ask(messages, "the conversation")
    (prompt,) = prompts(eye, folder, {"prompt": "what?", "image": "a.png"}, system="Be brief.")
    assert asked.token_ids == prompt.token_ids and asked.id == ""
    assert torch.equal(asked.media["pixel_values"].values, prompt.media["pixel_values"].values)
    more = encoder.ask(
        [
            *messages,
            {"role": "assistant", "content": "a cat"},
            {"role": "user", "content": "sure?"},
        ],
        "it",
    )
    assert more.token_ids[: len(asked.token_ids)] == asked.token_ids
    assert (
        "an <image> tag" in encoder.ask([{"role": "user", "content": "an <image> tag"}], "it").text
    )
    with pytest.raises(
        MalformedRow, match=r"^the conversation, message 1, image: 'gone\.png': there is no file"
    ):
        encoder.ask(
            [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}],
            "the conversation",
        )
    plain = ChatEncoder(DataConfig(apply_chat_template=True), eye.tokenizer).ask(
        [{"role": "user", "content": "hi"}], "the conversation"
    )
    assert plain.media == {} and "hi" in plain.text


STRINGS = (  # takes no parts
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (  # takes nothing else
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}{% if "
    "p['type'] == 'image' %}<|image_pad|>{% elif p['type'] == 'text' %}{{ p['text'] }}{% endif "
    "%}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
SORTED = (  # writes pictures before any text
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ "
    "m['content'] }}{% else %}{% for p in m['content'] | selectattr('type', 'equalto', 'image') "
    "%}<|image_pad|>{% endfor %}{% for p in m['content'] | selectattr('type', 'equalto', 'text') "
    "%}{{ p['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
FIRST_ONLY = PARTS.replace(
    "{% if p['type'] == 'image' %}", "{% if p['type'] == 'image' and loop.first %}"
)


def test_chat_templates_that_take_strings_or_parts_alone_write_media_too(
    eye: Rig, folder: Path
) -> None:
    row = {
        "prompt": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "see <image> it"},
        ],
        "image": "a.png",
    }
    before = eye.tokenizer.chat_template
    try:
        for template, expected in (
            (STRINGS, "user\nsee <|vision_start|><|image_pad|><|vision_end|> it<"),
            (PARTS, "user\nsee <|image_pad|> it<"),
            (SORTED, "user\n<|image_pad|>see  it<"),
        ):
            eye.tokenizer.chat_template = template
            (prompt,) = prompts(eye, folder, row)
            assert expected in prompt.text and "system\ns<" in prompt.text
        eye.tokenizer.chat_template = FIRST_ONLY
        with pytest.raises(
            MalformedRow,
            match=r"line 1: the chat template writes '<\|image_pad\|>' 1 times for 2 items",
        ):
            prompts(eye, folder, {"prompt": "x", "images": ["a.png", "b.png"]})
    finally:
        eye.tokenizer.chat_template = before


def test_marks_in_a_column_that_the_template_names_are_refused_whether_or_not_the_row_has_media(
    eye: Rig, folder: Path
) -> None:
    row = {"prompt": "x", "hint": "\ufdd2image:0\ufdd3"}
    for more in ({}, {"image": "a.png"}):
        with pytest.raises(MalformedRow, match=r"line 1: \{hint\} of data\.template holds U\+FDD2"):
            prompts(eye, folder, {**row, **more}, template="{hint} {prompt}")
    plain = PromptDataset(
        config_of(written(folder, [row]), template="{hint} {prompt}", apply_chat_template=False),
        eye.tokenizer,
        seed=0,
    )
    assert plain[0].text == "\ufdd2image:0\ufdd3 x"


def test_marks_in_tools_are_refused_by_a_model_that_reads_media(eye: Rig, folder: Path) -> None:
    tool = {"type": "function", "function": {"name": "a", "description": "\ufdd2image:0\ufdd3"}}
    before = eye.tokenizer.chat_template
    eye.tokenizer.chat_template = "{{ tools | tojson if tools }}" + str(before)
    try:
        row = {"prompt": "x", "image": "a.png", "tools": [tool]}
        with pytest.raises(MalformedRow, match=r"line 1: the tools hold U\+FDD2"):
            prompts(eye, folder, row)
        encoder = ChatEncoder(DataConfig(), eye.tokenizer, eye.processor)
        with pytest.raises(MalformedRow, match=r"the request: the tools hold U\+FDD2"):
            encoder.ask([{"role": "user", "content": "x"}], "the request", [tool])
    finally:
        eye.tokenizer.chat_template = before


def test_a_template_for_text_alone_leaves_out_nothing_that_belongs_around_an_item(
    ear: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # That tokens are not kept is said to the log file alone.
    caplog.set_level(logging.WARNING, "lightrft")
    talk = [{"role": "user", "content": "a <|audio_bos|><audio> or <audio>?"}]
    rows = [{"prompt": "who?", "audio": "s.wav"}, {"prompt": talk, "audios": ["s.wav", "s.wav"]}]
    own = prompts(ear, folder, *rows)
    assert not caplog.records
    monkeypatch.setattr(ear.tokenizer, "chat_template", STRINGS)
    found = prompts(ear, folder, *rows)
    assert "user\n<|audio_bos|><|AUDIO|><|audio_eos|>who?<" in found[0].text
    assert [p.token_ids for p in found] == [p.token_ids for p in own]
    said = (
        "the chat template takes no audio: each is written into the text of its message as "
        "'<|audio_bos|><|AUDIO|><|audio_eos|>'"
    )
    assert caplog.messages == [said]


def test_a_template_may_ask_one_question_of_every_picture(eye: Rig, folder: Path) -> None:
    (prompt,) = prompts(
        eye, folder, {"image": "a.png"}, template="What is it?", apply_chat_template=True
    )
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<" in prompt.text
    (prompt,) = prompts(
        eye,
        folder,
        {"prompt": "<image> or not", "image": "a.png"},
        template="Q: {prompt}?",
        apply_chat_template=True,
    )
    assert "Q: <|vision_start|><|image_pad|><|vision_end|> or not?" in prompt.text
    with pytest.raises(ConfigError, match="has no field"):
        PromptDataset(
            config_of(written(folder, [{"prompt": "x"}]), template="What?"), eye.tokenizer, seed=0
        )


def test_bounds_of_pixels_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="min_pixels = 9 is more than max_pixels = 4"):
        MediaConfig(min_pixels=9, max_pixels=4)
