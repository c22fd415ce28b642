"""Families whose prompts are read in both directions, with and without media."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models import ActorVL
from lightrft.models.attention.layouts import pack
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.multimodal.merge_inputs import media_token_ids, own_inputs
from lightrft.models.tiny.text_families import text_sizes
from lightrft.types import Batch, Prompt, Request, Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import Rig, mixed_batch, mixed_prompts, rig, rig_in

QUESTION = [5, 6, 7, 8, 9, 10, 11, 12]
ANSWER = [20, 30, 40]


@pytest.fixture(params=["gemma", "gemma2"])
def r(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    """PaliGemma, and PaliGemma 2, whose text model has a sliding window."""
    first = rig("paligemma", tmp_path)
    if request.param == "gemma":
        return first
    config = first.actor.base.config
    own = {name: getattr(config.text_config, name) for name in ("vocab_size", "pad_token_id")}
    sizes = {**text_sizes("gemma2"), **own, "eos_token_id": config.text_config.eos_token_id}
    fields = config.to_dict()
    fields["text_config"] = {"model_type": "gemma2", **sizes, "sliding_window": 10}
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(type(config)(**fields))
    path = tmp_path / "paligemma2"
    shutil.copytree(first.path, path)
    model.save_pretrained(path)
    return rig_in(path)


def own_logprobs(
    r: Rig, prompt: list[int], answer: list[int], *, sampled: bool = False
) -> torch.Tensor:
    """Return the log-probs by the model's own forward; ``sampled`` leaves out banned tokens."""
    ids = torch.tensor([[*prompt, *answer]])
    types = (torch.arange(ids.shape[1]) >= len(prompt)).long()[None]
    r.actor.use_attention("padded")
    with torch.no_grad():
        logits = r.actor.base(
            input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=types
        ).logits[0, len(prompt) - 1 : -1]
    if sampled:
        banned = media_token_ids(r.actor.base.config, r.actor.family)
        logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def batch_of(prompt: list[int], *answers: list[int]) -> Batch:
    prompts, zeros = Segments.of([prompt]), torch.zeros(len(answers), dtype=torch.long)
    return Batch(prompts, Segments.of(answers), zeros)


def test_a_prompt_without_media_is_read_in_both_directions(r: Rig) -> None:
    expected = own_logprobs(r, QUESTION, ANSWER)
    for layout in (r.actor.layout, "padded"):
        r.actor.layout = layout
        with torch.no_grad():
            found = r.actor.score(batch_of(QUESTION, ANSWER, ANSWER)).logprobs.view(2, -1)
        torch.testing.assert_close(found, expected.expand(2, -1), atol=2e-5, rtol=0)
    # the border matters: with another one the same tokens have other log-probs
    other = own_logprobs(r, QUESTION[:4], QUESTION[4:] + ANSWER)[-3:]
    assert (other - expected).abs().max() > 1e-4


def test_a_resumed_response_is_no_part_of_the_prompt(r: Rig) -> None:
    engine = NativeEngine(KVDecoder(r.actor.base), r.tokenizer, EngineConfig())
    settings = SamplingConfig(max_new_tokens=8)
    request = Request(Prompt("p", QUESTION), 3)
    [begun] = engine.generate([replace(request, pause_after_tokens=3)], settings)
    [whole] = engine.generate([replace(request, partial=begun)], settings)
    assert whole.token_ids[:3] == begun.token_ids and len(whole) > 4
    expected = own_logprobs(r, QUESTION, list(whole.token_ids), sampled=True)
    torch.testing.assert_close(torch.tensor(whole.logprobs), expected, atol=2e-5, rtol=0)


def test_keys_of_a_prompt_are_kept_for_no_longer_prompt(r: Rig) -> None:
    assert not KVDecoder(r.actor.base).keep_prefixes()


