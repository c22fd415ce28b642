"""Frozen models in workers: a reference or a teacher, which is asked what it makes of answers, and a reference that follows the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.distributed.process_group import ALONE, Ranks, together
from lightrft.distributed.worker_api import Worker
from lightrft.engines.base import Fingerprint
from lightrft.engines.native import checksums
from lightrft.engines.weight_transport import Inbox
from lightrft.learner.forward_passes import settle_layout
from lightrft.learner.reference_update import Follower
from lightrft.models.actor import Scores
from lightrft.models.divergence import Target
from lightrft.models.families import head_transform
from lightrft.roles import Frozen
from lightrft.strategy.base import Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import ModelError
from lightrft.workers.local import local_frozen
from lightrft.workers.weight_sync import Delivery, Hand, Receiver, led
from lightrft.workers.worker_group import Crew, Limits

PART_BYTES = 64 * 2**20
"""Of something large, sent at one time."""


def bare(batch: Batch, columns: Sequence[str] = ()) -> Batch:
    """Prompts and answers of ``batch`` and some of its columns, on the CPU."""
    kept = {name: getattr(batch, name) for name in columns}
    return Batch(batch.prompts, batch.responses, batch.prompt_of, **kept).to("cpu")


def model_host(model: ModelConfig, strategy: StrategyConfig, threads: int) -> ModelHost:
    """What a worker makes: a frozen ``model``, on the device of ``strategy`` with ``threads`` threads."""
    torch.set_num_threads(threads)
    placed = SingleStrategy(strategy)
    return ModelHost(Frozen(local_frozen(model, placed)), placed)


class HeadForm(NamedTuple):
    """What a head of a language model is: ``width`` logits of ``hidden`` numbers, and what becomes of them."""

    width: int
    hidden: int
    bias: bool
    dtype: torch.dtype
    softcap: float | None
    scale: float | None


class ModelHost:
    """A frozen model in its worker."""

    def __init__(self, role: Frozen, strategy: Strategy) -> None:
        self.role = role
        self.strategy = strategy

    @torch.no_grad()
    def score(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs ``[N]`` of the response tokens."""
        self._settled(batch)
        return self.role.score(batch.to(self.strategy.device), temperature=temperature).logprobs.float().cpu()

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """Final states ``[N, H]`` that predict the response tokens."""
        self._settled(batch)
        return self.role.model(batch.to(self.strategy.device), states_alone=True).cpu()

    def head_form(self) -> HeadForm:
        """Raises ``ModelError`` for a head that is more than a matrix."""
        head = self._head
        if type(head) is not nn.Linear:
            raise ModelError(
                f"the head of {self.role.model.config.path} is a {type(head).__name__}, which cannot be sent to the ranks, as "
                "algorithm.distill over whole vocabularies asks for; set launch.ray.teachers=0"
            )
        softcap, scale = head_transform(self.role.model.base.config, self.role.model.family)
        return HeadForm(head.out_features, head.in_features, head.bias is not None, head.weight.dtype, softcap, scale)

    def head_rows(self, first: int, count: int) -> list[Tensor]:
        """Some rows of the head's weight, and of its bias where it has one."""
        return [p.detach()[first : first + count].cpu().clone() for p in self._head.parameters(recurse=False)]

    @property
    def _head(self) -> nn.Module:
        return self.role.model.base.get_output_embeddings()

    def _settled(self, batch: Batch) -> None:
        if not self.role.layout_settled:
            settle_layout(self.role, batch, self.strategy)


class RemoteModel:
    """``Reference`` over workers that hold a ``ModelHost`` each. It keeps no state, so that what a lost worker had been asked is asked
    again. Raises ``WorkerError`` when workers cannot be kept alive."""

    of_all = False

    def __init__(self, workers: Sequence[Worker], limits: Limits) -> None:
        self.crew = Crew(workers, limits)

    @property
    def in_flight(self) -> int:
        """See ``Distant``: one more for each worker, that it finds when it is done with one."""
        return max(1, 2 * len(self.crew.workers))

    def score(self, batch: Batch, *, temperature: float) -> Scores:
        if not batch.tokens:
            return Scores(torch.zeros(0))
        return Scores(self.crew.ask("score", bare(batch), temperature))

    def take_counts(self) -> dict[str, int]:
        """See ``Counting``."""
        return {"restarts": self.crew.take_restarts()}

    def close(self) -> None:
        self.crew.close()


