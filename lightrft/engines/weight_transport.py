"""Transport of weights to engines in other processes.

Weights are sent as bytes, in buckets of bounded size, by one of three ways. ``broadcast`` reaches
workers on any machine through a separate process group. ``shared`` reaches workers on the same
machine or device through shared memory. ``message`` sends buckets as call arguments and reaches any
worker.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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

Way = Literal["broadcast", "shared", "message"]

LOOK_SECONDS = 0.05
"""Seconds between two checks for members that have joined."""
ALIGNED = 16
"""Pieces start at multiples of this many bytes, so that each can be viewed as its dtype."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a tensor inside a bucket.

    ``count`` bytes of tensor ``name``, from byte ``first`` of the tensor, start at byte ``at`` of
    the bucket.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    count: int
    at: int


Layout = tuple[TensorSlice, ...]


def used(layout: Layout) -> int:
    """Return the number of bytes of a bucket that ``layout`` fills."""
    return layout[-1].at + layout[-1].count


def fill(
    weights: Iterable[tuple[str, Tensor]],
    slots: Sequence[Tensor],
) -> Iterator[tuple[int, Layout]]:
    """Copy ``weights`` into ``slots`` in turn. Yield the index of each full slot with its layout.

    ``slots`` are uint8 buffers ``[bytes]`` of equal size. The next slot is overwritten as soon as
    the iterator resumes.
    """
    slot, at, layout = 0, 0, []
    size = slots[0].numel()
    for name, tensor in weights:
        # as bytes, since one bucket holds tensors of several dtypes
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        first, ended = 0, False
        # an empty tensor makes one empty piece, so that the receiver learns of it
        while not ended:
            count = min(size - at, data.numel() - first)
            slots[slot][at : at + count].copy_(data[first : first + count])
            layout.append(TensorSlice(name, tensor.dtype, tuple(tensor.shape), first, count, at))
            first += count
            # ``at`` may pass the end of the slot, which then is full too
            at += -(-count // ALIGNED) * ALIGNED
            ended = first == data.numel()
            if at >= size:
                yield slot, tuple(layout)
                slot, at, layout = (slot + 1) % len(slots), 0, []
    if layout:
        yield slot, tuple(layout)


class WeightBuffer:
    """The receiving end, in a worker. ``load`` is called with complete tensors by name."""

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._begun: dict[str, Tensor] = {}
        self._slots: list[Tensor] = []
        self._group: Any = None

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
    ) -> None:
        """Join the process group that ``host`` opens as ``rank``.

        Block until all members have joined.

        Args:
            host: Address of the sender's TCP store.
            port: Port of the sender's TCP store.
            rank: Rank of this worker in the group, from 1; the sender is rank 0.
            size: Number of members, the sender included.
            bucket: Bytes of a bucket.
            device: Device of the receive buffer.
            seconds: Timeout of the store and of the group.
        """
        self._slots = [torch.empty(bucket, dtype=torch.uint8, device=device)]
        # a separate store and group: the worker is no rank of the trainer's default group
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=seconds))
        self._group = group_of(store, rank, size, self._slots[0].device, seconds)

    def put_broadcast(self, layout: Layout) -> None:
        """Load the next bucket that is broadcast in the group."""
        part = self._slots[0][: used(layout)]
        self._group.broadcast(part, 0).wait()
        self.take(part, layout)

    def leave(self) -> None:
        """Drop the sender's memory and process group, and any incomplete tensors."""
        self._begun = {}
        self._slots = []
        self._group = None

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


class ProcessGroupBroadcast(WeightTransport):
    """Sends buckets through a separate process group of this process and the workers.

    ``host`` is the address of this process, as the workers reach it.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        size: int,
        device: torch.device,
        seconds: float,
        host: str,
    ) -> None:
        super().__init__(workers, size, device, seconds)
        patience = timedelta(seconds=seconds)
        members = len(self.workers) + 1
        self._store = open_store(host, members, patience)
        bucket = self.slots[0].numel()
        port = self._store.port
        joining = [
            worker.call("weights", "join", host, port, rank, members, bucket, device.type, seconds)
            for rank, worker in enumerate(self.workers, 1)
        ]

        def look() -> None:
            # a worker that failed to join raises here, before the timeout
            for future in joining:
                if future.done():
                    future.result()

        self._group: Any = group_of(self._store, 0, members, device, seconds, look)
        for future in joining:
            future.result(seconds)

    def _send(self, slot: int, layout: Layout) -> list[Future[object]]:
        # the workers must be asked first: the broadcast waits until they take part
        futures = self._ask("put_broadcast", layout)
        self._group.broadcast(self.slots[slot][: used(layout)], 0).wait()
        return futures

    def close(self) -> None:
        # must come first: it ends the wait of a worker that is blocked in a broadcast
        self._group = None
        super().close()


def build_transport(
    way: Way,
    workers: Sequence[Worker],
    size: int,
    device: torch.device,
    seconds: float,
    host: str = "127.0.0.1",
) -> WeightTransport:
    """Build the carrier that sends buckets to ``workers`` by ``way``.

    Args:
        way: ``broadcast``, ``shared`` or ``message``.
        workers: The receivers.
        size: Bytes of a bucket.
        device: Device of the buckets. ``message`` keeps them on the CPU.
        seconds: Timeout of one call.
        host: Address of this machine, as the workers reach it. Only ``broadcast`` uses it.
    """
    if way == "message":
        return RayObject(workers, size, seconds)
    if way == "shared":
        return SharedMemory(workers, size, device, seconds)
    return ProcessGroupBroadcast(workers, size, device, seconds, host)


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


def device_handle(slot: Tensor) -> tuple[Any, ...]:
    """Return a handle by which processes of this machine open ``slot [bytes]`` of a GPU."""
    # by identity: processes may number the devices that they see differently
    uuid = torch.cuda.get_device_properties(slot.device).uuid
    return str(uuid), *reductions.reduce_tensor(slot)


def opened(handle: Any) -> Tensor:
    """Return the ``[bytes]`` tensor of a handle from ``file_handle`` or ``device_handle``.

    Raises ``RuntimeError`` where the sender's file is not on this machine.
    """
    if isinstance(handle, FileHandle):
        return opened_file(handle)
    uuid, rebuild, arguments = handle
    numbers = range(torch.cuda.device_count())
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in numbers]
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
