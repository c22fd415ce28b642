"""The processes of one run, side by side: each has a rank, and they tell one another what they found.

Every rank runs the same program on the same data. What is costly is shared out (``mine``), the results are told to all, and from
there on every rank computes the same: a number that is the same everywhere needs no other care to be global.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightrft.distributed.local_store import is_loopback, keep_gloo_local, loopback_store
from lightrft.utils.errors import ConfigError, LostRankError, RankError, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from lightrft.distributed.heartbeat import Pulse

T = TypeVar("T")


class Ranks(Protocol):
    """Who else takes part. ``rank`` counts from 0 to ``size - 1``. One that the others wait for is missed after ``minutes``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def minutes(self) -> float: ...

    def gather(self, value: T) -> list[T]:
        """``value`` of each rank, in their order, on all of them. Plain data and tensors on the CPU."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all ranks."""
        ...

    def apart(self) -> Ranks:
        """The same ranks for another thread: its calls and those of this object do not wait for one another. A call of all ranks."""
        ...


class Alone:
    """A run of one process."""

    rank = 0
    size = 1
    minutes = math.inf

    def gather(self, value: T) -> list[T]:
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def apart(self) -> Alone:
        return self


ALONE = Alone()


class Together:
    """The ranks of torch's default process group, or ``group`` of them. Plain data goes through a group of its own, on the CPU."""

    pulse: Pulse | None = None  # that of the process
    _lines = itertools.count()

    def __init__(self, minutes: float, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.minutes = minutes
        self._plain = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes)) if group is None else group
        self.rank: int = dist.get_rank(self._plain)
        self.size: int = dist.get_world_size(self._plain)
        self._members: list[int] = dist.get_process_group_ranks(self._plain)
        self._line = str(next(self._lines))  # of the same calls on each rank: all make their groups in the same order

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._waiting():
            self._dist.all_gather_object(found, value, group=self._plain)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to("cpu", copy=True)
        with self._waiting():
            self._dist.all_reduce(total, group=self._plain)
        return total.to(tensor.device)

    def apart(self) -> Together:
        limit = timedelta(minutes=self.minutes)
        return Together(self.minutes, self._dist.new_group(self._members, limit, "gloo", use_local_synchronization=True))

    @contextmanager
    def _waiting(self) -> Generator[None]:
        if self.pulse is not None:
            self.pulse.come(self._line)
        try:
            yield
        except RuntimeError as error:  # gloo's own: a connection that broke, or time that ran out
            blame = "" if self.pulse is None else self.pulse.others(self._line, self._members)
            raise _lost(error, self.minutes, blame) from error


def _lost(error: RuntimeError, minutes: float, blame: str) -> LostRankError:
    """What to say of a connection that is gone: ``blame``, where that was found."""
    blame = blame or "a rank has ended, or not answered in time; see what the others said"
    return LostRankError(
        f"{blame} (strategy.timeout = {minutes:g} minutes; {first_line(error)}). The same command goes on from the last checkpoint"
    )


def _of_connection(error: RuntimeError) -> bool:
    """Whether torch's collectives have raised it. Those of gloo raise a plain ``RuntimeError``."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error)


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks side by side that work on the same rows, each on its part of them. ``place`` counts from 0 to ``size - 1``; ``group`` is
    torch's, for tensors where the model is. ``tensor`` ranks share out the layers of each part, and with them the heads."""

    place: int
    size: int
    group: Any = None
    tensor: int = 1


def check_teams(ranks: Ranks, size: int) -> None:
    """Raises ``ConfigError`` where some ranks would be left without a team of ``size``."""
    if ranks.size % size:
        raise ConfigError(
            f"{size} processes work on the same rows (strategy.sequence times strategy.tensor), which does not divide the {ranks.size} of "
            f"this run; set launch.processes to a multiple of {size}, or both to 1"
        )


