"""What each rank of ``test_weight_senders`` does: two ranks send the weights that they share to two workers in processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightrft.config.engine import EngineConfig
from lightrft.distributed.process_group import ProcessGroup, init_process_group
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import checksum
from lightrft.engines.weight_transport import WeightBuffer
from lightrft.utils.errors import LostRankError, ModelError, RankError
from lightrft.workers.engine_workers import EngineWorkerGroup, NativeEngineWorker
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests.worker_helpers import ProcessWorker

SECONDS = 600.0
"""Within which a call of a worker must have come back."""
SHAPES = {
    "embedding": (64, 16),
    **{f"layers.{i}.weight": (16, 24) for i in range(6)},
    "norm": (16,),
}
BUCKET = 2048
"""Bytes: two layers of bfloat16, and half of the embedding."""


class Shelf(NativeEngineWorker):
    """Holds weights in bfloat16, and no engine."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()
        }
        self.inbox = WeightBuffer(self.receive)

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if tensor.shape != self.held[name].shape:
                raise ModelError(f"weights {name!r} do not fit")
            self.held[name] = tensor

    def fingerprint(self) -> Fingerprint:
        return {name: checksum(tensor) for name, tensor in self.held.items()}

    def settle(self, version: int) -> Fingerprint:
        return self.fingerprint()


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sums_of(weights: Mapping[str, Tensor]) -> Fingerprint:
    return {name: checksum(tensor.bfloat16()) for name, tensor in weights.items()}


class Trainer:
    """A rank with shards of the weights, and its part of the engines."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self.rank, self.ranks = ranks.rank, ranks
        self.mesh = init_device_mesh("cpu", (ranks.size,))
        self.workers = (
            [ProcessWorker(f"engine {i}", Shelf) for i in range(2)] if not ranks.rank else []
        )
        transfer = WeightSyncConfig("broadcast", BUCKET)
        limits = FaultPolicy(restarts=2, call_timeout=SECONDS)
        self.engines = EngineWorkerGroup(self.workers, EngineConfig(), limits, transfer, ranks)

    def gathered(
        self, weights: Mapping[str, Tensor], at: str = "", act: Any = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights``, of which each rank has a shard, and call ``act`` before ``at``."""
        for name, tensor in weights.items():
            if name == at:
                act()
            yield name, distribute_tensor(tensor, self.mesh, [Shard(0)]).full_tensor()

    def told(self) -> dict[str, float]:
        return self.engines.take_counts()

    def held(self) -> list[Any]:
        """The fingerprints of all workers, on rank 0."""
        self.engines.group.settle()
        return self.engines.group.each("fingerprint")


def updates(trainer: Trainer) -> dict[str, Any]:
    """Updates of all weights, of two, of none, and past workers that are killed."""
    found: dict[str, Any] = {}
    first, engines = weights_of(1), trainer.engines
    found["first"] = engines.load_weights(trainer.gathered(first), 1)
    found["kept"] = sorted(engines.delivery.travelled)
    found["first bytes"] = trainer.told()["update_bytes"]

    second = first | {name: -first[name] for name in ("layers.0.weight", "layers.5.weight")}
    found["second"] = engines.load_weights(trainer.gathered(second), 2)
    found["second bytes"] = trainer.told()["update_bytes"]
    found["same"] = engines.load_weights(trainer.gathered(second), 3)
    found["same bytes"] = trainer.told()["update_bytes"]

    # a worker that was lost between updates has the copies of both ranks
    if trainer.workers:
        trainer.workers[1].signal(signal.SIGKILL)
        engines.group.each("ping")
        found["restarted"] = trainer.held()
    trainer.told()

    third = weights_of(3)
    kill = (lambda: trainer.workers[0].signal(signal.SIGKILL)) if trainer.workers else int
    found["third"] = engines.load_weights(trainer.gathered(third, "layers.3.weight", kill), 4)
    found["third counts"] = trainer.told()
    found["fourth"] = engines.load_weights(trainer.gathered(first), 5)
    found["fourth counts"] = trainer.told()

    began = time.monotonic()
    try:
        engines.load_weights(trainer.gathered(first | {"layers.2.weight": torch.zeros(3, 3)}), 6)
    except (ModelError, RankError) as error:
        found["misfit"] = str(error)
    found["misfit seconds"] = time.monotonic() - began
    return found


def killed(trainer: Trainer) -> dict[str, Any]:
    """Rank 1 is killed in the middle of an update."""
    engines = trainer.engines
    engines.load_weights(trainer.gathered(weights_of(1)), 7)

    def kill() -> None:
        if trainer.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        engines.load_weights(trainer.gathered(weights_of(2), "layers.4.weight", kill), 8)
    except LostRankError as error:
        found["said"] = str(error)
    # the workers wait for nobody
    for worker in trainer.workers:
        worker.call("ping").result(SECONDS)
    found["seconds"] = time.monotonic() - began
    return found


def main(rank: int, folder: str) -> None:
    """Update, and write what was found. Then rank 1 is killed, and rank 0 writes what it finds."""
    torch.set_num_threads(1)
    port = (Path(folder) / "port").read_text()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with init_process_group(10.0) as ranks:
        trainer = Trainer(ranks)
        try:
            for program in (updates, killed):
                file = Path(folder) / f"{program.__name__}-{rank}.json"
                file.write_text(json.dumps(program(trainer)))
        finally:
            trainer.engines.close()
