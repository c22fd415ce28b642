"""Send weights to workers, verify their checksums, and send them again to restarted workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup, run_on_all_ranks
from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import HeldDtypes, changed_weights, dtype_of
from lightrft.engines.sending.kept_copies import CopyRequests, CopyServer, KeptCopies
from lightrft.engines.sending.sender_turns import SenderTurns, usable_way
from lightrft.engines.sending.tensor_slices import fill, used
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.weight_transport import (
    Meeting,
    RayObject,
    SenderPlace,
    Way,
    WeightBuffer,
    WeightTransport,
    build_transport,
    device_name,
    open_meeting,
)
from lightrft.utils.errors import ModelError, first_line
from lightrft.workers.worker_group import FaultPolicy, WorkerGroup

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]
"""Tensors by name."""
SENDERS = 8
"""Most ranks that send weights. Each has a process group with all workers, which takes memory on
their devices."""


@dataclass(frozen=True, slots=True)
class WeightSyncConfig:
    """Settings of a weight transfer.

    ``way`` is the transport and ``bucket`` the size of its buffers in bytes. Buckets are filled on
    ``device``. ``host`` is the address of this machine. ``trained`` names the parameters that
    training changes. After the first transfer only these are compared. None compares all of them.
    Without ``only_changed``, all compared weights are sent, for engines that need whole layers. Up
    to ``senders`` ranks broadcast; by other ways rank 0 sends all weights.
    """

    way: Way = "message"
    bucket: int = 256 * 2**20
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a value that never changes)
    host: str = "127.0.0.1"
    trained: frozenset[str] | None = None
    only_changed: bool = True
    senders: int = SENDERS

    def ranks_that_send(self, size: int) -> list[int]:
        """Return the ranks of ``size`` that send. They are spread evenly over the machines."""
        count = min(self.senders, size) if self.way == "broadcast" else 1
        return [i * size // count for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The state of the workers before an update, as rank 0 knows it.

    ``dtypes`` and ``sums`` are of the weights that workers hold at the start. ``reopens`` is True
    if the transport must be made, by ``way``. ``meeting`` is where the senders of a broadcast then
    meet, and ``requests`` is where the first one asks the others for copies.
    """

    dtypes: HeldDtypes
    sums: Fingerprint
    reopens: bool
    way: Way
    meeting: Meeting | None
    requests: Meeting | None


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of an update that one rank has sent.

    ``arrived`` is False if the transfer failed. ``sums`` are the checksums that changed.
    """

    arrived: bool = True
    sums: Fingerprint = field(default_factory=dict)
    num_bytes: int = 0


class WeightSync:
    """Sends weights to ``workers`` with an ``EngineWorker`` each.

    Weights that changed since the last transfer are sent, in the workers' dtypes. Several ranks
    may send. Each sends the same tensors in every update, converts and compares these alone, and
    keeps a copy of them in CPU memory. A lost worker is restarted and receives the newest weights
    from these copies. Only rank 0 calls workers.

    Args:
        workers: the workers. Empty on other ranks than 0.
        limits: timeouts and restarts of workers.
        settings: settings of the transfer.
        ranks: all ranks of the run.

    Raises:
        WorkerError: restarts do not help.
        ModelError: workers do not hold the same weights.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        limits: FaultPolicy,
        settings: WeightSyncConfig,
        ranks: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.group = WorkerGroup(workers, limits, self._resend)
        self.settings = settings
        self._ranks = ranks
        self._senders = settings.ranks_that_send(ranks.size)
        self._turns = SenderTurns(len(self._senders), settings.bucket)
        self._begun = False
        # of every weight that was sent or trained, in the version that workers hold
        self._sums: Fingerprint = {}
        self._kept = KeptCopies()
        self._dtypes = HeldDtypes()
        self._transport: WeightTransport | None = None
        self._place: SenderPlace | None = None
        self._starts: tuple[int, ...] = ()
        self._found: dict[int, Fingerprint] = {}
        self._resent = 0
        self._cost = UpdateCost()
        self._requests: CopyRequests | None = None
        self._server: CopyServer | None = None

    @property
    def version(self) -> int:
        """The version of the newest weights."""
        return self._kept.version

    @property
    def travelled(self) -> set[str]:
        """The names of weights that this rank keeps for restarted workers."""
        return set(self._kept.weights)

    def sync(self, weights: Weights, version: int) -> Fingerprint:
        """Send ``weights`` of ``version`` to every worker and return their common fingerprint.

        Every rank must call it, since gathering ``weights`` may be a collective operation.
        """
        with self._cost.timed():
            return self._synced(weights, version)

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        resent, self._resent = self._resent, 0
        restarts = self.group.take_restarts()
        return {"restarts": restarts, "weights_resent": resent, **self._cost.take()}

    def close(self) -> None:
        """End the workers."""
        if self._server is not None:
            self._server.close()
        self.group.close()

    @property
    def _is_first(self) -> bool:
        return self._ranks.rank == 0

    @property
    def _sender(self) -> int | None:
        """The index of this rank among the senders."""
        rank = self._ranks.rank
        return self._senders.index(rank) if rank in self._senders else None

    def _synced(self, weights: Weights, version: int) -> Fingerprint:
        plan = run_on_all_ranks(self._ranks, self._prepared)[0]
        assert plan is not None
        if not self._begun:
            self._dtypes, self._sums = plan.dtypes, dict(plan.sums)
        copies = dict(self._kept.weights)
        parts = run_on_all_ranks(self._ranks, lambda: self._part(weights, plan, copies))
        self._kept = KeptCopies(version, self._kept.update + 1, copies)
        self._begun = True
        for part in parts:
            self._sums |= part.sums
            self._cost.num_bytes += part.num_bytes
        arrived = all(part.arrived for part in parts)
        if not arrived:
            self._close_transport()
        return run_on_all_ranks(self._ranks, lambda: self._settled(arrived))[0]

    def _prepared(self) -> _Plan | None:
        """Return what other ranks must know of the workers. Rank 0 looks after them."""
        if not self._is_first:
            return None
        self.group.settle()
        # This call also detects workers that were lost since the last transfer.
        there = self.group.each("ping" if self._begun else "fingerprint")
        dtypes, sums = self._dtypes, self._sums
        if not self._begun:
            dtypes, sums = _at_start([found for found in there if found is not None])
        self.group.settle()
        reopens = self._transport is None or self._starts != self.group.starts
        # Read before the transport is made: a worker restarted in between reopens it next time.
        self._starts = self.group.starts
        way = self._usable_way() if reopens else self.settings.way
        meeting = self._meet() if reopens and way == "broadcast" else None
        sums = {} if self._begun else sums
        return _Plan(dtypes, sums, reopens, way, meeting, self._listened())

    def _usable_way(self) -> Way:
        """Return the way of the settings, or another one where it does not reach the workers."""
        way, device = self.settings.way, self.settings.device
        own = device_name(device)
        # Several ranks send only to engines with whole devices, see ``most_senders``.
        if way != "broadcast" or not own or len(self._senders) > 1:
            return way
        return usable_way(own, self.group.each("weights", "device_name", device.type))

    def _meet(self) -> Meeting:
        """Open the store of a broadcast, and return where it is."""
        settings = self.settings
        seconds = self.group.limits.call_timeout
        self._place = open_meeting(
            settings.host, len(self._senders), len(self.group.workers), seconds
        )
        return self._place.meeting

    def _listened(self) -> Meeting | None:
        """Return where the other senders wait for requests, if there are others."""
        if len(self._senders) == 1:
            return None
        if self._requests is None:
            settings, seconds = self.settings, self.group.limits.call_timeout
            self._requests = CopyRequests(
                settings.host, len(self._senders), seconds, settings.bucket
            )
        return self._requests.meeting

    def _part(self, weights: Weights, plan: _Plan, copies: dict[str, Tensor]) -> _Part:
        """Send this rank's part of ``weights``. Put its newest copies into ``copies``."""
        stream = iter(weights)
        try:
            if self._sender is None:
                return _Part()
            self._serve(plan)
            self._open(plan)
            return self._sent(stream, self._sender, copies)
        except BaseException:
            # The workers would wait for this rank.
            self._close_transport()
            raise
        finally:
            # Every rank must exhaust the stream, since gathering a tensor is a collective call.
            deque(stream, maxlen=0)

    def _serve(self, plan: _Plan) -> None:
        """Begin to listen for requests of the first sender."""
        if plan.requests is None or self._is_first or self._server is not None:
            return
        assert self._sender is not None
        self._server = CopyServer(
            plan.requests,
            self._sender,
            lambda: self._kept,
            self.group.limits.call_timeout,
            self.settings.bucket,
        )

    def _sent(
        self, stream: Iterator[tuple[str, Tensor]], sender: int, copies: dict[str, Tensor]
    ) -> _Part:
        """Send the tensors of ``stream`` that belong to ``sender``."""
        # Not the copies of the last update: a worker that restarts meanwhile must get one version.
        keeper = WeightBuffer(copies.update)
        cost, sums = UpdateCost(), dict(self._sums)
        mine = self._own(stream, sender, sums, cost)
        # Without a transport the weights are still copied, since each worker is sent that copy.
        transport = self._transport or RayObject((), self.settings.bucket, 0.0)
        for slot, layout in fill(mine, transport.slots):
            keeper.take(transport.slots[slot][: used(layout)].cpu(), layout)
            self._step("send", slot, layout)
        self._step("flush")
        changed = {name: total for name, total in sums.items() if total != self._sums.get(name)}
        return _Part(self._transport is not None, changed, cost.num_bytes)

    def _own(
        self, stream: Iterator[tuple[str, Tensor]], sender: int, sums: Fingerprint, cost: UpdateCost
    ) -> Iterator[tuple[str, Tensor] | None]:
        """Yield the weights of ``sender`` that workers lack, in their dtypes, and None at the end
        of a turn. Update the checksums ``sums``, and count bytes in ``cost``."""
        trained = self.settings.trained if self._begun else None
        everything = not self.settings.only_changed
        mine = False
        self._turns.begin()
        for name, tensor in stream:
            if trained is not None and name not in trained:
                continue
            turn = self._turns.next(name, tensor.nbytes)
            if turn.begins:
                if mine and turn.sender != sender:
                    # What follows is sent by others, so the bucket is sent as it is.
                    yield None
                if mine:
                    self._step("end_turn")
                self._step("begin_turn", turn.sender)
                mine = turn.sender == sender
            if mine:
                found = changed_weights(
                    [(name, tensor)], sums, self._dtypes, all_of_them=everything
                )
                yield from cost.counted(found)
        if mine:
            yield None
            self._step("end_turn")

    def _open(self, plan: _Plan) -> None:
        """Open the transport if ``plan`` asks for it. ``_transport`` is None if it fails."""
        if not plan.reopens:
            return
        self._close_transport()
        settings, limits = self.settings, self.group.limits

        def make() -> None:
            place = self._place
            if plan.meeting is not None and not self._is_first:
                assert self._sender is not None
                place = plan.meeting.enter(self._sender, limits.call_timeout)
            self._transport = build_transport(
                plan.way,
                self.group.workers,
                settings.bucket,
                settings.device,
                limits.call_timeout,
                place,
            )

        self._carried(make)

    def _step(self, method: str, *args: object) -> None:
        """Call ``method`` of the transport, unless it has failed."""
        if self._transport is not None:
            self._carried(getattr(self._transport, method), *args)

    def _carried(self, step: Callable[..., None], *args: object) -> None:
        """Run ``step`` of the transport, which is closed if that fails."""
        try:
            step(*args)
        except (WorkerLost, TimeoutError, RuntimeError) as error:
            log.warning(
                "weights did not reach all workers (%s); they are sent again, one worker at a time",
                first_line(error),
            )
            self._close_transport()

    def _close_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _settled(self, arrived: bool) -> Fingerprint:
        """Return the common fingerprint of all workers. Rank 0 asks them."""
        if not self._is_first:
            return {}
        self._found = {}
        if arrived:
            settled = self.group.each("settle", self.version)
            for worker, found in zip(self.group.workers, settled):
                # A lost worker gives None. Its restart stores the fingerprint, which must stay.
                if found:
                    self._found[id(worker)] = found
        else:
            self._resent += 1
            # A worker that was lost during the transfer comes back with the weights.
            self.group.settle()
            for worker in self.group.workers:
                self.group.beside(worker, self._check_and_resend)
        self.group.settle()  # restarted workers have received the weights now
        return self._agreed(self._sums)

    def _check_and_resend(self, worker: Worker) -> None:
        """Send the newest weights as messages, after a transfer that failed."""
        # The failed transfer has already waited for this worker, so it gets only a short timeout.
        worker.call("ping").result(self.group.limits.grace)
        self._resend(worker)

    def _resend(self, worker: Worker) -> None:
        """Send the newest weights to ``worker``, if any have been sent before."""
        if not self._begun:
            return
        silence, kept = self.group.limits.call_timeout, self._kept
        # Messages, not the transport: that would need all workers of the group to take part.
        slots = RayObject((), self.settings.bucket, 0.0).slots
        for slot, layout in fill(kept.weights.items(), slots):
            data = slots[slot][: used(layout)].numpy()
            worker.call("weights", "put", data, layout).result(silence)
        if self._requests is not None:
            self._requests.send_to(worker, kept.update)
        found = worker.call("settle", kept.version).result(silence)
        # If an update has ended meanwhile, its transfer has failed, and the worker is sent to again.
        if kept is self._kept:
            self._found[id(worker)] = found
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
            names = ", ".join(worker.name for worker in self.group.workers)
            raise ModelError(
                f"{names} do not hold the weights of version {self.version} that they were sent: "
                f"{len(odd)} differ, e.g. {min(odd)!r}; set launch.ray.weights to another way if "
                "this comes again"
            )
        return first


def _at_start(known: Sequence[Fingerprint]) -> tuple[HeldDtypes, Fingerprint]:
    """Return the dtypes of the workers' weights, and the checksums that all of them agree on.

    Workers load the start model themselves, so they have most weights already.

    Args:
        known: the fingerprint of each worker.
    """
    first = known[0] if known else {}
    dtypes = HeldDtypes({name: dtype_of(total) for name, total in first.items()})
    agreed = {n: total for n, total in first.items() if all(f.get(n) == total for f in known)}
    return dtypes, agreed
