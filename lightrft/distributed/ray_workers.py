"""Workers of roles as actors on a Ray cluster, held by every rank and started anew once for all of them."""

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

from lightrft.distributed.placement import Slot
from lightrft.distributed.ray_cluster import actor, adopt, package, reason_of
from lightrft.distributed.ray_events import Teller, told
from lightrft.distributed.worker_api import Maker, Worker, WorkerLost
from lightrft.utils.errors import ConfigError, ResourceError, UserError


class Host:
    """The process of a worker. It calls one method at a time, in order."""

    def __init__(self, folder: str, environment: Mapping[str, str], desk: Any) -> None:
        adopt(environment)
        os.chdir(folder)
        told(Teller(desk, logging.WARNING))
        self._object: Any = None
        self._made = False
        self._failure: Exception | None = None

    def ready(self) -> None:
        """Nothing but a sign of life."""

    def make(self, make: list[Any]) -> None:
        """Make the object, unless it is there. An error of that is raised by every call."""
        if not self._made:
            self._made = True
            try:
                self._object = package().get(make[0])()
            except Exception as error:
                self._failure = error

    def call(self, make: list[Any], method: str, *args: Any) -> Any:
        self.make(make)  # calls of different processes come in no order
        if self._failure is not None:
            raise self._failure
        return getattr(self._object, method)(*args)

    def process(self) -> int:
        """Its number, on its node."""
        return os.getpid()


@dataclass(slots=True)
class Post:
    """A worker's place, what makes its object, and who is there: the actor of its ``life``. ``held`` counts the ranks that use it."""

    name: str
    slot: Slot
    make: list[Any]
    actor: Any = None
    life: int = 0
    held: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Roster:
    """All workers of a run, by name: an actor beside the driver, which they end with."""

    def __init__(self, group: Any, seconds: float, host: tuple[str, Mapping[str, str], Any]) -> None:
        self._group = group
        self._seconds = seconds
        self._host = host
        self._posts: dict[str, Post] = {}

    async def hold(self, name: str, slot: Slot, make: list[Any]) -> tuple[Any, int]:
        """The worker ``name`` and the number of its life; it is started for the first rank that asks."""
        post = self._posts.setdefault(name, Post(name, slot, make))
        post.held += 1
        if post.actor is None:
            self._start(post)
        return post.actor, post.life

    async def again(self, name: str, life: int) -> tuple[Any, int]:
        """The worker in a later life than ``life``, for whoever has lost it in that one. Raises ``ResourceError`` when it finds no place
        within ``launch.ray.wait`` minutes."""
        post = self._posts[name]
        async with post.lock:
            if post.life == life:
                package().kill(post.actor)
                await self._there(post, self._start(post))
            return post.actor, post.life

    async def leave(self, name: str) -> None:
        """One rank less uses the worker; after the last it is ended."""
        post = self._posts[name]
        post.held -= 1
        if not post.held:
            package().kill(post.actor)

    async def processes(self) -> dict[str, int]:
        """The number of each worker's process, by name."""
        return {name: await post.actor.process.remote() for name, post in self._posts.items()}

    def _start(self, post: Post) -> Any:
        """Have a new actor make the object; an answer that comes as soon as it has a place."""
        post.actor = actor(Host, self._group, post.slot).remote(*self._host)
        post.life += 1
        there = post.actor.ready.remote()  # first: calls are answered in order, and to make the object may take long
        post.actor.make.remote(post.make)
        return there

    async def _there(self, post: Post, there: Any) -> None:
        try:
            await asyncio.wait_for(there, self._seconds)
        except TimeoutError:
            package().kill(post.actor)
            raise ResourceError(
                f"{post.name} found no place within launch.ray.wait = {self._seconds / 60:g} minutes: its node is gone, and no other has "
                "what it asks for; add one, and give the same command again"
            ) from None
        except package().exceptions.RayActorError:
            return  # it has ended once more: whoever asks it next will see


class RayWorker:
    """``Worker`` over an actor that every rank may hold."""

    def __init__(self, roster: Any, name: str, slot: Slot, make: Maker) -> None:
        self.name = name
        self._roster = roster
        self._make = [package().put(make)]  # as Ray holds it: nobody but the worker loads it
        self._actor, self._life = answer_of(roster.hold.remote(name, slot, self._make))

    def call(self, method: str, *args: Any) -> Future[Any]:
        return answered(self._actor.call.remote(self._make, method, *args))

    def restart(self) -> None:
        self._actor, self._life = answer_of(self._roster.again.remote(self.name, self._life))

    def close(self) -> None:
        self._roster.leave.remote(self.name)


def answer_of(ref: Any) -> Any:
    """What ``ref`` stands for. Raises a user's error as what it was."""
    try:
        return package().get(ref)
    except package().exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None


def answered(ref: Any) -> Future[Any]:
    """The future of a call: ``WorkerLost`` for whatever befell the actor, else what the call returned or raised."""
    found: Future[Any] = Future()
    found.set_running_or_notify_cancel()
    errors = package().exceptions

    def settle(inner: Future[Any]) -> None:
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
class Office:
    """Where a rank gets its workers from: ``slots`` by the names of the workers, such as ``engine 0``. ``host`` is its address."""

    roster: Any
    slots: Mapping[str, Slot]
    host: str

    def hire(self, kind: str, make: Maker) -> list[Worker]:
        """All workers of ``kind``, each of which holds what ``make`` makes."""
        names = [name for name in self.slots if name.rpartition(" ")[0] == kind]
        return [RayWorker(self.roster, name, self.slots[name], make) for name in names]


_OFFICE: ContextVar[Office | None] = ContextVar("office", default=None)


@contextmanager
def opened(office: Office) -> Generator[None]:
    """While this is entered, ``office_here`` is ``office``."""
    token = _OFFICE.set(office)
    try:
        yield
    finally:
        _OFFICE.reset(token)


def office_here() -> Office:
    """Where this rank gets its workers from. Raises ``ConfigError`` in a process that no launcher has started."""
    office = _OFFICE.get()
    if office is None:
        raise ConfigError(
            "launch.ray gives roles workers of their own, and no cluster was asked for them: start the run by the command lightrft, or "
            "by lightrft.distributed.ray_launcher.run_on_ray"
        )
    return office
