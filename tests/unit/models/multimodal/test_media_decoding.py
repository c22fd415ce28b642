"""Greedy answers to prompts with media: those of a plain loop over the model's own forward, and a tower that sees each thing once."""

from collections import Counter

import pytest
import torch
from torch import nn

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.attention.layouts import pack
from lightrft.models.decoding.cache_decoder import CachedDecodeSession
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.multimodal.derived import SHAPE
from lightrft.models.multimodal.merge_inputs import own_inputs
from lightrft.models.sampled_distribution import distribution_of
from lightrft.models.tiny import ALL_MEDIA_FAMILIES
from lightrft.types import Batch, Request, Rollout, Segments
from tests.media_helpers import mixed_prompts, rig
from tests.model_helpers import STORED, by_family

TOKENS = 8


def banned(r):
    """What is not a character: ends, placeholders, and marks, by which some families' own forward finds media."""
    rows = r.actor.text_config.vocab_size
    known = r.tokenizer.get_vocab().items()
    return [token for text, token in known if len(text) > 1 and token < rows]


def own_logits(r, prompt, answer):
    """``[T, V]`` at the places that predict ``answer``, of the model's own forward over prompt and answer."""
    r.actor.use_attention("padded")
    batch = Batch(Segments.of_prompts([prompt]), Segments.of([answer]), torch.tensor([0]))
    packed = pack(batch, "padded")
    inputs = own_inputs(r.actor.base, r.actor.family, batch, packed)
    logits = r.actor.base(**inputs, use_cache=False).logits.flatten(0, 1)[packed.gather]
    logits[:, banned(r)] = -torch.inf
    return logits


def plain_loop(r, prompt):
    """The likeliest token again and again, ``banned`` ones apart, with a forward over everything for each."""
    answer = []
    for _ in range(TOKENS):
        answer.append(int(own_logits(r, prompt, [*answer, 0])[-1].argmax()))
    return answer


class Banning:
    """A session that gives ``banned`` tokens no probability."""

    banned: list[int]

    def prefill(self, *args, **kwargs):
        handles, logits = super().prefill(*args, **kwargs)
        logits[:, self.banned] = -torch.inf
        return handles, logits

    def step(self, tokens):
        logits = super().step(tokens)
        logits[:, self.banned] = -torch.inf
        return logits


class CarefulSession(Banning, PlanDecodeSession):
    """By plan."""


class CarefulCachedSession(Banning, CachedDecodeSession):
    """With the model's own cache."""


class Careful(KVDecoder):
    """Draws none of ``banned``."""

    banned: list[int]

    def session(self):
        session = (CarefulSession if self.by_plan else CarefulCachedSession)(self.model)
        session.banned = self.banned
        return session


class CarefulCached(Careful):
    """Draws none of ``banned``, with the model's own cache."""

    def __init__(self, model):
        super().__init__(model)
        self.by_plan = False


def answers(r, prompts, samples, temperature=0.0, decoder=Careful):
    decoder = decoder(r.actor.base)
    decoder.banned = banned(r)
    engine = NativeEngine(decoder, r.tokenizer, EngineConfig())
    requests = [
        Request(p, seed=10 * i + s, sample=s) for i, p in enumerate(prompts) for s in range(samples)
    ]
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=TOKENS)
    return {(x.prompt.id, x.sample): x for x in engine.generate(requests, sampling)}


@pytest.mark.parametrize("family", by_family(ALL_MEDIA_FAMILIES))
def test_greedy_answers_are_those_of_a_plain_loop_over_the_models_own_forward(family, tmp_path):
    r = rig(family, tmp_path)
    prompts = mixed_prompts(r)
    with torch.no_grad():
        expected = {p.id: plain_loop(r, p) for p in prompts}
    found = answers(r, prompts, 3)
    assert {key: rollout.token_ids for key, rollout in found.items()} == {
        (p.id, s): expected[p.id] for p in prompts for s in range(3)
    }


@pytest.mark.parametrize("family", by_family(ALL_MEDIA_FAMILIES))
def test_log_probs_of_drawn_answers_are_those_of_the_models_own_forward(family, tmp_path, exact):
    r = rig(family, tmp_path, torch.float64)
    prompts = mixed_prompts(r)
    found = answers(r, prompts, 3, temperature=1.0)
    assert len({tuple(rollout.token_ids) for rollout in found.values()}) == 3 * len(prompts)
    for rollout in found.values():
        with torch.no_grad():
            logprobs = own_logits(r, rollout.prompt, rollout.token_ids).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert rollout.logprobs == pytest.approx(expected.tolist(), rel=STORED, abs=1e-9)


def watched(model, prefixes):
    """Shapes of what comes into the first layer of each tower, call by call."""
    calls = []
    layers = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
    ]
    for prefix in prefixes:
        first = next((layer for name, layer in layers if name.startswith(prefix)), None)
        if first is not None:
            first.register_forward_hook(
                lambda module, args, out: calls.append(tuple(args[0].shape))
            )
    assert not calls
    return calls


def volume(calls):
    """Numbers that came into a tower in all ``calls``."""
    return sum(n * torch.Size(shape).numel() for shape, n in calls.items())


