"""Families that read pictures by their own processor: the numbers of transformers' own forward on its own tensors."""

import copy
import inspect
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from lightrft.config.data import DataConfig, MediaConfig
from lightrft.config.model import ModelConfig
from lightrft.datasets.media.items import Item
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.models.actor import Actor
from lightrft.models.families import _OWN_MEDIA, family_of
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.multimodal.derived import AXIS, SHAPE, _joined
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.models.multimodal.towers import in_dtype
from lightrft.models.processors import load_processor
from lightrft.models.processors.base import bounded
from lightrft.models.processors.own import _TEXT, _check_neighbours, _longest
from lightrft.models.tiny import own, own_rows, tiny_media_model, tiny_media_tokenizer
from lightrft.serving.sample_encoder import SampleEncoder
from lightrft.types import Batch, Extent, Prompt, Ragged, Segments
from lightrft.utils.errors import DataError, ModelError
from tests.media_helpers import mixed_prompts, rig

IMAGE_FAMILIES = [name for name, tiny in own.FAMILIES.items() if "image" in tiny.written]
SOUND_FAMILIES = [name for name, tiny in own.FAMILIES.items() if "audio" in tiny.written]
SIZES = [(20, 30), (9, 40), (33, 17)]


def pictures(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*size, 3)).astype(np.uint8) for size in SIZES]


def prompt_of(r, values):
    """A prompt of text and ``values``, put together item by item."""
    part = r.processor.parts["image"]
    media = {}
    for value in values:
        for name, tensor in part.inputs(value, Extent(value.shape)).items():
            media.setdefault(name, []).append(tensor)
    items = [(part, Extent(value.shape)) for value in values]
    text = r.processor.expanded(["see", *[" or "] * len(items)], items)
    ids = r.tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = {n: Ragged(torch.cat(t), torch.tensor([sum(map(len, t))])) for n, t in media.items()}
    return Prompt("0", ids, text, media=rows)


def check_scores(r, prompt, inputs):
    """Compare the log-probs of an answer with the model's own forward on ``inputs`` of the family."""
    answer = [10, 20, 30]
    ids = torch.tensor([[*prompt.token_ids, *answer]])
    extra = {}
    if "mm_token_type_ids" in inspect.signature(r.actor.base.forward).parameters:
        own = r.processor.parts["image"]
        named = getattr(own.processor, "image_token_ids", None) or [r.processor.tokens["image"]]
        extra = {"mm_token_type_ids": torch.isin(ids, torch.tensor(named)).long()}
    if "moe_mm_token_type_ids" in inspect.signature(r.actor.base.forward).parameters:
        types = r.processor.parts["image"].processor.create_moe_mm_token_type_ids(ids.tolist())
        extra["moe_mm_token_type_ids"] = torch.tensor(types)
    if r.actor.family.is_prefix_lm:
        extra = {
            "token_type_ids": (torch.arange(ids.shape[1]) >= len(prompt.token_ids)).long()[None]
        }
    r.actor.use_attention("padded")
    with torch.no_grad():
        logits = r.actor.base(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **extra
        ).logits
        batch = Batch(Segments.of_prompts([prompt]), Segments.of([answer]), torch.tensor([0]))
        found = r.actor.score(batch).logprobs
    expected = logits[0, -4:-1].log_softmax(-1).gather(1, ids[0, -3:, None])[:, 0]
    assert found.tolist() == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_ids_and_log_probs_are_those_of_the_familys_processor_and_forward(family, tmp_path):
    r = rig(family, tmp_path)
    part = r.processor.parts["image"]
    values = pictures()[: 3 if part.several else 1]
    prompt = prompt_of(r, values)
    text = "see" + "".join(f"{part.written} or " for _ in values)
    own = r.actor.family.own
    start = [r.tokenizer.bos_token_id or r.tokenizer.eos_token_id]
    if own is not None and own.adds_start:
        # the chat template writes it, which this prompt lacks
        prompt.token_ids[:0] = start
    made = part.processor(
        text=[text],
        images=[[Image.fromarray(value) for value in values]],
        return_tensors="pt",
        text_kwargs={"add_special_tokens": False},
    )
    assert prompt.token_ids == made["input_ids"][0].tolist()
    media = {name: value for name, value in made.items() if name not in _TEXT}
    if "cross_attention_mask" in made:
        # As ``generate`` does, an answer attends to the pictures of the last token before it.
        seen = made["cross_attention_mask"]
        media["cross_attention_mask"] = torch.cat([seen, seen[:, -1:].expand(-1, 3, -1, -1)], 1)
    media = in_dtype(media, tuple(media), r.actor.base.dtype)  # Llama 4's processor writes bfloat16
    check_scores(r, prompt, media)


