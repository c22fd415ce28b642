# ruff: noqa: E402 (the environment is set before torch is imported)
"""Updates of engine workers by two ranks with a shard of every weight each: one sender against two.

``benchmarks/transfer.py --senders 1 2`` runs it. Each rank is a process. Every number changes between updates, so all weights are sent,
and every update compares the checksums of all tensors in all workers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from benchmarks.transfer import SECONDS, Shelf, model_like
from lightrft.config.engine import EngineConfig
from lightrft.distributed.process_group import init_process_group
from lightrft.engines.fingerprint import checksums
from lightrft.workers.engine_workers import EngineWorkerGroup
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests.worker_helpers import ProcessWorker

RANKS = 2


class CheckedShelf(Shelf):
    """A worker that keeps weights, and says what it holds after each update."""

    def fingerprint(self) -> dict[str, str]:
        return checksums(self.held.items())

    def settle(self, version: int) -> dict[str, str]:
        return self.fingerprint()

    def ping(self) -> None:
        return


class Peak:
    """The memory that this process has taken at most since ``begin``, above what it had at the start."""

    def __init__(self) -> None:
        self._start = self._read("VmRSS")

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def megabytes(self) -> float:
        return (self._read("VmHWM") - self._start) / 1e6

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def gathered(shards: dict[str, DTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight in full, as FSDP2 does."""
    for name, shard in shards.items():
        yield name, shard.full_tensor()


def rank_of(
    rank: int,
    port: int,
    folder: str,
    megabytes: float,
    bucket: int,
    count: int,
    senders: int,
    rounds: int,
) -> None:
    """Send ``rounds`` updates as rank ``rank``, and write what the fastest cost."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with init_process_group(5.0) as ranks:
        mesh, peak = init_device_mesh("cpu", (RANKS,)), Peak()
        shards: dict[str, Any] = {
            name: distribute_tensor(tensor, mesh, [Shard(0)])
            for name, tensor in model_like(megabytes, "cpu").items()
        }
        make = partial(CheckedShelf, "cpu")
        workers = [ProcessWorker(f"shelf {i}", make) for i in range(count)] if not rank else []
        hand = WeightSyncConfig("broadcast", bucket, senders=senders)
        limits = FaultPolicy(call_timeout=SECONDS)
        engines = EngineWorkerGroup(workers, EngineConfig(), limits, hand, ranks)
        # the first one makes the groups, and the copies that later ones replace
        engines.load_weights(gathered(shards), 0)
        costs = []
        for version in range(1, rounds + 1):
            shards = {name: shard * -1.25 for name, shard in shards.items()}
            ranks.gather(None)
            peak.begin()
            began, used = time.perf_counter(), time.process_time()
            engines.load_weights(gathered(shards), version)
            seconds, cpu = time.perf_counter() - began, time.process_time() - used
            costs.append((seconds, cpu, peak.megabytes()))
        kept = sum(tensor.nbytes for tensor in engines.delivery._kept.weights.values()) / 1e6
        engines.close()
        (Path(folder) / f"{rank}.json").write_text(json.dumps([*min(costs), kept]))


def measure_ranks(
    megabytes: float, bucket: int, count: int, senders: int, rounds: int
) -> list[tuple[float, float, float, float]]:
    """Return seconds, CPU seconds, megabytes at most (its shards included) and megabytes kept of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        told = (port, folder, megabytes, bucket, count, senders, rounds)
        start_processes(rank_of, told, nprocs=RANKS, start_method="spawn")
        return [tuple(json.loads((Path(folder) / f"{r}.json").read_text())) for r in range(RANKS)]
