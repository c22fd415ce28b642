"""Transport of weights to engines in other processes.

Weights are sent as bytes, in buckets of bounded size, by one of three ways. ``broadcast`` reaches
workers on any machine through separate process groups, one for each sender. ``shared`` reaches
workers on the same machine or device through shared memory. ``message`` sends buckets as call
arguments and reaches any worker.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from lightrft.distributed.local_store import is_loopback, loopback_store
from lightrft.distributed.process_group import for_one_attempt
from lightrft.distributed.worker_api import Worker
from lightrft.engines.base import never_stop
from lightrft.engines.sending.tensor_slices import (
    ALIGNED,
    Layout,
    slice_from_json,
    slice_to_json,
    used,
)

Way = Literal["broadcast", "shared", "message"]

LOOK_SECONDS = 0.05
"""Seconds between two checks for members that have joined."""
FAILED = "failed"
"""Key of the store of a transfer whose groups could not be made."""


class WeightBuffer:
    """The receiving end, in a worker. ``load`` is called with complete tensors by name."""

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._begun: dict[str, Tensor] = {}
        self._slots: list[Tensor] = []
        self._groups: list[Any] = []
        self._store: dist.Store | None = None
        self._numbers: list[int] = []

    def device_name(self, kind: str) -> str:
        """Return the name of this process's device of type ``kind``, see ``device_name``."""
        return device_name(torch.device(kind))

    def put(self, data: np.ndarray, layout: Layout) -> None:
        """Load a bucket that came as a call argument."""
        # a copy, since an argument of a Ray call is in read-only memory
        self.take(torch.from_numpy(data.copy()), layout)

    def attach(self, handles: Sequence[object]) -> None:
        """Map the sender's ``slots`` into this process, by their ``handles``."""
        self._slots = [opened(handle) for handle in handles]

    def put_shared(self, slot: int, layout: Layout) -> None:
        """Load the contents of the sender's ``slot``."""
        self.take(self._slots[slot], layout)

    def join(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        bucket: int,
        device: str,
        seconds: float,
        senders: int = 1,
    ) -> None:
        """Join the process group of each sender as ``rank``.

        Block until all members have joined.

        Args:
            host: Address of the TCP store of the transfer.
            port: Port of the TCP store.
            rank: Rank of this worker in each group, from 1; the sender is rank 0.
            size: Number of members of a group: the receivers and a sender.
            bucket: Bytes of a bucket.
            device: Device of the receive buffer.
            seconds: Timeout of the store and of the groups.
            senders: Number of senders.
        """
        self._slots = [torch.empty(bucket, dtype=torch.uint8, device=device)]
        # a separate store and groups: the worker is no rank of the trainer's default group
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=seconds))
        self._groups = [
            group_of(
                sender_keys(store, sender),
                rank,
                size,
                self._slots[0].device,
                seconds,
                lambda: raise_failure(store),
            )
            for sender in range(senders)
        ]
        self._store, self._numbers = store, [0] * senders

    def put_broadcast(self, layout: Layout, sender: int = 0) -> None:
        """Load the next bucket that ``sender`` broadcasts."""
        part = self._slots[0][: used(layout)]
        self._groups[sender].broadcast(part, 0).wait()
        self.take(part, layout)

    def receive(self, sender: int) -> int:
        """Load the buckets that ``sender`` broadcasts in its turn. Return their number.

        Raises:
            RuntimeError: The sender has ended its transfer, or the connection broke.
        """
        count = 0
        try:
            while layout := self._next_layout(sender):
                self.put_broadcast(layout, sender)
                count += 1
        except BaseException:
            # Without this, senders would wait for this worker to take their next buckets.
            self.leave()
            raise
        return count

    def _next_layout(self, sender: int) -> Layout:
        """Return the layout of the next bucket of ``sender``. It is empty if its turn has ended."""
        if self._store is None:
            raise RuntimeError("this worker has left the transfer")
        key = layout_key(sender, self._numbers[sender])
        self._numbers[sender] += 1
        entries = json.loads(self._store.get(key))
        if entries is None:
            raise RuntimeError(f"sender {sender} has ended its transfer")
        return tuple(slice_from_json(entry) for entry in entries)

    def leave(self) -> None:
        """Drop the senders' memory and process groups, and any incomplete tensors."""
        self._begun = {}
        self._slots = []
        self._groups = []
        self._store = None

    def take(self, bucket: Tensor, layout: Layout) -> None:
        """Load the tensors that ``bucket [bytes]`` completes."""
        for piece in layout:
            # a tensor larger than a bucket comes in several pieces
            data = self._begun.get(piece.name)
            if data is None:
                size = piece.dtype.itemsize * int(np.prod(piece.shape, dtype=np.int64))
                data = torch.empty(size, dtype=torch.uint8, device=bucket.device)
                self._begun[piece.name] = data
            end = piece.first + piece.count
            data[piece.first : end].copy_(bucket[piece.at : piece.at + piece.count])
            if end == data.numel():
                del self._begun[piece.name]
                self._load([(piece.name, data.view(piece.dtype).view(piece.shape))])
        if bucket.is_cuda:
            # The sender overwrites the bucket once this call returns, so the copies must be
            # finished.
            torch.cuda.synchronize(bucket.device)