def test_a_prompt_beyond_the_window_is_refused(r: Rig) -> None:
    window = getattr(r.actor.text_config, "sliding_window", None)
    if window is None:
        r.actor.score(batch_of(QUESTION * 4, ANSWER))
        return
    with pytest.raises(ModelError, match=r"sliding window of 10 tokens.*16 tokens; set data\.max"):
        r.actor.score(batch_of(QUESTION * 2, ANSWER))


def test_actor_vl_reads_the_prompt_before_the_actions_in_both_directions(r: Rig) -> None:
    ids = torch.tensor([QUESTION + ANSWER])
    with torch.no_grad():
        found = ActorVL(r.actor.base)(ids, len(ANSWER), torch.ones_like(ids))
    expected = own_logprobs(r, QUESTION, ANSWER)
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=0)


def test_without_a_chat_template_a_message_is_written_as_the_processor_writes_it(
    tmp_path: Path,
) -> None:
    first = rig("paligemma", tmp_path)
    first.tokenizer.bos_token = first.tokenizer.eos_token = first.tokenizer.pad_token
    first.tokenizer.chat_template = None
    (first.path / "chat_template.jinja").unlink()
    first.tokenizer.save_pretrained(first.path)
    tokenizer = load_tokenizer(ModelConfig(path=str(first.path)))
    parts = [{"type": "text", "text": "what is it?"}]
    pictures = [np.full((20, 30, 3), 90, np.uint8)] * 2
    message = {"role": "user", "content": [*({"type": "image"} for _ in pictures), *parts]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    processor = AutoProcessor.from_pretrained(first.path)
    made = processor(
        text=["<image><image>what is it?"], images=[[Image.fromarray(p) for p in pictures]]
    )
    part = first.processor.parts["image"]
    mine = str(text).replace("<image>", part.written * 16)
    assert tokenizer(mine, add_special_tokens=False)["input_ids"] == made["input_ids"][0]
    answered = [message, {"role": "assistant", "content": "a cat"}]
    assert (
        tokenizer.apply_chat_template(answered, tokenize=False)
        == text + "a cat" + tokenizer.eos_token
    )
    with pytest.raises(Exception, match="PaliGemma reads one question"):
        tokenizer.apply_chat_template([*answered, message], tokenize=False)


@pytest.mark.parametrize("layout", ["prefix_shared", "padded"])
def test_pictures_of_gemma_4_attend_ahead_in_windows_alone_where_the_config_says_so(
    layout: str, tmp_path: Path
) -> None:
    first = rig("gemma4", tmp_path)
    config = first.actor.base.config
    config.text_config.use_bidirectional_attention = "vision"
    first.actor.base.save_pretrained(first.path)
    r = rig_in(first.path)
    causal = mixed_batch(mixed_prompts(first)[1:3])
    r.actor.layout = layout
    with torch.no_grad():
        expected = r.actor.own_logprobs(causal)
        torch.testing.assert_close(r.actor.score(causal).logprobs, expected, atol=2e-5, rtol=0)
        assert (first.actor.score(causal).logprobs - expected).abs().max() > 1e-3
    assert r.actor.family.reader.both_ways == "windowed media"
    engine = NativeEngine(KVDecoder(r.actor.base), r.tokenizer, EngineConfig())
    prompts = mixed_prompts(r)[1:2]
    [found] = engine.generate([Request(prompts[0], 3)], SamplingConfig(max_new_tokens=6))
    tokens = Segments.of([list(found.token_ids)])
    batch = Batch(Segments.of_prompts(prompts), tokens, torch.tensor([0]))
    packed = pack(batch, "padded")
    r.actor.use_attention("padded")
    with torch.no_grad():
        inputs = own_inputs(r.actor.base, r.actor.family, batch, packed)
        logits = r.actor.base(**inputs).logits.flatten(0, 1)[packed.gather]
    logits[:, list(media_token_ids(r.actor.base.config, r.actor.family))] = -torch.inf
    again = logits.log_softmax(-1).gather(1, tokens.tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), again, atol=2e-5, rtol=0)