def in_teams(ranks: Ranks, sequence: int, tensor: int = 1) -> tuple[Team, Ranks]:
    """The team of ``sequence`` ranks that this one is in, ``tensor`` apart from one another, and the blocks of all who work on the same
    rows, as ranks to share rows out to: this rank and, of every other block, the one in the same place. A call on every rank."""
    size = sequence * tensor
    check_teams(ranks, size)
    if size == 1:
        return Team(0, 1), ranks
    if not isinstance(ranks, Together):
        raise ValueError("one process alone makes no team")
    import torch.distributed as dist

    limit = timedelta(minutes=ranks.minutes)
    blocks = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    lines = [block[place::tensor] for block in blocks for place in range(tensor)]
    own, _ = dist.new_subgroups_by_enumeration(lines, timeout=limit)
    across, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*blocks)], timeout=limit, backend="gloo")
    return Team(ranks.rank % size // tensor, sequence, own, tensor), Together(ranks.minutes, across)


def first_rank() -> bool:
    """Whether this process is the one that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"


def starts_again() -> int:
    """How many times the launcher has started all ranks again since its own start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(minutes: float) -> Generator[Ranks]:
    """The ranks that a launcher such as torchrun has started, or none but this process. One that the others have waited for during
    ``minutes`` is an error on each of them, which names it. Ranks that have joined already stay so."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    from lightrft.distributed.heartbeat import Pulse

    if dist.is_initialized():
        if Together.pulse is not None:
            Together.pulse.next_run()
        yield Together(minutes)
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    failed: BaseException | None = None
    pulse: Pulse | None = None
    try:
        store, rank, size = _meeting(minutes)
        pulse = Together.pulse = Pulse(store, rank, size, minutes)
        _connect(store, rank, size, timedelta(minutes=minutes))
        yield Together(minutes)
    except RuntimeError as error:
        failed = error
        if not _of_connection(error):
            raise
        _stores.clear()
        failed = _lost(error, minutes, "" if pulse is None else pulse.others())
        raise failed from error
    except BaseException as error:
        failed = error
        raise
    finally:
        if pulse is not None:
            pulse.end(failed)
        Together.pulse = None
        if dist.is_initialized():
            dist.destroy_process_group()


_stores: dict[tuple[str, ...], tuple[Any, int, int]] = {}
"""By where the ranks meet. The first rank's is what the others talk to, so it lives as long as the process."""

LOOK_SECONDS = 0.02
"""Between two looks of the first rank at who has come."""

ATTEMPTS = 5
"""How often gloo tries to connect two ranks, each time for as long as it is given."""
CONNECTED = timedelta(seconds=30)
"""What it is given each time at the least, or all that there is: a busy machine takes some seconds."""


def _meeting(minutes: float) -> tuple[Any, int, int]:
    """A store of this meeting alone, once all ranks are there; this rank, and how many there are. Raises ``LostRankError`` when they do
    not come in time."""
    import torch.distributed as dist

    limit = timedelta(minutes=minutes)
    address, port, *_, size = place = tuple(
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    )
    try:
        if place not in _stores:
            _stores[place] = _store_at(address, port, limit)
        store, rank, count = _stores[place]
        store.set_timeout(limit)
        return _room(store, rank, count, limit), rank, count
    except (dist.DistError, TimeoutError) as error:
        _stores.pop(place, None)
        raise LostRankError(
            f"{size} processes were to meet at {address}:{port} (MASTER_ADDR, MASTER_PORT) and have not within strategy.timeout = "
            f"{minutes:g} minutes ({first_line(error)}); see that all were started and can reach that address"
        ) from error


def _store_at(address: str, port: str, limit: timedelta) -> tuple[Any, int, int]:
    """The store of the environment, this rank and how many there are. Where all are on this machine, nobody else can reach it."""
    import torch.distributed as dist

    if is_loopback(address):
        keep_gloo_local()
        if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return loopback_store(int(port), limit), 0, int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous("env://", timeout=limit))


