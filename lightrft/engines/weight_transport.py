"""Weights on their way to engines in other processes: as bytes, in buckets of a bounded size, by one of three ways.

``broadcast`` reaches workers on any machine through a process group of its own, ``shared`` those of the same machine or device through
memory that both see, and ``message`` anyone who can be called.
"""

from __future__ import annotations

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
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing import reductions

from lightrft.distributed.local_store import is_loopback, loopback_store
from lightrft.distributed.process_group import for_one_attempt
from lightrft.distributed.worker_api import Worker
from lightrft.engines.base import never

Way = Literal["broadcast", "shared", "message"]

LOOK_SECONDS = 0.05
"""Between two looks at who has come."""
ALIGNED = 16
"""Pieces begin at multiples of this many bytes, so that each can be read as what it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` bytes, from byte ``first`` on, of the tensor ``name``; they stand at byte ``at`` of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    count: int
    at: int


Layout = tuple[Piece, ...]


def used(layout: Layout) -> int:
    """Bytes of a bucket that ``layout`` fills."""
    return layout[-1].at + layout[-1].count


def fill(weights: Iterable[tuple[str, Tensor]], slots: Sequence[Tensor]) -> Iterator[tuple[int, Layout]]:
    """Put ``weights`` into ``slots`` (``[bytes]`` of uint8, equally large), one after another and round again; yields each that is full
    with what is in it. The next one is written to as soon as the iterator goes on."""
    slot, at, layout = 0, 0, []
    size = slots[0].numel()
    for name, tensor in weights:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        first, ended = 0, False
        while not ended:
            count = min(size - at, data.numel() - first)
            slots[slot][at : at + count].copy_(data[first : first + count])
            layout.append(Piece(name, tensor.dtype, tuple(tensor.shape), first, count, at))
            first += count
            at += -(-count // ALIGNED) * ALIGNED
            ended = first == data.numel()
            if at >= size:
                yield slot, tuple(layout)
                slot, at, layout = (slot + 1) % len(slots), 0, []
    if layout:
        yield slot, tuple(layout)


class Inbox:
    """The receiving end, in a worker. ``load`` takes over tensors by name."""

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._begun: dict[str, Tensor] = {}
        self._slots: list[Tensor] = []
        self._group: Any = None

    def put(self, data: np.ndarray, layout: Layout) -> None:
        """Take a bucket that came with the call."""
        self._take(torch.from_numpy(data.copy()), layout)

    def attach(self, handles: Sequence[Any]) -> None:
        """See the sender's ``slots``, by their ``handles``."""
        self._slots = [opened(handle) for handle in handles]

    def put_shared(self, slot: int, layout: Layout) -> None:
        """Take what stands in the sender's ``slot``."""
        self._take(self._slots[slot], layout)

    def join(self, host: str, port: int, rank: int, size: int, bucket: int, device: str, seconds: float) -> None:
        """Become ``rank`` of the group that ``host`` opens; blocks until all of it are there."""
        self._slots = [torch.empty(bucket, dtype=torch.uint8, device=device)]
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=seconds))
        self._group = group_of(store, rank, size, self._slots[0].device, seconds)

    def put_broadcast(self, layout: Layout) -> None:
        """Take the next bucket of the group."""
        part = self._slots[0][: used(layout)]
        self._group.broadcast(part, 0).wait()
        self._take(part, layout)

    def leave(self) -> None:
        """Forget memory and group of the sender, and what it did not finish."""
        self._begun, self._slots, self._group = {}, [], None

    def _take(self, bucket: Tensor, layout: Layout) -> None:
        for piece in layout:
            data = self._begun.get(piece.name)
            if data is None:
                size = piece.dtype.itemsize * int(np.prod(piece.shape, dtype=np.int64))
                data = self._begun[piece.name] = torch.empty(size, dtype=torch.uint8, device=bucket.device)
            data[piece.first : piece.first + piece.count].copy_(bucket[piece.at : piece.at + piece.count])
            if piece.first + piece.count == data.numel():
                del self._begun[piece.name]
                self._load([(piece.name, data.view(piece.dtype).view(piece.shape))])
        if bucket.is_cuda:
            torch.cuda.synchronize(bucket.device)  # the sender writes the next one once this has returned