# The model class of glmasr expects other numbers of features than its processor for several windows.
@pytest.mark.parametrize(
    ("family", "lengths"),
    [(family, (9000,)) for family in SOUND_FAMILIES]
    + [(family, (9000, 5000)) for family in SOUND_FAMILIES]
    + [(family, (70000,)) for family in SOUND_FAMILIES if family != "glmasr"],
)
def test_sounds_are_read_as_the_familys_processor_and_forward_read_them(family, lengths, tmp_path):
    r = rig(family, tmp_path)
    part = r.processor.parts["audio"]
    if len(lengths) > 1 and not part.several:
        pytest.skip("a prompt with several sounds is refused")
    prompt = r.prompt("0", *[("audio", (length,)) for length in lengths], "who?", seed=3)
    rng = np.random.default_rng(3)
    sounds = [rng.normal(0, 0.1, size=(length,)).astype(np.float32) for length in lengths]
    text = prompt.text
    for length in lengths:
        text = text.replace(part.placeholder_text(Extent((length,))), part.written, 1)
    made = part.processor(
        text=[text], audio=sounds, return_tensors="pt", text_kwargs={"add_special_tokens": False}
    )
    assert made["input_ids"][0].tolist() == prompt.token_ids
    check_scores(r, prompt, {name: value for name, value in made.items() if name not in _TEXT})


@pytest.mark.parametrize("family", ["idefics2", "minicpmv4_6", "minicpmv4_7"])
@pytest.mark.parametrize(
    "pieces", [("", "", "", ""), ("a", "b", " c", ""), ("see ", "!", "<x>\n", "Which one?")]
)
def test_text_of_pictures_that_depends_on_its_place_is_that_of_the_processor(
    family, pieces, tmp_path
):
    r = rig(family, tmp_path)
    part = r.processor.parts["image"]
    assert not part.apart and part.several
    text = part.written.join(pieces)
    images = [Image.fromarray(value) for value in pictures()]
    made = part.processor(text=[text], images=[images], text_kwargs={"add_special_tokens": False})
    items = [(part, Extent(value.shape)) for value in pictures()]
    found = r.processor.expanded(pieces, items)
    assert r.tokenizer(found, add_special_tokens=False)["input_ids"] == list(made["input_ids"][0])
    apart = [part.placeholder_text(extent) for _, extent in items]
    assert found != "".join(a + b for a, b in zip(pieces, [*apart, ""]))


def test_a_processor_is_called_once_for_texts_that_differ_away_from_pictures(tmp_path):
    part = rig("idefics2", tmp_path).processor.parts["image"]
    shapes = [SIZES[0], SIZES[1]]
    shapes = [(*size, 3) for size in shapes]
    first = part.in_text(["one\n", "\nor two?", ""], shapes)
    known = dict(part._texts)
    second = part.in_text(["other words\n", "\nlonger than before?", ""], shapes)
    assert part._texts == known
    assert second == first.replace("one", "other words").replace("or two", "longer than before")


def test_a_processor_that_looks_further_than_the_words_beside_pictures_is_refused(tmp_path):
    part = rig("idefics2", tmp_path).processor.parts["image"]

    class Counting(type(part.processor)):
        def __call__(self, *, text, **options):
            return super().__call__(text=[f"{len(text[0])}{text[0]}"], **options)

    other = copy.copy(part.processor)
    other.__class__ = Counting
    with pytest.raises(ValueError, match="Counting: the text of one image depends on more than"):
        _check_neighbours(replace(part, processor=other, _texts={}))


