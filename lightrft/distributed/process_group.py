"""Process groups of one run: ranks that run the same program and exchange their results.

Every rank runs the same program on the same data. Expensive work is split between ranks
(``mine``) and the results are gathered. After that every rank computes the same values, so they
are global without further communication.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightrft.distributed.local_store import is_loopback, keep_gloo_local, loopback_store
from lightrft.utils.errors import (
    RESUMES,
    ConfigError,
    LostRankError,
    RankError,
    UserError,
    first_line,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup as TorchGroup
    from torch.distributed import Store

    from lightrft.distributed.heartbeat import Heartbeat

T = TypeVar("T")

log = logging.getLogger(__name__)

NOTICE_SECONDS = 20.0
"""Time after which a rank says that it waits for others at the start."""


def has_other_processes() -> bool:
    """Return ``True`` if torch's default process group has several ranks."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class ProcessGroup(Protocol):
    """A group of processes. ``rank`` is this process's index in ``range(size)``.

    A collective call fails after ``minutes`` if a rank does not join.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def minutes(self) -> float: ...

    def gather(self, value: T) -> list[T]:
        """Gather ``value`` from every rank, in rank order. All ranks get the result.

        ``value`` is plain data or a tensor on the CPU.
        """
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all ranks."""
        ...

    def duplicate(self) -> ProcessGroup:
        """Return a new group of the same ranks, for collective calls of another thread.

        Calls of the two groups do not wait for each other. Every rank must call it.
        """
        ...