class Carrier(ABC):
    """The sending end: ``slots`` to fill, on ``device``, and ``workers`` whose ``weights`` method reaches their ``Inbox``.

    Every method but ``close`` may raise what a worker raised, ``WorkerLost``, ``TimeoutError`` after ``seconds`` of silence, or
    ``RuntimeError`` where a connection broke: what was sent must then be sent again.
    """

    def __init__(self, workers: Sequence[Worker], size: int, device: torch.device, seconds: float) -> None:
        self.workers = list(workers)
        self.seconds = seconds
        self.slots = [torch.empty(-(-size // ALIGNED) * ALIGNED, dtype=torch.uint8, device=device) for _ in range(2)]
        self._under_way: list[list[Future[Any]]] = [[] for _ in self.slots]

    def send(self, slot: int, layout: Layout) -> None:
        """Send off what is in ``slot``; returns when the next one may be written to."""
        self._under_way[slot] = self._send(slot, layout)
        self._wait((slot + 1) % len(self.slots))

    def flush(self) -> None:
        """Wait until all of it has arrived."""
        for slot in range(len(self.slots)):
            self._wait(slot)

    def close(self) -> None:
        """Let go of what the workers were given to see."""
        for worker in self.workers:
            worker.call("weights", "leave")

    @abstractmethod
    def _send(self, slot: int, layout: Layout) -> list[Future[Any]]: ...

    def _wait(self, slot: int) -> None:
        futures, self._under_way[slot] = self._under_way[slot], []
        for future in futures:
            future.result(self.seconds)

    def _ask(self, method: str, *args: Any) -> list[Future[Any]]:
        return [worker.call("weights", method, *args) for worker in self.workers]


class Message(Carrier):
    """Buckets as arguments of calls."""

    def __init__(self, workers: Sequence[Worker], size: int, seconds: float) -> None:
        super().__init__(workers, size, torch.device("cpu"), seconds)

    def _send(self, slot: int, layout: Layout) -> list[Future[Any]]:
        return self._ask("put", self.slots[slot][: used(layout)].numpy(), layout)


class Shared(Carrier):
    """Buckets in memory of this machine, or of a device that the workers have too."""

    def __init__(self, workers: Sequence[Worker], size: int, device: torch.device, seconds: float) -> None:
        super().__init__(workers, size, device, seconds)
        handles = [handle_of(slot) for slot in self.slots]
        for future in self._ask("attach", handles):
            future.result(seconds)

    def _send(self, slot: int, layout: Layout) -> list[Future[Any]]:
        if self.slots[slot].is_cuda:
            torch.cuda.synchronize(self.slots[slot].device)
        return self._ask("put_shared", slot, layout)


class Broadcast(Carrier):
    """Buckets through a process group of this process and the workers, apart from the default one. ``host`` is where they find it."""

    def __init__(self, workers: Sequence[Worker], size: int, device: torch.device, seconds: float, host: str) -> None:
        super().__init__(workers, size, device, seconds)
        patience, members = timedelta(seconds=seconds), len(self.workers) + 1
        self._store = (
            loopback_store(0, patience)
            if is_loopback(host)
            else dist.TCPStore(host, 0, members, is_master=True, timeout=patience, wait_for_workers=False)
        )
        bucket, port = self.slots[0].numel(), self._store.port
        joining = [
            worker.call("weights", "join", host, port, rank, members, bucket, device.type, seconds)
            for rank, worker in enumerate(self.workers, 1)
        ]

        def look() -> None:
            for future in joining:
                if future.done():
                    future.result()

        self._group: Any = group_of(self._store, 0, members, device, seconds, look)
        for future in joining:
            future.result(seconds)

    def _send(self, slot: int, layout: Layout) -> list[Future[Any]]:
        futures = self._ask("put_broadcast", layout)
        self._group.broadcast(self.slots[slot][: used(layout)], 0).wait()
        return futures

    def close(self) -> None:
        self._group = None  # first: it is what a worker in the middle of a broadcast waits for
        super().close()


def carrier_of(
    way: Way, workers: Sequence[Worker], size: int, device: torch.device, seconds: float, host: str = "127.0.0.1"
) -> Carrier:
    """Buckets of ``size`` bytes from ``device`` to ``workers``, by ``way``. ``host`` is this machine, as they know it."""
    if way == "message":
        return Message(workers, size, seconds)
    if way == "shared":
        return Shared(workers, size, device, seconds)
    return Broadcast(workers, size, device, seconds, host)


def group_of(
    store: dist.Store, rank: int, size: int, device: torch.device, seconds: float, look: Callable[[], object] = never
) -> Any:
    """A process group that no other knows of; blocks until its ``size`` members are there, and calls ``look``, which may raise, while
    they are not."""
    patience = timedelta(seconds=seconds)
    store.set(f"here/{rank}", "")
    until = time.monotonic() + seconds
    while not store.check([f"here/{other}" for other in range(size)]):  # gloo waits for nobody who is late
        look()
        if time.monotonic() > until:
            raise TimeoutError(f"a group of {size} was not complete within {seconds:g} s")
        time.sleep(LOOK_SECONDS)
    if device.type != "cuda":
        group = dist.ProcessGroupGloo(store, rank, size, for_one_attempt(patience))
        group._set_default_timeout(patience)
        return group
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def handle_of(slot: Tensor) -> Any:
    """What another process of this machine needs to see ``slot [bytes]``."""
    if slot.is_cuda:
        return str(torch.cuda.get_device_properties(slot.device).uuid), *reductions.reduce_tensor(slot)
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")  # by name: a descriptor would have to be handed over by a server of this process
    try:
        return "", *reductions.reduce_storage(slot.untyped_storage())
    finally:
        mp.set_sharing_strategy(before)


def opened(handle: Any) -> Tensor:
    """The ``[bytes]`` that ``handle_of`` spoke of."""
    device, rebuild, arguments = handle
    if not device:
        return torch.empty(0, dtype=torch.uint8).set_(rebuild(*arguments))
    numbers = range(torch.cuda.device_count())
    here = next(i for i in numbers if str(torch.cuda.get_device_properties(i).uuid) == device)
    return rebuild(*arguments[:6], here, *arguments[7:])
