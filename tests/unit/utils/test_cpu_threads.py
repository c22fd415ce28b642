"""Steps on a CPU get as many threads as they are worth; the number is put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request
from lightrft.utils import cpu
from lightrft.utils.cpu import (
    POLICIES,
    SPINS,
    WORTH_A_THREAD,
    set_thread_policy,
    threads_for,
)

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_steps_get_one_thread_and_the_number_is_put_back() -> None:
    with threads_for(1.9 * WORTH_A_THREAD, CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_inside_puts_the_number_back() -> None:
    with pytest.raises(KeyError), threads_for(0, CPU):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("operations", "device"), [(2 * WORTH_A_THREAD, CPU), (0.0, torch.device("cuda"))]
)
def test_large_steps_and_other_devices_keep_all_threads(
    operations: float, device: torch.device
) -> None:
    with threads_for(operations, device):
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_large_step_among_small_ones_gets_the_threads_that_it_names() -> None:
    with threads_for(0, CPU):
        with threads_for(100 * WORTH_A_THREAD, CPU, 2):
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
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 2.0 * engine.size * 10)
    requests = [Request(Prompt("p", [5] * 20), 0), Request(Prompt("q", [6] * 3), 1)]
    list(engine.generate(requests, SamplingConfig(max_new_tokens=3)))
    assert set(used) == {("prefill", 2), ("step", 1)}


def test_threads_sleep_soon_unless_the_environment_says_how_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in POLICIES:
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as given:
        given.setenv("OMP_WAIT_POLICY", "ACTIVE")
        set_thread_policy()
        assert "GOMP_SPINCOUNT" not in os.environ
    with monkeypatch.context() as given:
        # a number of threads is no policy
        given.setenv("OMP_NUM_THREADS", "2")
        for name in POLICIES:
            # so that it is removed again
            given.setenv(name, "")
            given.delenv(name)
        set_thread_policy()
        assert os.environ["GOMP_SPINCOUNT"] == str(SPINS)
        assert os.environ["KMP_BLOCKTIME"] == "0"


def test_the_policy_is_set_before_torch_is_imported() -> None:
    code = "import sys, lightrft.cli.main; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "False\n"
