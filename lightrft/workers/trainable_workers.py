"""Trained models in remote workers: a critic and a process reward model, each on one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ALONE, Ranks, together
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.learner.forward_passes import settle_layout
from lightrft.learner.policy_update import critic_step
from lightrft.learner.process_reward import process_step
from lightrft.models.actor import Scores
from lightrft.observability.metrics import Metrics
from lightrft.roles import Trained
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import WorkerError
from lightrft.workers.local import local_critic, local_process
from lightrft.workers.model_workers import PART_BYTES, bare
from lightrft.workers.worker_group import Limits


def critic_host(config: RLConfig, strategy: StrategyConfig, optimizer_steps: int, threads: int) -> CriticHost:
    """Make the object of a critic worker. Raises ``ValueError`` if the algorithm has no critic.

    Args:
        config: settings of the run.
        strategy: settings that give the device.
        optimizer_steps: number of optimizer steps of the run.
        threads: number of CPU threads.
    """
    return CriticHost(*_alone(local_critic, config, strategy, optimizer_steps, threads), config)


def process_host(config: RLConfig, strategy: StrategyConfig, steps: int, threads: int) -> ProcessHost:
    """Make the object of a process-reward worker. Raises ``ValueError`` if the algorithm has none.

    Args:
        config: settings of the run.
        strategy: settings that give the device.
        steps: number of steps of the run.
        threads: number of CPU threads.
    """
    return ProcessHost(*_alone(local_process, config, strategy, steps, threads), config)


Make = Callable[[RLConfig, Strategy, int], Trained | None]


def _alone(make: Make, config: RLConfig, strategy: StrategyConfig, steps: int, threads: int) -> tuple[Trained, SingleStrategy]:
    torch.set_num_threads(threads)
    placed = SingleStrategy(strategy)
    made = make(config, placed, steps)
    if made is None:
        raise ValueError(f"advantage {config.algorithm.advantage.name!r} has no such model")
    return made, placed


class TrainedHost:
    """A model with its optimizer, inside its worker.

    Args:
        trained: the model and its optimizer.
        strategy: strategy of a single process.
        config: settings of the run.
    """

    def __init__(self, trained: Trained, strategy: Strategy, config: RLConfig) -> None:
        self.trained = trained
        self.strategy = strategy
        self.config = config
        self.folder = tempfile.TemporaryDirectory(prefix="trained-")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        return self.trained.shapes

    def save(self) -> list[tuple[str, int]]:
        """Write the state to a local folder and return its files with their sizes in bytes."""
        folder = self._emptied()
        self.trained.save(self.strategy, folder)
        return [(str(file.relative_to(folder)), file.stat().st_size) for file in sorted(folder.rglob("*")) if file.is_file()]

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Return bytes of a file that ``save`` has written.

        Args:
            name: path of the file, relative to the folder.
            first: offset, in bytes.
            count: number of bytes.
        """
        return np.fromfile(Path(self.folder.name) / name, dtype=np.uint8, count=count, offset=first)

    def write(self, name: str, data: np.ndarray) -> None:
        """Append ``data`` to a file for ``load``."""
        file = Path(self.folder.name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.write(data.tobytes())

    def load(self) -> None:
        """Load the state from the files that were written."""
        self.trained.load(self.strategy, Path(self.folder.name))
        self._emptied()

    def _emptied(self) -> Path:
        self.folder.cleanup()
        self.folder = tempfile.TemporaryDirectory(prefix="trained-")
        return Path(self.folder.name)


class CriticHost(TrainedHost):
    """A critic inside its worker."""

    @torch.no_grad()
    def values(self, batch: Batch, final: bool) -> tuple[Tensor, Tensor | None]:
        """See ``Critic.values``. The results are on the CPU."""
        values, after = self.trained.model.values(batch.to(self.strategy.device), final=final)
        return values.cpu(), None if after is None else after.cpu()

    def learn(self, mini: Batch) -> Metrics:
        """Take one optimizer step and return its metrics."""
        metrics = critic_step(self.strategy, self.trained, mini, self.config)
        metrics.compute()  # tensors become numbers, which can be sent
        return metrics


class ProcessHost(TrainedHost):
    """A process reward model inside its worker."""

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Return log-probs ``[N]`` of the response tokens."""
        return self.trained.model.score(batch.to(self.strategy.device), temperature=temperature).logprobs.float().cpu()

    def learn(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Take one optimizer step. Return the log-probs ``[N]`` before it, and metrics."""
        if not self.trained.layout_settled:
            settle_layout(self.trained, batch, self.strategy)
        logprobs, metrics = process_step(self.strategy, self.trained, batch, self.config)
        metrics.compute()  # tensors become numbers, which can be sent
        return logprobs, metrics


class RemoteTrained:
    """A model that is trained in ``worker``, which has a ``TrainedHost``.

    Every rank sends its own micro-batches for inference. Rank 0 requests the optimizer step and
    broadcasts its result. Weights and optimizer state exist only in the worker between checkpoints.
    If it is lost, ``WorkerError`` ends the run, which can resume from the last checkpoint.

    Args:
        worker: the worker.
        limits: timeouts of the worker.
        ranks: all ranks of the run.
    """

    in_flight = 2
    of_all = False

    def __init__(self, worker: Worker, limits: Limits, ranks: Ranks = ALONE) -> None:
        self.worker = worker
        self._limits = limits
        self._ranks = ranks
        self._shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        if self._shapes is None:
            self._shapes = self._ask("shapes")
        return self._shapes

    def save(self, strategy: Strategy, path: Path) -> None:
        """Write the state to the folder ``path``, in the format of a single process."""
        self._first(lambda: self._fetch(path))

    def load(self, strategy: Strategy, path: Path) -> None:
        """Load the state that any strategy has saved in ``path``.

        Raises ``CheckpointError`` when it belongs to another model.
        """
        self._first(lambda: self._bring(path))

    def close(self) -> None:
        """End the worker."""
        self.worker.close()

    def _taught(self, batch: Batch, columns: Sequence[str]) -> Any:
        """Take one optimizer step on ``batch``, of which the loss reads ``columns``. Return its
        result.
        """
        return self._first(lambda: self._ask("learn", bare(batch, columns)))

    def _first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 and broadcast the result."""
        return together(self._ranks, lambda: work() if self._ranks.rank == 0 else None)[0]

    def _fetch(self, path: Path) -> None:
        for name, size in self._ask("save"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            with (path / name).open("wb") as file:
                for first in range(0, size, PART_BYTES):
                    file.write(self._ask("read", name, first, min(PART_BYTES, size - first)).tobytes())

    def _bring(self, path: Path) -> None:
        for source in sorted(p for p in path.rglob("*") if p.is_file()):
            with source.open("rb") as file:
                while data := file.read(PART_BYTES):
                    self._ask("write", str(source.relative_to(path)), np.frombuffer(data, dtype=np.uint8))
        self._ask("load")

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return self.worker.call(method, *args).result(self._limits.silence)
        except (WorkerLost, TimeoutError) as error:
            reason = str(error) or f"it did not answer for {self._limits.silence:g} s"
            raise WorkerError(
                f"{self.worker.name} was lost ({reason}), and with it what it has learned since the last checkpoint; the same "
                "command goes on from there. Lower checkpoint.every, so that less is lost"
            ) from error


class RemoteCritic(RemoteTrained):
    """A ``ValueLearner`` over a worker with a ``CriticHost``."""

    @overload
    def values(self, batch: Batch, final: Literal[True]) -> tuple[Tensor, Tensor]: ...

    @overload
    def values(self, batch: Batch, final: Literal[False] = False) -> tuple[Tensor, None]: ...

    def values(self, batch: Batch, final: bool = False) -> tuple[Tensor, Tensor | None]:
        """See ``Critic.values``."""
        if not len(batch):
            return torch.zeros(0), torch.zeros(0) if final else None
        return self._ask("values", bare(batch), final)

    def learn(self, mini: Batch) -> Metrics:
        """Take one optimizer step on ``mini``, which is the same on every rank."""
        return self._taught(mini, ("sampled", "values", "returns", "loss_weights"))


class RemoteProcess(RemoteTrained):
    """A ``ProcessLearner`` over a worker with a ``ProcessHost``."""

    def score(self, batch: Batch, *, temperature: float) -> Scores:
        """See ``Actor.score``."""
        return Scores(self._ask("score", bare(batch), temperature) if batch.tokens else torch.zeros(0))

    def learn(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Take one optimizer step on ``batch``, which is the same on every rank.

        Return the log-probs ``[N]`` before the step, and metrics.
        """
        return self._taught(batch, ("sampled", "rewards", "ref_logprobs"))
