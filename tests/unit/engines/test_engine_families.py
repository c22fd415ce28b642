"""What the engine samples, over a tiny model of every text family: its log-probs are those of the model's own forward."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.cache_decoder import CachedDecodeSession
from lightrft.models.decoding.kinds import (
    PLAN_FAMILIES,
    decodes_by_plan,
    length_bound,
    rereads_prefix,
)
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.decoding.static_step import uncompiled
from lightrft.models.onednn import packed_layers
from lightrft.models.onednn.products import onednn_available
from lightrft.models.tiny import (
    ALL_MEDIA_FAMILIES,
    MEDIA_FAMILIES,
    missing_package,
    tiny_media_model,
)
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import TEXT_FAMILIES, family_config, family_model
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ModelError
from tests.model_helpers import STORED, Float64, by_family, float32_bound

PROMPTS = (5, 20, 1, 13, 5)
"""Tokens of the prompts: beyond a window of 8, and two of equal length."""

SAMPLING = SamplingConfig(temperature=1.3)


def model_of(family: str, **options: object) -> PreTrainedModel:
    """An endless model in float64, or in float32 where the family cannot run in float64."""
    config = family_config(family)
    longer = (
        {"index_topk": 64}
        if length_bound(config) is not None and "index_topk" in config.to_dict()
        else {}
    )
    model = family_model(family, dtype=torch.float64, eos_token_id=None, **longer, **options)
    model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6]]), use_cache=False)
    except RuntimeError:
        model = model.float()
    return model


def engine_of(model: PreTrainedModel, **config: int) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return NativeEngine(KVDecoder(model), tokenizer, EngineConfig(**config))


def requests_of(
    lengths: tuple[int, ...] = PROMPTS, limits: tuple[int, ...] = (1, 7, 20, 12)
) -> list[Request]:
    """Two responses to each of some prompts, of lengths that differ."""
    generator, limit = torch.Generator().manual_seed(0), itertools.cycle(limits)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]
    return [
        Request(p, 100 * i + s, s, next(limit)) for i, p in enumerate(prompts) for s in range(2)
    ]


def own_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """By one forward of the model as it was made, over prompt and response."""
    ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[
            0, len(rollout.prompt.token_ids) - 1 : -1
        ]
    logprobs = (logits.double() / SAMPLING.temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def exact(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Let a float64 model round nothing to float32."""
    return Float64() if model.dtype == torch.float64 else nullcontext()


def bound_of(model: PreTrainedModel) -> float:
    """Return the relative bound: the engine reports log-probs in float32, whatever the model's type."""
    return STORED if model.dtype == torch.float64 else float32_bound(model)


