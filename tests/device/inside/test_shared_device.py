"""A device that several programs share: cached memory that an engine needs, and ranks that need a device each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.distributed.process_group import choose_device, init_process_group
from lightrft.engines.sglang import SGLangEngine
from lightrft.engines.vllm import MEMORY, VLLMEngine
from lightrft.utils.errors import ConfigError
from lightrft.workers.engine_workers import EngineWorkerGroup
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests.device.counting_device import NAME, build
from tests.e2e.several import ENVIRONMENT
from tests.serving_helpers import free_port

ROOT = Path(__file__).parents[3]


class Taker:
    """Takes memory of the device beside torch: it finds what torch has cached still taken."""

    name = "engine 0"

    def __init__(self) -> None:
        self.found: list[int] = []

    def take(self, *_: object, **__: object) -> None:
        self.found.append(build().counts()["cached_bytes"])

    wake_up = ask = take

    def call(self, method: str, *_: object) -> Future[None]:
        self.take()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Do nothing: there is no process."""


def vllm(taker: Taker) -> Callable[[], None]:
    engine: Any = object.__new__(VLLMEngine)
    engine._llm, engine._freed = taker, list(MEMORY)
    return engine.wake


def sglang(taker: Taker) -> Callable[[], None]:
    engine: Any = object.__new__(SGLangEngine)
    engine.client, engine._process = taker, None
    engine._released, engine._released_by = ("kv_cache",), 0
    return lambda: engine._restore("kv_cache")


def workers(taker: Taker) -> Callable[[], None]:
    limits = FaultPolicy(restarts=0, call_timeout=60.0)
    way: Any = WeightSyncConfig("shared")
    group: Any = EngineWorkerGroup([taker], EngineConfig(), limits, way)  # ty: ignore[invalid-argument-type]
    return group.wake


@pytest.mark.parametrize("build_engine", [vllm, sglang, workers])
def test_an_engine_on_the_same_device_finds_the_memory_that_training_has_freed(
    build_engine: Callable[[Taker], Callable[[], None]], device: torch.device
) -> None:
    taker = Taker()
    wake = build_engine(taker)
    freed = torch.empty(1000, device=device)
    del freed
    assert build().counts()["cached_bytes"] >= 4000
    wake()
    assert taker.found == [0]


RANK = """
from tests.device.counting_device import register
register()
from lightrft.distributed.process_group import init_process_group
with init_process_group(1.0, "cpu") as ranks:
    print("ranks", ranks.gather(ranks.rank))
"""


def test_ranks_on_the_cpu_ignore_the_device_of_their_machine() -> None:
    port = str(free_port())
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **ENVIRONMENT, **given, "RANK": str(k), "LOCAL_RANK": str(k)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    found = [process.communicate(timeout=240)[0].strip() for process in both]
    assert found == ["ranks [0, 1]"] * 2


@pytest.mark.parametrize(
    ("device", "more", "problem"),
    [
        ("auto", {"LOCAL_WORLD_SIZE": "2"}, "2 processes of this machine need a device each"),
        (f"{NAME}:0", {}, f"strategy.device = '{NAME}:0' names one device for all processes"),
    ],
)
def test_ranks_without_a_device_each_are_refused(
    device: str, more: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**given, "MASTER_PORT": "1", **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem), init_process_group(1.0, device):
        pass


def test_a_rank_to_which_a_launcher_shows_one_device_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert choose_device("auto") is None


def test_ranks_that_do_not_know_their_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert choose_device("auto") is None
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="does not say which of the 2 devices"):
        choose_device("auto")
