"""Pictures and clips, family by family: the numbers and the text of transformers' own processors, and positions by the clock."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.attention.layouts import pack
from lightrft.models.loading.from_pretrained import load_model, load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.models.processors import load_processor
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, qwen, save_tiny_media, tiles
from lightrft.types import Batch, Extent, Prompt, Ragged, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import layouts_of, mixed_batch, mixed_prompts, random_media, rig
from tests.model_helpers import Float64

QWEN = tuple(qwen.FAMILIES)
SEEING = (*QWEN, *tiles.FAMILIES)
SIZES = [(20, 30), (9, 40), (33, 17), (16, 16), (100, 7), (61, 61)]
OWN = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "internvl": "InternVLProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
}


def own_processor(family, r, **fields):
    """The family's own class with what its constructor would set: the constructor itself wants torchvision."""
    own = object.__new__(getattr(transformers, OWN[family]))
    pictures = r.processor.parts["image"].processor
    tokens = {
        "image_token": r.processor.parts["image"].written,
        "video_token": getattr(r.processor.parts.get("video"), "written", None),
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
    }
    for name, value in {
        **tokens,
        "image_processor": pictures,
        "video_processor": pictures,
        **fields,
    }.items():
        setattr(own, name, value)
    return own


def picture(height, width, seed=0):
    return random_media("image", (height, width, 3), np.random.default_rng(seed))


