"""Frozen models in remote workers: reference and teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.worker_api import Worker
from lightrft.learner.forward_passes import verify_layout
from lightrft.models.actor import TokenScores
from lightrft.models.divergence.token_divergence import Target
from lightrft.models.families import head_transform
from lightrft.models.onednn.layers import is_plain_linear
from lightrft.models.sampled_distribution import Distribution
from lightrft.roles import FrozenModel
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import ModelError, path_of
from lightrft.workers.frozen_models import local_frozen
from lightrft.workers.worker_group import FaultPolicy, WorkerGroup

PART_BYTES = 64 * 2**20
"""Maximum number of bytes of one message, when a large tensor is sent."""


def without_columns(batch: Batch) -> Batch:
    """Return a CPU copy of ``batch`` with prompts and responses only."""
    return Batch(batch.prompts, batch.responses, batch.prompt_of).to("cpu")


def frozen_model_worker(
    model: ModelConfig, strategy: StrategyConfig, threads: int, setting: str = ""
) -> FrozenModelWorker:
    """Make the object of a worker with a frozen model.

    Args:
        model: the model to load.
        strategy: settings that give the device.
        threads: number of CPU threads.
        setting: setting of the model's path, for messages; empty for ``model.path``.
    """
    torch.set_num_threads(threads)
    placed = SingleStrategy(strategy)
    with path_of(setting):
        return FrozenModelWorker(FrozenModel(local_frozen(model, placed)), placed)


class HeadForm(NamedTuple):
    """The form of a language-model head: ``hidden`` inputs, ``width`` logits, and their transform.

    ``softcap`` and ``scale`` are applied to the logits, where they are not None.
    """

    width: int
    hidden: int
    bias: bool
    dtype: torch.dtype
    softcap: float | None
    scale: float | None


class FrozenModelWorker:
    """A frozen model inside its worker."""

    def __init__(self, role: FrozenModel, strategy: Strategy) -> None:
        self.role = role
        self.strategy = strategy

    @torch.no_grad()
    def score(self, batch: Batch, temperature: Distribution) -> Tensor:
        """Return log-probs ``[N]`` of the response tokens."""
        verify_layout(self.role, batch, self.strategy)
        scores = self.role.score(batch.to(self.strategy.device), temperature=temperature)
        return scores.logprobs.float().cpu()

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """Return the final hidden states ``[N, H]`` that predict the response tokens."""
        verify_layout(self.role, batch, self.strategy)
        return self.role.model(batch.to(self.strategy.device), states_alone=True).cpu()

    def head_form(self) -> HeadForm:
        """Return the form of the head. Raises ``ModelError`` for a head that is not an
        ``nn.Linear``.
        """
        head = self._head
        if not is_plain_linear(head):
            raise ModelError(
                f"the head of {self.role.model.config.path} is a {type(head).__name__}, which "
                "cannot be sent to the ranks, as algorithm.distill over whole vocabularies asks "
                "for; set launch.ray.teachers=0"
            )
        softcap, scale = head_transform(self.role.model.base.config, self.role.model.family)
        return HeadForm(
            head.out_features,
            head.in_features,
            head.bias is not None,
            head.weight.dtype,
            softcap,
            scale,
        )

    def head_rows(self, first: int, count: int) -> list[Tensor]:
        """Return ``count`` rows from ``first`` on of the head's weight, and of its bias if it has
        one.
        """
        rows = slice(first, first + count)
        # A clone: Ray would pickle the storage of a view as a whole.
        return [p.detach()[rows].cpu().clone() for p in self._head.parameters(recurse=False)]

    @property
    def _head(self) -> nn.Module:
        return self.role.model.base.get_output_embeddings()


class RemoteReference:
    """A ``Reference`` over workers with a ``FrozenModelWorker`` each.

    It is stateless, so calls of a lost worker are simply repeated. Raises ``WorkerError`` when
    workers cannot be kept alive.
    """

    def __init__(self, workers: Sequence[Worker], limits: FaultPolicy) -> None:
        self.group = WorkerGroup(workers, limits)

    @property
    def max_in_flight(self) -> int:
        """The maximum number of pending calls: two per worker, so that none waits for its next."""
        return max(1, 2 * len(self.group.workers))

    def score(self, batch: Batch, *, temperature: Distribution) -> TokenScores:
        """See ``Actor.score``."""
        if not batch.tokens:
            return TokenScores(torch.zeros(0))
        return TokenScores(self.group.ask("score", without_columns(batch), temperature))

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``."""
        return {"restarts": self.group.take_restarts()}

    def close(self) -> None:
        """End the workers."""
        self.group.close()


class RemoteTeacher(RemoteReference):
    """A ``RemoteReference`` that computes full distributions locally, on ``device``.

    The head is copied once, in parts. For each micro-batch the worker sends the final hidden
    states. They have the width of the model, which is smaller than the vocabulary.

    Args:
        workers: the workers.
        limits: timeouts and restarts of workers.
        device: device of the head and of the distributions.
    """

    def __init__(
        self, workers: Sequence[Worker], limits: FaultPolicy, device: torch.device
    ) -> None:
        super().__init__(workers, limits)
        self._device = device
        self._held: tuple[HeadForm, nn.Module] | None = None

    def target(
        self, batch: Batch, kind: str, *, temperature: float = 1.0, beta: float = 0.5
    ) -> Target:
        """Return the teacher's target distributions for the response tokens. See ``Actor.target``.

        Args:
            batch: prompts and responses.
            kind: name of the divergence.
            temperature: temperature of the distributions.
            beta: weight of the teacher in the mixture of the divergence ``jsd``.
        """
        if self._held is None:
            self._held = self._fetched()
        form, head = self._held
        states = torch.zeros(0, form.hidden, dtype=form.dtype)
        if batch.tokens:
            states = self.group.ask("states", without_columns(batch))
        return Target(
            states.to(self._device), head, kind, temperature, beta, form.softcap, form.scale
        )

    @torch.no_grad()
    def _fetched(self) -> tuple[HeadForm, nn.Module]:
        form: HeadForm = self.group.ask("head_form")
        head = nn.Linear(form.hidden, form.width, form.bias, self._device, form.dtype)
        head.requires_grad_(False)
        # In parts: a head of 150,000 tokens and width 3,584 is 1 GiB in bfloat16.
        count = max(1, PART_BYTES // (form.hidden * form.dtype.itemsize))
        for first in range(0, form.width, count):
            parts = self.group.ask("head_rows", first, count)
            for own, rows in zip(head.parameters(), parts, strict=True):
                own[first : first + count] = rows.to(self._device)
        return form, head
