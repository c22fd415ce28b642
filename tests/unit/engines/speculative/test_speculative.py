"""Speculative decoding: the tokens of plain decoding, whatever is drafted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.generation.decoding import SpeculativeConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.engines.speculative.drafter import NgramDrafter, accepted_tokens
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError
from tests.model_helpers import STORED, small_model

NGRAM: dict[str, Any] = {"kind": "ngram", "tokens": 5}
DRAFT: dict[str, Any] = {"kind": "draft", "tokens": 4, "path": "draft"}
LOOP = [11, 12, 13, 14, 15, 16] * 4
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.4, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.4, "min_new_tokens": 9, "stop_token_ids": (5, 12, 14)},
    {"first_token_temperature": 9.0, "temperature": 0.7},
]


def repeating(seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model in float64 that likes to repeat itself: its logits are those of few tokens."""
    model = small_model("qwen2", torch.float64, eos_token_id=None, seed=seed, **options)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[30:] *= 0.1
        head[:30] *= 4
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return repeating()


@pytest.fixture(scope="module")
def draft(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with noise, so that it is often right and often wrong."""
    other = repeating()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.05 * parameter.std().nan_to_num() * noise
    return other


def engine_of(
    model: PreTrainedModel,
    speculative: dict[str, Any] | None,
    draft: PreTrainedModel | None = None,
    **config: Any,
) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    other = None if draft is None else KVDecoder(draft)
    settings = EngineConfig(speculative=speculative, **config)
    return NativeEngine(KVDecoder(model), tokenizer, settings, draft=other)


def requests_of(samples: int = 4, **more: Any) -> list[Request]:
    prompts = [Prompt("loop", LOOP), Prompt("short", [40, 41, 42]), Prompt("one", [7])]
    return [
        Request(prompt, 100 * p + k, k, max_new_tokens=5 + (13 * p + 7 * k) % 30, **more)
        for p, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def by_seed(rollouts: Any) -> dict[int, Rollout]:
    return {r.seed: r for r in rollouts}


def assert_same(found: dict[int, Rollout], plain: dict[int, Rollout]) -> None:
    assert found.keys() == plain.keys()
    for seed, rollout in found.items():
        assert rollout.token_ids == plain[seed].token_ids
        assert rollout.finish_reason == plain[seed].finish_reason
        assert rollout.text == plain[seed].text
        assert rollout.logprobs == pytest.approx(plain[seed].logprobs, rel=STORED, abs=1e-7)
        assert rollout.versions == plain[seed].versions


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_tokens_and_logprobs_are_those_of_plain_decoding(
    model: PreTrainedModel, draft: PreTrainedModel, kind: str, sampling: dict[str, Any]
) -> None:
    settings, other = (NGRAM, None) if kind == "ngram" else (DRAFT, draft)
    wanted, given = requests_of(), SamplingConfig(**sampling)
    plain = by_seed(engine_of(model, None).generate(wanted, given))
    for rows in (256, 3):
        engine = engine_of(model, settings, other, max_num_seqs=rows)
        found = by_seed(engine.generate(wanted, given))
        assert_same(found, plain)
    assert 0 < sum(r.accepted for r in found.values()) < sum(r.drafted for r in found.values())
    assert all(r.drafted == 0 for r in plain.values())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_drafts_are_accepted(model: PreTrainedModel, kind: str) -> None:
    settings, other = (NGRAM, None) if kind == "ngram" else (DRAFT, model)
    engine = engine_of(model, settings, other)
    [rollout] = engine.generate(
        [Request(Prompt("p", LOOP), 1)], SamplingConfig(temperature=0, max_new_tokens=60)
    )
    assert len(rollout) == 60
    assert rollout.accepted > (40 if kind == "draft" else 8)
    if kind == "draft":
        # the draft model is the policy, so every draft is right
        assert rollout.accepted == rollout.drafted


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "gemma3_text"])
def test_windows_and_other_kinds_of_attention_give_the_same_tokens(family: str) -> None:
    model = family_model(family, dtype=torch.float64, eos_token_id=None)
    model.set_experts_implementation("eager")
    sampling = SamplingConfig(temperature=0.1, max_new_tokens=30)
    wanted = [Request(Prompt("loop", LOOP), seed) for seed in range(4)]
    plain = by_seed(engine_of(model, None).generate(wanted, sampling))
    found = by_seed(engine_of(model, NGRAM).generate(wanted, sampling))
    assert_same(found, plain)
    assert sum(r.drafted for r in found.values()) > 0


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_pauses_stop_strings_and_watches_act_at_the_same_token(
    model: PreTrainedModel, draft: PreTrainedModel, kind: str
) -> None:
    settings, other = (NGRAM, None) if kind == "ngram" else (DRAFT, draft)
    sampling = SamplingConfig(temperature=0.3, max_new_tokens=40)
    prompt = Prompt("loop", LOOP)
    [whole] = engine_of(model, None).generate([Request(prompt, 4)], sampling)
    engine = engine_of(model, settings, other)
    for pause in (1, 2, 7, 20):
        [part] = engine.generate([Request(prompt, 4, pause_after_tokens=pause)], sampling)
        assert (part.finish_reason, part.token_ids) == ("abort", whole.token_ids[:pause])
        [done] = engine.generate([Request(prompt, 4, partial=part)], sampling)
        assert_same({4: done}, {4: whole})
        assert done.drafted >= part.drafted
    seen: list[int] = []

    def watch(tokens: list[int]) -> bool:
        seen.append(len(tokens))
        return len(tokens) < 11

    [left] = engine.generate([Request(prompt, 4, watch=watch)], sampling)
    assert left.token_ids == whole.token_ids[:11]
    assert seen == list(range(1, 12))
    stop = engine.tokenizer.decode(whole.token_ids[8:10])
    cut = SamplingConfig(temperature=0.3, max_new_tokens=40, stop=(stop,))
    [plain] = engine_of(model, None).generate([Request(prompt, 4)], cut)
    [found] = engine.generate([Request(prompt, 4)], cut)
    assert_same({4: found}, {4: plain})
    assert found.finish_reason == "stop"


@pytest.mark.usefixtures("exact")
def test_constraints_and_drafts_work_together(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer()
    prompt = Prompt("p", tokenizer("abcabcabcabcab")["input_ids"])
    sampling = SamplingConfig(constraint={"regex": "[abc]{10,30}(xyz){2,9}"}, max_new_tokens=70)
    own = small_model("qwen2", torch.float64, eos_token_id=tokenizer.eos_token_id)
    wanted = [Request(prompt, seed) for seed in range(8)]
    found = []
    for settings in (None, NGRAM):
        config = EngineConfig(speculative=settings)
        engine = NativeEngine(KVDecoder(own), tokenizer, config)
        found.append(by_seed(engine.generate(wanted, sampling)))
    plain, drafted = found
    assert_same(drafted, plain)
    assert {r.finish_reason for r in plain.values()} == {"stop"}
    assert sum(r.accepted for r in drafted.values()) > 8


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_responses_have_the_frequencies_of_the_exact_distribution(kind: str) -> None:
    """Three tokens over a vocabulary of six, against all 216 probabilities."""
    model = tiny_model("qwen2", vocab_size=6, hidden_size=32, eos_token_id=None, seed=3)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    other = tiny_model("qwen2", vocab_size=6, hidden_size=32, eos_token_id=None, seed=4)
    prompt = Prompt(
        "p", torch.randint(6, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    )
    settings, draft = (NGRAM, None) if kind == "ngram" else (DRAFT, other)
    engine = engine_of(model, settings, draft, max_num_seqs=40)
    count, sampling = 6000, SamplingConfig(max_new_tokens=3)
    rollouts = list(engine.generate([Request(prompt, s) for s in range(count)], sampling))
    assert sum(r.drafted for r in rollouts) > count / 10
    found = Counter(tuple(r.token_ids) for r in rollouts)
    grid = torch.cartesian_prod(*[torch.arange(6)] * 3)
    ids = torch.cat([torch.tensor(prompt.token_ids).expand(len(grid), -1), grid], 1)
    with torch.no_grad():
        logprobs = model(ids).logits.double().log_softmax(-1)[:, 39:42]
    exact = logprobs.gather(-1, grid[..., None]).sum((1, 2)).exp()
    assert float(exact.sum()) == pytest.approx(1, abs=1e-5)
    kept, chi2, rest, others = 0, 0.0, 0.0, 0
    for triple, probability in zip(grid.tolist(), exact.tolist()):
        expected, seen = count * probability, found[tuple(triple)]
        if expected < 5:
            rest, others = rest + expected, others + seen
            continue
        kept, chi2 = kept + 1, chi2 + (seen - expected) ** 2 / expected
    if rest >= 5:
        kept, chi2 = kept + 1, chi2 + (others - rest) ** 2 / rest
    # five standard deviations of a chi-square variable
    assert chi2 < kept - 1 + 5 * math.sqrt(2 * (kept - 1))
    assert kept > 10


def test_a_session_that_cannot_remove_tokens_is_refused_at_start() -> None:
    recurrent = family_model("falcon_h1", eos_token_id=None)
    with pytest.raises(ConfigError, match=r"this policy decodes by its own cache"):
        engine_of(recurrent, NGRAM)
    with pytest.raises(ConfigError, match=r"engine.speculative.path decodes by its own cache"):
        engine_of(repeating(), DRAFT, recurrent)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "draft"}, "needs a model"),
        ({"kind": "ngram", "path": "x"}, "needs engine.speculative.kind"),
        ({"kind": "draft", "path": "x", "longest_match": 5}, "needs engine.speculative.kind"),
    ],
)
def test_settings_that_contradict_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SpeculativeConfig(**given)
    with pytest.raises(ValueError, match=r"needs engine\.kind native"):
        EngineConfig(kind="vllm", speculative={"kind": "ngram"})


def lookup(
    tokens: Sequence[int], response: Sequence[int], most: int, longest: int = 3
) -> list[int]:
    drafter = NgramDrafter(longest)
    drafter.append([Prompt("p", list(tokens))], [99])
    drafter.extend([list(response)])
    places: Any = None
    return drafter.propose(np.array([most]), places)[0]


def test_an_ngram_is_continued_as_at_its_last_occurrence() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2], [3], 2) == [4, 5]
    # the longest match counts, and the last of several
    assert lookup([9, 2, 3, 7, 1, 2, 3, 8, 1, 2], [3], 1) == [8]
    assert lookup([5, 2, 3, 7, 0, 4, 2, 3, 9, 5, 2], [3], 1) == [7]
    # over the border of prompt and response, and beyond the end
    assert lookup([1, 2, 3, 1], [2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert lookup([1, 2, 3], [4], 3) == []
    # a run of one token says too little, unless it is all that is asked for
    assert lookup([1, 2, 3], [1], 3) == []
    assert lookup([1, 2, 3], [1], 3, longest=1) == [2, 3, 1]


def test_sampled_tokens_are_taken_up_to_the_first_that_differs() -> None:
    found = accepted_tokens([[5, 6, 7], [], [8]], np.array([5, 6, 9, 1, 2, 3, 4]))
    assert found.counts.tolist() == [3, 1, 1]
    assert found.rejected.tolist() == [1, 0, 1]
    assert found.taken(np.array([5, 6, 9, 1, 2, 3, 4])) == [[5, 6, 9], [2], [3]]
