"""Ranks as actors on a Ray cluster: placed, started, watched, and started again when one is lost. The one file that knows Ray."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft import config as trees
from lightrft.config import LaunchConfig, RayConfig, RLConfig, SFTConfig
from lightrft.trainer.launch.placement import Bundle, Layout, Place, Slot, environments, layout, side_by_side
from lightrft.utils import errors
from lightrft.utils.errors import ConfigError, RankError, ResourceError, UserError
from lightrft.utils.logs import FILE_ONLY, ROOT
from lightrft.utils.settings import build, parse_yaml, to_yaml
from lightrft.utils.signals import StopFlag

if TYPE_CHECKING:
    from lightrft.trainer.session import Observer

log = logging.getLogger(__name__)

INSTALL = "pip install 'lightrft[ray]'"
GRACE = 15.0
"""Seconds that ranks have to end by themselves after one of them failed; whoever has not by then is taken for lost."""
SETTLING = 30.0
"""Seconds that a shared folder has to show what another node wrote, and the ranks before these to be gone."""


def run_on_ray(path: str, config: RLConfig | SFTConfig, observer: Observer) -> dict[str, Any]:
    """Call ``module:name`` with ``config`` in ``launch.processes`` actors, and tell ``observer`` what the first one reports.

    Returns what the call returned to the first rank. Raises the error of the rank that failed; ``RankError`` when ranks were lost
    more than ``launch.ray.restarts`` times; ``ConfigError`` or ``ResourceError`` when there is no such cluster or no room in it.
    """
    check_devices(config)
    with cluster(config.launch.ray), StopFlag() as stop:
        return Driver(path, config, observer, stop).run()


def check_devices(config: RLConfig | SFTConfig) -> None:
    """Raises ``ConfigError`` where devices are asked for and not used."""
    if config.strategy.device == "cpu" and config.launch.ray.devices is not None:
        raise ConfigError(
            f"launch.ray.devices = {config.launch.ray.devices} changes nothing: strategy.device is cpu; leave one of them out"
        )


def package() -> Any:
    """The package ray. Raises ``ConfigError`` with the way to install it."""
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"launch.kind = 'ray' needs the package ray ({error}): {INSTALL}") from None
    return ray


@contextmanager
def cluster(config: RayConfig) -> Generator[None]:
    """Be connected to the cluster of ``config``. A program that has connected itself stays as it is.

    Raises ``ConfigError`` when none is at ``address``.
    """
    if (config.address or "").startswith("ray://"):
        raise ConfigError(
            f"launch.ray.address = {config.address!r}: the ranks' driver must run on a node of the cluster; start the command there "
            "(ray job submit does that) with launch.ray.address=auto"
        )
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}.items():
        os.environ.setdefault(name, value)
    if config.address is None and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        # nobody else may use the cluster of this run: Ray asks for a token by itself, and would write one into the user's home
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray = package()
    if ray.is_initialized():
        yield
        return
    own = {"include_dashboard": False} if config.address is None else {}
    try:
        ray.init(address=config.address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"launch.ray.address = {config.address!r}: no Ray cluster could be joined or started ({first_line(error)}); start one with "
            "ray start --head, or leave the address out for a cluster of this machine alone"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class Order:
    """What a rank is told to do. ``tree`` is YAML of the settings class ``kind``; ``again``: ranks before it were lost, and it goes on."""

    path: str
    kind: str
    tree: str
    environment: Mapping[str, str]
    desk: Any
    again: bool
    before: tuple[Place, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended on a rank: with a result, or with an error by the name of its kind."""

    result: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


class RankLost(Exception):
    """A rank ended without an answer."""