def assert_own(model: PreTrainedModel, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        found = torch.tensor(rollout.logprobs, dtype=torch.float64)
        own = own_logprobs(model, rollout)
        atol = bound_of(model) * float(own.abs().max())
        torch.testing.assert_close(found, own, atol=atol, rtol=0)


@pytest.mark.parametrize("family", by_family(TEXT_FAMILIES))
def test_sampled_log_probs_are_those_of_the_models_own_forward(family: str) -> None:
    model = model_of(family)
    with exact(model):
        assert_sampled_as_own(model)


@pytest.mark.skipif(not onednn_available(), reason="torch has no oneDNN on this processor")
@pytest.mark.parametrize("family", by_family(TEXT_FAMILIES))
def test_log_probs_of_products_by_onednn_are_those_of_the_models_own_forward(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "SMALLEST", 0)
    model = family_model(family, eos_token_id=None)
    engine = engine_of(model, max_num_seqs=4)
    assert_own(model, list(engine.generate(requests_of(), SAMPLING)))


def assert_sampled_as_own(model: PreTrainedModel) -> None:
    engine, requests = engine_of(model, max_num_seqs=4), requests_of()
    rollouts = list(engine.generate(requests, SAMPLING))
    assert sorted(len(r) for r in rollouts) == sorted(r.max_new_tokens or 0 for r in requests)
    assert_own(model, rollouts)
    if isinstance(engine.decoder, KVDecoder) and engine.decoder.by_plan:
        engine.decoder.compiler = uncompiled
        padded = {r.seed: r.token_ids for r in engine.generate(requests, SAMPLING)}
        assert padded == {r.seed: r.token_ids for r in rollouts}
        assert engine.decoder.compiled.steps > 0
        engine.decoder.compiler = None
    few = requests[2:5]  # resumed, and among other rows than before
    begun = {
        r.seed: r
        for r in engine.generate([replace(r, pause_after_tokens=5) for r in few], SAMPLING)
    }
    resumed = {
        r.seed: r
        for r in engine.generate(
            [replace(r, partial=begun[r.seed]) for r in few if len(begun[r.seed]) == 5], SAMPLING
        )
    }
    assert len(resumed) == 2
    for rollout in rollouts:
        if rollout.seed in resumed:
            assert resumed[rollout.seed].token_ids == rollout.token_ids
            assert resumed[rollout.seed].logprobs == pytest.approx(
                rollout.logprobs, rel=bound_of(model), abs=bound_of(model)
            )


def test_every_family_that_decodes_by_plan_is_proved_by_a_tiny_model() -> None:
    config = {
        family: tiny_media_model(family).config
        for family in ALL_MEDIA_FAMILIES
        if missing_package(family) is None
    }
    assert {f for f in MEDIA_FAMILIES if not decodes_by_plan(config[f])} == {
        "qwen3_5",
        "qwen3_5_moe",
    }
    proved = {
        kind
        for media in config.values()
        for kind in (media.model_type, media.get_text_config(decoder=True).model_type)
    }
    assert proved | set(TEXT_FAMILIES) >= PLAN_FAMILIES


def test_a_known_family_with_an_unknown_kind_of_layer_decodes_with_its_own_cache() -> None:
    config = family_config("qwen3")
    assert decodes_by_plan(config)
    config.layer_types = ["linear_attention", "full_attention"]
    assert not decodes_by_plan(config)


def calls_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Shapes of the tokens of each call of ``model`` from now on."""
    calls: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return calls


def test_a_cached_prompt_is_computed_once_and_rows_of_equal_length_run_in_one_call() -> None:
    model = family_model("falcon_h1", eos_token_id=None)
    calls = calls_of(model)
    list(engine_of(model).generate(requests_of((5, 9, 5), limits=(3,)), SAMPLING))
    assert calls == [(1, 5), (1, 9), (1, 5), *[(4, 1), (2, 1)] * 2]


def test_a_model_without_a_usable_cache_runs_over_the_whole_prefix() -> None:
    model = family_model("openai-gpt", eos_token_id=None)
    calls = calls_of(model)
    list(engine_of(model).generate(requests_of((5,), limits=(3,)), SAMPLING))
    assert calls == [(1, 5), (2, 6), (2, 7)]


@pytest.mark.parametrize("budget", [25, 32, 50, 1000])
def test_cached_rows_and_prompts_stay_within_the_budget_and_give_the_same_responses(
    budget: int,
) -> None:
    model = family_model("bloom", eos_token_id=None)
    most = [0]

    class Watched(CachedDecodeSession):
        def admit(self, *args) -> None:
            super().admit(*args)
            most[0] = max(most[0], self.held)

        def step(self, tokens: Tensor) -> Tensor:
            logits = super().step(tokens)
            most[0] = max(most[0], self.held)
            return logits

    engine = engine_of(model, max_cache_tokens=budget)
    engine.decoder.session = lambda: Watched(model)
    requests = requests_of((5, 20), limits=(4, 5, 5))
    found = {r.seed: r.token_ids for r in engine.generate(requests, SAMPLING)}
    assert 0 < most[0] <= budget
    assert found == {r.seed: r.token_ids for r in engine_of(model).generate(requests, SAMPLING)}


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2", "mamba2"])
def test_a_recurrent_layer_whose_time_step_has_a_floor_gives_the_log_probs_of_training(
    family: str,
) -> None:
    floor = {"time_step_limit": (0.3, 0.6)} if family == "mamba2" else {"time_step_min": 0.3}
    model = model_of(family, **floor)
    assert rereads_prefix(model.config)
    with exact(model):
        requests = requests_of((5,), limits=(12,))
        assert_own(model, list(engine_of(model).generate(requests, SAMPLING)))


def test_a_cache_that_cannot_be_shared_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightrft.models.decoding.cache_decoder.rereads_prefix", lambda config: False
    )
    model = family_model("qwen4_exp_text", eos_token_id=None)
    with pytest.raises(ModelError, match="not known"):
        list(engine_of(model).generate(requests_of((5,)), SAMPLING))


def test_adapters_and_changed_weights_act_on_cached_decoding() -> None:
    model = model_of("gptj")
    engine, requests = engine_of(model), requests_of((5, 9), limits=(6,))
    first = {r.seed: r.logprobs for r in engine.generate(requests, SAMPLING)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.1
    with exact(model):
        rollouts = list(engine.generate(requests, SAMPLING))
        assert_own(model, rollouts)
    assert all(r.logprobs != first[r.seed] for r in rollouts)


def test_an_engine_apart_with_cached_decoding_keeps_the_attention_that_was_loaded() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    decoder = KVDecoder(model)
    decoder.by_plan = False
    loaded = model.config._attn_implementation
    model.config._attn_implementation = "lightrft"  # as training by plan leaves it
    copy = decoder.with_own_weights()
    copy.by_plan = False
    with copy.running():
        assert copy.model.config._attn_implementation == loaded
    assert copy.model.config._attn_implementation == "lightrft"
