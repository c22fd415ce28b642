"""Pictures at one size (Gemma 3) and in crops (SmolVLM): the numbers and the text of transformers' own processors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from lightrft.config.model import ModelConfig
from lightrft.models import ActorVL
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.multimodal.merge_inputs import merge_multimodal_inputs
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.types import Batch, Extent, Ragged, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import mixed_prompts, rig
from tests.model_helpers import Float64

SIZES = [(1, 1), (20, 30), (9, 40), (33, 17), (16, 16), (200, 30), (31, 32), (120, 7), (77, 300)]
PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def picture(height, width):
    return (
        np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    )


def part_of(family, folder, **processor):
    save_tiny_media(family, folder, processor=processor)
    config = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(config)
    return load_processor(config, tokenizer).parts["image"], tokenizer


def gemma_own(tokenizer):
    """``Gemma3Processor`` over a tokenizer that names the three tokens as the family's does."""
    for name, text in (
        ("boi", "<start_of_image>"),
        ("eoi", "<end_of_image>"),
        ("image", "<image_soft_token>"),
    ):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 24, "width": 24}), tokenizer, image_seq_length=9
    )


@pytest.mark.parametrize("crops", [{}, PAN])
@pytest.mark.parametrize("size", SIZES)
def test_gemma_pictures_and_prompts_are_those_of_the_familys_own_processor(tmp_path, size, crops):
    part, tokenizer = part_of("gemma3", tmp_path, **crops)
    value, extent, text = picture(*size), Extent((*size, 3)), f"see {part.written} now"
    found = part.inputs(value, extent)
    ids = tokenizer(
        text.replace(part.written, part.placeholder_text(extent)), add_special_tokens=False
    )["input_ids"]
    made = gemma_own(tokenizer)(
        images=[[Image.fromarray(value)]], text=[text], return_tensors="pt", **crops
    )
    assert torch.equal(found["pixel_values"], made["pixel_values"])
    assert ids == made["input_ids"][0].tolist()
    assert part.count(found) == int(made["token_type_ids"].sum()) == 9 * len(found["pixel_values"])


def test_gemma_crops_are_off_until_the_folder_turns_them_on_and_null_settings_have_the_familys_values(
    tmp_path,
):
    wide = Extent((300, 900, 3))
    assert (
        part_of("gemma3", tmp_path / "off")[0].placeholder_text(wide).count("<start_of_image>") == 1
    )
    assert (
        part_of("gemma3", tmp_path / "on", do_pan_and_scan=True)[0]
        .placeholder_text(wide)
        .count("<start_of_image>")
        == 4
    )


@pytest.mark.parametrize(
    "options", [{}, {"do_image_splitting": False}, {"size": {"longest_edge": 50}}]
)
@pytest.mark.parametrize("size", SIZES)
def test_smolvlm_crops_are_those_of_the_familys_own_processor_and_the_text_names_each(
    tmp_path, size, options
):
    part, _ = part_of("smolvlm", tmp_path, **options)
    settings = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, **options}
    own = SmolVLMImageProcessorPil(**settings)
    value, extent = picture(*size), Extent((*size, 3))
    made = own(images=[Image.fromarray(value)], return_row_col_info=True, return_tensors="pt")
    found = part.inputs(value, extent)
    assert torch.equal(found["pixel_values"], made["pixel_values"][0])
    assert bool(made["pixel_attention_mask"].all())
    rows, columns, text = made["rows"][0][0], made["cols"][0][0], part.placeholder_text(extent)
    assert text.count("<image>") == part.count(found) == 4 * (rows * columns + 1)
    assert [f"<row_{r + 1}_col_{c + 1}>" in text for r in range(rows) for c in range(columns)] == [
        True
    ] * rows * columns


def test_smolvlm_grids_fit_pictures_of_every_shape(tmp_path):
    """At sizes where rounding could go either way."""
    part, _ = part_of("smolvlm", tmp_path, size={"longest_edge": 100})
    own = part.processor
    for height in range(1, 60, 3):
        for width in range(1, 60, 4):
            made = own(images=[Image.fromarray(picture(height, width))], return_row_col_info=True)
            crops = len(made["pixel_values"][0])
            assert (
                part.placeholder_text(Extent((height, width, 3))).count("<image>") == 4 * crops
            ), (height, width)


def test_smolvlm_writes_rows_of_crops_and_then_the_whole_picture(tmp_path):
    part, _ = part_of("smolvlm", tmp_path)
    four, fake = "<image>" * 4, "<fake_token_around_image>"
    assert part.placeholder_text(Extent((32, 16, 3))) == (
        f"{fake}<row_1_col_1>{four}\n{fake}<row_2_col_1>{four}\n\n{fake}<global-img>{four}{fake}"
    )
    single = part_of("smolvlm", tmp_path / "one", do_image_splitting=False)[0]
    assert single.placeholder_text(Extent((32, 16, 3))) == f"{fake}<global-img>{four}{fake}"