def test_rows_with_pictures_side_by_side_have_the_ids_of_the_processor(tmp_path):
    r = rig("idefics2", tmp_path)
    part = r.processor.parts["image"]
    for number, value in enumerate(pictures()):
        Image.fromarray(value).save(tmp_path / f"{number}.png")
    content = "<image><image>beside this one: <image>"
    row = {"prompt": content, "images": ["0.png", "1.png", "2.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(sources=[{"path": str(tmp_path / "rows.jsonl")}], token_cache=None)
    (prompt,) = PromptDataset(data, r.tokenizer, seed=0, processor=r.processor)
    text = r.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.open(tmp_path / f"{number}.png") for number in range(3)]
    made = part.processor(text=[text], images=[images], text_kwargs={"add_special_tokens": False})
    assert prompt.token_ids == list(made["input_ids"][0])


def test_a_text_of_a_request_has_one_mark_for_each_picture_whose_text_depends_on_its_place(
    tmp_path,
):
    r = rig("idefics2", tmp_path)
    encoder = SampleEncoder(r.tokenizer, r.processor, MediaConfig(), len(r.tokenizer))
    items = []
    for number, value in enumerate(pictures()[:2]):
        Image.fromarray(value).save(tmp_path / f"{number}.png")
        items.append(Item("image", f"{number}.png", "images.0", tmp_path))
    part = r.processor.parts["image"]
    shapes = [value.shape for value in pictures()[:2]]
    found = encoder._with_places("a<image><image>b", items, "queries.0")
    assert found == part.in_text(["a", "", "b"], shapes)
    with pytest.raises(DataError, match=r"queries\.0 has 2 images, and 3 texts '<image>'"):
        encoder._with_places("a<image><image><image>b", items, "queries.0")


CLIP_FAMILIES = ["llava_next_video", "video_llava"]


@pytest.mark.parametrize("family", CLIP_FAMILIES)
def test_clips_are_read_as_the_familys_forward_reads_frames_that_clip_would_process(
    family, tmp_path
):
    r = rig(family, tmp_path)
    assert r.kinds == {"image", "video"}
    prompt = r.prompt("0", ("video", (3, 24, 36, 3)), "and then?", seed=5)
    clip = np.random.default_rng(5).integers(0, 256, size=(3, 24, 36, 3)).astype(np.uint8)
    frames = CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    pixels = frames([Image.fromarray(frame) for frame in clip], return_tensors="pt")["pixel_values"]
    check_scores(r, prompt, {"pixel_values_videos": pixels[None]})


@pytest.mark.parametrize("family", CLIP_FAMILIES)
def test_clips_of_unequal_length_are_computed_one_by_one(family, tmp_path):
    r = rig(family, tmp_path)
    pieces = [("video", (2, 24, 36, 3)), ("video", (4, 20, 20, 3))]
    both = r.prompt("0", *pieces, "and then?")
    with torch.no_grad():
        seen = merge_multimodal_inputs(r.actor.base, r.actor.family, Segments.of_prompts([both]))
        found = []
        part = r.processor.parts["video"]
        rng = np.random.default_rng(0)
        for _, shape in pieces:
            value = rng.integers(0, 256, size=shape).astype(np.uint8)
            made = part.inputs(value, Extent(shape))
            pixels = made["pixel_values_videos"].view(
                made["pixel_values_videos" + SHAPE][0].tolist()
            )
            output = r.actor.base.model.get_video_features(
                pixel_values_videos=pixels, return_dict=True
            )
            found.append(output.pooler_output.reshape(-1, seen.features.shape[1]))
    torch.testing.assert_close(seen.features, torch.cat(found))
    batch = Batch(Segments.of_prompts([both]), Segments.of([[10, 20]]), torch.tensor([0]))
    with pytest.raises(ModelError, match=r"clips of unequal length.*model\.check_layout=false"):
        r.actor.own_logprobs(batch)


def test_a_processor_that_joins_pictures_in_another_way_refuses_several(tmp_path):
    r = rig("llava", tmp_path)
    part = replace(r.processor.parts["image"], several=False)
    media = prompt_of(r, pictures()).media
    with pytest.raises(
        DataError, match=r"a prompt with 3 items of kind image: LlavaProcessor.*one by one"
    ):
        part.count({name: rows.values for name, rows in media.items()})


def test_limits_of_pixels_are_refused_where_every_picture_has_one_size(tmp_path):
    part = rig("llava", tmp_path).processor.parts["image"]
    with pytest.raises(ModelError, match="max_pixels = 64: this model reads pictures of 256"):
        part.limited(None, 64)


def test_limits_of_pixels_change_placeholders_and_features_alike(tmp_path):
    r = rig("exaone4_5", tmp_path)
    part = r.processor.parts["image"]
    value = np.full((64, 96, 3), 90, np.uint8)
    small = part.limited(None, 1024)
    counts = []
    for one in (part, small):
        inputs = one.inputs(value, Extent(value.shape))
        text = one.placeholder_text(Extent(value.shape))
        assert text.count(one.token) == one.count(inputs)
        counts.append(one.count(inputs))
    assert counts[1] < counts[0] / 3
    assert bounded(64, 96, None, 1024) == (26, 39)


def test_a_saved_processor_loads_in_transformers_and_makes_the_same_ids(tmp_path):
    r = rig("llava", tmp_path)
    r.processor.save(tmp_path / "llava")
    value = pictures()[0]
    part = r.processor.parts["image"]
    text = f"a{part.placeholder_text(Extent(value.shape))}b"
    mine = part.inputs(value, Extent(value.shape))["pixel_values"]
    # By default, torchvision resizes where it is installed, and rounds a colour to the next one.
    color = 1.01 / 255 / min(part.processor.image_processor.image_std)
    for options, bound in (({"backend": "pil"}, 0.0), ({}, color)):
        saved = AutoProcessor.from_pretrained(tmp_path / "llava", **options)
        made = saved(text=["a<image>b"], images=[Image.fromarray(value)], return_tensors="pt")
        assert made["input_ids"][0].tolist() == r.tokenizer(text)["input_ids"]
        torch.testing.assert_close(made["pixel_values"], mine, atol=bound, rtol=0)


def test_items_of_unequal_shape_are_padded_at_the_end_of_each_axis():
    first, second = torch.ones(1, 2, 3), 2 * torch.ones(2, 3, 2)
    media = {
        "x": torch.cat([first.flatten(), second.flatten()]),
        "x" + SHAPE: torch.tensor([[1, 2, 3], [2, 3, 2]]),
    }
    whole = _joined("x", media)
    assert whole.shape == (3, 3, 3)
    assert torch.equal(whole[:1, :2, :3], first)
    assert torch.equal(whole[1:, :, :2], second)
    assert whole.sum() == first.sum() + second.sum()
    assert _joined("x", media, 5).sum() == whole.sum() + 5 * (whole == 0).sum()


@pytest.mark.parametrize("family", ["phi4_multimodal"])
def test_masks_of_tiles_are_padded_as_the_processor_pads_them(family, tmp_path):
    r = rig(family, tmp_path)
    part = r.processor.parts["image"]
    values = [pictures()[0], np.full((24, 90, 3), 90, np.uint8)]
    media = {name: rows.values for name, rows in prompt_of(r, values).media.items()}
    assert len(set(media["image_attention_mask" + SHAPE][:, 1].tolist())) == 2
    images = [Image.fromarray(value) for value in values]
    made = part.processor(text=[2 * part.written], images=[images], return_tensors="pt")
    found = r.actor.family.reader.towers[0].adapt(r.actor.base.config, media)
    for name, value in found.items():
        assert torch.equal(value, made[name])


def test_the_axis_along_which_a_processor_joins_items_is_found(tmp_path):
    part = rig("minicpmv4_6", tmp_path).processor.parts["image"]
    assert part.rules == {"pixel_values": 3, "target_sizes": "rows"}
    first, second = torch.ones(1, 3, 4, 2), 2 * torch.ones(1, 3, 4, 5)
    media = {
        "x": torch.cat([first.movedim(3, 0), second.movedim(3, 0)]),
        "x" + AXIS: torch.tensor([[3], [3]]),
    }
    assert torch.equal(_joined("x", media), torch.cat([first, second], 3))


@pytest.mark.parametrize("family", ["perception_lm"])
def test_tiles_that_a_processor_does_not_pad_are_joined_along_their_axis(family, tmp_path):
    r = rig(family, tmp_path)
    part = r.processor.parts["image"]
    assert part.rules == {"pixel_values": 1} and not part.several
    wide, high = (np.full(shape, 90, np.uint8) for shape in ((16, 60, 3), (40, 16, 3)))
    made = [part.inputs(value, Extent(value.shape)) for value in (wide, high)]
    counts = [len(one["pixel_values"]) for one in made]
    assert counts[0] != counts[1]
    media = {name: torch.cat([one[name] for one in made]) for name in made[0]}
    assert _joined("pixel_values", media).shape == (1, sum(counts), 3, 16, 16)
    with pytest.raises(DataError, match="PerceptionLMProcessor reads several of one prompt"):
        part.count(media)


def test_media_without_places_are_an_error(tmp_path):
    r = rig("llava", tmp_path)
    prompt = mixed_prompts(r)[1]
    token = r.processor.tokens["image"]
    prompt.token_ids = [i for i in prompt.token_ids if i != token]
    with pytest.raises(ModelError, match=r"0 image tokens in the batch, but \d+ image features"):
        merge_multimodal_inputs(r.actor.base, r.actor.family, Segments.of_prompts([prompt]))


def test_a_folder_without_a_processor_is_refused(tmp_path: Path):
    r = rig("llava", tmp_path)
    (r.path / "preprocessor_config.json").unlink()
    config = ModelConfig(path=str(r.path))
    with pytest.raises(ModelError, match="how it reads media cannot be loaded"):
        load_processor(config, load_tokenizer(config))


LACKING = {
    # The picture processor of the first one alone has a form without torchvision.
    "PixtralProcessor": ("mistral3", "torchvision"),
    "Kimi_K25Processor": ("kimi_k25", "torchvision"),
    # torchaudio is missing when the first one is made, and when the second one is imported.
    "GraniteSpeechProcessor": ("granite_speech", "torchaudio"),
    "FunAsrNanoProcessor": ("fun_asr_nano", "torchaudio"),
}


@pytest.mark.parametrize("processor", LACKING)
def test_a_processor_is_refused_without_a_package_that_it_needs(processor, tmp_path):
    family, package = LACKING[processor]
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    tokenizer = tiny_media_tokenizer(family)
    save_model(tiny_media_model(family, tokenizer), tokenizer, tmp_path)
    if package == "torchaudio":
        fields = {"feature_extractor_type": own_rows.ROWS[family].extractor}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    message = rf"{processor} needs {package}.*fits torch.*pip install {package}"
    with pytest.raises(ModelError, match=message):
        load_processor(ModelConfig(path=str(tmp_path)), tokenizer)


def test_the_text_model_inside_decides_about_the_layout(tmp_path):
    r = rig("llava", tmp_path)
    config = r.actor.base.config
    assert family_of(config).layout == "prefix_shared"
    config.text_config.model_type = "falcon"
    assert family_of(config).layout == "padded"


# The modules of Phi-4 that compute features read token ids too, which differ between responses.
@pytest.mark.parametrize(
    "family", [n for n, row in _OWN_MEDIA.items() if row.forward and n != "phi4_multimodal"]
)
def test_towers_run_once_for_the_responses_of_a_prompt_with_the_numbers_of_one_by_one(
    family, tmp_path
):
    r = rig(family, tmp_path)
    prompt = next(prompt for prompt in mixed_prompts(r) if prompt.media)
    answers = Segments.of([[10, 20], [30], [40, 50, 60]])
    batch = Batch(Segments.of_prompts([prompt]), answers, torch.zeros(3, dtype=torch.long))
    towers = r.actor.family.reader.parts["tower"]
    convolutions = [
        module
        for name, module in r.actor.base.named_modules()
        if name.startswith(towers) and isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d)
    ]
    first = convolutions[0] if convolutions else r.actor.base.model.vision_tower.patch_embedding
    sizes = []
    first.register_forward_hook(lambda _, given, made: sizes.append(made.shape))
    with torch.no_grad():
        found = r.actor.score(batch).logprobs
        apart = [r.actor.score(batch.select(torch.tensor([b]))).logprobs for b in range(3)]
    assert len(sizes) == 4 and len(set(sizes)) == 1
    torch.testing.assert_close(found, torch.cat(apart), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Gemma3nAudioFeatureExtractor", "Gemma4AudioFeatureExtractor"])
def test_a_sound_that_the_processor_would_cut_is_refused_in_seconds(name, tmp_path):
    part = rig("audioflamingo3", tmp_path).processor.parts["audio"]
    assert part.longest == math.inf
    cut = replace(part, longest=_longest(getattr(transformers, name)()))
    assert cut.longest == 30 * 16000
    extent = Extent((30 * 16000 + 100,))
    assert cut.placeholder_text(extent) == part.placeholder_text(extent)
    with pytest.raises(ValueError, match=r"30\.5 s, and the model hears at most 30 s"):
        cut.placeholder_text(Extent((61 * 8000,)))


def test_a_scale_of_logits_that_a_class_leaves_out_is_refused(tmp_path):
    """Granite Speech was trained with it, and transformers 5.23 computes its logits without."""
    tokenizer = tiny_media_tokenizer("granite_speech")
    save_model(tiny_media_model("granite_speech", tokenizer), tokenizer, tmp_path)
    Actor.load(ModelConfig(path=str(tmp_path)))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["logits_scaling"] = 4.0
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"logits_scaling = 4\.0, which the class of transformers"):
        Actor.load(ModelConfig(path=str(tmp_path)))
