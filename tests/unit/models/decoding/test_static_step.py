"""Padded steps that are captured once: the same tokens, whatever happens between their replays."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.engines.native_parts.compiled_steps import compile_where_it_pays
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.decoding.static_step import (
    CompileCount,
    Step,
    StepCompiler,
    padded_shape,
    uncompiled,
)
from lightrft.models.expert_replay import ExpertReplay
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError

LIMITS = (1, 70, 9, 20)
"""Tokens of the responses: the array of responses grows."""


def captured(step: Step) -> Step:
    """Capture on a CPU: a list of operations on the tensors of the first run, as in a CUDA graph."""
    return make_fx(step)()


class SameWeights:
    """Refuses to replay a step once the weights have other memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, step: Step) -> Step:
        then = self.addresses()

        def run() -> Tensor:
            assert self.addresses() == then
            return step()

        return run

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.model.parameters()]


def impossible(step: Step) -> Step:
    """Fail as for a model whose step waits for the host."""
    raise RuntimeError("operation not permitted when stream is capturing")


def engine_of(
    model: PreTrainedModel, compiler: StepCompiler | None = None, **config: int
) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    decoder = KVDecoder(model)
    decoder.compiler = compiler
    return NativeEngine(decoder, tokenizer, EngineConfig(**config))