class SingleProcess:
    """The process group of a run with one process."""

    rank = 0
    size = 1
    minutes = math.inf

    def gather(self, value: T) -> list[T]:
        """Return ``[value]``."""
        return [value]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``."""
        return tensor

    def duplicate(self) -> SingleProcess:
        """Return this group."""
        return self


SINGLE_PROCESS = SingleProcess()


class TorchProcessGroup:
    """The default process group of torch, or ``group``, a subset of its ranks.

    Plain data and sums go through a separate gloo group on the CPU.
    """

    heartbeat: Heartbeat | None = None  # one per process
    _lines = itertools.count()

    def __init__(self, minutes: float, group: TorchGroup | None = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.minutes = minutes
        if group is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
        self._plain = group
        self.rank: int = dist.get_rank(self._plain)
        self.size: int = dist.get_world_size(self._plain)
        self._members: list[int] = dist.get_process_group_ranks(self._plain)
        # Names the same group on each rank, because all ranks make their groups in the same order.
        self._line = str(next(self._lines))

    def gather(self, value: T) -> list[T]:
        """See ``ProcessGroup.gather``."""
        found: list[T] = [value] * self.size
        with self._waiting():
            # Overwrites every entry. It unpickles what other ranks of this run sent, which are
            # trusted as this process is.
            self._dist.all_gather_object(found, value, group=self._plain)
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """See ``ProcessGroup.sum``."""
        # A copy, since ``all_reduce`` writes into it and ``tensor`` may be on the CPU already.
        total = tensor.detach().to("cpu", copy=True)
        with self._waiting():
            self._dist.all_reduce(total, group=self._plain)
        return total.to(tensor.device)

    def duplicate(self) -> TorchProcessGroup:
        """See ``ProcessGroup.duplicate``."""
        limit = timedelta(minutes=self.minutes)
        return TorchProcessGroup(
            self.minutes,
            # Only the members take part: the default waits for every rank of the run.
            self._dist.new_group(self._members, limit, "gloo", use_local_synchronization=True),
        )

    @contextmanager
    def _waiting(self) -> Generator[None]:
        if self.heartbeat is not None:
            self.heartbeat.count_collective(self._line)
        try:
            yield
        except RuntimeError as error:  # gloo raises it for a broken connection and for a timeout
            blame = ""
            if self.heartbeat is not None:
                blame = self.heartbeat.diagnose_peers(self._line, self._members)
            raise _lost(error, self.minutes, blame) from error


def _lost(error: RuntimeError, minutes: float, blame: str) -> LostRankError:
    """Build the error of a lost connection, which names the rank in ``blame`` if one was found."""
    blame = blame or "a rank has ended or timed out; see the messages of the other ranks"
    return LostRankError(
        f"{blame} (strategy.timeout_minutes = {minutes:g} minutes; {first_line(error)}). {RESUMES}"
    )


@dataclass(frozen=True, slots=True)
class ModelParallelGroup:
    """A group of ranks that process different parts of the same rows (sequence parallelism).

    ``place`` is this rank's index in ``range(size)``. ``group`` is a torch process group for
    tensors on the model's device. ``tensor`` ranks shard the layers, and with them the heads, of
    each part.
    """

    place: int
    size: int
    group: TorchGroup | None = None
    tensor: int = 1


def check_parallel_sizes(ranks: ProcessGroup, size: int) -> None:
    """Raise ``ConfigError`` if ``size`` does not divide the number of ranks."""
    if ranks.size % size:
        raise ConfigError(
            f"{size} processes work on the same rows (strategy.sequence_parallel times "
            f"strategy.tensor_parallel), which does not divide the {ranks.size} of this run; set "
            f"launch.processes to a multiple of {size}, or both to 1"
        )


def build_parallel_groups(
    ranks: ProcessGroup, sequence: int, tensor: int = 1
) -> tuple[ModelParallelGroup, ProcessGroup]:
    """Build the sequence-parallel group of this rank and its data-parallel group.

    A model-parallel group has ``sequence * tensor`` consecutive ranks that work on the same rows.
    The sequence-parallel group consists of its ranks with the same tensor-parallel index. The
    data-parallel group consists of the ranks at the same position in every model-parallel group.
    Every rank must call it.

    Args:
        ranks: all ranks of the run.
        sequence: number of ranks that split a sequence.
        tensor: number of ranks that shard each layer.

    Returns:
        The sequence-parallel group and the data-parallel group.
    """
    size = sequence * tensor
    check_parallel_sizes(ranks, size)
    if size == 1:
        return ModelParallelGroup(0, 1), ranks
    if not isinstance(ranks, TorchProcessGroup):
        raise ValueError("one process alone makes no team")
    import torch.distributed as dist

    limit = timedelta(minutes=ranks.minutes)
    # Tensor-parallel ranks are neighbours, which share the fastest link: they communicate in every
    # layer.
    blocks = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    lines = [block[place::tensor] for block in blocks for place in range(tensor)]
    # Every rank creates every group, in the same order, as torch demands.
    own, _ = dist.new_subgroups_by_enumeration(lines, timeout=limit)
    columns = [list(column) for column in zip(*blocks)]
    across, _ = dist.new_subgroups_by_enumeration(columns, timeout=limit, backend="gloo")
    place = ranks.rank % size // tensor
    model_parallel = ModelParallelGroup(place, sequence, own, tensor)
    return model_parallel, TorchProcessGroup(ranks.minutes, across)


def first_rank() -> bool:
    """Return True on rank 0, which writes files and prints."""
    return os.environ.get("RANK", "0") == "0"


def choose_device(device: str) -> str | None:
    """Make the accelerator of this rank current. Return the backend of its process group.

    Torch chooses the backend if the result is None.

    Args:
        device: The setting ``strategy.device``.

    Raises:
        ConfigError: Several ranks of this machine would share an accelerator.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    kind, _, index = device.partition(":")
    if kind not in ("auto", accelerator.type):
        # By default, torch would also connect the accelerators that this run does not use.
        return "gloo"
    count = torch.accelerator.device_count()
    if not os.environ.get("LOCAL_RANK", "" if count > 1 else "0").isdigit():
        raise ConfigError(
            f"LOCAL_RANK = {os.environ.get('LOCAL_RANK', '')!r} does not say which of the {count} "
            f"devices of the type {accelerator.type} a process takes: a launcher such as torchrun "
            "sets it; start the command by torchrun, or set strategy.device=cpu"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # A launcher without this variable may show each rank one device, whatever its local rank is.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1 if count > 1 else 1))
    if index and max(ranks, local + 1) > 1:
        raise ConfigError(
            f"strategy.device = {device!r} names one device for all processes of this machine; "
            f"set strategy.device={kind}, which gives each process its own, or launch.processes=1"
        )
    if ranks > count:
        raise ConfigError(
            f"launch.processes: {ranks} processes of this machine need a device each, and it has "
            f"{count} of the type {accelerator.type}; set launch.processes={count}, or "
            "strategy.device=cpu"
        )
    torch.accelerator.set_device_index(min(local, count - 1))
    return None


@contextmanager
def init_process_group(minutes: float, device: str = "auto") -> Generator[ProcessGroup]:
    """Join the ranks that a launcher such as torchrun has started, or run alone without one.

    A warning says so if a scheduler has started several copies that run alone.

    If a rank does not join a collective call within ``minutes``, each rank raises an error that
    names it. Ranks that have already joined are reused.

    Args:
        minutes: Time to wait for a rank in a collective call.
        device: The setting ``strategy.device``.

    Raises:
        ConfigError: The environment has a part of the variables of a launcher, or several ranks of
            this machine would share an accelerator.
    """
    if _world_size() == 1:
        _warn_of_copies()
        yield SINGLE_PROCESS
        return
    import torch.distributed as dist

    from lightrft.distributed.heartbeat import Heartbeat

    if dist.is_initialized():
        if TorchProcessGroup.heartbeat is not None:
            TorchProcessGroup.heartbeat.next_run()
        yield TorchProcessGroup(minutes)
        return
    # Before the group is made: NCCL takes the current device of each rank, by default device 0.
    backend = choose_device(device)
    failed: BaseException | None = None
    pulse: Heartbeat | None = None
    try:
        store, rank, size = _meeting(minutes)
        # Before connecting, so that a rank that fails to connect can name the one that is missing.
        pulse = TorchProcessGroup.heartbeat = Heartbeat(store, rank, size, minutes)
        limit = timedelta(minutes=minutes)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=for_one_attempt(limit)
        )
        # The short timeout is for connecting only. Collective calls get the full one.
        dist.distributed_c10d._set_pg_timeout(limit)
        yield TorchProcessGroup(minutes)
    except RuntimeError as error:
        failed = error
        # Gloo raises a plain ``RuntimeError``, which only its text tells from one of the program.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        _stores.clear()  # the next rendezvous must not reuse a broken store
        failed = _lost(error, minutes, "" if pulse is None else pulse.diagnose_peers())
        raise failed from error
    except BaseException as error:
        failed = error
        raise
    finally:
        # Before the group is destroyed: others that still wait then learn the cause, and not only
        # that a connection broke.
        if pulse is not None:
            pulse.end(failed)
        TorchProcessGroup.heartbeat = None
        if dist.is_initialized():
            dist.destroy_process_group()


RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which a launcher tells a process its rank, and where the ranks meet."""


def _world_size() -> int:
    """Return the number of ranks of the environment, 1 without a launcher. Raises ``ConfigError``.

    Some schedulers set ``WORLD_SIZE`` alone.
    """
    given = {name: os.environ.get(name, "") for name in RENDEZVOUS}
    if given["WORLD_SIZE"] in ("", "1"):
        return 1
    wrong = [name for name, value in given.items() if not value]
    wrong += [n for n in ("RANK", "WORLD_SIZE", "MASTER_PORT") if not (given[n] or "0").isdigit()]
    if wrong:
        shown = ", ".join(f"{name} = {given[name]!r}" for name in wrong)
        raise ConfigError(
            f"WORLD_SIZE = {given['WORLD_SIZE']!r} is set, and {shown}: a launcher such as torchrun "
            f"sets {', '.join(RENDEZVOUS)}; start the command by torchrun, or unset WORLD_SIZE and "
            "set launch.processes"
        )
    if int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        raise ConfigError(
            f"RANK = {given['RANK']} is set, and WORLD_SIZE = {given['WORLD_SIZE']}: ranks are "
            "numbered from 0; start the command by torchrun, or unset WORLD_SIZE and set "
            "launch.processes"
        )
    return int(given["WORLD_SIZE"])


COPIES = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
"""Variables that hold how many copies of a command a scheduler has started, and its program."""


def _warn_of_copies() -> None:
    """Warn if a scheduler has started several copies of the command, which know nothing of it."""
    for name, program in COPIES.items():
        count = os.environ.get(name, "")
        if count.isdigit() and int(count) > 1:
            log.warning(
                "%s = %s: %s has started %s copies of this command, and each runs alone. For one "
                "run of all, start torchrun once per node, or one copy with launch.processes",
                *(name, count, program, count),
            )


_stores: dict[tuple[str, ...], tuple[Store, int, int]] = {}
"""Stores by rendezvous address. Rank 0 serves the store, so it lives as long as the process."""

LOOK_SECONDS = 0.02
"""Interval, in seconds, at which rank 0 polls for ranks that have arrived."""

ATTEMPTS = 5
"""Number of attempts of gloo to connect two ranks, each with the full timeout of the group."""
CONNECTED = timedelta(seconds=30)
"""Minimum timeout of one attempt to connect. A busy machine needs several seconds."""


def _meeting(minutes: float) -> tuple[Store, int, int]:
    """Wait until all ranks have arrived, and return a fresh store, this rank and the number of
    ranks.

    After ``NOTICE_SECONDS``, a warning says that this rank waits, and where.

    Raises ``LostRankError`` when they do not arrive in time.
    """
    import torch.distributed as dist

    limit = timedelta(minutes=minutes)
    address, port, *_, size = place = tuple(
        os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    )
    notice = threading.Timer(
        NOTICE_SECONDS,
        log.warning,
        (
            f"rank {os.environ.get('RANK')} waits for all {size} processes to meet at "
            f"{address}:{port} (MASTER_ADDR, MASTER_PORT), for at most "
            f"strategy.timeout_minutes = {minutes:g} minutes",
        ),
    )
    notice.daemon = True
    notice.start()
    try:
        if place not in _stores:
            _stores[place] = _store_at(address, port, limit)
        store, rank, count = _stores[place]
        store.set_timeout(limit)
        return _room(store, rank, count, limit), rank, count
    except (dist.DistError, TimeoutError) as error:
        _stores.pop(place, None)
        raise LostRankError(
            f"{size} processes were to meet at {address}:{port} (MASTER_ADDR, MASTER_PORT) and "
            f"have not within strategy.timeout_minutes = {minutes:g} minutes "
            f"({first_line(error)}); see that all were started and can reach that address"
        ) from error
    finally:
        notice.cancel()


def _store_at(address: str, port: str, limit: timedelta) -> tuple[Store, int, int]:
    """Return the store of the environment, this rank and the number of ranks.

    If all ranks are on this machine, the store is not reachable from others.
    """
    import torch.distributed as dist

    if is_loopback(address):
        keep_gloo_local()
        if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return loopback_store(int(port), limit), 0, int(os.environ["WORLD_SIZE"])
    return next(dist.rendezvous("env://", timeout=limit))


def _room(store: Store, rank: int, size: int, limit: timedelta) -> Store:
    """Return a fresh namespace of ``store``, once all ranks have found it.

    ``store`` may have been used before. A program may meet several times (e.g. SFT, then RL), with
    some ranks in the next rendezvous while others are still in the last one. torchrun also keeps
    its store for all processes that it restarts. With the old keys, a rank would look for the
    others at their old addresses. So each rank sends rank 0 a random token, and rank 0 replies to
    that token.

    Raises ``TimeoutError``, or torch's ``DistError``, after ``limit``.
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
    """Return the timeout to give gloo so that a group connects, or fails, within about ``limit``.

    All members of the group must already be running.
    """
    return max(limit / ATTEMPTS, min(limit, CONNECTED))


