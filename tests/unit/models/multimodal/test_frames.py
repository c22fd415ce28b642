"""Frames, sizes and positions of clips: those that the video processors of transformers have."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import transformers.utils.import_utils
import transformers.video_processing_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from lightrft.config.data import DataConfig
from lightrft.config.model import ModelConfig
from lightrft.datasets.media.video import VideoSettings
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.types import Batch, Extent, Segments
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import clip

DEFAULT = ("llava_onevision", "llava_next_video", "video_llava")
"""Families whose video processor takes frames as ``default_sample_indices_fn`` does."""
TRANSFORMS = "torchvision.transforms.v2.functional"
"""The module that the video processors import, and that neither sampling nor sizes use."""


@pytest.fixture(scope="module")
def own() -> Iterator[SimpleNamespace]:
    """Yield the video processors of transformers. Their frames and sizes need no torchvision."""
    assert transformers.video_processing_utils
    parents = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2", TRANSFORMS]
    empty = {name: ModuleType(name) for name in parents}
    empty[parents[2]].functional = empty[TRANSFORMS]  # type: ignore[attr-defined]
    before = set(sys.modules)
    sys.modules.update({name: module for name, module in empty.items() if name not in before})
    try:
        two, three = (
            importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
            for name in ("qwen2_vl", "qwen3_vl")
        )
        # their constructors ask for the package, and compute nothing with it
        with pytest.MonkeyPatch.context() as patch:
            mapping = transformers.utils.import_utils.BACKENDS_MAPPING
            patch.setitem(mapping, "torchvision", (lambda: True, ""))
            yield SimpleNamespace(two=two, three=three)
    finally:
        for name in set(sys.modules) - before:
            if "torchvision" in name or "video_processing_qwen" in name:
                del sys.modules[name]


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    folder = tmp_path_factory.mktemp("eyes")
    names = ("qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_vl", *DEFAULT)
    return {name: rig(name, folder) for name in names}


def indices(own: SimpleNamespace, family: str, total: int, rate: float, **options: Any) -> list:
    """Return what ``sample_frames`` of the family's processor returns."""
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    if family in DEFAULT:
        return default_sample_indices_fn(metadata, **options).tolist()
    if family == "qwen3_vl":
        made = own.three.Qwen3VLVideoProcessor(max_frames=options.pop("max_frames", 768))
    else:
        made = own.two.Qwen2VLVideoProcessor()
    return made.sample_frames(metadata, **options).tolist()


def rule(eyes: dict[str, Rig], family: str) -> Any:
    return eyes[family].processor.parts["video"].frames


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(2, 2000),
    rate=st.sampled_from([1.0, 8.0, 12.5, 15.0, 23.976, 24.0, 25.0, 29.97, 30.0, 50.0, 60.0]),
    fps=st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0, 7.5]),
    most=st.sampled_from([4, 7, 64, 768]),
    family=st.sampled_from(["qwen2_5_vl", "qwen2_5_omni_thinker", "qwen3_vl"]),
)
def test_the_frames_of_a_clip_are_those_that_transformers_samples(
    own: Any, eyes: dict[str, Rig], total: int, rate: float, fps: float, most: int, family: str
) -> None:
    asked = VideoSettings(fps, most, None, 10**9, least=eyes[family].processor.parts["video"].least)
    found = rule(eyes, family).select(total, rate, asked)
    expected = indices(own, family, total, rate, fps=fps, max_frames=most)
    # by rounding, transformers may add an index behind the last frame
    assert found == [k for k in expected if k < total]
    told = rule(eyes, family).rate(total, rate, len(found), asked)
    seen = VideoMetadata(total, fps=rate, frames_indices=found).sampled_fps
    if family == "qwen2_5_omni_thinker":
        # its processor tells the requested rate
        assert told == fps
    else:
        assert told == pytest.approx(seen)


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(2, 500),
    count=st.integers(2, 60),
    family=st.sampled_from(["qwen2_5_vl", "qwen3_vl", "llava_onevision"]),
)
def test_an_exact_number_of_frames_is_that_of_transformers(
    own: Any, eyes: dict[str, Rig], total: int, count: int, family: str
) -> None:
    asked = VideoSettings(None, 9, None, 10**9, nframes=count)
    try:
        expected = indices(own, family, total, 25.0, num_frames=count)
    except ValueError:
        expected = None
    if expected is None or count > total:
        if family != "qwen3_vl":
            with pytest.raises(ValueError, match=f"nframes = {count}, and the clip has {total}"):
                rule(eyes, family).select(total, 25.0, asked)
    else:
        found = rule(eyes, family).select(total, 25.0, asked)
        # by rounding, transformers may add an index behind the last frame
        assert found == [k for k in expected if k < total]