class WeightTransport(ABC):
    """The sending end: two ``slots`` to fill, and ``workers`` with a ``WeightBuffer``.

    The ``weights`` method of a worker reaches its ``WeightBuffer``. Every method but ``close`` may
    raise a worker's exception, ``WorkerLost``, ``TimeoutError`` after ``seconds`` without a reply,
    or ``RuntimeError`` for a broken connection. All weights must then be sent again.

    Args:
        workers: The receivers.
        size: Bytes of a slot, rounded up to ``ALIGNED``.
        device: Device of the slots.
        seconds: Timeout of one call.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        size: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.workers = list(workers)
        self.seconds = seconds
        room = -(-size // ALIGNED) * ALIGNED
        # two slots: one is filled while the other is on its way
        self.slots = [self._slot(room, device) for _ in range(2)]
        self._under_way: list[list[Future[object]]] = [[] for _ in self.slots]

    def send(self, slot: int, layout: Layout) -> None:
        """Send the contents of ``slot``. Return when the next slot may be overwritten."""
        self._under_way[slot] = self._send(slot, layout)
        self._wait((slot + 1) % len(self.slots))

    def begin_turn(self, sender: int) -> None:
        """Make the workers take the next buckets from ``sender``, for transports with several."""
        return

    def end_turn(self) -> None:
        """End the turn of this sender, for transports with several."""
        return

    def flush(self) -> None:
        """Wait until every bucket has arrived."""
        for slot in range(len(self.slots)):
            self._wait(slot)

    def close(self) -> None:
        """Make the workers release the memory that they share with this process."""
        for worker in self.workers:
            # the reply is not awaited: the worker may be gone
            worker.call("weights", "leave")

    def _slot(self, room: int, device: torch.device) -> Tensor:
        return torch.empty(room, dtype=torch.uint8, device=device)

    @abstractmethod
    def _send(self, slot: int, layout: Layout) -> list[Future[object]]: ...

    def _wait(self, slot: int) -> None:
        futures = self._under_way[slot]
        # forgotten first, so that a failed send is not waited for again
        self._under_way[slot] = []
        for future in futures:
            future.result(self.seconds)

    def _ask(self, method: str, *args: object) -> list[Future[object]]:
        return [worker.call("weights", method, *args) for worker in self.workers]


class RayObject(WeightTransport):
    """Sends buckets as arguments of calls."""

    def __init__(self, workers: Sequence[Worker], size: int, seconds: float) -> None:
        super().__init__(workers, size, torch.device("cpu"), seconds)

    def _send(self, slot: int, layout: Layout) -> list[Future[object]]:
        return self._ask("put", self.slots[slot][: used(layout)].numpy(), layout)


class SharedMemory(WeightTransport):
    """Sends buckets through memory of this machine, or of a device that the workers use too."""

    def __init__(
        self,
        workers: Sequence[Worker],
        size: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self._files: list[int] = []
        try:
            super().__init__(workers, size, device, seconds)
            handles = [file_handle(number) for number in self._files]
            handles = handles or [device_handle(slot) for slot in self.slots]
            for future in self._ask("attach", handles):
                future.result(seconds)
        finally:
            # the workers have mapped the files, which need not stay open
            for number in self._files:
                os.close(number)

    def _slot(self, room: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return super()._slot(room, device)
        self._files.append(nameless_file(room))
        return mapped(self._files[-1])

    def _send(self, slot: int, layout: Layout) -> list[Future[object]]:
        slot_memory = self.slots[slot]
        if slot_memory.is_cuda:
            # another process reads the slot, which no stream of this process orders
            torch.cuda.synchronize(slot_memory.device)
        return self._ask("put_shared", slot, layout)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store by which the senders and the receivers of a transfer find one another.

    Attributes:
        host: Address of the TCP store of the transfer, as all of them reach it.
        port: Port of the TCP store.
        senders: Number of senders.
        receivers: Number of receivers.
    """

    host: str
    port: int
    senders: int
    receivers: int

    def enter(self, sender: int, seconds: float) -> SenderPlace:
        """Connect to the store as ``sender``. ``seconds`` is the timeout of a call."""
        patience = timedelta(seconds=seconds)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=patience)
        return SenderPlace(self, store, sender)


