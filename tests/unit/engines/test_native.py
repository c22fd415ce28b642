"""The native engine over small real models: what it draws, what it computes, and what it leaves behind."""

import dataclasses
import gc
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.fingerprint import checksum
from lightrft.engines.native import NativeEngine
from lightrft.models.attention import interface
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.tiny.text import FAMILIES, PRINTABLE, tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import DataError, ModelError, ResourceError
from tests.model_helpers import STORED, small_model


class WatchedSession(PlanDecodeSession):
    log: list[tuple[int, int]]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().step(tokens)
        self.log.append((len(self), self.held))
        return out

    def admit(self, handles: list[int], sealed: list[int] = ()) -> None:
        super().admit(handles, sealed)
        self.log.append((len(self), self.held))


class Watched(KVDecoder):
    """Records the rows and the held tokens of every step."""

    def session(self) -> PlanDecodeSession:
        session = WatchedSession(self.model)
        self.log = session.log = []
        self.latest = weakref.ref(session)
        return session


def endless(family: str = "qwen2", **overrides: object) -> PreTrainedModel:
    """A model that ends an answer only when told to."""
    return tiny_model(family, eos_token_id=None, **overrides)


def exact_model(family: str = "qwen2", **overrides: object) -> PreTrainedModel:
    return small_model(family, torch.float64, eos_token_id=None, **overrides)


def engine_of(
    model: torch.nn.Module, *, version: int = 0, eos: bool = False, **config: int
) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    if not eos:
        tokenizer.eos_token = None
    return NativeEngine(Watched(model), tokenizer, EngineConfig(**config), version=version)