def _room(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """A part of ``store`` that nobody has used before, once all ranks have found it.

    ``store`` may have served others: a program may meet more than once, for supervised training and then RL say, with some ranks in the
    next meeting while others are in the last one, and torchrun keeps its own for all the processes that it starts anew. Under the keys
    of before, a rank would look for the others where they were. So each asks the first one with a word of its own, which answers that
    word alone. Raises ``TimeoutError``, or torch's ``DistError``, after ``limit``.
    """
    from torch.distributed import PrefixStore

    word = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", word)
        room = PrefixStore(f"room/{store.get(f'answer/{word}').decode()}", store)
        room.set(f"here/{rank}", "")
        room.wait(["all here"], limit)
        return room
    room = PrefixStore(f"room/{word}", store)
    missing, until = set(range(1, size)), time.monotonic() + limit.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", word)
        missing = {other for other in missing if not room.check([f"here/{other}"])}
        if missing and time.monotonic() > until:
            raise TimeoutError(f"rank {', '.join(map(str, sorted(missing)))} did not come")
        time.sleep(LOOK_SECONDS)
    room.set("all here", "")
    return room


def for_one_attempt(limit: timedelta) -> timedelta:
    """What gloo is to be given for a group whose members are all there, so that it connects them in about ``limit`` or not at all."""
    return max(limit / ATTEMPTS, min(limit, CONNECTED))


def _connect(store: Any, rank: int, size: int, limit: timedelta) -> None:
    """Torch's default process group. Ranks that are all there cannot reach one another if they do not in about ``limit``."""
    import torch.distributed as dist

    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=for_one_attempt(limit))
    dist.distributed_c10d._set_pg_timeout(limit)


def tell_others(error: BaseException) -> None:
    """Have the other ranks know of the ``error`` that ends this one before it has done what it still waits for."""
    if Together.pulse is not None:
        Together.pulse.fail(error)


def another_fails() -> bool:
    """Whether some rank is known to end with an error: there is nothing to go on for."""
    return Together.pulse is not None and Together.pulse.failing


def mine(items: Sequence[T], ranks: Ranks) -> list[T]:
    """This rank's share of ``items``: each is exactly one rank's."""
    return list(items[ranks.rank :: ranks.size])


def together(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """What ``work`` gives on each rank, on all of them. When it raises on one, every rank raises: that one its own error, and the
    others ``RankError``, or the same error if it is a stop that all take part in."""
    if ranks.size == 1:
        return [work()]
    failure: BaseException | None = None
    value: Any = None
    try:
        value = work()
    except Exception as error:
        failure = error
    told = ranks.gather((value, None if failure is None else (type(failure), str(failure))))
    if failure is not None:
        raise failure
    for rank, (_, found) in enumerate(told):
        if found is not None:
            kind, text = found
            raise kind(text) if getattr(kind, "shared_by_ranks", False) else RankError(f"rank {rank}: {kind.__name__}: {text}")
    return [value for value, _ in told]


PULSES = 4
"""Signs of life that a rank gives in the time after which it would be missed."""


class Signs:
    """Signs to all ``ranks`` that this one is at work. Giving one waits for nobody: the others may need what this rank does next, as those
    of a team do who draw each token together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pause = 60 * ranks.minutes / PULSES
        self._due = time.monotonic() + self._pause
        self._given: Future[list[bool]] | None = None

    def give(self) -> None:
        """One more, if it is time and all have taken the last one. Raises what that one came to."""
        if time.monotonic() >= self._due and (self._given is None or self._given.done()):
            self.end()
            self._given = Future()
            threading.Thread(target=self._tell, args=[self._given], name="sign of life", daemon=True).start()
            self._due = time.monotonic() + self._pause

    def end(self) -> None:
        """Wait until all have taken the last one."""
        given, self._given = self._given, None
        if given is not None:
            given.result()

    def wait_for_all(self) -> None:
        """Give no more, and wait until no rank does: those that are at work still say so from time to time. A call of all ranks."""
        self.end()
        while not all(self._ranks.gather(True)):
            pass

    def _tell(self, given: Future[list[bool]]) -> None:
        try:
            given.set_result(self._ranks.gather(False))
        except BaseException as error:
            given.set_exception(error)


def patiently(ranks: Ranks, work: Callable[[Callable[[], None]], T]) -> list[T]:
    """``together`` for work that may take one rank much longer than another. While it calls what ``work`` is given, between tokens
    say, the others go on waiting; one that has ceased to is missed as in any other call."""
    signs = Signs(ranks)

    def awaited() -> T:
        failure: Exception | None = None
        value: Any = None
        try:
            value = work(signs.give)
        except Exception as error:
            failure = error
        signs.wait_for_all()
        if failure is not None:
            raise failure
        return value

    return together(ranks, awaited) if ranks.size > 1 else [work(signs.give)]