class RemoteTeacher(RemoteModel):
    """A ``RemoteModel`` whose whole distributions are made here, on ``device``: a copy of its head comes once, in parts, and for each
    micro-batch the final states, which are as wide as the model and not as its vocabulary."""

    def __init__(self, workers: Sequence[Worker], limits: Limits, device: torch.device) -> None:
        super().__init__(workers, limits)
        self._device = device
        self._held: tuple[HeadForm, nn.Module] | None = None

    def target(self, batch: Batch, kind: str, *, temperature: float = 1.0, beta: float = 0.5) -> Target:
        """See ``Actor.target``."""
        if self._held is None:
            self._held = self._fetched()
        form, head = self._held
        states = self.crew.ask("states", bare(batch)) if batch.tokens else torch.zeros(0, form.hidden, dtype=form.dtype)
        return Target(states.to(self._device), head, kind, temperature, beta, form.softcap, form.scale)

    @torch.no_grad()
    def _fetched(self) -> tuple[HeadForm, nn.Module]:
        form: HeadForm = self.crew.ask("head_form")
        head = nn.Linear(form.hidden, form.width, form.bias, self._device, form.dtype).requires_grad_(False)
        count = max(1, PART_BYTES // (form.hidden * form.dtype.itemsize))
        for first in range(0, form.width, count):
            for own, rows in zip(head.parameters(), self.crew.ask("head_rows", first, count), strict=True):
                own[first : first + count] = rows.to(self._device)
        return form, head


def follower_host(model: ModelConfig, strategy: StrategyConfig, threads: int) -> FollowerHost:
    """What a worker makes: a ``model`` whose weights come from elsewhere, on the device of ``strategy`` with ``threads`` threads."""
    made = model_host(model, strategy, threads)
    return FollowerHost(made.role, made.strategy)


class FollowerHost(ModelHost, Receiver):
    """A reference in its worker, which is given other weights now and then."""

    def __init__(self, role: Frozen, strategy: Strategy) -> None:
        super().__init__(role, strategy)
        self.inbox = Inbox(self._take)
        self._own = dict(role.model.named_parameters())

    def fingerprint(self) -> Fingerprint:
        return checksums(self._own.items())

    def settle(self, version: int) -> Fingerprint:
        return self.fingerprint()

    @torch.no_grad()
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._own[name].copy_(tensor)


class RemoteFollower(RemoteModel):
    """``Moving`` over workers that hold a ``FollowerHost`` each. The first rank has the reference itself too, as ``follower``, in memory
    of its machine: there it moves, from there workers are given what came of it, and one that is lost is given it again. That rank asks
    the workers on behalf of all, who else might find one that has been started anew and not been given it yet."""

    of_all = True

    def __init__(
        self, workers: Sequence[Worker], limits: Limits, hand: Hand, follower: Follower | None, ranks: Ranks = ALONE
    ) -> None:
        self.delivery = Delivery(workers, limits, hand, self._weights)
        self.crew = self.delivery.crew
        self._follower = follower
        self._ranks = ranks
        self._moves = 0

    def follow(self, parameters: Iterable[tuple[str, Tensor]], decay: float) -> None:
        """See ``Follower.follow``. A call of all ranks."""

        def move(whole: Iterable[tuple[str, Tensor]]) -> None:
            self.crew.settle()  # nobody is being given what is about to change
            self._own.follow(whole, decay)
            self._hand_over()

        led(self._ranks, parameters, move)

    def state_dict(self) -> dict[str, Tensor]:
        """See ``Follower.state_dict``."""
        return {} if self._follower is None else self._follower.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See ``Follower.load_state_dict``. A call of all ranks."""

        def take() -> None:
            if self._follower is not None:
                self.crew.settle()
                self._follower.load_state_dict(state)
                self._hand_over()

        together(self._ranks, take)

    def take_counts(self) -> dict[str, int]:
        """See ``Counting``."""
        return self.delivery.take_counts()

    @property
    def _own(self) -> Follower:
        if self._follower is None:
            raise ValueError("the reference is on the first rank alone")
        return self._follower

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        return self._own.model.named_parameters()

    def _hand_over(self) -> None:
        """Have the workers hold what the reference is now."""
        self._moves += 1
        self.delivery.hand_over(self._weights(), self._moves)
