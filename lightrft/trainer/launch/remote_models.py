"""Models in workers: a reference or a teacher that is asked for log-probs, and a critic that is asked for values and told to learn."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from lightrft.config import RLConfig
from lightrft.models.actor import Scores
from lightrft.models.settings import ModelConfig
from lightrft.strategy.base import Strategy
from lightrft.strategy.settings import StrategyConfig
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.launch.local import local_critic, local_frozen
from lightrft.trainer.launch.remote import Crew, Limits, Worker, WorkerLost
from lightrft.trainer.roles import Frozen, Trained, settle_layout
from lightrft.trainer.update import critic_step
from lightrft.types import Batch
from lightrft.utils.errors import WorkerError
from lightrft.utils.metrics import Metrics
from lightrft.utils.ranks import ALONE, Ranks, together

PART_BYTES = 64 * 2**20
"""Of a file, sent at one time."""
LEARNS_FROM = ("sampled", "values", "returns", "loss_weights")
"""Columns that the loss of a critic reads."""


def bare(batch: Batch, columns: Sequence[str] = ()) -> Batch:
    """Prompts and answers of ``batch`` and some of its columns, on the CPU."""
    kept = {name: getattr(batch, name) for name in columns}
    return Batch(batch.prompts, batch.responses, batch.prompt_of, **kept).to("cpu")


def model_host(model: ModelConfig, strategy: StrategyConfig, threads: int) -> ModelHost:
    """What a worker makes: a frozen ``model``, on the device of ``strategy`` with ``threads`` threads."""
    torch.set_num_threads(threads)
    placed = SingleStrategy(strategy)
    return ModelHost(Frozen(local_frozen(model, placed)), placed)


class ModelHost:
    """A frozen model in its worker."""

    def __init__(self, role: Frozen, strategy: Strategy) -> None:
        self.role = role
        self.strategy = strategy

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs ``[N]`` of the response tokens."""
        if not self.role.layout_settled:
            settle_layout(self.role, batch, self.strategy)
        return self.role.score(batch.to(self.strategy.device), temperature=temperature).logprobs.float().cpu()


class RemoteModel:
    """``Reference`` over workers that hold a ``ModelHost`` each. It keeps no state, so that what a lost worker had been asked is asked
    again. Raises ``WorkerError`` when workers cannot be kept alive."""

    def __init__(self, workers: Sequence[Worker], limits: Limits) -> None:
        self.crew = Crew(workers, limits)

    @property
    def in_flight(self) -> int:
        """See ``Distant``: one more for each worker, that it finds when it is done with one."""
        return 2 * len(self.crew.workers)

    def score(self, batch: Batch, *, temperature: float) -> Scores:
        if not batch.tokens:
            return Scores(torch.zeros(0))
        return Scores(self.crew.ask("score", bare(batch), temperature))

    def take_counts(self) -> dict[str, int]:
        """See ``Counting``."""
        return {"restarts": self.crew.take_restarts()}

    def close(self) -> None:
        self.crew.close()


def critic_host(config: RLConfig, strategy: StrategyConfig, optimizer_steps: int, threads: int) -> CriticHost:
    """What a worker makes: the critic of ``config``, trained by one process on the device of ``strategy``. Raises ``ValueError`` where
    the algorithm has none."""
    torch.set_num_threads(threads)
    placed = SingleStrategy(strategy)
    critic = local_critic(config, placed, optimizer_steps)
    if critic is None:
        raise ValueError(f"advantage {config.algorithm.advantage.name!r} has no critic")
    return CriticHost(critic, placed, config)


class CriticHost:
    """A critic with its optimizer, in its worker."""

    def __init__(self, critic: Trained, strategy: Strategy, config: RLConfig) -> None:
        self.critic = critic
        self.strategy = strategy
        self.config = config
        self.folder = tempfile.TemporaryDirectory(prefix="critic-")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.critic.shapes

    @torch.no_grad()
    def values(self, batch: Batch, final: bool) -> tuple[Tensor, Tensor | None]:
        values, after = self.critic.model.values(batch.to(self.strategy.device), final=final)
        return values.cpu(), None if after is None else after.cpu()

    def learn(self, mini: Batch) -> Metrics:
        """One optimizer step."""
        metrics = critic_step(self.strategy, self.critic, mini, self.config)
        metrics.compute()  # tensors become numbers
        return metrics

    def save(self) -> list[tuple[str, int]]:
        """Write the state down here: its files, and how long they are."""
        folder = self._emptied()
        self.critic.save(self.strategy, folder)
        return [(str(file.relative_to(folder)), file.stat().st_size) for file in sorted(folder.rglob("*")) if file.is_file()]

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Bytes of a file that ``save`` has written."""
        return np.fromfile(Path(self.folder.name) / name, dtype=np.uint8, count=count, offset=first)

    def write(self, name: str, data: np.ndarray) -> None:
        """Append to a file that ``load`` will read."""
        file = Path(self.folder.name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.write(data.tobytes())

    def load(self) -> None:
        """Take up the state that was written."""
        self.critic.load(self.strategy, Path(self.folder.name))
        self._emptied()

    def _emptied(self) -> Path:
        self.folder.cleanup()
        self.folder = tempfile.TemporaryDirectory(prefix="critic-")
        return Path(self.folder.name)


class RemoteCritic:
    """``ValueLearner`` over a worker that holds a ``CriticHost``. Every rank asks it for the values of its own parts; the first has it
    learn, and tells the others what came of it.

    Its weights and its optimizer exist nowhere else between two checkpoints. Its loss therefore ends the run, which goes on from the
    last of them: it raises ``WorkerError``.
    """

    in_flight = 2

    def __init__(self, worker: Worker, limits: Limits, ranks: Ranks = ALONE) -> None:
        self.worker = worker
        self._limits = limits
        self._ranks = ranks
        self._shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self._shapes is None:
            self._shapes = self._ask("shapes")
        return self._shapes

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
        """One optimizer step on ``mini``, which all ranks know."""
        first = self._ranks.rank == 0
        found = together(self._ranks, lambda: self._ask("learn", bare(mini, LEARNS_FROM)) if first else Metrics())
        return found[0]

    def save(self, strategy: Strategy, path: Path) -> None:
        """Write the state under the folder ``path``, in the form that one process writes."""
        together(self._ranks, lambda: self._fetch(path) if self._ranks.rank == 0 else None)

    def load(self, strategy: Strategy, path: Path) -> None:
        """Restore what ``save``, or any other strategy, wrote there. Raises ``CheckpointError`` when it is not of this model."""
        together(self._ranks, lambda: self._bring(path) if self._ranks.rank == 0 else None)

    def close(self) -> None:
        self.worker.close()

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
                f"{self.worker.name} was lost ({reason}), and with it what the critic has learned since the last checkpoint; the same "
                "command goes on from there. Lower checkpoint.every, so that less is lost"
            ) from error