def broadcast_failure(error: BaseException) -> None:
    """Report the ``error`` that ends this rank to the other ranks, before it has cleaned up."""
    if TorchProcessGroup.heartbeat is not None:
        TorchProcessGroup.heartbeat.fail(error)


def peer_failed() -> bool:
    """Return True if some rank is known to end with an error, so waiting for it is useless."""
    return TorchProcessGroup.heartbeat is not None and TorchProcessGroup.heartbeat.failing


def _classes(failure: BaseException) -> tuple[type[BaseException], ...]:
    """Return ``UserError.of_ranks`` of a failure, or its own class."""
    return getattr(failure, "of_ranks", ()) or (type(failure),)


def _error_of(rank: int, kind: type[BaseException], text: str) -> BaseException:
    """Return the error that other ranks raise for the failure of ``rank``."""
    if getattr(kind, "shared_by_ranks", False):
        return kind(text)
    return RankError(f"rank {rank}: {kind.__name__}: {text}")


def run_on_all_ranks(ranks: ProcessGroup, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and gather the results on all of them.

    When it raises on one rank, every rank raises. That rank raises its original error. The others
    raise ``RankError``, or the same error if it is a stop shared by all ranks. A ``UserError`` gets
    ``of_ranks``.
    """
    if ranks.size == 1:
        return [work()]
    failure: BaseException | None = None
    value: Any = None
    try:
        value = work()
    except Exception as error:  # gathered first: all ranks must reach the collective call
        failure = error
    # The class and the text, since an exception itself may not be picklable.
    report = None if failure is None else (type(failure), str(failure), _classes(failure))
    told = ranks.gather((value, report))
    failures = [(rank, *found) for rank, (_, found) in enumerate(told) if found is not None]
    if failures:
        error = failure or _error_of(*failures[0][:3])
        if isinstance(error, UserError):
            error.of_ranks = tuple(kind for *_, classes in failures for kind in classes)
        raise error
    return [value for value, _ in told]


KEEPALIVES = 4
"""Number of signals that a busy rank gives within the timeout."""


class KeepAlive:
    """Non-blocking keep-alive signals to all ``ranks`` while this rank is still working.

    Sending one must not block, since other ranks may need what this rank does next. This is the
    case for tensor-parallel ranks that generate each token jointly.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._pause = 60 * ranks.minutes / KEEPALIVES
        self._due = time.monotonic() + self._pause
        self._given: Future[list[bool]] | None = None

    def give(self) -> None:
        """Send a signal if one is due and all ranks have received the last one.

        Raises the error of the last signal.
        """
        last_is_pending = self._given is not None and not self._given.done()
        if last_is_pending or time.monotonic() < self._due:
            return
        self.end()
        self._given = Future()
        signal = partial(self._tell, self._given)
        threading.Thread(target=signal, name="keep-alive", daemon=True).start()
        self._due = time.monotonic() + self._pause

    def end(self) -> None:
        """Wait until all ranks have received the last signal."""
        given, self._given = self._given, None
        if given is not None:
            given.result()

    def wait_for_all(self) -> None:
        """Stop sending, and wait until no rank sends. Every rank must call it.

        Ranks that still work continue to send signals.
        """
        self.end()
        # Meets the ``gather(False)`` of ranks that still work, until every rank has come here.
        while not all(self._ranks.gather(True)):
            pass

    def _tell(self, given: Future[list[bool]]) -> None:
        try:
            given.set_result(self._ranks.gather(False))
        except BaseException as error:  # raised by the next ``give`` or ``end``, in its thread
            given.set_exception(error)


def run_with_keepalive(ranks: ProcessGroup, work: Callable[[Callable[[], None]], T]) -> list[T]:
    """Call ``run_on_all_ranks`` for work that may take much longer on one rank than on another.

    ``work`` gets a function to call regularly, e.g. between tokens. While a rank calls it, the
    other ranks keep waiting. A rank that no longer calls it times out as in any collective call.
    """
    signs = KeepAlive(ranks)

    def awaited() -> T:
        try:
            value = work(signs.give)
        except Exception:
            # Before this rank reports the error: the others still wait for its last signal.
            signs.wait_for_all()
            raise
        signs.wait_for_all()
        return value

    return run_on_all_ranks(ranks, awaited) if ranks.size > 1 else [work(signs.give)]
