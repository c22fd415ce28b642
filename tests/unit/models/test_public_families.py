"""The documented actors on the tensors of each family's processor: the numbers of the model's own forward, row by row."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.models import ActorAL, ActorVL, CriticVL
from lightrft.models.tiny import own
from lightrft.utils.errors import ModelError
from tests.media_helpers import rig

IMAGE_FAMILIES = [name for name, tiny in own.FAMILIES.items() if "image" in tiny.written]
SOUND_FAMILIES = [name for name, tiny in own.FAMILIES.items() if "audio" in tiny.written]
ONE_LENGTH = ("granite_speech", "granite_speech_plus")
NUM, PAD, END = 3, 0, 3
LIMITS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
ENDS = {"eos_token_id": END, "pad_token_id": PAD}


def call(part, rows, kind):
    """Ids, mask and media of a batch, as the family's processor of transformers makes them."""
    processor, given = part.processor, {}
    processor.tokenizer.padding_side = "left"
    processor.tokenizer.pad_token_id = PAD
    if kind == "audio":
        given = {"audio": [clip for row in rows for clip in row], "sampling_rate": part.rate}
    elif any(rows):
        given = {"images": [[Image.fromarray(item) for item in row] for row in rows]}
    texts = ["see " + "".join(f"{part.written} or " for _ in row) + "one two" for row in rows]
    made = processor(
        text=texts,
        **given,
        return_tensors="pt",
        text_kwargs={"add_special_tokens": False, "padding": True},
    )
    media = {n: v for n, v in made.items() if n not in ("input_ids", "attention_mask", "labels")}
    return made["input_ids"], made["attention_mask"], media


def own_logprobs(actor, ids, mask, media):
    """Log-probs ``[B, NUM]`` of the last tokens by the model's own forward."""
    base = actor.backbone.base
    media = {n: v.to(base.dtype) if v.is_floating_point() else v for n, v in media.items()}
    if actor.backbone.family.is_prefix_lm:
        media["token_type_ids"] = torch.zeros_like(ids)
        media["token_type_ids"][:, -NUM:] = 1
    token = actor.backbone.family.reader.towers[0].token_id(base.config)
    if "mm_token_type_ids" in inspect.signature(base.forward).parameters:
        media.setdefault("mm_token_type_ids", (ids == token).long())
    actor.backbone.use_attention("padded")
    logits = base(input_ids=ids, attention_mask=mask, **media).logits
    return logits[:, -NUM - 1 : -1].log_softmax(-1).gather(2, ids[:, -NUM:, None])[..., 0]


def rows_of(part, family):
    rng = np.random.default_rng(0)
    sizes = [(20, 30), (9, 40), (33, 17)]
    images = [rng.integers(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]
    # Molmo 2 cannot pad; in Llama 3.2 Vision, tokens before a picture read those of other rows; and
    # PaliGemma's processor takes no row without pictures.
    if family in ("molmo2", "mllama"):
        return [images[:2]]
    first = images[:2] if part.several and family != "perception_lm" else images[:1]
    return [first, images[2:], *([] if family == "paligemma" else [[]])]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
@torch.no_grad()
def test_the_actor_takes_all_tensors_of_a_processor_in_rows_with_different_numbers_of_pictures(
    family, tmp_path
):
    r = rig(family, tmp_path)
    part, actor = r.processor.parts["image"], ActorVL(r.actor.model.eval(), bf16=False)
    rows = rows_of(part, family)
    ids, mask, media = call(part, rows, "image")
    found = actor(ids, NUM, mask, **media)
    for row, logprobs in zip(rows, found, strict=True):
        alone = own_logprobs(actor, *call(part, [row], "image"))[0]
        assert torch.allclose(logprobs, alone, atol=1e-4)
    # Without pictures: they matter.
    texts = call(part, [[]], "image") if family != "paligemma" else None
    assert texts is None or torch.isfinite(actor(texts[0], NUM)).all()
    critic = CriticVL(r.actor.model, bf16=False)
    assert critic(ids, NUM, mask, **media).shape == found.shape
    made = actor.generate(ids, attention_mask=mask, **media, **LIMITS, **ENDS)[0]
    again = actor(made[:, :-1], 2, torch.cat([mask, torch.ones_like(mask[:, :2])], 1), **media)
    assert torch.isfinite(again).all()
    with pytest.raises(ModelError, match=f"{family!r} cannot read media .pixel_value."):
        actor(ids, NUM, mask, pixel_value=torch.zeros(1))
    with pytest.raises(TypeError, match="unexpected keyword argument retrun_output"):
        actor(ids, NUM, mask, retrun_output=True)


@pytest.mark.parametrize("family", SOUND_FAMILIES)
@torch.no_grad()
def test_the_actor_that_hears_takes_all_tensors_of_a_processor(family, tmp_path):
    r = rig(family, tmp_path)
    part, actor = r.processor.parts["audio"], ActorAL(r.actor.model.eval(), bf16=False)
    rng = np.random.default_rng(0)
    clips = [
        rng.normal(0, 0.1, n).astype(np.float32)
        for n in (7000, 7000 if family in ONE_LENGTH else 4000)
    ]
    ids, mask, media = call(part, [[clip] for clip in clips], "audio")
    content = part_inputs(r, "audio")[0]
    named = {**media, "audio_values": media[content]}
    del named[content]
    found = actor(ids, NUM, mask, **media)
    assert torch.equal(actor(ids, NUM, mask, **named), found)
    # Features of a clip depend on its padding in a call.
    assert torch.allclose(found, own_logprobs(actor, ids, mask, media), atol=1e-4)
    made = actor.generate(ids, attention_mask=mask, **media, **LIMITS, **ENDS)[0]
    assert torch.equal(actor.generate(ids, attention_mask=mask, **named, **LIMITS, **ENDS)[0], made)


def part_inputs(r, kind):
    return next(t.inputs for t in r.actor.family.reader.towers if t.kind == kind)