class Desk:
    """Where ranks leave what they have to say and learn that they are to stop. An actor beside the driver."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []
        self._news = asyncio.Event()
        self._stop = asyncio.Event()

    async def tell(self, event: tuple[str, Any]) -> None:
        self._events.append(event)
        self._news.set()

    async def news(self, seconds: float) -> list[tuple[str, Any]]:
        """Everything that was told since the last call, at most ``seconds`` after this one."""
        if seconds:
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return []
        events, self._events = self._events, []
        self._news.clear()
        return events

    async def stop(self) -> None:
        self._stop.set()

    async def stopped(self) -> bool:
        """Answers once the ranks are to stop."""
        return await self._stop.wait()


class Teller(logging.Handler):
    """In a rank: an observer, and a log handler, that pass everything on to the desk."""

    def __init__(self, desk: Any, level: int) -> None:
        super().__init__(level)
        self._desk = desk
        self._last: Any = None
        self.addFilter(lambda record: not any(hasattr(record, key) for key in FILE_ONLY))

    def begin(self, title: str, total: int, done: int) -> None:
        self.tell("begin", (title, total, done))

    def update(self, row: Mapping[str, Any]) -> None:
        self.tell("update", dict(row))

    def emit(self, record: logging.LogRecord) -> None:
        self.tell("log", (record.levelno, record.getMessage()))

    def tell(self, kind: str, value: Any) -> None:
        self._last = self._desk.tell.remote((kind, value))

    def delivered(self) -> None:
        """Wait until everything has arrived."""
        if self._last is not None:
            package().get(self._last)


class Rank:
    """One rank: an actor whose main thread runs the program."""

    def place(self, folder: str) -> Place:
        """Go to ``folder`` and say where this is. Raises ``ConfigError`` where the node has no such folder."""
        ray = package()
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(
                f"node {address} has no folder {folder} ({error.strerror}); with launch.kind=ray, give the command in a folder that all "
                "nodes share"
            ) from None
        devices = tuple(str(device) for device in context.get_accelerator_ids().get("GPU", ()))
        return Place(context.get_node_id(), address, os.getpid(), devices)

    def free_port(self) -> int:
        """A port that nobody listens on here, for the ranks to meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def put_mark(self, folder: str) -> str:
        """Leave a file in ``folder``; its path."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        mark = Path(folder) / f".seen-by-all-{secrets.token_hex(8)}"
        mark.touch()
        return str(mark)

    def sees(self, mark: str, seconds: float) -> bool:
        """Whether the file is here too, or comes within that time."""
        until = time.monotonic() + seconds
        while not (found := Path(mark).exists()) and time.monotonic() < until:
            list(Path(mark).parent.glob("*"))  # has a network file system look anew
            time.sleep(0.2)
        return found

    def remove_mark(self, mark: str) -> None:
        Path(mark).unlink(missing_ok=True)

    def run(self, order: Order) -> Ended:
        """Do as ordered; an error is part of the answer."""
        os.environ.update(order.environment)
        for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}.items():
            os.environ.setdefault(name, value)
        teller = Teller(order.desk, logging.WARNING if order.environment["RANK"] == "0" else logging.ERROR)
        logger = logging.getLogger(ROOT)
        logger.setLevel(logging.INFO)
        logger.addHandler(teller)
        with StopFlag(), stopping(order.desk):
            ended = answer(order, teller)
        logger.removeHandler(teller)
        teller.delivered()
        return ended


def answer(order: Order, observer: Observer) -> Ended:
    """Call the program of ``order``."""
    try:
        config = going_on(order)
        wait_until_gone(order.before)
        if config.run.threads:
            import torch

            torch.set_num_threads(config.run.threads)
        module, _, name = order.path.partition(":")
        return Ended(result=getattr(importlib.import_module(module), name)(config, observer))
    except Exception as error:
        return Ended(error=type(error).__name__, text=str(error), trace=traceback.format_exc())


def going_on(order: Order) -> RLConfig | SFTConfig:
    """The config of ``order``; that of ranks which go on takes up the newest checkpoint, whatever the first ones began with."""
    config = build(getattr(trees, order.kind), parse_yaml(order.tree))
    if not order.again:
        return config
    own = list((Path(config.run.dir).expanduser() / config.run.name / "checkpoints").glob("step_*"))
    resume = config.run.resume if config.run.resume not in ("auto", "never") and not own else "auto"
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": resume, "overwrite": False})})


def wait_until_gone(before: Sequence[Place]) -> None:
    """Wait for the processes of ``before`` that were on this node: one of them may hold the run folder still."""
    here = package().get_runtime_context().get_node_id()
    until = time.monotonic() + SETTLING
    while any(alive(place.pid) for place in before if place.node == here) and time.monotonic() < until:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether there is a process of that number that still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def stopping(desk: Any) -> Generator[None]:
    """While the program runs, a stop at the desk becomes SIGTERM, which it takes as ever; again until it has."""
    done = threading.Event()

    def watch() -> None:
        package().get(desk.stopped.remote())
        while not done.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            done.wait(2.0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@dataclass(slots=True)
class Driver:
    """Starts the ranks of a run and stays with them, in the process of the command."""

    path: str
    config: RLConfig | SFTConfig
    observer: Observer
    stop: StopFlag
    losses: int = 0
    began: bool = False
    places: tuple[Place, ...] = ()
    _asked_to_stop: bool = False
    _desk: Any = None

    @property
    def asked(self) -> RayConfig:
        return self.config.launch.ray

    def run(self) -> dict[str, Any]:
        """The first rank's result, from as many starts as it takes."""
        self._desk = beside_driver(Desk)
        while True:
            try:
                return self.attempt()
            except RankLost as lost:
                self.losses += 1
                self.after(lost)

    def after(self, lost: RankLost) -> None:
        """Say what was lost. Raises ``RankError`` when there is to be no other start."""
        if self.stop:
            raise RankError(f"{lost}, while the run was being stopped; the same command goes on from the last checkpoint")
        if self.losses > self.asked.restarts:
            raise RankError(
                f"{lost}; the ranks were started again launch.ray.restarts = {self.asked.restarts} times. The same command goes on from "
                "the last checkpoint"
            )
        log.warning("%s; all ranks start again from the last checkpoint (%d of %d)", lost, self.losses, self.asked.restarts)

    def attempt(self) -> dict[str, Any]:
        """Place the ranks, and see them through."""
        accelerated = uses_devices(self.config)
        with placed(layout(self.config.launch, accelerated), self.config.launch, self.stop) as (group, plan):
            actors = [actor(Rank, group, slot).remote() for slot in plan.ranks]
            try:
                return self.see_through(actors)
            finally:
                for rank in actors:
                    package().kill(rank)

    def see_through(self, actors: list[Any]) -> dict[str, Any]:
        """Give every actor its rank and its order, and wait for all of them."""
        before = self.places
        folder = str(Path.cwd())
        found = self.all_of(actors, [one.place.remote(folder) for one in actors], "start")
        order = side_by_side(found)
        actors, self.places = [actors[i] for i in order], tuple(found[i] for i in order)
        self.check_shared(actors)
        (port,) = self.all_of(actors[:1], [actors[0].free_port.remote()], "find a port")
        orders = self.orders(port, before)
        ended = self.watch({one.run.remote(order): rank for rank, (one, order) in enumerate(zip(actors, orders))})
        return self.outcome(ended)

    def orders(self, port: int, before: tuple[Place, ...] = ()) -> list[Order]:
        """What each rank is told, at its place; ``before``: where the ranks were that these stand in for."""
        common = Order(self.path, type(self.config).__name__, to_yaml(self.config), {}, self._desk, self.began, before)
        environment = {**self.asked.environment, "TORCHELASTIC_RESTART_COUNT": str(self.losses)}
        return [replace(common, environment={**environment, **own}) for own in environments(self.places, port)]

    def all_of(self, actors: Sequence[Any], refs: list[Any], what: str) -> list[Any]:
        """The answers to ``refs``. Raises ``RankLost`` for one that does not come within ``launch.ray.wait`` minutes."""
        ray = package()
        try:
            return ray.get(refs, timeout=60 * self.asked.wait)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() if isinstance(error.cause, UserError) else error from None
        except ray.exceptions.GetTimeoutError:
            raise RankLost(f"{len(actors)} ranks did not {what} within launch.ray.wait = {self.asked.wait:g} minutes") from None
        except ray.exceptions.RayActorError as error:
            raise RankLost(f"a rank ended before it could {what} ({reason_of(error)})") from None

    def check_shared(self, actors: list[Any]) -> None:
        """Raises ``ConfigError`` when a node does not see what the first rank writes."""
        folder = str(Path(self.config.run.dir).expanduser())
        others = {p.node: i for i, p in enumerate(self.places) if p.node != self.places[0].node}
        if not others:
            return
        (mark,) = self.all_of(actors[:1], [actors[0].put_mark.remote(folder)], "write to run.dir")
        seen = self.all_of(actors, [actors[i].sees.remote(mark, SETTLING) for i in others.values()], "look at run.dir")
        self.all_of(actors[:1], [actors[0].remove_mark.remote(mark)], "write to run.dir")
        for rank, found in zip(others.values(), seen):
            if not found:
                raise ConfigError(
                    f"run.dir = {self.config.run.dir!r}: rank {rank} on {self.places[rank]} does not see what rank 0 on {self.places[0]} "
                    "writes there; set run.dir to a folder of a file system that all nodes share"
                )

    def watch(self, waiting: dict[Any, int]) -> dict[int, Ended]:
        """Pass on what ranks say until each has ended, or some time after one failed. Raises ``RankLost`` for one that is gone."""
        ray = package()
        ended: dict[int, Ended] = {}
        until = float("inf")
        news = self._desk.news.remote(1.0)
        while waiting and time.monotonic() < until:
            done, _ = ray.wait([*waiting, news], timeout=1.0)
            if self.stop and not self._asked_to_stop:
                self._asked_to_stop = True
                self._desk.stop.remote()
            for ref in done:
                if ref == news:
                    self.pass_on(ray.get(ref))
                    news = self._desk.news.remote(1.0)
                    continue
                rank = waiting.pop(ref)
                try:
                    ended[rank] = ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise RankLost(f"rank {rank} on node {self.places[rank]} was lost: {reason_of(error)}") from None
                if ended[rank].error:
                    until = min(until, time.monotonic() + GRACE)
        self.pass_on([*ray.get(news), *ray.get(self._desk.news.remote(0.0))])
        return ended

    def pass_on(self, events: Sequence[tuple[str, Any]]) -> None:
        """What the first rank observed, and what any rank logged."""
        for kind, value in events:
            if kind == "log":
                logging.getLogger(ROOT).log(*value)
            elif kind == "update":
                self.observer.update(value)
            else:
                self.began = True
                self.observer.begin(*value)

    def outcome(self, ended: Mapping[int, Ended]) -> dict[str, Any]:
        """The first rank's result, or the error of the rank where it began; those that only heard of one come last."""
        failed = {rank: one for rank, one in ended.items() if one.error}
        silent = [rank for rank in range(len(self.places)) if rank not in ended]
        for rank, one in sorted(failed.items()):
            if one.error != RankError.__name__:
                raise self.as_error(rank, one)
        if silent:
            where = ", ".join(f"rank {rank} on node {self.places[rank]}" for rank in silent)
            raise RankLost(f"{where} did not answer, though another had ended ({next(iter(failed.values())).text})")
        if failed:
            raise RankLost(f"ranks lost one another: {failed[min(failed)].text}")
        return ended[0].result

    def as_error(self, rank: int, one: Ended) -> Exception:
        """The error of a rank, as its own kind where it is a user's to fix."""
        kind = getattr(errors, one.error, None)
        if isinstance(kind, type) and issubclass(kind, UserError):
            return kind(one.text)
        if one.error == MemoryError.__name__:
            return MemoryError(one.text)
        return RuntimeError(f"{one.error} on rank {rank}, node {self.places[rank]}: {one.text}\n{one.trace}")