def requests_of(*lengths: int) -> list[Request]:
    generator, limit = torch.Generator().manual_seed(0), itertools.cycle(LIMITS)
    prompts = [
        Prompt(str(i), torch.randint(4, 99, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]
    return [Request(p, 10 * i + s, s, next(limit)) for i, p in enumerate(prompts) for s in range(3)]


def tokens_of(rollouts: list[Rollout]) -> dict[int, list[int]]:
    return {r.seed: r.token_ids for r in rollouts}


def test_captured_steps_sample_the_same_tokens() -> None:
    model, requests = tiny_model("qwen2", eos_token_id=None), requests_of(5, 17)
    # fewer than the rounded sizes need
    limits = {"max_num_seqs": 3, "max_cache_tokens": 320}
    plain = list(engine_of(model, **limits).generate(requests, SamplingConfig()))
    engine = engine_of(model, captured, **limits)
    found = list(engine.generate(requests, SamplingConfig()))
    assert tokens_of(found) == tokens_of(plain)
    assert isinstance(engine.decoder, KVDecoder)
    counts = engine.decoder.compiled
    assert counts.graphs >= 2
    assert counts.steps > 60
    assert not counts.failure


def test_steps_are_captured_again_once_the_weights_have_other_memory() -> None:
    model = tiny_model("qwen2", eos_token_id=None)
    decoder = KVDecoder(model).with_own_weights()
    decoder.compiler = SameWeights(decoder.model)
    engine = NativeEngine(decoder, engine_of(model).tokenizer, EngineConfig(), shared=False)
    rollouts = engine.generate(requests_of(5, 8), SamplingConfig())
    for _ in range(3):
        next(rollouts)
    other = tiny_model("qwen2", eos_token_id=None, seed=3)
    before = decoder.compiled.graphs
    engine.load_weights(other.named_parameters(), 1)
    assert len(list(rollouts)) == 3
    assert decoder.compiled.graphs > before > 0


def test_a_step_that_cannot_be_captured_runs_as_it_is_and_is_counted() -> None:
    model, requests = tiny_model("qwen2", eos_token_id=None), requests_of(5, 8)
    engine = engine_of(model, impossible)
    found = list(engine.generate(requests, SamplingConfig()))
    assert tokens_of(found) == tokens_of(
        list(engine_of(model).generate(requests, SamplingConfig()))
    )
    assert isinstance(engine.decoder, KVDecoder)
    assert "not permitted" in engine.decoder.compiled.failure


class FullAbove:
    """Fails to compile steps of more than ``rows`` rows for lack of memory, as a full GPU does."""

    def __init__(self, rows: int) -> None:
        self.rows, self.attempts = rows, 0

    def __call__(self, step: Step) -> Step:
        self.attempts += 1
        if len(step()) <= self.rows:
            return step
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            # Ending the capture hides the cause.
            raise RuntimeError("operation failed due to a previous error during capture")


def counts_of(engine: NativeEngine) -> CompileCount:
    assert isinstance(engine.decoder, KVDecoder)
    return engine.decoder.compiled


def test_where_memory_is_short_fewer_rows_are_captured_and_the_next_call_tries_again() -> None:
    model, requests = tiny_model("qwen2", eos_token_id=None), requests_of(5, 8)
    engine, compiler = engine_of(model), FullAbove(2)
    assert isinstance(engine.decoder, KVDecoder)
    engine.decoder.compiler = compiler
    found = list(engine.generate(requests, SamplingConfig()))
    assert tokens_of(found) == tokens_of(
        list(engine_of(model).generate(requests, SamplingConfig()))
    )
    counts = counts_of(engine)
    assert "out of memory" in counts.failure
    failures, graphs, steps = counts.failures, counts.graphs, counts.steps
    assert failures > 0 and graphs > 0 and steps > 0
    compiler.rows = 99
    list(engine.generate(requests, SamplingConfig()))
    assert counts.failures == failures
    assert counts.steps - steps > steps


def test_steps_that_cannot_be_captured_are_tried_again_at_growing_intervals() -> None:
    model, requests, tried = tiny_model("qwen2", eos_token_id=None), requests_of(5), []
    engine = engine_of(model, impossible)
    for _ in range(12):
        before = counts_of(engine).failures
        list(engine.generate(requests, SamplingConfig()))
        tried.append(counts_of(engine).failures - before)
    assert tried == [1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert isinstance(engine.decoder, KVDecoder)
    engine.decoder.compiler = uncompiled
    for _ in range(9):
        list(engine.generate(requests, SamplingConfig()))
    assert counts_of(engine).graphs > 0


def test_sizes_are_rounded_up_where_the_budget_allows_it() -> None:
    assert padded_shape(3, 65, 9, 50, 10_000) == (4, 128, 16, 50)
    assert padded_shape(3, 65, 9, 50, 700) == (3, 65, 9, 50)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    experts = KVDecoder(model, ExpertReplay(family_model("qwen3_moe")))
    for decoder, problem in (
        (KVDecoder(family_model("mamba")), "'mamba' decodes by its own cache"),
        (experts, "experts of each token are recorded"),
    ):
        with pytest.raises(ConfigError, match=problem):
            decoder.compile_steps(uncompiled)
    settings = EngineConfig(compile=True)
    with pytest.raises(ConfigError, match="shard the weights"):
        NativeEngine(KVDecoder(model), tiny_tokenizer(), settings, whole=lambda: torch.no_grad())
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no no-such-compiler"):
        NativeEngine(KVDecoder(model), tiny_tokenizer(), settings)


@pytest.mark.parametrize(
    "other",
    [{"kind": "http", "url": "http://127.0.0.1:1"}, {"speculative": {"kind": "ngram"}}],
    ids=["http", "speculative"],
)
def test_settings_that_compile_nothing_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"engine\.compile = true"):
        EngineConfig.model_validate({"compile": True, **other})


def test_by_default_steps_are_compiled_on_a_gpu_alone() -> None:
    class OnGPU(KVDecoder):
        device = torch.device("cuda")

    model, chosen = tiny_model("qwen2"), partial(compile_where_it_pays, config=EngineConfig())
    assert chosen(OnGPU(model), sharded=False)
    assert not chosen(KVDecoder(model), sharded=False)
    assert not chosen(OnGPU(model), sharded=True)
    assert not chosen(OnGPU(family_model("mamba")), sharded=False)
    assert not compile_where_it_pays(OnGPU(model), EngineConfig(compile=False), sharded=False)
