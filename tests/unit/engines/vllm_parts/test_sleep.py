"""Sleep and wake of vLLM, which maps memory a second time if it is asked for what is awake."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.engines.vllm import MEMORY, VLLMEngine


class Memory:
    """The parts of memory that vLLM has freed."""

    def __init__(self) -> None:
        self.freed: set[str] = set()

    def sleep(self, level: int) -> None:
        self.freed = set(MEMORY)

    def wake_up(self, parts: list[str]) -> None:
        assert self.freed.issuperset(parts), f"{parts} are awake"
        self.freed -= set(parts)


@pytest.fixture
def engine() -> Any:
    made: Any = object.__new__(VLLMEngine)
    made._llm = Memory()
    made._freed = []
    made._sleeping = made.stays_awake = False
    made._has_weights = True
    made._frees_memory = True
    return made


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_each_part_of_memory_is_woken_once_whatever_is_loaded_before(
    updates: int, engine: Any
) -> None:
    engine.sleep(1)
    for _ in range(updates):
        engine._restore("weights")
        assert engine._llm.freed == {"kv_cache"}
    engine.wake()
    assert not engine._llm.freed
    engine.wake()