@dataclass(frozen=True, slots=True)
class SenderPlace:
    """The place of one sender in a transfer.

    Attributes:
        meeting: The store, and the number of members.
        store: The store of the transfer.
        sender: Index of the sender.
    """

    meeting: Meeting
    store: dist.Store
    sender: int = 0


def open_meeting(host: str, senders: int, receivers: int, seconds: float) -> SenderPlace:
    """Open the store of a transfer on this machine. Return the place of the first sender.

    Args:
        host: Address of this machine, as the others reach it.
        senders: Number of senders.
        receivers: Number of receivers.
        seconds: Timeout of a call.
    """
    store = open_store(host, senders + receivers, timedelta(seconds=seconds))
    return SenderPlace(Meeting(host, store.port, senders, receivers), store)


class ProcessGroupBroadcast(WeightTransport):
    """Sends buckets through a separate process group of this process and all receivers.

    Several processes may be senders, with a group each. Receivers take the buckets of one sender
    after the other, in turns. So all receivers take part in the same broadcast, and none waits for
    another one. The first sender, which alone has the ``workers``, calls them at the begin of each
    turn. The layout of each bucket goes through the store.

    Args:
        workers: The receivers. Empty on other senders than the first.
        size: Bytes of a bucket.
        device: Device of the buckets. A CUDA device selects NCCL, any other Gloo.
        seconds: Timeout of joining, of each call and of each broadcast.
        place: The place of this sender.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        size: int,
        device: torch.device,
        seconds: float,
        place: SenderPlace,
    ) -> None:
        super().__init__(workers, size, device, seconds)
        meeting = place.meeting
        self._store, self._sender, self._senders = place.store, place.sender, meeting.senders
        self._works: list[Any] = [None] * len(self.slots)
        # Layouts of this update, and of the one before, which all receivers have read.
        self._published: list[str] = []
        self._read: list[str] = []
        bucket, members = self.slots[0].numel(), meeting.receivers + 1
        self._asked = [
            worker.call(
                "weights",
                "join",
                meeting.host,
                meeting.port,
                rank,
                members,
                bucket,
                device.type,
                seconds,
                meeting.senders,
            )
            for rank, worker in enumerate(self.workers, 1)
        ]

        def look() -> None:
            # a worker that failed to join raises here, before the timeout
            self._look()
            raise_failure(place.store)

        try:
            keys = sender_keys(place.store, place.sender)
            self._group: Any = group_of(keys, 0, members, device, seconds, look)
            self._finish_calls()
        except BaseException:
            # The others would wait until the timeout. The store itself may be gone.
            with contextlib.suppress(RuntimeError):
                place.store.set(FAILED, "")
            raise

    def begin_turn(self, sender: int) -> None:
        """See ``WeightTransport.begin_turn``."""
        self._look()
        # The workers must be asked first: a broadcast waits until they take part.
        self._asked += self._ask("receive", sender)

    def end_turn(self) -> None:
        """See ``WeightTransport.end_turn``."""
        self._publish([])

    def flush(self) -> None:
        """See ``WeightTransport.flush``. Only the first sender knows that all have arrived."""
        super().flush()
        self._finish_calls()
        for key in self._read:
            self._store.delete_key(key)
        self._read, self._published = self._published, []

    def close(self) -> None:
        """See ``WeightTransport.close``."""
        # Workers that wait for the next bucket leave the groups. The first sender ends the turns of
        # the others too, since one of them may be gone.
        ended = range(self._senders) if self.workers else [self._sender]
        with contextlib.suppress(RuntimeError):
            for sender in ended:
                self._publish(None, sender)
        super().close()
        works, self._works = self._works, [None] * len(self.slots)
        for work in works:
            # A group with a broadcast that is under way is not freed before its end.
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait()
        # It ends the wait of a worker that is blocked in a broadcast.
        self._group = None

    def _send(self, slot: int, layout: Layout) -> list[Future[object]]:
        group = self._group
        if group is None:
            raise RuntimeError("the transfer was ended")
        self._publish([slice_to_json(piece) for piece in layout])
        # Not waited for: the next bucket is filled meanwhile.
        self._works[slot] = group.broadcast(self.slots[slot][: used(layout)], 0)
        return []

    def _wait(self, slot: int) -> None:
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            try:
                work.wait()
            except RuntimeError:
                # The error of a worker says more than that of a broken connection.
                self._look()
                raise
        super()._wait(slot)

    def _publish(self, entries: list[dict[str, Any]] | None, sender: int | None = None) -> None:
        """Tell the receivers the slices of the next bucket of ``sender``, by default this one.

        An empty list ends its turn, and None its transfer.
        """
        sender = self._sender if sender is None else sender
        key = layout_key(sender, self._store.add(f"layouts/{sender}", 1) - 1)
        self._store.set(key, json.dumps(entries))
        self._published.append(key)

    def _look(self) -> None:
        """Raise the error of a call that has failed. Forget calls that have succeeded."""
        for future in [future for future in self._asked if future.done()]:
            self._asked.remove(future)
            future.result()

    def _finish_calls(self) -> None:
        """Wait for all calls of workers."""
        asked, self._asked = self._asked, []
        for future in asked:
            future.result(self.seconds)


def build_transport(
    way: Way,
    workers: Sequence[Worker],
    size: int,
    device: torch.device,
    seconds: float,
    place: SenderPlace | None = None,
) -> WeightTransport:
    """Build the carrier that sends buckets of this process to ``workers`` by ``way``.

    Args:
        way: ``broadcast``, ``shared`` or ``message``.
        workers: The receivers. Empty on other senders than the first.
        size: Bytes of a bucket.
        device: Device of the buckets. ``message`` keeps them on the CPU.
        seconds: Timeout of one call.
        place: The place of this sender, for ``broadcast``.
    """
    if way == "message":
        return RayObject(workers, size, seconds)
    if way == "shared":
        return SharedMemory(workers, size, device, seconds)
    if place is None:
        raise ValueError("a broadcast needs the place of this sender")
    return ProcessGroupBroadcast(workers, size, device, seconds, place)


def sender_keys(store: dist.Store, sender: int) -> dist.Store:
    """Return the part of ``store`` in which the members of the group of ``sender`` meet."""
    return dist.PrefixStore(f"sender/{sender}", store)


def layout_key(sender: int, number: int) -> str:
    """Return the key of the store where ``sender`` writes the layout of its bucket ``number``."""
    return f"layout/{sender}/{number}"


def raise_failure(store: dist.Store) -> None:
    """Raise ``RuntimeError`` if the groups of a transfer could not be made."""
    if store.check([FAILED]):
        raise RuntimeError("a member of the transfer has failed to join")


def group_of(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    seconds: float,
    look: Callable[[], object] = never_stop,
) -> Any:
    """Build a process group outside of the default one.

    Block until its ``size`` members have joined.

    Args:
        store: Store that all members reach.
        rank: Rank of this process in the group.
        size: Number of members.
        device: A CUDA device selects NCCL, any other Gloo.
        seconds: Timeout of joining and of each collective.
        look: Called while members are missing; it may raise to end the wait.

    Raises:
        TimeoutError: Some member has not joined within ``seconds``.
    """
    patience = timedelta(seconds=seconds)
    store.set(f"here/{rank}", "")
    until = time.monotonic() + seconds
    # Wait here: Gloo does not wait for members that join late.
    while not store.check([f"here/{other}" for other in range(size)]):
        look()
        if time.monotonic() > until:
            raise TimeoutError(f"a group of {size} was not complete within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    return backend_group(store, rank, size, device, patience)


def open_store(host: str, members: int, timeout: timedelta) -> dist.TCPStore:
    """Open a store for a group, at a free port of this machine.

    Args:
        host: Address of this machine, as the members reach it.
        members: Number of members.
        timeout: Timeout of a call.
    """
    if is_loopback(host):
        return loopback_store(0, timeout)
    # it must not wait here for the members, which are asked to join later
    return dist.TCPStore(host, 0, members, is_master=True, timeout=timeout, wait_for_workers=False)


def backend_group(
    store: dist.Store, rank: int, size: int, device: torch.device, patience: timedelta
) -> Any:
    """Build the backend of a process group.

    Args:
        store: Store that all members reach.
        rank: Rank of this process in the group.
        size: Number of members. They must be joining.
        device: A CUDA device selects NCCL, any other Gloo.
        patience: Timeout of joining and of each collective.
    """
    if device.type != "cuda":
        group = dist.ProcessGroupGloo(store, rank, size, for_one_attempt(patience))
        # the constructor's timeout limits connecting; collectives may take longer
        group._set_default_timeout(patience)
        return group
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


@dataclass(frozen=True, slots=True)
class FileHandle:
    """A file without a name that process ``pid`` has open as ``number``.

    ``identity`` is its device and inode.
    """

    pid: int
    number: int
    identity: tuple[int, int]


def nameless_file(size: int) -> int:
    """Return the number of a new open file of ``size`` bytes in memory.

    Its memory is freed however the processes end, and the size of ``/dev/shm``, which is 64 MB in
    many containers, does not limit it.
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError("launch.ray.weights=shared needs Linux; set it to message")
    number = os.memfd_create("lightrft-weights")
    os.ftruncate(number, size)
    return number