def uses_devices(config: RLConfig | SFTConfig) -> bool:
    """Whether ranks compute on accelerators of the cluster."""
    if config.strategy.device == "cpu":
        return False
    return config.strategy.device != "auto" or config.launch.ray.devices is not None or "GPU" in package().cluster_resources()


@contextmanager
def placed(plan: Layout, launch: LaunchConfig, stop: StopFlag) -> Generator[tuple[Any, Layout]]:
    """A placement group of ``plan``, removed on the way out. Raises ``ResourceError`` when there is no room for it in time."""
    groups = package().util
    group = groups.placement_group([dict(bundle) for bundle in plan.bundles], strategy=launch.ray.placement)
    try:
        until = time.monotonic() + 60 * launch.ray.wait
        own = launch.ray.address is None  # nothing will be added to it
        while not group.wait(1):
            if stop:
                raise RankError("stopped before the ranks had a place")
            if time.monotonic() > until or (own and lacking(plan.asked, totals())):
                raise ResourceError(no_room(plan, launch))
        yield group, plan
    finally:
        groups.remove_placement_group(group)


def totals() -> Bundle:
    """What all nodes of the cluster have, used or not."""
    return {name: value for name, value in package().cluster_resources().items() if name in ("CPU", "GPU")}


def lacking(asked: Bundle, there: Bundle) -> list[str]:
    """Resources of which the cluster has less than ``asked``."""
    return [name for name, value in asked.items() if value > there.get(name, 0.0)]


