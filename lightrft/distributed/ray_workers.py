"""Workers of models and engines as actors on a Ray cluster, shared by all ranks.

A lost worker is restarted once, on behalf of all ranks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from lightrft.distributed.placement import BundleSlot
from lightrft.distributed.ray_cluster import (
    ActorHandle,
    ResultRef,
    adopt,
    package,
    reason_of,
    start_actor,
)
from lightrft.distributed.ray_events import EventReporter, report_logs_and_errors
from lightrft.distributed.worker_api import Maker, Worker, WorkerLost
from lightrft.utils.errors import ConfigError, ResourceError, UserError


class WorkerActor:
    """The process of a worker. It calls one method after the other, in order.

    Args:
        folder: working directory of the run.
        environment: environment variables to set.
        desk: receives log records.
    """

    def __init__(self, folder: str, environment: Mapping[str, str], desk: ActorHandle) -> None:
        adopt(environment)
        os.chdir(folder)
        report_logs_and_errors(EventReporter(desk, logging.WARNING))
        self._object: object = None
        self._made = False
        self._failure: Exception | None = None

    def ready(self) -> None:
        """Do nothing: a reply proves that the actor is scheduled and alive."""

    def make(self, make: list[ResultRef]) -> None:
        """Make the object unless it exists. If that fails, every later call raises the error."""
        if not self._made:
            self._made = True
            try:
                self._object = package().get(make[0])()
            except Exception as error:
                # Raised by each later call, since nobody waits for the result of ``make``.
                self._failure = error

    def call(self, make: list[ResultRef], method: str, *args: object) -> object:
        """Call ``method`` of the object, which is made first if needed, and return the result.

        Args:
            make: one-element list with a Ray reference to the ``Maker``.
            method: name of the method.
            args: arguments of the method.
        """
        self.make(make)  # calls of different ranks are unordered: this may arrive before ``make``
        if self._failure is not None:
            raise self._failure
        return getattr(self._object, method)(*args)

    def process(self) -> int:
        """Return the process id on this node."""
        return os.getpid()


@dataclass(slots=True)
class WorkerRecord:
    """The slot of a worker, the function that makes its object, and its current actor.

    ``life`` counts the starts of the actor. ``held`` counts the ranks that use the worker.
    """

    name: str
    slot: BundleSlot
    make: list[ResultRef]
    actor: ActorHandle
    life: int = 1
    held: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkerRegistry:
    """All workers of a run, by name: an actor on the driver's node. The workers end with it.

    Args:
        group: placement group of the run.
        seconds: time within which a restarted worker must be scheduled.
        host: working directory, environment and desk of each worker.
    """

    def __init__(
        self, group: object, seconds: float, host: tuple[str, Mapping[str, str], ActorHandle]
    ) -> None:
        self._group = group
        self._seconds = seconds
        self._host = host
        self._posts: dict[str, WorkerRecord] = {}

    async def hold(
        self, name: str, slot: BundleSlot, make: list[ResultRef]
    ) -> tuple[ActorHandle, int]:
        """Return the worker ``name`` and its number of starts. The first rank that asks starts it.

        Args:
            name: name of the worker, e.g. ``engine 0``.
            slot: its share of a bundle.
            make: one-element list with a Ray reference to its ``Maker``.
        """
        # No ``await`` in here, so two ranks that ask at the same time do not both start it.
        if name not in self._posts:
            worker, _ = self._start(slot, make)
            self._posts[name] = WorkerRecord(name, slot, make, worker)
        post = self._posts[name]
        post.held += 1
        return post.actor, post.life

    async def again(self, name: str, life: int) -> tuple[ActorHandle, int]:
        """Restart the worker unless that has happened since start ``life``, and return it.

        Every rank that has lost the worker passes the start it knew, so one restart serves all
        ranks.

        Raises:
            ResourceError: it finds no place within ``launch.ray.placement_timeout_minutes``
            minutes.
        """
        post = self._posts[name]
        async with post.lock:
            # Another rank may have restarted it while this call waited for the lock.
            if post.life != life:
                return post.actor, post.life
            package().kill(post.actor)
            post.actor, scheduled = self._start(post.slot, post.make)
            post.life += 1
            try:
                await asyncio.wait_for(scheduled, self._seconds)
            except TimeoutError:
                package().kill(post.actor)
                raise ResourceError(
                    f"{post.name} found no place within launch.ray.placement_timeout_minutes = "
                    f"{self._seconds / 60:g} minutes: its node is gone, and no other has what it "
                    "asks for; add one, and give the same command again"
                ) from None
            except package().exceptions.RayActorError:
                # It has died again, and the next call will report that.
                return post.actor, post.life
            return post.actor, post.life

    async def leave(self, name: str) -> None:
        """Release the worker for one rank. It ends when the last rank has released it."""
        post = self._posts[name]
        post.held -= 1
        if not post.held:
            package().kill(post.actor)

    async def processes(self) -> dict[str, int]:
        """Return the process id of each worker, by name."""
        return {name: await post.actor.process.remote() for name, post in self._posts.items()}

    def _start(self, slot: BundleSlot, make: list[ResultRef]) -> tuple[ActorHandle, ResultRef]:
        """Start an actor that makes the object.

        Return it with a reference that is ready once it is scheduled.
        """
        worker = start_actor(WorkerActor, self._group, slot, *self._host)
        # Must come first: calls run in order, and making the object may take long.
        scheduled = worker.ready.remote()
        worker.make.remote(make)
        return worker, scheduled


class RayWorker:
    """A ``Worker`` over an actor that all ranks may share.

    Args:
        roster: the actor that starts and restarts workers.
        name: name of the worker, e.g. ``engine 0``.
        slot: its share of a bundle.
        make: makes the object inside the worker.
    """

    def __init__(self, roster: ActorHandle, name: str, slot: BundleSlot, make: Maker) -> None:
        self.name = name
        self._roster = roster
        # In a list Ray passes the reference itself, so only the worker unpickles the maker.
        self._make = [package().put(make)]
        self._actor, self._life = answer_of(roster.hold.remote(name, slot, self._make))

    def call(self, method: str, *args: object) -> Future[Any]:
        """See ``Worker.call``."""
        return answered(self._actor.call.remote(self._make, method, *args))

    def restart(self) -> None:
        """See ``Worker.restart``."""
        self._actor, self._life = answer_of(self._roster.again.remote(self.name, self._life))

    def close(self) -> None:
        """See ``Worker.close``."""
        self._roster.leave.remote(self.name)


def answer_of(ref: ResultRef) -> Any:
    """Return the value of ``ref``. A ``UserError`` is raised in its original class."""
    try:
        return package().get(ref)
    except package().exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None


def answered(ref: ResultRef) -> Future[object]:
    """Return a future of the call ``ref``, which raises ``WorkerLost`` if the actor is lost."""
    found: Future[object] = Future()
    found.set_running_or_notify_cancel()
    errors = package().exceptions

    def settle(inner: Future[object]) -> None:
        error = inner.exception()
        if error is None:
            found.set_result(inner.result())
        elif isinstance(error, errors.RayTaskError):
            found.set_exception(error.cause if isinstance(error.cause, Exception) else error)
        elif isinstance(error, errors.RayError):
            found.set_exception(WorkerLost(reason_of(error)))
        else:
            found.set_exception(error)

    ref.future().add_done_callback(settle)
    return found


@dataclass(frozen=True, slots=True)
class WorkerAllocator:
    """Access of a rank to its workers: ``slots`` by worker name, and its own address ``host``.

    ``roster`` is None in a run without workers.
    """

    roster: ActorHandle | None
    slots: Mapping[str, BundleSlot]
    host: str

    def start_workers(self, kind: str, make: Maker) -> list[Worker]:
        """Return all workers of ``kind``, each with an object that ``make`` makes."""
        if self.roster is None:
            return []
        names = [name for name in self.slots if name.rpartition(" ")[0] == kind]
        return [RayWorker(self.roster, name, self.slots[name], make) for name in names]


_ALLOCATOR: ContextVar[WorkerAllocator | None] = ContextVar("allocator", default=None)


@contextmanager
def use_allocator(allocator: WorkerAllocator) -> Generator[None]:
    """Within this context, ``current_allocator`` returns ``allocator``."""
    token = _ALLOCATOR.set(allocator)
    try:
        yield
    finally:
        _ALLOCATOR.reset(token)


def current_allocator() -> WorkerAllocator:
    """Return the allocator of this rank. Raises ``ConfigError`` if no Ray launcher started it."""
    allocator = _ALLOCATOR.get()
    if allocator is None:
        raise ConfigError(
            "launch.ray gives roles separate workers, but no cluster is connected: start the run "
            "by the command lightrft, or by lightrft.distributed.ray_launcher.run_on_ray"
        )
    return allocator