def clip(frames, height, width, rate=2.0, seed=0):
    value, _ = random_media("video", (frames, height, width, 3), np.random.default_rng(seed))
    return value, Extent(value.shape, tuple(t / rate for t in range(frames)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", QWEN)
def test_pictures_of_qwen_are_those_of_its_own_processor(family, size, tmp_path):
    r = rig(family, tmp_path)
    part = r.processor.parts["image"]
    value, extent = picture(*size)
    made = part.processor(images=[Image.fromarray(value)], return_tensors="pt")
    found = part.inputs(value, extent)
    assert torch.equal(found["pixel_values"], made["pixel_values"]) and torch.equal(
        found["image_grid_thw"], made["image_grid_thw"]
    )
    assert part.placeholder_text(extent) == own_processor(family, r).replace_image_token(made, 0)


def patches_one_by_one(frames, grid, processor):
    """``frames [T, H, W, 3]``, resized: blocks of merged patches row by row, in each colour, time, height and width."""
    side, merge, step = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    mean, std = (np.array(x, np.float32) for x in (processor.image_mean, processor.image_std))
    scaled = (frames.astype(np.float32) / 255 - mean) / std
    rows = []
    for t in range(grid[0]):
        for block in np.ndindex(grid[1] // merge, grid[2] // merge):
            for inner in np.ndindex(merge, merge):
                top, left = ((b * merge + i) * side for b, i in zip(block, inner))
                cut = scaled[t * step : (t + 1) * step, top : top + side, left : left + side]
                rows.append(cut.transpose(3, 0, 1, 2).reshape(-1))
    return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("frames", [2, 5, 8])
@pytest.mark.parametrize("family", QWEN)
def test_clips_of_qwen_are_patches_of_consecutive_frames_with_the_last_repeated(
    family, frames, tmp_path
):
    r = rig(family, tmp_path)
    part = r.processor.parts["video"]
    value, extent = clip(frames, 23, 14)
    found = part.inputs(value, extent)
    grid = found["video_grid_thw"][0].tolist()
    assert grid[0] == (frames + 1) // 2
    taken = [*range(frames), frames - 1][: 2 * grid[0]]
    size = (grid[2] * part.processor.patch_size, grid[1] * part.processor.patch_size)
    resized = np.stack(
        [
            np.asarray(Image.fromarray(value[t]).resize(size, resample=part.processor.resample))
            for t in taken
        ]
    )
    torch.testing.assert_close(
        found["pixel_values_videos"],
        patches_one_by_one(resized, grid, part.processor),
        atol=1e-5,
        rtol=0,
    )
    metadata = SimpleNamespace(fps=2.0, frames_indices=list(range(frames)))
    inputs = {"video_grid_thw": found["video_grid_thw"], "video_metadata": [metadata]}
    text = part.placeholder_text(extent)
    assert text == own_processor(family, r).replace_video_token(inputs, 0)
    assert text.count("<|video_pad|>") == part.count(found)


def test_a_clip_of_qwen3_tells_when_each_pair_of_frames_was(tmp_path):
    part = rig("qwen3_vl", tmp_path).processor.parts["video"]
    pair = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    extent = Extent((3, 16, 16, 3), (0.0, 0.5, 4.0))
    assert part.placeholder_text(extent) == f"<0.2 seconds>{pair}<4.0 seconds>{pair}"


def test_clips_go_by_the_folders_own_settings_for_clips(tmp_path):
    save_tiny_media("qwen3_vl", tmp_path)
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
    fields["size"] = {"shortest_edge": 64, "longest_edge": 2048}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(fields))
    config = ModelConfig(path=str(tmp_path))
    processor = load_processor(config, load_tokenizer(config))
    assert processor.parts["image"].inputs(*picture(64, 64))["image_grid_thw"].tolist() == [
        [1, 8, 8]
    ]
    # 2048 pixels are for all eight frames together: 256 for each.
    assert processor.parts["video"].inputs(*clip(8, 64, 64))["video_grid_thw"].tolist() == [
        [4, 4, 4]
    ]
    one_frame = processor.limited(None, 64).parts["video"]
    assert one_frame.inputs(*clip(8, 64, 64))["video_grid_thw"].tolist() == [[4, 2, 2]]


@pytest.mark.parametrize(
    ("family", "frames"), [("qwen3_vl", 1), ("qwen3_vl", 4), ("qwen2_5_vl", 4)]
)
def test_a_clip_that_cannot_be_read_is_refused(family, frames, tmp_path):
    part = rig(family, tmp_path).processor.parts["video"]
    value, extent = clip(frames, 16, 16)
    untimed = Extent(extent.shape)
    with pytest.raises(ValueError, match="at least 2" if frames == 1 else "times are not known"):
        part.placeholder_text(untimed)
        part.inputs(value, untimed)


def timed_prompt(r, rate, frames=6):
    part = r.processor.parts["video"]
    value, extent = clip(frames, 16, 16, rate)
    text = f"see <|vision_start|>{part.placeholder_text(extent)}<|vision_end|> then?"
    media = {
        name: Ragged(x, torch.tensor([len(x)])) for name, x in part.inputs(value, extent).items()
    }
    return Prompt(id="", token_ids=r.tokenizer(text)["input_ids"], media=media)


def test_two_frame_rates_give_the_positions_that_the_models_own_rule_has(tmp_path):
    r = rig("qwen2_5_vl", tmp_path)
    model, found = r.actor.base, []
    for rate, seconds in ((2.0, 1), (1.0, 2)):
        prompt = timed_prompt(r, rate)
        assert prompt.media["second_per_grid_ts"].values.tolist() == [seconds]
        ids = torch.tensor([prompt.token_ids])
        types = 2 * (ids == r.processor.tokens["video"]).long()
        grid = prompt.media["video_grid_thw"].values
        own, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=types,
            video_grid_thw=grid,
            second_per_grid_ts=torch.tensor([float(seconds)]),
        )
        positions = merge_multimodal_inputs(
            model, r.actor.family, Segments.of_prompts([prompt])
        ).positions
        assert torch.equal(positions, own[:, 0])
        per_second = model.config.vision_config.tokens_per_second
        first = prompt.token_ids.index(r.processor.tokens["video"])
        assert positions[0, first : first + 12 : 4].tolist() == [
            first + t * per_second * seconds for t in range(3)
        ]
        found.append(positions)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", QWEN)
def test_answers_to_a_long_clip_go_on_where_the_models_own_forward_does(family, tmp_path):
    """The clip's last frames are at later positions than the text that follows it."""
    r = rig(family, tmp_path, torch.float64)
    prompt = timed_prompt(r, 0.25, frames=40)
    batch = Batch(
        Segments.of_prompts([prompt]), Segments.of([[5, 6, 7], [8, 9]]), torch.tensor([0, 0])
    )
    with Float64(), torch.no_grad():
        expected = r.actor.own_logprobs(batch)
        for layout in layouts_of(r.actor):
            r.actor.layout = layout
            assert (
                r.actor.score(batch).logprobs - expected
            ).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("size", SIZES)
def test_tiles_of_internvl_are_those_of_its_own_processor(size, tmp_path):
    r = rig("internvl", tmp_path)
    part = r.processor.parts["image"]
    value, extent = picture(*size)
    made = part.processor(
        images=[Image.fromarray(value)], crop_to_patches=True, return_tensors="pt"
    )
    found = part.inputs(value, extent)
    assert torch.equal(found["pixel_values"], made["pixel_values"])
    own = own_processor("internvl", r, image_seq_length=4)
    assert part.placeholder_text(extent) == own.replace_image_token(made, 0)
    assert part.placeholder_text(extent).count(part.written) == part.count(found)


def test_bounds_of_internvl_are_counts_of_tiles(tmp_path):
    part = rig("internvl", tmp_path).processor.parts["image"]
    value, extent = picture(30, 33)
    tiles_of = lambda p: len(p.inputs(value, extent)["pixel_values"])  # noqa: E731
    assert tiles_of(part) == 5  # two by two, and the whole
    assert tiles_of(part.limited(None, 400)) == 1
    assert tiles_of(part.limited(7 * 256, 9 * 256)) == 10
    limited = part.limited(7 * 256, 9 * 256)
    assert (
        limited.placeholder_text(extent).count(part.written)
        == limited.count(limited.inputs(value, extent))
        == 40
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("most", [9, 2])
def test_tiles_of_onevision_are_as_many_features_as_its_processor_and_its_model_have(
    size, most, tmp_path
):
    r = rig("llava_onevision", tmp_path)
    edit(r.path / "config.json", vision_aspect_ratio=f"anyres_max_{most}")
    config = ModelConfig(path=str(r.path))
    part = load_processor(config, r.tokenizer).parts["image"]
    value, extent = picture(*size)
    made = part.processor(images=[Image.fromarray(value)], return_tensors="pt")
    found = part.inputs(value, extent)
    assert torch.equal(found["pixel_values"], made["pixel_values"][0]) and torch.equal(
        found["image_sizes"], made["image_sizes"]
    )
    fields = {
        "num_image_tokens": 9,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": f"anyres_max_{most}",
    }
    own = own_processor("llava_onevision", r, **fields)
    assert part.placeholder_text(extent) == own.replace_image_token(made, 0)
    model = load_model(config)
    features = r.actor.family.reader.towers[0].features(model, found).values
    assert len(features) == part.count(found) == part.placeholder_text(extent).count("<image>")


def test_tiles_of_onevision_at_real_sizes_are_counted_as_its_processor_does(tmp_path):
    grids = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
    r = rig("llava_onevision", tmp_path, tower={"image_size": 384, "patch_size": 14})
    for name in ("config.json", "preprocessor_config.json"):
        edit(r.path / name, image_grid_pinpoints=grids)
    edit(r.path / "preprocessor_config.json", size={"height": 384, "width": 384})
    part = load_processor(ModelConfig(path=str(r.path)), r.tokenizer).parts["image"]
    own = own_processor(
        "llava_onevision",
        r,
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
        image_processor=part.processor,
    )
    rng = np.random.default_rng(0)
    for height, width in rng.integers(20, 4000, size=(60, 2)).tolist():
        expected = own._get_number_of_features(height, width, 384, 384)
        assert len(part.placeholder_text(Extent((height, width, 3)))) == len("<image>") * expected


def test_clips_of_onevision_are_whole_frames_and_one_mark(tmp_path):
    r = rig("llava_onevision", tmp_path)
    part = r.processor.parts["video"]
    value, extent = clip(3, 20, 31)
    found = part.inputs(value, extent)
    frames = np.stack(
        [
            np.asarray(Image.fromarray(f).resize((12, 12), resample=Image.Resampling.BICUBIC))
            for f in value
        ]
    )
    mean, std = (np.array(x) for x in (part.processor.image_mean, part.processor.image_std))
    expected = torch.from_numpy(((frames / 255 - mean) / std).transpose(0, 3, 1, 2)).float()
    torch.testing.assert_close(found["pixel_values_videos"], expected, atol=1e-5, rtol=0)
    own = own_processor("llava_onevision", r, num_image_tokens=9)
    assert part.placeholder_text(extent) == own.replace_video_token(
        {"pixel_values_videos": [found["pixel_values_videos"]]}, 0
    )
    assert part.placeholder_text(extent).count("<video>") == part.count(found) == 13


def test_bounds_of_onevision_shrink_and_enlarge_the_picture_first(tmp_path):
    r = rig("llava_onevision", tmp_path)
    value, extent = picture(40, 80)
    small = r.processor.limited(None, 200).parts["image"]
    assert small.inputs(value, extent)["image_sizes"].tolist() == [[10, 20]]
    large = r.processor.limited(12800, None).parts["image"]
    assert large.inputs(value, extent)["image_sizes"].tolist() == [[80, 160]]
    for part in (small, large):
        assert part.placeholder_text(extent).count("<image>") == part.count(
            part.inputs(value, extent)
        )


def test_tiles_that_model_and_processor_see_differently_are_an_error(tmp_path):
    r = rig("llava_onevision", tmp_path)
    edit(r.path / "preprocessor_config.json", image_grid_pinpoints=[[12, 12]])
    with pytest.raises(ModelError, match="image_grid_pinpoints differ"):
        load_processor(ModelConfig(path=str(r.path)), r.tokenizer)


def test_clips_of_two_lengths_in_a_prompt_are_scored_and_their_check_says_why_it_cannot_be_made(
    tmp_path,
):
    r = rig("llava_onevision", tmp_path)
    two = r.prompt("", ("video", (2, 12, 12, 3)), "and", ("video", (3, 16, 12, 3)))
    batch = Batch(Segments.of_prompts([two]), Segments.of([[5, 6, 7]]), torch.tensor([0]))
    ends = (
        r.actor.family.reader.towers[1]
        .features(r.actor.base, {k: x.values for k, x in two.media.items()})
        .values[[8, 21]]
    )
    assert torch.equal(ends, r.actor.base.model.image_newline.expand(2, -1))
    assert r.actor.score(batch).logprobs.shape == (3,)
    with pytest.raises(ModelError, match=r"clips of 2, 3 frames.*model\.check_layout"):
        check_layout(r.actor, batch)


def test_a_folder_may_be_named_from_the_home_folder(tmp_path, monkeypatch):
    r = rig("llava_onevision", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    processor = load_processor(ModelConfig(path="~/llava_onevision"), r.tokenizer)
    assert processor.tokens == r.processor.tokens


def edit(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_a_saved_folder_loads_with_equal_log_probs(family, tmp_path):
    r = rig(family, tmp_path)
    batch = mixed_batch(mixed_prompts(r))
    save_tiny_media(family, tmp_path / "again")
    again = Actor.load(ModelConfig(path=str(tmp_path / "again")))
    with torch.no_grad():
        found = r.actor.score(batch).logprobs
        assert torch.equal(again.score(batch).logprobs, found)


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_a_processor_that_was_saved_makes_the_same_of_everything(family, tmp_path):
    r = rig(family, tmp_path)
    save_model(r.actor, r.tokenizer, tmp_path / "saved", processor=r.processor)
    config = ModelConfig(path=str(tmp_path / "saved"))
    again = load_processor(config, load_tokenizer(config))
    rng = np.random.default_rng(0)
    for kind, shape in (("image", (20, 30, 3)), ("video", (5, 16, 24, 3)), ("audio", (7000,))):
        if kind in r.kinds:
            value, extent = random_media(kind, shape, rng)
            assert again.parts[kind].placeholder_text(extent) == r.processor.parts[
                kind
            ].placeholder_text(extent)
            first, second = (p.parts[kind].inputs(value, extent) for p in (r.processor, again))
            assert first.keys() == second.keys() and all(
                torch.equal(first[k], second[k]) for k in first
            )


@pytest.mark.parametrize("family", SEEING)
def test_transformers_loads_the_folder_by_its_automatic_classes(family, tmp_path):
    r = rig(family, tmp_path)
    save_model(r.actor, r.tokenizer, tmp_path / "saved", processor=r.processor)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(model) is type(r.actor.base)
    pictures = AutoImageProcessor.from_pretrained(tmp_path / "saved")
    value, extent = picture(20, 30)
    options = {"crop_to_patches": True} if family == "internvl" else {}
    made = pictures(images=[Image.fromarray(value)], return_tensors="pt", **options)["pixel_values"]
    expected = r.processor.parts["image"].inputs(value, extent)["pixel_values"]
    assert torch.equal(made.reshape(expected.shape), expected)
    with torch.no_grad():
        batch = mixed_batch(mixed_prompts(r)[:1])
        packed = pack(batch, "padded")
        assert torch.equal(model(**packed.inputs).logits, r.actor.base(**packed.inputs).logits)