def no_room(plan: Layout, launch: LaunchConfig) -> str:
    """What is asked for, what is there, and what to do about it."""
    ray = package()
    free = ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    asked = ", ".join(f"{value:g} {name}" for name, value in plan.asked.items())
    there = ", ".join(f"{value:g} {name} ({free.get(name, 0.0):g} free)" for name, value in totals().items())
    way = "add nodes" if launch.ray.address else "join a cluster with more (launch.ray.address)"
    return (
        f"launch.ray: {launch.processes} ranks ask for {asked} in {len(plan.bundles)} bundles ({launch.ray.placement}), and the cluster "
        f"has {there} on {nodes} node{'s' if nodes != 1 else ''}: no room within launch.ray.wait = {launch.ray.wait:g} minutes; lower "
        f"launch.processes or launch.ray.cpus, choose another launch.ray.placement, or {way}"
    )


def actor(kind: type, group: Any, slot: Slot) -> Any:
    """``kind`` as an actor class whose actors live in ``slot``; Ray starts none of them again by itself."""
    ray = package()
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot.bundle)
    return ray.remote(kind).options(
        num_cpus=slot.cpus, num_gpus=slot.devices, max_restarts=0, max_task_retries=0, scheduling_strategy=scheduling
    )


def beside_driver(kind: type) -> Any:
    """An actor on the driver's own node."""
    ray = package()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote()


def reason_of(error: BaseException) -> str:
    """The part of Ray's message that says why."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    telling = [row for row in rows if "because" in row or "exit detail" in row]
    return " ".join(telling or rows[:1]).rstrip(".")[:400]


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