def prompts_of(*lengths: int, seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Prompt(id=str(i), token_ids=torch.randint(4, 99, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def requests_of(
    prompts: list[Prompt], answers: int = 1, limits: Iterator[int] | None = None
) -> list[Request]:
    return [
        Request(
            p, seed=1000 * i + j, sample=j, max_new_tokens=None if limits is None else next(limits)
        )
        for i, p in enumerate(prompts)
        for j in range(answers)
    ]


def by_key(rollouts: Iterator[Rollout]) -> dict[tuple[str, int], Rollout]:
    found = {(r.prompt.id, r.sample): r for r in rollouts}
    for r in found.values():
        assert len(r.token_ids) == len(r.logprobs) == len(r.versions) == len(r.sampled) > 0
    return found


def reference_logits(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """``[T, V]`` of a plain forward over prompt and answer, at the places that predict the answer's tokens."""
    ids = torch.tensor([rollout.prompt.token_ids + rollout.token_ids])
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[
            0, len(rollout.prompt.token_ids) - 1 : -1
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_those_of_transformers_generate(family: str) -> None:
    model = endless(family)
    prompts = prompts_of(5, 23, 40, 11)
    got = by_key(
        engine_of(model).generate(
            requests_of(prompts, 2), SamplingConfig(temperature=0, max_new_tokens=45)
        )
    )
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=45,
            pad_token_id=0,
        )
        with torch.no_grad():
            logits = model(want).logits[0, ids.shape[1] - 1 : -1].double()
        scored = logits.log_softmax(-1).gather(-1, want[0, ids.shape[1] :, None])[:, 0].tolist()
        for sample in range(2):
            rollout = got[prompt.id, sample]
            assert rollout.token_ids == want[0, ids.shape[1] :].tolist()
            assert rollout.logprobs == pytest.approx(scored, abs=1e-4)
            assert rollout.finish_reason == "length"


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_plain_forward(family: str) -> None:
    model = exact_model(family)
    limits = itertools.cycle([1, 7, 30])
    requests = requests_of(prompts_of(5, 40, 23), 2, limits)
    rollouts = list(
        engine_of(model, max_num_seqs=4).generate(requests, SamplingConfig(temperature=1.3))
    )
    assert sorted(len(r) for r in rollouts) == [1, 1, 7, 7, 30, 30]
    for r in rollouts:
        want = torch.log_softmax(reference_logits(model, r) / 1.3, -1).gather(
            1, torch.tensor(r.token_ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(
            torch.tensor(r.logprobs, dtype=torch.float64), want, atol=1e-9, rtol=STORED
        )


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_a_lone_row_crosses_the_border_of_the_sliding_window_exactly(family: str) -> None:
    model = exact_model(family)
    for length in (10, 15, 16, 17):
        [r] = engine_of(model).generate(
            requests_of(prompts_of(length)), SamplingConfig(max_new_tokens=12)
        )
        want = torch.log_softmax(reference_logits(model, r), -1).gather(
            1, torch.tensor(r.token_ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(
            torch.tensor(r.logprobs, dtype=torch.float64), want, atol=1e-9, rtol=STORED
        )


def filtered(
    logits: torch.Tensor, sampling: SamplingConfig, before: list[int], suppressed: set[int]
) -> dict[int, float]:
    """Token to log-probability, by the definitions, in Python floats."""
    x = {i: float(v) for i, v in enumerate(logits.tolist())}
    for token in set(before):
        x[token] = (
            x[token] * sampling.repetition_penalty
            if x[token] < 0
            else x[token] / sampling.repetition_penalty
        )
    x = {i: v / sampling.temperature for i, v in x.items() if i not in suppressed}
    ranked = sorted(x, key=lambda i: -x[i])[: sampling.top_k or None]
    total = math.fsum(math.exp(x[i]) for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass < sampling.top_p and math.exp(x[i]) >= sampling.min_p * math.exp(x[ranked[0]]):
            kept.append(i)
        mass += math.exp(x[i]) / total
    norm = math.log(math.fsum(math.exp(x[i]) for i in kept))
    return {i: x[i] - norm for i in kept}


@pytest.mark.usefixtures("exact")
def test_log_probs_are_those_of_the_filtered_distribution_that_was_drawn_from() -> None:
    model = exact_model("gemma2")
    # Fmt: skip.
    sampling = SamplingConfig(
        temperature=0.9,
        top_k=30,
        top_p=0.8,
        min_p=0.02,
        repetition_penalty=1.2,
        max_new_tokens=25,
        min_new_tokens=9,
        stop_token_ids=tuple(range(4, 30)),
    )
    rollouts = list(
        engine_of(model, max_num_seqs=3).generate(requests_of(prompts_of(6, 31), 4), sampling)
    )
    assert any(r.finish_reason == "stop" for r in rollouts)
    for r in rollouts:
        assert len(r) > 9 or r.finish_reason == "length"
        for t, (logits, token) in enumerate(zip(reference_logits(model, r), r.token_ids)):
            suppressed = set(sampling.stop_token_ids) if t < 9 else set()
            want = filtered(logits, sampling, r.prompt.token_ids + r.token_ids[:t], suppressed)
            assert r.logprobs[t] == pytest.approx(want[token], rel=STORED, abs=1e-9)


@pytest.mark.usefixtures("exact")
def test_an_answer_depends_on_its_request_alone() -> None:
    model = exact_model()
    prompts = prompts_of(9, 30, 17)
    limits = itertools.cycle([33, 4, 18, 9, 26])
    requests = requests_of(prompts, 5, limits)
    sampling = SamplingConfig(top_p=0.95)
    together = by_key(engine_of(model).generate(requests, sampling))
    for other in (
        engine_of(model, max_num_seqs=3).generate(requests, sampling),
        engine_of(model, max_num_seqs=1).generate(requests[::-1], sampling),
        engine_of(model, max_cache_tokens=150).generate(requests[::2] + requests[1::2], sampling),
        (r for request in requests for r in engine_of(model).generate([request], sampling)),
    ):
        found = by_key(other)
        assert found.keys() == together.keys()
        for key, rollout in found.items():
            assert rollout.token_ids == together[key].token_ids
            assert rollout.logprobs == pytest.approx(together[key].logprobs, rel=STORED, abs=1e-9)
    assert len({tuple(r.token_ids[:4]) for r in together.values()}) == len(requests)


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 3}, {"max_cache_tokens": 130}])
def test_each_distinct_prompt_and_each_drawn_token_goes_through_the_model_once(
    config: dict[str, int],
) -> None:
    model = endless()
    prompts = prompts_of(9, 30, 17)
    prompts.append(Prompt(id="same tokens", token_ids=list(prompts[1].token_ids)))
    seen = {"tokens": 0, "logits": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(_: object, args: tuple[torch.Tensor], __: object = None) -> None:
            seen[name] += args[0].shape[0] * args[0].shape[1]

        return hook

    model.get_input_embeddings().register_forward_pre_hook(count("tokens"))
    model.get_output_embeddings().register_forward_pre_hook(count("logits"))
    requests = requests_of(prompts, 4, itertools.cycle([12, 1, 30, 5]))
    rollouts = list(engine_of(model, **config).generate(requests, SamplingConfig()))
    fed = sum(len(r) - 1 for r in rollouts)
    assert seen == {"tokens": 9 + 30 + 17 + fed, "logits": 3 + fed}


def test_a_finished_row_leaves_at_once_and_a_waiting_one_takes_its_place() -> None:
    engine = engine_of(endless(), max_num_seqs=2)
    requests = requests_of(prompts_of(6), 4, iter([3, 9, 5, 2]))
    order = [r.sample for r in engine.generate(requests, SamplingConfig())]
    assert order == [0, 2, 1, 3]
    # Rounds 1-3 grow answers 0 and 1; 2 enters in round 4 and ends in round 8; 3 enters in round 9, where 1 ends, and ends in 10.
    # A round with an entry shows twice: the rows that were there, then all.
    assert [rows for rows, _ in engine.decoder.log] == [2, 2, 2, 1, 2, 2, 2, 2, 2, 1, 2, 1]


def test_the_budget_is_never_exceeded_and_is_put_to_use() -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = prompts_of(*torch.randint(1, 60, (12,), generator=generator).tolist())
    limits = [int(x) for x in torch.randint(1, 80, (36,), generator=generator)]
    for budget in (140, 300, 1000):
        engine = engine_of(endless(), max_cache_tokens=budget)
        rollouts = by_key(engine.generate(requests_of(prompts, 3, iter(limits)), SamplingConfig()))
        assert [len(rollouts[str(i), j]) for i in range(12) for j in range(3)] == limits
        assert max(held for _, held in engine.decoder.log) <= budget
        assert max(held for _, held in engine.decoder.log) > budget // 2
        assert max(rows for rows, _ in engine.decoder.log) > 1


def test_a_request_that_can_never_fit_is_refused_before_anything_is_drawn() -> None:
    engine = engine_of(endless(), max_cache_tokens=30)
    with pytest.raises(
        ResourceError,
        match=r"engine\.max_cache_tokens = 30 .* 21 prompt tokens \+ max_new_tokens 10 = 31",
    ):
        engine.generate(requests_of(prompts_of(5, 21)), SamplingConfig(max_new_tokens=10))
    assert (
        len(list(engine.generate(requests_of(prompts_of(20)), SamplingConfig(max_new_tokens=10))))
        == 1
    )


def test_stop_tokens_and_the_end_tokens_of_model_and_tokenizer_end_an_answer() -> None:
    model = endless()
    requests = requests_of(prompts_of(9), 6)
    free = by_key(engine_of(model).generate(requests, SamplingConfig(max_new_tokens=60)))
    tokens = free["0", 0].token_ids
    stop = tokens[10]
    where = tokens.index(stop)

    ended = by_key(
        engine_of(model).generate(
            requests, SamplingConfig(max_new_tokens=60, stop_token_ids=(stop,))
        )
    )["0", 0]
    model.generation_config.eos_token_id = [1, stop]
    listed = by_key(engine_of(model).generate(requests, SamplingConfig(max_new_tokens=60)))["0", 0]
    model.generation_config.eos_token_id = None
    tokenized = engine_of(model)
    tokenized.tokenizer.eos_token = tokenized.tokenizer.convert_ids_to_tokens(stop)
    own = by_key(tokenized.generate(requests, SamplingConfig(max_new_tokens=60)))["0", 0]
    for rollout in (ended, listed, own):
        assert rollout.token_ids == tokens[: where + 1]
        assert rollout.finish_reason == "stop"


def test_the_end_of_turn_of_the_chat_template_ends_an_answer() -> None:
    model = endless()
    requests = requests_of(prompts_of(9), 6)
    tokens = by_key(engine_of(model).generate(requests, SamplingConfig(max_new_tokens=60)))[
        "0", 0
    ].token_ids
    engine = engine_of(model)
    # neither tokenizer nor configs name the special token that ends a turn
    stop = tokens[10]
    word = engine.tokenizer.convert_ids_to_tokens(stop)
    unused = next(c for c in PRINTABLE if c not in engine.tokenizer.decode(tokens))
    engine.tokenizer.eos_token = unused
    engine.tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{{ '" + word + "' }}{% endfor %}"
    )
    ended = by_key(engine.generate(requests, SamplingConfig(max_new_tokens=60)))["0", 0]
    assert ended.token_ids == tokens[: tokens.index(stop) + 1]
    assert ended.finish_reason == "stop"
    engine.tokenizer.chat_template = None
    named = by_key(engine.generate(requests, SamplingConfig(max_new_tokens=60, stop=(word,))))
    assert named["0", 0].token_ids == ended.token_ids
    assert named["0", 0].text == engine.tokenizer.decode(ended.token_ids[:-1])


def test_a_stop_string_across_tokens_ends_the_answer_and_is_cut_from_its_text() -> None:
    engine = engine_of(endless())
    requests = requests_of(prompts_of(9), 5)
    free = by_key(engine.generate(requests, SamplingConfig(max_new_tokens=60)))
    text = free["0", 2].plain_text
    assert len(text) > 30
    stop = text[20:24]
    where = text.index(stop)
    got = by_key(
        engine.generate(requests, SamplingConfig(max_new_tokens=60, stop=("not there", stop)))
    )
    rollout = got["0", 2]
    assert rollout.plain_text == text[:where]
    assert rollout.finish_reason == "stop"
    assert engine.tokenizer.decode(rollout.token_ids, skip_special_tokens=True) == text[: where + 4]
    assert rollout.token_ids == free["0", 2].token_ids[: len(rollout)]
    others = [key for key, r in free.items() if stop not in r.plain_text]
    assert others
    assert all(got[key].token_ids == free[key].token_ids for key in others)


def test_no_stop_before_the_least_number_of_tokens() -> None:
    engine = engine_of(endless())
    half = tuple(range(4, 50))
    sampling = SamplingConfig(
        max_new_tokens=40, min_new_tokens=12, stop_token_ids=half, stop=("a", "b", "c")
    )
    rollouts = list(engine.generate(requests_of(prompts_of(9), 20), sampling))
    assert {r.finish_reason for r in rollouts} == {"stop"}
    assert min(len(r) for r in rollouts) == 12
    for r in rollouts:
        assert not set(r.token_ids[:12]) & set(half)


def test_weights_are_shared_and_a_change_in_place_shows_in_the_next_answers() -> None:
    model = endless()
    engine = engine_of(model, version=4)
    pointers = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for _, p in engine.decoder.parameters()} == pointers
    requests = requests_of(prompts_of(9), 3)
    before = by_key(engine.generate(requests, SamplingConfig(max_new_tokens=20)))
    first = engine.load_weights([], version=5)
    assert engine.load_weights([], version=5) == first
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    second = engine.load_weights([], version=6)
    assert [name for name in first if first[name] != second[name]] == [
        "model.layers.0.mlp.up_proj.weight"
    ]
    after = by_key(engine.generate(requests, SamplingConfig(max_new_tokens=20)))
    fresh = by_key(engine_of(model).generate(requests, SamplingConfig(max_new_tokens=20)))
    for key, rollout in after.items():
        assert rollout.token_ids == fresh[key].token_ids
        assert rollout.token_ids != before[key].token_ids
        assert set(rollout.versions) == {6}
        assert set(before[key].versions) == {4}


def test_a_checksum_sees_one_changed_number_and_an_exchange_of_two() -> None:
    x = torch.randn(20, 30)
    y, z = x.clone(), x.clone()
    y[3, 4] += 1e-3
    z[0, 0], z[0, 1] = x[0, 1], x[0, 0]
    assert len({checksum(t) for t in (x, y, z, x.bfloat16(), x.view(30, 20))}) == 5
    assert checksum(x.clone()) == checksum(x)
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_a_version_that_arrives_midway_marks_the_tokens_drawn_after_it() -> None:
    engine = engine_of(endless(), version=1)
    answers = engine.generate(requests_of(prompts_of(9), 2, iter([5, 12])), SamplingConfig())
    assert next(answers).versions == [1] * 5
    engine.load_weights([], version=2)
    assert next(answers).versions == [1] * 5 + [2] * 7


def test_an_adapted_model_runs_with_its_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(endless(), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    prompt = prompts_of(12)[0]
    sampling = SamplingConfig(temperature=0, max_new_tokens=20)
    ids = torch.tensor([prompt.token_ids])
    want = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=0,
    )
    [got] = engine_of(model).generate([Request(prompt, 0)], sampling)
    assert got.token_ids == want[0, 12:].tolist()
    with model.disable_adapter():
        [base] = engine_of(model).generate([Request(prompt, 0)], sampling)
    assert base.token_ids != got.token_ids


def test_the_policy_is_itself_again_whenever_the_caller_has_control() -> None:
    model = endless()
    model.train()
    model.model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    before = model.config._attn_implementation
    assert before != interface.NAME
    for _ in engine_of(model).generate(
        requests_of(prompts_of(9, 4), 2, iter([2, 5, 5, 9])), SamplingConfig()
    ):
        assert [m.training for m in model.modules()] == modes
        assert model.config._attn_implementation == before
        assert torch.is_grad_enabled()
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()


def test_dropping_an_iterator_early_leaves_the_engine_usable_and_frees_its_cache() -> None:
    engine = engine_of(endless())
    requests = requests_of(prompts_of(9, 4), 3)
    sampling = SamplingConfig(max_new_tokens=10)
    want = by_key(engine.generate(requests, sampling))
    answers = engine.generate(
        requests_of(prompts_of(9, 4), 3, itertools.cycle([3, 8, 20])), SamplingConfig()
    )
    next(answers)
    answers.close()
    gc.collect()
    assert engine.decoder.latest() is None
    assert {k: r.token_ids for k, r in by_key(engine.generate(requests, sampling)).items()} == {
        k: r.token_ids for k, r in want.items()
    }


def test_two_open_iterators_do_not_disturb_each_other() -> None:
    engine = engine_of(endless())
    requests = requests_of(prompts_of(9, 4), 2, itertools.cycle([3, 11, 7, 5]))
    want = {k: r.token_ids for k, r in by_key(engine.generate(requests, SamplingConfig())).items()}
    pair = [engine.generate(requests, SamplingConfig()) for _ in range(2)]
    mixed = list(zip(*pair))
    for side in zip(*mixed):
        assert {k: r.token_ids for k, r in by_key(iter(side)).items()} == want


def test_a_model_that_raises_leaves_the_engine_and_the_policy_usable() -> None:
    model = endless()
    model.train()
    engine = engine_of(model)
    requests = requests_of(prompts_of(9, 4), 2)
    calls = itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == 5:
            raise MemoryError("no memory")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        list(engine.generate(requests, SamplingConfig(max_new_tokens=10)))
    hook.remove()
    assert model.training
    assert model.config._attn_implementation != interface.NAME
    assert torch.is_grad_enabled()
    assert len(list(engine.generate(requests, SamplingConfig(max_new_tokens=10)))) == 4


def test_diverged_weights_are_an_error_that_says_so() -> None:
    model = endless()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match="not numbers"):
            list(
                engine_of(model).generate(
                    requests_of(prompts_of(3)), SamplingConfig(temperature=temperature)
                )
            )


def test_no_requests_give_no_answers_and_touch_nothing() -> None:
    assert list(engine_of(endless()).generate([], SamplingConfig())) == []


def test_requests_that_make_no_sense_are_refused() -> None:
    engine = engine_of(endless())
    with pytest.raises(DataError, match="no tokens"):
        list(engine.generate([Request(Prompt(id="empty", token_ids=[]), 0)], SamplingConfig()))
    with pytest.raises(ValueError, match="at least 1"):
        engine.generate([Request(prompts_of(3)[0], 0, max_new_tokens=0)], SamplingConfig())


def test_a_sleeping_engine_refuses_to_draw_until_woken() -> None:
    engine = engine_of(endless())
    answers = engine.generate(requests_of(prompts_of(9), 2, iter([2, 6])), SamplingConfig())
    next(answers)
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="wake"):
        next(answers)
    engine.wake()
    assert (
        len(list(engine.generate(requests_of(prompts_of(9)), SamplingConfig(max_new_tokens=3))))
        == 1
    )


def test_a_bfloat16_policy_draws_with_float32_log_probs() -> None:
    model = endless("gemma2", dtype=torch.bfloat16)
    [r] = engine_of(model).generate(requests_of(prompts_of(30)), SamplingConfig(max_new_tokens=20))
    want = torch.log_softmax(reference_logits(model, r).float(), -1).gather(
        1, torch.tensor(r.token_ids)[:, None]
    )[:, 0]
    torch.testing.assert_close(torch.tensor(r.logprobs), want, atol=0.1, rtol=0)


def test_many_prompts_are_prefilled_in_parts_and_released_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightrft.models.decoding.kv_decoder.PREFILL_TOKENS", 50)
    model = endless("gemma3")
    generator = torch.Generator().manual_seed(5)
    prompts = prompts_of(*torch.randint(1, 45, (9,), generator=generator).tolist())
    limits = [int(x) for x in torch.randint(1, 40, (27,), generator=generator)]
    sampling = SamplingConfig(temperature=0)
    got = by_key(
        engine_of(model, max_num_seqs=5).generate(requests_of(prompts, 3, iter(limits)), sampling)
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.token_ids])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=0,
        )[0]
        for j in range(3):
            assert (
                got[str(i), j].token_ids
                == want[len(prompt.token_ids) :].tolist()[: limits[3 * i + j]]
            )


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_greedy_request_among_sampled_ones_is_answered_as_at_temperature_0(
    penalty: float,
) -> None:
    model = endless()
    shared = {
        "max_new_tokens": 20,
        "repetition_penalty": penalty,
        "stop_token_ids": (7,),
        "min_new_tokens": 20,
    }
    sampling, greedy = (
        SamplingConfig(temperature=1.3, top_p=0.9, **shared),
        SamplingConfig(temperature=0, **shared),
    )
    requests = requests_of(prompts_of(9, 14), 3)
    want = by_key(engine_of(model).generate(requests, greedy))
    drawn = by_key(engine_of(model).generate(requests, sampling))
    marked = [dataclasses.replace(r, greedy=r.sample == 1) for r in requests]
    for max_rows in (2, 64):
        mixed = by_key(engine_of(model, max_num_seqs=max_rows).generate(marked, sampling))
        for key, rollout in mixed.items():
            assert rollout.token_ids == (want if key[1] == 1 else drawn)[key].token_ids
        assert mixed["0", 1].logprobs == pytest.approx(want["0", 1].logprobs, abs=1e-5)


def test_when_stopped_every_request_that_is_not_finished_comes_out_as_it_is() -> None:
    engine = engine_of(endless(), max_num_seqs=3)
    requests = requests_of(prompts_of(9, 14), 3, iter([4, 30, 30, 30, 30, 30]))
    whole = by_key(engine.generate(requests, SamplingConfig()))
    done: list[Rollout] = []
    for rollout in engine.generate(requests, SamplingConfig(), lambda: bool(done)):
        done.append(rollout)
    assert sorted((r.prompt.id, r.sample) for r in done) == sorted(whole)
    finished, begun, empty = done[0], done[1:3], done[3:]
    assert (finished.finish_reason, len(finished)) == ("length", 4)
    assert [(r.finish_reason, len(r)) for r in begun] == [("abort", 4)] * 2
    assert [(r.finish_reason, len(r)) for r in empty] == [("abort", 0)] * 3
    for rollout in begun:
        assert rollout.token_ids == whole[rollout.prompt.id, rollout.sample].token_ids[:4]
        assert len(rollout.logprobs) == len(rollout.versions) == len(rollout.sampled) == 4


def test_being_stopped_is_seen_between_tokens() -> None:
    engine = engine_of(endless())
    asked = itertools.count()
    [cut] = engine.generate(
        requests_of(prompts_of(9)), SamplingConfig(max_new_tokens=50), lambda: next(asked) >= 8
    )
    assert cut.finish_reason == "abort"
    assert 0 < len(cut) <= 8


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_an_answer_that_pauses_and_goes_on_is_the_one_that_was_never_paused(
    family: str, penalty: float
) -> None:
    model = exact_model(family)
    requests = requests_of(prompts_of(5, 23), 3, itertools.cycle([29, 12, 7]))
    sampling = SamplingConfig(temperature=1.2, repetition_penalty=penalty, min_new_tokens=3)
    whole = by_key(engine_of(model).generate(requests, sampling))
    waiting, found = requests, {}
    for round_ in range(1, 20):
        engine = engine_of(model, version=round_, max_num_seqs=4, max_cache_tokens=130)
        drawn = by_key(
            engine.generate(
                [replace(r, pause_after_tokens=r.num_generated + 5) for r in waiting], sampling
            )
        )
        found |= {key: r for key, r in drawn.items() if r.finish_reason != "abort"}
        assert all(len(r) == 5 * round_ for r in drawn.values() if r.finish_reason == "abort")
        waiting = [
            replace(r, partial=drawn[r.prompt.id, r.sample])
            for r in waiting
            if (r.prompt.id, r.sample) not in found
        ]
        if not waiting:
            break
    assert found.keys() == whole.keys()
    for key, rollout in found.items():
        assert (rollout.token_ids, rollout.finish_reason, rollout.text) == (
            whole[key].token_ids,
            whole[key].finish_reason,
            whole[key].text,
        )
        assert rollout.logprobs == pytest.approx(whole[key].logprobs, rel=STORED, abs=1e-9)
        assert rollout.versions == [1 + t // 5 for t in range(len(rollout))]
        assert rollout.sampled == [True] * len(rollout)


@pytest.mark.usefixtures("exact")
def test_what_goes_on_is_drawn_by_the_weights_of_now() -> None:
    first, second = exact_model(seed=1), exact_model(seed=2)
    [request] = requests_of(prompts_of(9), 1, iter([12]))
    [begun] = engine_of(first).generate([replace(request, pause_after_tokens=5)], SamplingConfig())
    [whole] = engine_of(second).generate([replace(request, partial=begun)], SamplingConfig())
    assert whole.token_ids[:5] == begun.token_ids and whole.logprobs[:5] == begun.logprobs
    want = torch.log_softmax(reference_logits(second, whole), -1).gather(
        1, torch.tensor(whole.token_ids)[:, None]
    )[:, 0]
    found = torch.tensor(whole.logprobs[5:], dtype=torch.float64)
    torch.testing.assert_close(found, want[5:], atol=1e-9, rtol=STORED)


def test_stop_strings_and_ends_are_seen_over_a_pause() -> None:
    model = endless()
    [request] = requests_of(prompts_of(9), 1, iter([40]))
    [free] = engine_of(model).generate([request], SamplingConfig())
    stop = tiny_tokenizer().decode(free.token_ids[6:9])
    sampling = SamplingConfig(stop=(stop,))
    [whole] = engine_of(model).generate([request], sampling)
    [begun] = engine_of(model).generate([replace(request, pause_after_tokens=8)], sampling)
    if len(whole) > 8:
        assert begun.finish_reason == "abort"
        [begun] = engine_of(model).generate([replace(request, partial=begun)], sampling)
    assert (begun.token_ids, begun.text, begun.finish_reason) == (
        whole.token_ids,
        whole.text,
        "stop",
    )


def test_what_was_begun_and_not_reached_before_a_stop_comes_back_as_it_was() -> None:
    model = endless()
    requests = requests_of(prompts_of(9, 12), 1, iter([20, 20]))
    begun = by_key(
        engine_of(model).generate(
            [replace(r, pause_after_tokens=4) for r in requests], SamplingConfig()
        )
    )
    going_on = [replace(r, partial=begun[r.prompt.id, r.sample]) for r in requests]
    again = by_key(engine_of(model).generate(going_on, SamplingConfig(), lambda: True))
    assert again == begun


def test_an_answer_that_is_as_long_as_it_may_be_cannot_go_on() -> None:
    [request] = requests_of(prompts_of(9), 1, iter([4]))
    [whole] = engine_of(endless()).generate([request], SamplingConfig())
    with pytest.raises(ValueError, match="4 tokens of a response to '0' are there; it ends at 4"):
        engine_of(endless()).generate([replace(request, partial=whole)], SamplingConfig())


def test_an_engine_apart_draws_by_the_weights_that_it_was_given_and_leaves_the_policy_alone() -> (
    None
):
    policy, other = endless("qwen2", seed=1), endless("qwen2", seed=2)
    before = {n: p.clone() for n, p in policy.named_parameters()}
    requests = requests_of(prompts_of(9, 4), 2, itertools.cycle([12]))
    apart = NativeEngine(
        KVDecoder(policy).with_own_weights(),
        engine_of(policy).tokenizer,
        EngineConfig(),
        shared=False,
    )
    wanted = {
        key: r.token_ids
        for key, r in by_key(engine_of(other).generate(requests, SamplingConfig())).items()
    }
    weights = {n: p.detach().clone() for n, p in other.named_parameters()}
    assert apart.load_weights(weights.items(), 3) == engine_of(other).load_weights([], 3)
    found = by_key(apart.generate(requests, SamplingConfig()))
    assert {key: r.token_ids for key, r in found.items()} == wanted
    assert {v for r in found.values() for v in r.versions} == {3}
    assert all(p.equal(before[n]) and p.requires_grad for n, p in policy.named_parameters())
    with pytest.raises(ModelError, match=r"'nonsense'.*no such parameter"):
        apart.load_weights([("nonsense", torch.zeros(2))], 4)
