"""All responses to a prompt go to one replica of a vLLM server. ``tests/e2e/vllm`` has a server of two."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.served.vllm_server import REPLICA, VLLMServerEngine
from lightrft.types import Prompt, Request


def engine_of(replicas: int) -> Any:
    """Return an engine over a server of ``replicas`` with two processes each."""
    sizes = {"true": 2 * replicas, "false": 2}
    ask = lambda method, path: {"world_size": sizes[path.rpartition("=")[2]]}  # noqa: E731
    config = EngineConfig(kind="http", url="http://127.0.0.1:1")
    client: Any = SimpleNamespace(url=config.url, ask=ask)
    engine: Any = VLLMServerEngine(client, SimpleNamespace(), config, [])  # type: ignore[arg-type]
    engine.replicas = engine._count_replicas()
    return engine


def responses(prompts: int, group: int = 3) -> list[GrowingResponse]:
    made = [Prompt(f"p{k}", [k + 1]) for k in range(prompts)]
    wanted = [Request(prompt, seed) for prompt in made for seed in range(group)]
    return [GrowingResponse.of(one, SamplingConfig(), None) for one in wanted]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_group_stays_together_and_groups_go_to_the_replicas_in_turn(replicas: int) -> None:
    engine = engine_of(replicas)
    calls = engine.shared_calls(responses(5))
    found = [engine.headers(call)[REPLICA] for call in calls]
    assert found == [str(k % replicas) for k in range(5) for _ in range(3)]
    # more responses to a known prompt, e.g. after a pause
    again = engine.shared_calls(responses(2))
    assert [engine.headers(call)[REPLICA] for call in again] == ["0"] * 3 + ["1"] * 3


def test_a_server_with_one_replica_is_asked_for_none() -> None:
    engine = engine_of(1)
    assert [engine.headers(call) for call in engine.shared_calls(responses(2))] == [{}] * 6
