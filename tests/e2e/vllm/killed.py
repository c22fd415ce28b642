"""``python killed.py config.yaml PHASE VERSION``: an RL run that kills itself while vLLM has that version of the weights.

``generation`` is between two tokens, ``sync`` after half of the tensors of an update, and ``sleep`` before the engine sleeps.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from lightrft.config.base import load_settings
from lightrft.config.verbs import RLConfig
from lightrft.engines.vllm import VLLMEngine
from lightrft.trainer.rl import run_rl

FILE, PHASE, VERSION = sys.argv[1], sys.argv[2], int(sys.argv[3])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


step, load, sleep = VLLMEngine.step, VLLMEngine.load_weights, VLLMEngine.sleep
steps = 0


def stepping(self: VLLMEngine) -> None:
    global steps
    steps += self.version == VERSION
    if steps > 3:
        die()
    step(self)


def loading(self: VLLMEngine, weights: Any, version: int) -> Any:
    def half() -> Iterator[Any]:
        everything = list(weights)
        yield from everything[: len(everything) // 2]
        die()

    return load(self, half() if version == VERSION + 1 else weights, version)


def sleeping(self: VLLMEngine, level: int) -> None:
    if self.version == VERSION:
        die()
    sleep(self, level)


if PHASE == "generation":
    VLLMEngine.step = stepping  # ty: ignore[invalid-assignment]
elif PHASE == "sync":
    VLLMEngine.load_weights = loading  # ty: ignore[invalid-assignment]
else:
    VLLMEngine.sleep = sleeping  # ty: ignore[invalid-assignment]
run_rl(load_settings(RLConfig, [FILE]).settings)