def test_bounds_on_pixels_lower_the_number_of_smolvlm_crops(tmp_path):
    part, _ = part_of("smolvlm", tmp_path, size={"longest_edge": 64})
    square = Extent((50, 50, 3))
    counts = [
        part.limited(None, most).placeholder_text(square).count("<image>")
        for most in (None, 64 * 64, 64 * 64 - 1, 900, 256)
    ]
    assert counts == [4 * 17, 4 * 17, 4 * 10, 4 * 1, 4 * 1]
    with pytest.raises(ModelError, match="max_pixels = 255"):
        part.limited(None, 255)
    with pytest.raises(ModelError, match="min_pixels = 257"):
        part.limited(257, None)


def test_bounds_that_a_fixed_size_breaks_are_an_error(tmp_path):
    part, _ = part_of("gemma3", tmp_path)
    assert part.limited(576, 576) is part
    with pytest.raises(
        ModelError, match="min_pixels = 577: this model reads pictures of 576 pixels"
    ):
        part.limited(577, None)
    with pytest.raises(ModelError, match="max_pixels = 575"):
        part.limited(None, 575)


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_a_saved_processor_reads_pictures_as_before(tmp_path, family):
    part, tokenizer = part_of(family, tmp_path / "first")
    save_tiny_media(family, tmp_path / "second")
    (tmp_path / "second" / "preprocessor_config.json").unlink()
    part.save(tmp_path / "second")
    config = ModelConfig(path=str(tmp_path / "second"))
    again = load_processor(config, tokenizer).parts["image"]
    value, extent = picture(20, 30), Extent((20, 30, 3))
    assert again.placeholder_text(extent) == part.placeholder_text(extent)
    assert torch.equal(
        again.inputs(value, extent)["pixel_values"], part.inputs(value, extent)["pixel_values"]
    )
    assert json.loads((tmp_path / "second" / "preprocessor_config.json").read_text())[
        "image_processor_type"
    ]


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_rectangles_filled_up_on_the_left_give_the_log_probs_of_plain_rows(tmp_path, family):
    r = rig(family, tmp_path, torch.float64)
    prompts = mixed_prompts(r)
    answers = torch.randint(4, 90, (len(prompts), 4), generator=torch.Generator().manual_seed(0))
    batch = Batch(
        Segments.of_prompts(prompts), Segments.of(answers.tolist()), torch.arange(len(prompts))
    )
    width = max(len(p.token_ids) for p in prompts)
    ids = torch.cat(
        [torch.tensor([[0] * (width - len(p.token_ids)) + p.token_ids for p in prompts]), answers],
        1,
    )
    mask = torch.tensor(
        [[0] * (width - len(p.token_ids)) + [1] * (len(p.token_ids) + 4) for p in prompts]
    )
    pixels = batch.prompts.media["pixel_values"].values
    with Float64(), torch.no_grad():
        expected = r.actor.own_logprobs(batch).view(-1, 4)
        found = ActorVL(r.actor.base, bf16=False)(ids, 4, mask, pixel_values=pixels)
    assert (found - expected).abs().max() < 1e-9


def test_spans_are_found_at_every_copy_of_a_prompt_and_end_where_it_ends(tmp_path):
    actor = rig("gemma3", tmp_path).actor
    soft = [actor.base.config.image_token_index] * 9
    media = {"pixel_values": Ragged(torch.rand(4, 3, 24, 24), torch.tensor([1, 1, 2]))}
    seen = merge_multimodal_inputs(
        actor.base, actor.family, Segments.of([soft, [*soft, 5], [6, *soft, *soft]], media)
    )
    first, second, third = range(9), range(9, 19), range(19, 38)
    row = [*first, *first, *second, *first, *third, -1, -1]
    assert seen.spans(torch.tensor(row)).runs == [(0, 9), (9, 9), (18, 9), (28, 9), (38, 18)]
    assert seen.spans(torch.tensor([18, -1])).runs == []


def test_a_sampled_placeholder_belongs_to_no_span(tmp_path):
    actor = rig("gemma3", tmp_path).actor
    token = actor.base.config.image_token_index
    media = {"pixel_values": Ragged(torch.rand(1, 3, 24, 24), torch.tensor([1]))}
    row = [5, *[token] * 9, token, token]
    seen = merge_multimodal_inputs(actor.base, actor.family, Segments.of([row], media), begun=[2])
    assert seen.spans(torch.arange(len(row))).runs == [(1, 9)]