@pytest.mark.parametrize("family", DEFAULT)
def test_a_family_without_a_rule_takes_frames_as_the_default_of_transformers(
    own: Any, eyes: dict[str, Rig], family: str
) -> None:
    for total in (1, 3, 17, 100):
        for rate in (8.0, 25.0):
            asked = VideoSettings(2.0, 768, None, 10**9)
            found = rule(eyes, family).select(total, rate, asked)
            assert found == indices(own, family, total, rate, fps=2.0)


def prompt_of(r: Rig, folder: Path, row: dict[str, Any], **media: Any) -> Any:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(
        sources=[str(folder / "rows.jsonl")],  # type: ignore[arg-type]
        media=media,  # type: ignore[arg-type]
        max_prompt_tokens=100_000,
        token_cache=None,
    )
    (prompt,) = PromptDataset(config, r.tokenizer, seed=0, processor=r.processor)
    return prompt


def told_by_omni(taken: list[int], **videos: Any) -> float:
    """Return the seconds of a patch of frames that the processor of Qwen2.5-Omni tells its model."""
    module = importlib.import_module("transformers.models.qwen2_5_omni.processing_qwen2_5_omni")
    grid = torch.tensor([[(len(taken) + 1) // 2, 2, 2]])

    class Frames:
        temporal_patch_size = 2

        def __call__(self, *given: Any, **kwargs: Any) -> dict[str, Any]:
            return {"video_grid_thw": grid}

    without = SimpleNamespace(video_processor=Frames(), replace_video_token=lambda *a, **k: "")
    process = module.Qwen2_5OmniProcessor._process_videos
    made, _ = process(without, [taken], videos_kwargs=videos)
    return made["video_second_per_grid"][0]


@pytest.mark.parametrize("name", ["c.mp4", "c.mkv"])
@pytest.mark.parametrize(("rate", "frames"), [(15, 60), (25, 100), (15, 36), (25, 3)])
def test_positions_and_log_probs_of_a_clip_are_those_of_its_sampled_rate(
    own: Any, eyes: dict[str, Rig], rate: int, frames: int, name: str, tmp_path: Path
) -> None:
    r = eyes["qwen2_5_vl"]
    taken = indices(own, "qwen2_5_vl", frames, rate, fps=2.0)
    seconds = 2 / VideoMetadata(frames, fps=rate, frames_indices=taken).sampled_fps
    clip(tmp_path / name, frames=frames, rate=rate)
    prompt = prompt_of(r, tmp_path, {"prompt": "<video>then?", "video": name})
    plain = transformers.AutoModelForImageTextToText.from_pretrained(r.path)
    ids = torch.tensor([prompt.token_ids])
    types = 2 * (ids == r.processor.tokens["video"]).long()
    model = {
        "mm_token_type_ids": types,
        "video_grid_thw": prompt.media["video_grid_thw"].values,
        "second_per_grid_ts": torch.tensor([seconds]),
    }
    positions, _ = plain.model.get_rope_index(ids, **model)
    merged = compare_clip(r, prompt, positions, len(taken), seconds)
    model["mm_token_type_ids"] = torch.cat([types, torch.zeros(1, 3, dtype=torch.long)], 1)
    compare_log_probs(r, prompt, plain, model)
    if (rate, frames) in ((15, 60), (25, 100)):
        assert steps(r, prompt, merged) == whole_seconds(r)


@pytest.mark.parametrize(
    ("rate", "frames", "media"),
    [
        *((rate, 4 * rate, {}) for rate in (8, 12, 15, 24, 25, 30, 60)),
        *((rate, 7, {}) for rate in (5, 15, 25)),
        *((15, 45, {"fps": fps}) for fps in (1.0, 3.0, 4.0)),
        (25, 50, {"fps": 5.0}),
        *((rate, 4 * rate, {"max_frames": 4}) for rate in (15, 25)),
        (15, 60, {"fps": 4.0, "max_frames": 6}),
        *((rate, 2 * rate, {"nframes": 8}) for rate in (15, 25)),
    ],
)
def test_positions_and_log_probs_of_a_clip_of_omni_are_those_of_the_requested_rate(
    own: Any,
    eyes: dict[str, Rig],
    rate: int,
    frames: int,
    media: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The processor of Qwen2.5-Omni tells its model the requested rate, not the sampled one."""
    family = "qwen2_5_omni_thinker"
    r = eyes[family]
    if "nframes" in media:
        taken = indices(own, family, frames, rate, num_frames=media["nframes"])
    else:
        taken = indices(own, family, frames, rate, **{"fps": 2.0, **media})
    seconds = told_by_omni(taken, **media)
    clip(tmp_path / "c.mp4", frames=frames, rate=rate)
    exact = {"nframes": media["nframes"]} if "nframes" in media else {}
    parts = [{"type": "video", "video": "c.mp4", **exact}, {"type": "text", "text": "then?"}]
    row = {"messages": [{"role": "user", "content": parts}]}
    prompt = prompt_of(r, tmp_path, row, **{k: v for k, v in media.items() if k not in exact})
    plain = transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(r.path)
    ids = torch.tensor([prompt.token_ids])
    grid = prompt.media["video_grid_thw"].values
    told = torch.tensor([seconds])
    positions, _ = plain.get_rope_index(
        ids, None, grid, torch.ones_like(ids), False, second_per_grids=told
    )
    merged = compare_clip(r, prompt, positions, len(taken), seconds)
    model = {
        "video_grid_thw": grid,
        "video_second_per_grid": told,
        "attention_mask": torch.ones(1, ids.shape[1] + 3, dtype=torch.long),
    }
    compare_log_probs(r, prompt, plain, model)
    if frames == 4 * rate and not media:
        assert steps(r, prompt, merged) == whole_seconds(r)


@pytest.mark.parametrize("name", ["c.mp4", "c.mkv"])
@pytest.mark.parametrize(
    ("rate", "frames", "media"),
    [
        *((rate, 4 * rate, {}) for rate in (8, 12, 15, 24, 25, 30, 60)),
        *((rate, 7, {}) for rate in (5, 15, 25)),
        *((15, 45, {"fps": fps}) for fps in (1.0, 3.0, 4.0)),
        (15, 60, {"fps": 4.0, "max_frames": 6}),
    ],
)
def test_times_positions_and_log_probs_of_a_clip_of_qwen3_vl_are_those_of_transformers(
    own: Any,
    eyes: dict[str, Rig],
    rate: int,
    frames: int,
    media: dict[str, Any],
    name: str,
    tmp_path: Path,
) -> None:
    """Its prompt tells the time of each two frames as text."""
    r = eyes["qwen3_vl"]
    taken = indices(own, "qwen3_vl", frames, rate, **{"fps": 2.0, **media})
    clip(tmp_path / name, frames=frames, rate=rate)
    prompt = prompt_of(r, tmp_path, {"prompt": "<video>then?", "video": name}, **media)
    grid = prompt.media["video_grid_thw"].values
    ids = torch.tensor([prompt.token_ids])
    assert written_by_qwen3(r, taken, rate, grid) in r.tokenizer.decode(prompt.token_ids)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(r.path)
    types = 2 * (ids == r.processor.tokens["video"]).long()
    positions, _ = plain.model.get_rope_index(ids, types, video_grid_thw=grid)
    merged = merge_multimodal_inputs(r.actor.base, r.actor.family, Segments.of_prompts([prompt]))
    assert merged is not None and merged.positions is not None
    assert torch.equal(merged.positions, positions[:, 0])
    types = torch.cat([types, torch.zeros(1, 3, dtype=torch.long)], 1)
    compare_log_probs(r, prompt, plain, {"mm_token_type_ids": types, "video_grid_thw": grid})


def written_by_qwen3(r: Rig, taken: list[int], rate: float, grid: torch.Tensor) -> str:
    """Return the text with which the processor of Qwen3-VL replaces the mark of a clip."""
    module = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")
    of = module.Qwen3VLProcessor
    words = {
        kind: r.tokenizer.convert_ids_to_tokens(one) for kind, one in r.processor.tokens.items()
    }
    tower = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    given = SimpleNamespace(
        video_processor=tower,
        image_processor=tower,
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token=words["video"],
        _calculate_timestamps=lambda *a: of._calculate_timestamps(None, *a),
    )
    metadata = VideoMetadata(len(taken), fps=rate, frames_indices=list(taken))
    made = {"video_grid_thw": grid, "video_metadata": [metadata]}
    return of.replace_video_token(given, made, 0)


def compare_clip(
    r: Rig, prompt: Any, positions: torch.Tensor, taken: int, seconds: float
) -> torch.Tensor:
    """Compare frames, rate and positions of a prompt of one clip. Return the positions."""
    media = {key: rows.values for key, rows in prompt.media.items()}
    assert media["video_grid_thw"][0, 0] == (taken + 1) // 2
    assert media["second_per_grid_ts"].tolist() == pytest.approx([seconds])
    merged = merge_multimodal_inputs(r.actor.base, r.actor.family, Segments.of_prompts([prompt]))
    assert merged is not None and merged.positions is not None
    assert torch.equal(merged.positions, positions[:, 0])
    return merged.positions


def compare_log_probs(r: Rig, prompt: Any, plain: Any, model: dict[str, torch.Tensor]) -> None:
    """Compare the log-probs of a response with those of ``plain``, the model of transformers."""
    answer = [5, 6, 7]
    batch = Batch(Segments.of_prompts([prompt]), Segments.of([answer]), torch.tensor([0]))
    whole = torch.tensor([[*prompt.token_ids, *answer]])
    pixels = prompt.media["pixel_values_videos"].values
    with torch.no_grad():
        logits = plain(input_ids=whole, pixel_values_videos=pixels, **model).logits[0, -4:-1]
        expected = logits.log_softmax(-1)[torch.arange(3), torch.tensor(answer)]
        found = r.actor.score(batch).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def steps(r: Rig, prompt: Any, positions: torch.Tensor) -> list[int]:
    """Return the time positions of a clip, from the first on."""
    shown = torch.tensor(prompt.token_ids) == r.processor.tokens["video"]
    times = positions[0, shown].unique()
    return (times - times[0]).tolist()


def whole_seconds(r: Rig) -> list[int]:
    """Return the time positions of a clip of four seconds."""
    config = r.actor.base.config
    per_second = getattr(config, "position_id_per_seconds", None)
    per_second = per_second or config.vision_config.tokens_per_second
    return [second * per_second for second in range(4)]


def test_frames_of_a_rate_that_changes_go_by_their_times(eyes: dict[str, Rig]) -> None:
    asked = VideoSettings(1.0, 64, None, 10**9, rule=rule(eyes, "qwen2_5_vl"))
    # 8 frames in the first second, then one each second: 16 frames in 8 s
    times = [*(k / 8 for k in range(8)), *(float(k) for k in range(1, 9))]
    chosen, shown, told = asked.chosen(times, 2.0)
    assert shown == tuple(float(k) for k in range(8))
    assert [times[k] for k in chosen] == list(shown) and told == 1.0


def test_a_part_of_a_clip_is_the_frames_from_its_start_to_its_end(eyes: dict[str, Rig]) -> None:
    asked = VideoSettings(2.0, 64, None, 10**9, start=1.0, end=2.9, rule=rule(eyes, "qwen3_vl"))
    chosen, shown, told = asked.chosen([k / 10 for k in range(100)], 10.0)
    assert chosen[0] == 10 and chosen[-1] == 29 and len(chosen) == 4
    assert shown == tuple(k / 10 for k in chosen) and told == 2.0
    late = VideoSettings(2.0, 64, None, 10**9, start=12.0)
    with pytest.raises(ValueError, match=r"video_start = 12 .*the last frame is at 9\.9 s"):
        late.chosen([k / 10 for k in range(100)], 10.0)


def folder_with(folder: Path, family: str, **limits: Any) -> Path:
    """Write a tiny model with the settings of pictures that published folders have."""
    save_tiny_media(family, folder)
    file = folder / "preprocessor_config.json"
    fields = json.loads(file.read_text())
    del fields["size"]
    file.write_text(json.dumps({**fields, **limits}))
    return folder


LIMITS = [
    {},
    {"min_pixels": 256, "max_pixels": 4096},
    {"size": {"shortest_edge": 128, "longest_edge": 2048}, "max_pixels": 1024},
    {"size": {"shortest_edge": 128, "longest_edge": 2048}},
    {"max_pixels": 100_000, "cap_pixels_per_frame": True, "max_video_tokens": 100},
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_limits_of_the_folder_hold_for_clips_as_in_transformers(
    own: Any, family: str, limits: dict[str, Any], tmp_path: Path
) -> None:
    if not hasattr(own.two.Qwen2VLVideoProcessor, "cap_pixels_per_frame"):
        # older releases have no such limit to compare with
        limits = {name: value for name, value in limits.items() if name != "cap_pixels_per_frame"}
    config = ModelConfig(path=str(folder_with(tmp_path / "first", family, **limits)))
    processor = load_processor(config, load_tokenizer(config))
    assert processor is not None
    processor.save(tmp_path / "first")
    again = load_processor(config, load_tokenizer(config))
    assert again is not None
    fields = json.loads(
        (folder_with(tmp_path / "own", family, **limits) / "preprocessor_config.json").read_text()
    )
    kind = (
        own.three.Qwen3VLVideoProcessor if family == "qwen3_vl" else own.two.Qwen2VLVideoProcessor
    )
    theirs = kind(**fields)
    for frames, height, width in ((2, 20, 30), (4, 100, 300), (9, 640, 480), (40, 33, 17)):
        size: dict[str, Any] = {}

        def seen(image: Any, size: Any, resample: Any, kept: Any = size) -> Any:
            kept.update(height=size.height, width=size.width)
            return image

        base = transformers.video_processing_utils.BaseVideoProcessor
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "resize", lambda self, **given: seen(**given), raising=False)
            theirs.resize(
                torch.zeros(1, frames, 3, height, width),
                transformers.image_utils.SizeDict(**dict(theirs.size)),
                None,
                theirs.patch_size * theirs.merge_size,
                theirs.temporal_patch_size,
                cap_pixels_per_frame=fields.get("cap_pixels_per_frame", False),
            )
        expected = (size["height"] // theirs.patch_size, size["width"] // theirs.patch_size)
        for made in (processor, again):
            part = made.parts["video"]
            grid = part._grid(Extent((frames, height, width, 3)))
            assert tuple(grid[1:].tolist()) == expected


def test_published_limits_of_a_folder_hold_for_images_and_clips_alike(tmp_path: Path) -> None:
    """A clip of one frame has the size of the image."""
    config = ModelConfig(path=str(folder_with(tmp_path, "qwen2_vl", min_pixels=64, max_pixels=512)))
    processor = load_processor(config, load_tokenizer(config))
    assert processor is not None
    value = np.zeros((2, 200, 100, 3), np.uint8)
    image = processor.parts["image"].inputs(value[0], Extent(value.shape[1:]))
    video = processor.parts["video"].inputs(value, Extent(value.shape, (0.0, 0.5)))
    assert image["image_grid_thw"].tolist() == video["video_grid_thw"].tolist() == [[1, 8, 4]]


@pytest.mark.parametrize(
    ("seconds", "side", "said"), [(8, 64, True), (1, 64, False), (8, 600, False)]
)
def test_a_clip_that_reaches_beyond_the_text_after_it_is_reported(
    seconds: int, side: int, said: bool, eyes: dict[str, Rig], tmp_path: Path, caplog: Any
) -> None:
    r = eyes["qwen2_5_vl"]
    clip(tmp_path / "c.mp4", frames=8 * seconds, rate=8, height=side, width=side)
    caplog.set_level("WARNING", "lightrft")
    row = {"prompt": "<video>then?", "video": "c.mp4"}
    prompt = prompt_of(r, tmp_path, row, max_pixels=side**2)
    positions = merge_multimodal_inputs(
        r.actor.base, r.actor.family, Segments.of_prompts([prompt])
    ).positions
    shown = torch.tensor(prompt.token_ids) == r.processor.tokens["video"]
    text = positions[:, int(shown.nonzero().max()) + 1 :]
    assert (int(text.min()) <= int(positions[:, shown].max())) == said
    assert any("reaches position" in message for message in caplog.messages) == said