@pytest.mark.parametrize("family", by_family(ALL_MEDIA_FAMILIES))
def test_a_tower_sees_the_media_of_a_prompt_once_whatever_the_number_of_answers(family, tmp_path):
    r = rig(family, tmp_path)
    prompts = mixed_prompts(r)
    calls = watched(r.actor.base, r.actor.family.reader.parts["tower"])
    once = {}
    for samples in (1, 8):
        calls.clear()
        drawn = answers(r, prompts, samples)
        once["drawing", samples] = Counter(calls)
        rows = [drawn[p.id, s].token_ids for p in prompts for s in range(samples)]
        of = torch.arange(len(prompts)).repeat_interleave(samples)
        batch = Batch(Segments.of_prompts(prompts), Segments.of(rows), of)
        for layout in ("prefix_shared", "packed", "padded"):
            calls.clear()
            r.actor.layout = layout
            r.actor.score(batch)
            once[layout, samples] = Counter(calls)
    first = once["drawing", 1]
    assert sum(first.values()) >= 1
    if KVDecoder(r.actor.base).by_plan:
        assert all(calls == first for calls in once.values())
    elif r.actor.family.own_forward is not None:
        assert once["drawing", 8] == first
        # It gets the media of each response while they are scored.
        scored = {volume(once[layout, 1]) for layout in ("prefix_shared", "packed", "padded")}
        assert scored == {volume(first)}
    else:  # prompt by prompt while the responses are generated, all at once where they are scored
        assert once["drawing", 8] == first
        assert {volume(calls) for calls in once.values()} == {volume(first)}
    if "audio" not in r.kinds:
        media = Segments.of_prompts(prompts).media
        held = sum(
            x.values.numel()
            for name, x in media.items()
            if x.values.is_floating_point() and (x.values.dim() > 1 or name + SHAPE in media)
        )
        # Pictures of unequal size are padded.
        assert volume(first) == held or (held < volume(first) and "pixel_values.shape" in media)


@pytest.mark.parametrize("family", by_family(ALL_MEDIA_FAMILIES))
def test_the_models_own_cache_gives_the_answers_of_the_plan_where_media_are_read(family, tmp_path):
    r = rig(family, tmp_path)
    prompts = mixed_prompts(r)[:4]
    by_plan, cached = (
        {
            key: (found.token_ids, found.logprobs)
            for key, found in answers(r, prompts, 2, temperature=1.0, decoder=decoder).items()
        }
        for decoder in (Careful, CarefulCached)
    )
    assert by_plan.keys() == cached.keys()
    for key, (tokens, logprobs) in by_plan.items():
        assert cached[key][0] == tokens
        assert cached[key][1] == pytest.approx(logprobs, abs=1e-5)


def test_a_placeholder_that_was_sampled_stands_for_nothing_when_its_answer_is_resumed(tmp_path):
    r = rig("qwen2_vl", tmp_path)
    prompt = next(p for p in mixed_prompts(r) if p.media)
    token = r.actor.family.reader.towers[0].token_id(r.actor.base.config)
    engine = NativeEngine(KVDecoder(r.actor.base), r.tokenizer, EngineConfig())
    begun = Rollout(prompt, [token, 40, 41], [True] * 3, [-1.0] * 3, [0] * 3, "abort", 7, 0)
    (found,) = engine.generate(
        [Request(prompt, 7, partial=begun)], SamplingConfig(max_new_tokens=6)
    )
    batch = Batch(Segments.of_prompts([prompt]), Segments.of([found.token_ids]), torch.tensor([0]))
    sampled_from = distribution_of(SamplingConfig(), (), engine.decoder.media_token_ids)
    with torch.no_grad():
        expected = r.actor.score(batch, temperature=sampled_from).logprobs
    assert found.logprobs[3:] == pytest.approx(expected[3:].tolist(), abs=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("family", by_family(ALL_MEDIA_FAMILIES))
def test_no_response_has_a_token_that_the_model_reads_as_media(family, tmp_path, greedy):
    r = rig(family, tmp_path)
    kinds = {r.actor.family.reader.towers[0].token_id(r.actor.base.config)}
    if family.endswith("thinker"):
        vocabulary = r.tokenizer.get_vocab()
        kinds |= {vocabulary[text] for text in ("<|audio_bos|>", "<|vision_bos|>", "<|VIDEO|>")}
    # Some heads have no row for them.
    kinds = {token for token in kinds if token < r.actor.text_config.vocab_size}
    decoder = KVDecoder(r.actor.base)
    assert kinds <= set(decoder.media_token_ids)
    # Without the ban, one of these tokens is the likeliest at every place.
    head = r.actor.base.get_output_embeddings()
    head.register_forward_hook(
        lambda m, given, out: out.index_fill(-1, torch.tensor([*kinds], dtype=torch.long), 50)
    )
    engine = NativeEngine(decoder, r.tokenizer, EngineConfig())
    sampling = SamplingConfig(temperature=0.0 if greedy else 1.0, max_new_tokens=TOKENS)
    prompts = mixed_prompts(r)
    found = list(engine.generate([Request(p, seed) for seed, p in enumerate(prompts)], sampling))
    assert not kinds & {token for rollout in found for token in rollout.token_ids}
    batch = Batch(
        Segments.of_prompts([rollout.prompt for rollout in found]),
        Segments.of([rollout.token_ids for rollout in found]),
        torch.arange(len(found)),
    )
    with torch.no_grad():
        expected = r.actor.score(
            batch, temperature=distribution_of(sampling, (), decoder.media_token_ids)
        ).logprobs
    reported = [logprob for rollout in found for logprob in rollout.logprobs]
    assert reported == pytest.approx(expected.tolist(), abs=1e-4)
