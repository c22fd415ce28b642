"""Prompts that begin with an earlier sequence compute only the rest, and give the same responses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.decoding.prefix_store import PrefixStore
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Prompt, Request, Rollout
from tests.model_helpers import Float64

SAMPLING = SamplingConfig(max_new_tokens=12, temperature=1.0)
FIRST = list(range(10, 30))


def engine_of(model: PreTrainedModel, *, keeps: bool = True, **config: int) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig(**config))
    if keeps:
        assert engine.keep_prefixes()
    return engine


def ask(engine: NativeEngine, ids: list[int], seed: int = 1) -> Rollout:
    (found,) = engine.generate([Request(Prompt("p", ids), seed)], SAMPLING)
    return found


def turns(engine: NativeEngine, count: int = 4) -> list[Rollout]:
    """Return the responses of a conversation of ``count`` turns."""
    ids, found = list(FIRST), []
    for turn in range(count):
        found.append(ask(engine, ids, seed=turn))
        ids = [*ids, *found[-1].token_ids, 40 + turn, 50, 51]
    return found


def held(engine: NativeEngine) -> int:
    assert isinstance(engine.decoder, KVDecoder) and engine.decoder.prefixes is not None
    return engine.decoder.prefixes.held


@pytest.mark.parametrize(
    "family", ["qwen2", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_moe", "opt"]
)
def test_turns_with_reuse_give_the_tokens_and_logprobs_of_turns_without(family: str) -> None:
    model = family_model(family, dtype=torch.float64, eos_token_id=None)
    model.set_experts_implementation("eager")
    with Float64():
        plain, reusing = (turns(engine_of(model, keeps=keeps)) for keeps in (False, True))
    assert [r.token_ids for r in reusing] == [r.token_ids for r in plain]
    for one, other in zip(reusing, plain):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    # all but the last token of a response was fed, so its keys are kept
    before = [len(r.prompt.token_ids) + len(r) - 1 for r in reusing]
    assert [r.reused_tokens for r in reusing] == [0, *before[:-1]]
    assert not any(r.reused_tokens for r in plain)


def test_requests_with_and_without_a_kept_prefix_join_in_one_call() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    prompts = [[*FIRST, 5], [60, 61, 62], [*FIRST[:12], 7, 8], list(range(70, 90))]
    asked = [Request(Prompt(str(k), p), k + 9) for k, p in enumerate(prompts)]
    engine = engine_of(model)
    ask(engine, FIRST)
    found = {r.prompt.id: r for r in engine.generate(asked, SAMPLING)}
    plain = {r.prompt.id: r for r in engine_of(model, keeps=False).generate(asked, SAMPLING)}
    assert {k: r.token_ids for k, r in found.items()} == {k: r.token_ids for k, r in plain.items()}
    assert [found[str(k)].reused_tokens for k in range(4)] == [20, 0, 12, 0]


def test_a_continued_response_reuses_the_keys_of_its_own_beginning() -> None:
    engine = engine_of(tiny_model("qwen2", eos_token_id=None))
    request = Request(Prompt("p", FIRST), 3)
    seen: list[int] = []

    def watch(ids: list[int]) -> bool:
        seen.append(len(ids))
        return len(ids) < 6

    (cut,) = engine.generate([replace(request, watch=watch)], SAMPLING)
    assert cut.finish_reason == "abort" and len(cut) == 6
    (whole,) = engine.generate([replace(request, partial=cut)], SAMPLING)
    plain = ask(engine_of(tiny_model("qwen2", eos_token_id=None), keeps=False), FIRST, seed=3)
    assert whole.token_ids == plain.token_ids
    assert whole.reused_tokens == len(FIRST) + 5


def test_responses_of_a_stopped_call_are_not_kept_and_later_ones_are_right() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    engine, calls = engine_of(model), iter(range(99))
    (cut,) = engine.generate([Request(Prompt("p", FIRST), 1)], SAMPLING, lambda: next(calls) > 4)
    assert cut.finish_reason == "abort" and held(engine) == 0
    assert ask(engine, FIRST).token_ids == ask(engine_of(model, keeps=False), FIRST).token_ids


@pytest.mark.parametrize("how", ["load_weights", "sleep", "close"])
def test_nothing_is_kept_across_a_weight_update_or_sleep(how: str) -> None:
    engine = engine_of(tiny_model("qwen2", eos_token_id=None))
    ask(engine, FIRST)
    assert held(engine) > 0
    {
        "load_weights": lambda: engine.load_weights((), 1),
        "sleep": lambda: engine.sleep(1),
        "close": engine.close,
    }[how]()
    assert held(engine) == 0
    engine.wake()
    assert ask(engine, FIRST).reused_tokens == 0


def test_responses_after_a_weight_update_are_those_of_the_new_weights() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    engine = engine_of(model)
    ask(engine, FIRST)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.load_weights((), 1)
    ids = [*FIRST, 4]
    assert ask(engine, ids).token_ids == ask(engine_of(model, keeps=False), ids).token_ids


def test_kept_sequences_and_requests_together_stay_within_the_cache() -> None:
    engine = engine_of(tiny_model("qwen2", eos_token_id=None), max_cache_tokens=80)
    for start in range(0, 60, 10):
        ask(engine, list(range(start + 4, start + 24)))
        # the session of the response takes 20 + 12 tokens while it lives
        assert held(engine) <= 80 - 32
    assert held(engine) > 0
    # a request that needs the whole cache is admitted, and has it alone
    beside: list[int] = []

    def watch(ids: list[int]) -> bool:
        beside.append(held(engine))
        return True

    long = Request(Prompt("long", list(range(4, 72))), 1, watch=watch)
    (found,) = engine.generate([long], SAMPLING)
    assert len(found) == 12 and set(beside) == {0}


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_models_with_a_cache_of_their_own_reuse_nothing(family: str) -> None:
    tokenizer = tiny_tokenizer()
    engine = NativeEngine(KVDecoder(family_model(family)), tokenizer, EngineConfig())
    assert not engine.keep_prefixes()
    assert ask(engine, FIRST).reused_tokens == ask(engine, FIRST).reused_tokens == 0


def test_a_model_whose_keys_depend_on_the_whole_length_reuses_nothing() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not KVDecoder(model).keep_prefixes()


def test_prompts_with_media_reuse_nothing() -> None:
    decoder = KVDecoder(tiny_model("qwen2", eos_token_id=None))
    decoder.keep_prefixes()
    assert decoder.prefixes is not None
    layers = {0: (torch.zeros(1, 20, 2), torch.zeros(1, 20, 2))}
    decoder.prefixes.put(FIRST, layers, 100)
    session = decoder.session()
    text, seen = Prompt("a", [*FIRST, 4]), Prompt("b", [*FIRST, 4], media=[object()])  # ty: ignore
    assert session._prefix_of(text) is not None  # ty: ignore
    assert session._prefix_of(seen) is None  # ty: ignore


def test_the_least_recently_used_sequence_is_dropped_first() -> None:
    store, layers = PrefixStore(), {0: (torch.zeros(1, 10, 2), torch.zeros(1, 10, 2))}
    first, second, third = (list(range(k, k + 10)) for k in (0, 20, 40))
    store.put(first, layers, 20)
    store.put(second, layers, 20)
    assert store.longest([*first, 1]) is not None
    store.put(third, layers, 20)
    assert store.held == 20
    assert store.longest([*second, 1]) is None and store.longest([*first, 1]) is not None
