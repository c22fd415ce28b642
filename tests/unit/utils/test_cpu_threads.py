"""Small steps on a CPU get one thread, large ones all; the number is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request
from lightrft.utils import cpu_threads
from lightrft.utils.cpu_threads import WORTH_SHARING, threads_for

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_steps_get_one_thread_and_the_number_is_put_back() -> None:
    with threads_for(WORTH_SHARING / 2, CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_inside_puts_the_number_back() -> None:
    with pytest.raises(KeyError), threads_for(0, CPU):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("operations", "device"), [(WORTH_SHARING, CPU), (0.0, torch.device("cuda"))]
)
def test_large_steps_and_other_devices_keep_all_threads(
    operations: float, device: torch.device
) -> None:
    with threads_for(operations, device):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_large_step_among_small_ones_gets_the_threads_that_it_names() -> None:
    with threads_for(0, CPU):
        with threads_for(WORTH_SHARING, CPU, 2):
            assert torch.get_num_threads() == 2
        with threads_for(0, CPU, 2):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_threads")
def test_long_prompts_are_computed_with_all_threads_and_tokens_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = tiny_model("qwen2", eos_token_id=None), tiny_tokenizer()
    tokenizer.eos_token = None
    used: list[tuple[str, int]] = []
    for name in ("prefill", "step"):
        own = getattr(PlanDecodeSession, name)

        def noted(self: PlanDecodeSession, *given: object, name: str = name, own: Any = own) -> Any:
            used.append((name, torch.get_num_threads()))
            return own(self, *given)

        monkeypatch.setattr(PlanDecodeSession, name, noted)
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    monkeypatch.setattr(cpu_threads, "WORTH_SHARING", 2.0 * engine.size * 20)
    requests = [Request(Prompt("p", [5] * 20), 0), Request(Prompt("q", [6] * 3), 1)]
    list(engine.generate(requests, SamplingConfig(max_new_tokens=3)))
    assert set(used) == {("prefill", 2), ("step", 1)}