def mapped(number: int) -> Tensor:
    """Return the contents of open file ``number`` as a uint8 tensor that shares its memory."""
    # the mapping stays when the file is closed
    return torch.frombuffer(mmap.mmap(number, 0), dtype=torch.uint8)


def file_handle(number: int) -> FileHandle:
    """Return a handle by which processes of this machine open file ``number``."""
    found = os.fstat(number)
    return FileHandle(os.getpid(), number, (found.st_dev, found.st_ino))


def device_name(device: torch.device) -> str:
    """Return a name of a GPU that all processes have for it. It is empty for other devices."""
    if device.type != "cuda":
        return ""
    # processes may number the devices that they see differently
    return str(torch.cuda.get_device_properties(device).uuid)


def device_handle(slot: Tensor) -> tuple[Any, ...]:
    """Return a handle by which processes of this machine open ``slot [bytes]`` of a GPU."""
    return device_name(slot.device), *reductions.reduce_tensor(slot)


def opened(handle: Any) -> Tensor:
    """Return the ``[bytes]`` tensor of a handle from ``file_handle`` or ``device_handle``.

    Raises ``RuntimeError`` where the sender's file is not on this machine.
    """
    if isinstance(handle, FileHandle):
        return opened_file(handle)
    uuid, rebuild, arguments = handle
    uuids = [device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    # the seventh argument is the device's number in the sender
    return rebuild(*arguments[:6], uuids.index(uuid), *arguments[7:])


def opened_file(handle: FileHandle) -> Tensor:
    """Return the contents of the file of ``handle``. Raises as ``opened`` does."""
    try:
        number = os.open(f"/proc/{handle.pid}/fd/{handle.number}", os.O_RDWR)
    except OSError as error:
        raise RuntimeError(f"the sender's memory cannot be opened here: {error}") from error
    try:
        # on another machine the path may be another file
        if file_handle(number).identity != handle.identity:
            raise RuntimeError("the sender's memory is not on this machine")
        return mapped(number)
    finally:
        os.close(number)
