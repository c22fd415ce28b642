"""Compiled decoding of the native engine: CUDA graphs on a GPU, ``torch.compile`` on a CPU."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.engines.base import Engine
from lightrft.engines.decoder_protocol import CompilingDecoder, DecoderProtocol
from lightrft.observability.metrics import Last, Metrics
from lightrft.utils.device_transfer import is_out_of_memory
from lightrft.utils.errors import ConfigError

log = logging.getLogger(__name__)

Step = Callable[[], Tensor]


class CudaGraphs:
    """Captures each step as a CUDA graph. All graphs share a memory pool.

    Args:
        device: Device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # keeps the pool: it ends with its last graph, and each call of ``generate`` would then take
        # memory for another one
        self._last: torch.cuda.CUDAGraph | None = None
        self._stream: Any = None

    def __call__(self, step: Step) -> Step:
        with torch.cuda.device(self._device):
            try:
                graph, logits = self._capture(step)
            except Exception as error:
                # ending a capture that ran out of memory may raise another error
                if not is_out_of_memory(error):
                    raise
                # nothing can be freed during a capture
                torch.cuda.empty_cache()
                graph, logits = self._capture(step)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _capture(self, step: Step) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return the graph of ``step``, and the logits that a replay writes.

        ``torch.cuda.graph`` would empty the allocator's cache first, and the next training step
        would ask the device for all of its memory again.
        """
        if self._last is None:
            self._pool = torch.cuda.graph_pool_handle()
            # one for all captures: memory of a pool belongs to the stream that asked for it
            self._stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        random = torch.cuda.default_generators[torch.cuda.current_device()]
        state = random.clone_state()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                # other threads may allocate memory meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    logits = step()
                finally:
                    graph.capture_end()
        except BaseException:
            # a failed capture leaves a state that gives no random numbers outside of captures
            random.graphsafe_set_state(state)
            raise
        self._last = graph
        return graph, logits


class TorchCompile:
    """Compiles each step for the CPU."""

    def __call__(self, step: Step) -> Step:
        compiled = torch.compile(step, dynamic=False)

        def run() -> Tensor:
            # one step is compiled for many shapes, and torch stops at 8 by default
            with torch._dynamo.config.patch(recompile_limit=1024):
                return compiled()

        return run


def compiler_for(device: torch.device) -> Callable[[Step], Step]:
    """Return the compiler of steps on ``device``.

    Raises:
        ConfigError: There is none.
    """
    problem = f"engine.compile = true on the device {device}"
    if device.type == "cuda":
        return CudaGraphs(device)
    if device.type != "cpu":
        raise ConfigError(
            f"{problem}: it compiles for NVIDIA GPUs and CPUs; leave out engine.compile"
        )
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"{problem} needs a C++ compiler, and there is no {compiler}; install one, name it in "
            f"the environment variable CXX, or leave out engine.compile"
        )
    return TorchCompile()


SHARDED = (
    "engine.compile = true: the ranks shard the weights, so a step gathers weights or waits for "
    "other ranks; leave out engine.compile, run one process, or set launch.ray.engines"
)
"""Why the policy of several processes compiles no steps."""


def compile_decoder(decoder: DecoderProtocol, *, sharded: bool) -> None:
    """Let ``decoder`` compile its steps.

    Args:
        decoder: The policy.
        sharded: Several ranks hold the weights.

    Raises:
        ConfigError: Its steps cannot be compiled.
    """
    if sharded:
        raise ConfigError(SHARDED)
    if not isinstance(decoder, CompilingDecoder):
        raise ConfigError(
            f"engine.compile = true: {type(decoder).__name__} compiles no steps; leave out "
            "engine.compile"
        )
    decoder.compile_steps(compiler_for(decoder.device))


def compile_where_it_pays(decoder: DecoderProtocol, config: EngineConfig, *, sharded: bool) -> bool:
    """Let ``decoder`` compile its steps as ``engine.compile`` says. Return whether it does.

    Args:
        decoder: The policy.
        config: The settings of the engine.
        sharded: Several ranks hold the weights.

    Raises:
        ConfigError: ``engine.compile`` is true, and its steps cannot be compiled.
    """
    by_default = config.compile is None and decoder.device.type == "cuda"
    if config.compile:
        compile_decoder(decoder, sharded=sharded)
    elif by_default and config.speculative is None:
        try:
            compile_decoder(decoder, sharded=sharded)
        except ConfigError as error:
            log.info("decoding is not compiled: %s", error)
            return False
    else:
        return False
    return True


def compile_metrics(engine: Engine) -> Metrics:
    """Return what ``engine`` has compiled so far. Return no metrics without compilation."""
    metrics = Metrics()
    if (found := engine.compiled) is not None:
        metrics.add("rollout/compiled_graphs", Last(found.graphs))
        metrics.add("rollout/compiled_steps", Last(found.steps))
        metrics.add("rollout/compile_seconds", Last(found.seconds))
        metrics.add("rollout/compile_failed", Last(found.failures))
    return metrics
