"""Send weights to workers, verify their checksums, and send them again to restarted workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrft.distributed.process_group import ProcessGroup, run_on_all_ranks
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import dtype_of
from lightrft.engines.sending.changed_weights import HeldDtypes, changed_weights
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.weight_transport import (
    RayObject,
    Way,
    WeightBuffer,
    WeightTransport,
    build_transport,
    fill,
    used,
)
from lightrft.utils.errors import ModelError
from lightrft.workers.worker_group import FaultPolicy, WorkerGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
Weights = Iterable[tuple[str, Tensor]]
"""Tensors by name."""


@dataclass(frozen=True, slots=True)
class WeightSyncConfig:
    """Settings of a weight transfer.

    ``way`` is the transport and ``bucket`` the size of its buffers in bytes. Buckets are filled on
    ``device``. ``host`` is the address of this machine. ``trained`` names the parameters that
    training changes. After the first transfer only these are compared. None compares all of them.
    Without ``only_changed``, all compared weights are sent, for engines that need whole layers.
    """

    way: Way = "message"
    bucket: int = 256 * 2**20
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a value that never changes)
    host: str = "127.0.0.1"
    trained: frozenset[str] | None = None
    only_changed: bool = True


class WeightSync:
    """Sends weights to ``workers`` with an ``EngineWorker`` each.

    Weights that changed since the last transfer are sent, in the workers' dtypes. A lost
    worker is restarted and receives the newest weights. This machine keeps a copy in CPU memory for
    that.

    Args:
        workers: the workers. Empty on other ranks than 0.
        limits: timeouts and restarts of workers.
        hand: settings of the transfer.

    Raises:
        WorkerError: restarts do not help.
        ModelError: workers do not hold the same weights.
    """

    def __init__(
        self, workers: Sequence[Worker], limits: FaultPolicy, hand: WeightSyncConfig
    ) -> None:
        self.crew = WorkerGroup(workers, limits, self._give)
        self.hand = hand
        self.version = 0
        self._begun = False
        # of every weight that was sent or trained, in the version that workers hold
        self._sums: Fingerprint = {}
        self._copies: dict[str, Tensor] = {}
        self._dtypes = HeldDtypes()
        self._carrier: WeightTransport | None = None
        self._lives: tuple[int, ...] = ()
        self._found: dict[int, Fingerprint] = {}
        self._resent = 0
        self._cost = UpdateCost()

    @property
    def travelled(self) -> set[str]:
        """The names of weights that are kept for restarted workers."""
        return set(self._copies)

    def sync(self, weights: Weights, version: int) -> Fingerprint:
        """Send ``weights`` of ``version`` to every worker and return their common fingerprint."""
        with self._cost.timed():
            return self._synced(weights, version)

    def _synced(self, weights: Weights, version: int) -> Fingerprint:
        self.crew.settle()
        # This call also detects workers that were lost since the last transfer.
        there = self.crew.each("ping" if self._begun else "fingerprint")
        if not self._begun:
            self._compare_start([found for found in there if found is not None])
        self.crew.settle()
        sums = dict(self._sums)
        copies, arrived = self._send(self._cost.counted(self._travelling(weights, sums)))
        self._copies, self._sums, self._begun = copies, sums, True
        self.version, self._found = version, {}
        if arrived:
            settled = self.crew.each("settle", version)
            for worker, found in zip(self.crew.workers, settled):
                # A lost worker gives None. Its restart stores the fingerprint, which must stay.
                if found:
                    self._found[id(worker)] = found
        else:
            self._resent += 1
            # A worker that was lost during the transfer comes back with the weights.
            self.crew.settle()
            for worker in self.crew.workers:
                self.crew.beside(worker, self._give_again)
        self.crew.settle()  # restarted workers have received the weights now
        return self._agreed(self._sums)

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        resent, self._resent = self._resent, 0
        restarts = self.crew.take_restarts()
        return {"restarts": restarts, "weights_resent": resent, **self._cost.take()}

    def close(self) -> None:
        """End the workers."""
        self.crew.close()

    def _compare_start(self, known: Sequence[Fingerprint]) -> None:
        """Read the dtypes of the workers' weights, and the checksums that all of them agree on.

        Workers load the start model themselves, so they have most weights already.
        """
        first = known[0] if known else {}
        self._dtypes = HeldDtypes({name: dtype_of(total) for name, total in first.items()})
        for name, total in first.items():
            if all(there.get(name) == total for there in known):
                self._sums[name] = total

    def _travelling(self, weights: Weights, sums: Fingerprint) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``weights`` that workers lack, in their dtypes. Update the checksums ``sums``
        of all weights."""
        trained = self.hand.trained if self._begun else None
        compared = ((n, w) for n, w in weights if trained is None or n in trained)
        return changed_weights(compared, sums, self._dtypes, all_of_them=not self.hand.only_changed)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], bool]:
        """Send ``weights`` to all workers.

        Returns:
            The newest copy of every weight that was ever sent, and True if all workers received
            the weights.
        """
        copies = dict(self._copies)
        # Not ``_copies``: a worker that restarts meanwhile must get one version.
        keeper = WeightBuffer(copies.update)
        carrier = self._open()
        arrived = carrier is not None
        # Without a transport the weights are still copied, since each worker is sent that copy.
        slots = RayObject((), self.hand.bucket, 0.0).slots if carrier is None else carrier.slots
        for slot, layout in fill(weights, slots):
            keeper.take(slots[slot][: used(layout)].cpu(), layout)
            arrived = arrived and carrier is not None and self._carried(carrier.send, slot, layout)
        return copies, arrived and carrier is not None and self._carried(carrier.flush)

    def _open(self) -> WeightTransport | None:
        """Return the transport, reopened if a worker was restarted, or None if that fails."""
        hand, crew = self.hand, self.crew
        if self._carrier is None or self._lives != crew.lives:
            self._close_carrier()
            # Read before the transport is made: a worker restarted in between reopens it next time.
            self._lives = crew.lives

            def make() -> None:
                self._carrier = build_transport(
                    hand.way,
                    crew.workers,
                    hand.bucket,
                    hand.device,
                    crew.limits.call_timeout,
                    hand.host,
                )

            self._carried(make)
        return self._carrier

    def _carried(self, step: Callable[..., None], *args: object) -> bool:
        """Run ``step`` of the transport and return True if it succeeded."""
        try:
            step(*args)
        except (WorkerLost, TimeoutError, RuntimeError) as error:
            log.warning(
                "weights did not reach all workers (%s); they are sent again, one worker at a time",
                error,
            )
            self._close_carrier()
            return False
        return True

    def _close_carrier(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = None

    def _give_again(self, worker: Worker) -> None:
        """Send the newest weights as messages, after a transfer that failed."""
        # The failed transfer has already waited for this worker, so it gets only a short timeout.
        worker.call("ping").result(self.crew.limits.grace)
        self._give(worker)

    def _give(self, worker: Worker) -> None:
        """Send the newest weights to ``worker``, if any have been sent before."""
        if not self._begun:
            return
        silence = self.crew.limits.call_timeout
        # Messages, not the transport: that would need all workers of the group to take part.
        slots = RayObject((), self.hand.bucket, 0.0).slots
        for slot, layout in fill(self._copies.items(), slots):
            data = slots[slot][: used(layout)].numpy()
            worker.call("weights", "put", data, layout).result(silence)
        self._found[id(worker)] = worker.call("settle", self.version).result(silence)
        # Among workers alone: a transfer may be replacing the weights that it was given.
        self._agreed({})

    def _agreed(self, sums: Fingerprint) -> Fingerprint:
        """Return the common fingerprint of all workers.

        Raises ``ModelError`` where fingerprints differ between workers or from the weights that
        were sent.
        """
        first, *others = self._found.values()
        odd = {name for other in others for name, _ in first.items() ^ other.items()}
        odd |= {name for name, total in sums.items() if total != first.get(name)}
        if odd:
            names = ", ".join(worker.name for worker in self.crew.workers)
            raise ModelError(
                f"{names} do not hold the weights of version {self.version} that they were sent: "
                f"{len(odd)} differ, e.g. {min(odd)!r}; set launch.ray.weights to another way if "
                "this comes again"
            )
        return first


def led(
    ranks: ProcessGroup, weights: Weights, take: Callable[[Iterator[tuple[str, Tensor]]], T]
) -> T:
    """Run ``take`` on ``weights`` on rank 0 and broadcast its result.

    The other ranks only join the collective calls that gather the weights.

    Args:
        ranks: all ranks of the run.
        weights: full tensors by name. Iterating may be a collective operation.
        take: function that consumes them on rank 0.
    """
    stream = iter(weights)

    def work() -> Any:
        try:
            return take(stream) if ranks.rank == 0 else None
        finally:
            # Every rank must exhaust the stream, since gathering a tensor is a collective call.
            deque(stream, maxlen=0)

    return run_on_all_ranks(ranks, work)[0]
