"""Run ranks as actors on a Ray cluster: place, start and watch them, and restart lost ones."""

from __future__ import annotations

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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.config import verbs as trees
from lightrft.config.base import build, to_yaml
from lightrft.config.launch import RayConfig
from lightrft.config.verbs import GivenDataConfig, TrainingConfig
from lightrft.distributed.error_report import error_listener
from lightrft.distributed.placement import (
    BundleSlot,
    PlacementPlan,
    RankPlacement,
    environments,
    plan_placement,
    side_by_side,
)
from lightrft.distributed.ray_cluster import (
    ActorHandle,
    ResultRef,
    adopt,
    beside_driver,
    cluster,
    create_placement_group,
    package,
    reason_of,
    start_actor,
    uses_devices,
)
from lightrft.distributed.ray_events import Event, EventQueue, EventReporter, report_logs_and_errors
from lightrft.distributed.ray_workers import WorkerAllocator, WorkerRegistry, use_allocator
from lightrft.observability.logging_setup import ROOT
from lightrft.observability.redaction import check_complete
from lightrft.utils import errors
from lightrft.utils.errors import RESUMES, ConfigError, RankError, UserError, WorkerError
from lightrft.utils.stop_signal import StopFlag
from lightrft.utils.yaml_text import parse_yaml

if TYPE_CHECKING:
    from lightrft.observability.observer import Observer
    from lightrft.observability.trackers import Summary

log = logging.getLogger(__name__)

GRACE = 15.0
"""Seconds that ranks have to end after one of them failed. Later they count as lost."""
SETTLING = 30.0
"""Seconds for a shared file system to show a new file, and for previous ranks to end."""


def run_on_ray(path: str, config: TrainingConfig, observer: Observer) -> Summary:
    """Call ``module:name`` in ``launch.processes`` actors and forward the reports of rank 0.

    Args:
        path: function to call, as ``module:name``. It gets a config and an observer.
        config: settings of the run.
        observer: receives the progress of rank 0.

    Returns:
        The result of the call on rank 0.

    Raises:
        RankError: ranks were lost more than ``launch.ray.restarts`` times.
        ConfigError: there is no such cluster.
        ResourceError: the cluster has no room for the run.
        Exception: the error of the rank that failed.
    """
    check_launch(config)
    with cluster(config.launch.ray), StopFlag() as stop:
        summary = RayLauncher(path, config, observer, stop).run()
        if stop and "stopped_by" in summary:
            # Ranks always get SIGTERM, so their summary does not name the signal of the driver.
            return {**summary, "stopped_by": stop.reason}
        return summary


def check_launch(config: TrainingConfig) -> None:
    """Raise ``ConfigError`` if ``launch.ray`` sets something that this config does not use."""
    check_complete(config)
    asked = config.launch.ray
    if config.strategy.device == "cpu":
        for name in ("devices", "engine_devices", "model_devices"):
            share = getattr(asked, name)
            if share is not None:
                raise ConfigError(
                    f"launch.ray.{name} = {share} changes nothing: strategy.device is cpu; leave "
                    "one of them out"
                )
    limit, call = config.strategy.timeout_minutes, asked.call_timeout_minutes
    if config.launch.processes > 1 and call is not None and call >= limit:
        raise ConfigError(
            f"launch.ray.call_timeout_minutes = {call:g} minutes is not "
            f"below strategy.timeout_minutes = {limit:g}: ranks that wait for a worker would "
            "time out before it is restarted; lower the first or raise the second"
        )
    if isinstance(config, GivenDataConfig):
        for name, count in asked.worker_counts.items():
            if count:
                raise ConfigError(
                    f"launch.ray.{name} = {count} changes nothing: {config.verb} has no such "
                    "workers; leave it out"
                )


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of a rank: a program, its settings, environment and workers.

    ``tree`` is YAML of the settings class ``kind``. ``again`` is True if previous ranks were lost
    and the run resumes. ``before`` are the places of these previous ranks.
    """

    path: str
    kind: str
    tree: str
    environment: Mapping[str, str]
    desk: ActorHandle
    again: bool
    before: tuple[RankPlacement, ...] = ()
    roster: ActorHandle | None = None
    slots: Mapping[str, BundleSlot] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of a call on a rank: a result, or an error given by the name of its class."""

    result: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""

    @property
    def kind(self) -> type[UserError] | None:
        """The class of the error if it is a ``UserError``, else None."""
        kind = getattr(errors, self.error, None)
        return kind if isinstance(kind, type) and issubclass(kind, UserError) else None


class RankLost(Exception):
    """Raised when a rank ended without returning a result."""


class RankActor:
    """One rank: an actor whose main thread runs the program."""

    def place(self, folder: str) -> RankPlacement:
        """Change to ``folder`` and return the place of this rank.

        Raises ``ConfigError`` if the node has no such folder.
        """
        ray = package()
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        # Settings may hold relative paths, and Ray starts actors in a folder of its own.
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(
                f"node {address} has no folder {folder} ({error.strerror}); with "
                "launch.kind=ray, give the command in a folder that all nodes share"
            ) from None
        devices = tuple(str(device) for device in context.get_accelerator_ids().get("GPU", ()))
        return RankPlacement(context.get_node_id(), address, os.getpid(), devices)

    def free_port(self) -> int:
        """Return a free port of this node, for the rendezvous of the ranks."""
        # Another program may take it before the ranks do. They are then lost and start again.
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def put_mark(self, folder: str) -> str:
        """Create a file in ``folder`` and return its path. Raises ``ConfigError`` if that fails."""
        mark = Path(folder) / f".seen-by-all-{secrets.token_hex(8)}"
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            raise ConfigError(
                f"run.dir = {folder!r}: the first rank cannot write there: {error.strerror}"
            ) from None
        return str(mark)

    def sees(self, mark: str, seconds: float) -> bool:
        """Return True if the file ``mark`` exists on this node within ``seconds``."""
        until = time.monotonic() + seconds
        while not (found := Path(mark).exists()) and time.monotonic() < until:
            list(Path(mark).parent.glob("*"))  # makes NFS refresh its directory cache
            time.sleep(0.2)
        return found

    def remove_mark(self, mark: str) -> None:
        """Delete the file of ``put_mark``."""
        Path(mark).unlink(missing_ok=True)

    def run(self, order: RankTask) -> RankResult:
        """Run ``order`` and return its outcome, which includes an error."""
        adopt(order.environment)
        rank = int(order.environment["RANK"])
        # Ranks warn of the same things, so one of them is enough.
        teller = EventReporter(order.desk, logging.ERROR if rank else logging.WARNING)
        report_logs_and_errors(teller)
        allocator = WorkerAllocator(order.roster, order.slots, package().util.get_node_ip_address())
        leave = partial(teller.leave, rank)
        with StopFlag(), stopping(order.desk), use_allocator(allocator), error_listener(leave):
            ended = run_rank_task(order, teller)
        teller.delivered()
        return ended


def run_rank_task(order: RankTask, observer: Observer) -> RankResult:
    """Call the program of ``order`` and return its outcome."""
    try:
        config = resumes_run(order)
        wait_until_gone(order.before)
        if config.run.threads:
            import torch

            torch.set_num_threads(config.run.threads)
        module, _, name = order.path.partition(":")
        return RankResult(result=getattr(importlib.import_module(module), name)(config, observer))
    except Exception as error:
        return RankResult(error=type(error).__name__, text=str(error), trace=traceback.format_exc())


def resumes_run(order: RankTask) -> TrainingConfig:
    """Return the config of ``order``. Restarted ranks resume from the newest checkpoint of the run.

    A checkpoint that ``run.resume`` names is used only while the run has no checkpoint yet.
    """
    config = build(getattr(trees, order.kind), parse_yaml(order.tree))
    if not order.again:
        return config
    folder = config.run.folder / "checkpoints"
    has_checkpoint = any(folder.glob("step_*"))
    names_one = config.run.resume not in ("auto", "never")
    resume = config.run.resume if names_one and not has_checkpoint else "auto"
    # Not ``overwrite`` again: it would delete what the lost ranks have saved.
    run = config.run.model_copy(update={"resume": resume, "overwrite": False})
    return config.model_copy(update={"run": run})


def wait_until_gone(before: Sequence[RankPlacement]) -> None:
    """Wait until the processes of ``before`` on this node end, since one may still lock the run
    folder.
    """
    here = package().get_runtime_context().get_node_id()
    until = time.monotonic() + SETTLING
    previous = [place.pid for place in before if place.node == here]
    while any(map(alive, previous)) and time.monotonic() < until:
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Return True if the process ``pid`` is running and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # The state follows the name in parentheses, which may itself hold spaces and parentheses.
    state = stat.rpartition(")")[2].split()[0]
    return state != "Z"


@contextmanager
def stopping(desk: ActorHandle) -> Generator[None]:
    """Within this context, turn a stop request at the desk into SIGTERM to this process.

    The signal is repeated every 2 s until the program ends.
    """
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
        # The watcher may wait at the desk for ever. It is a daemon and sends nothing after this.
        done.set()


@dataclass(slots=True)
class RayLauncher:
    """Starts and watches the ranks of a run, in the process of the command."""

    path: str
    config: TrainingConfig
    observer: Observer
    stop: StopFlag
    losses: int = 0
    began: bool = False
    places: tuple[RankPlacement, ...] = ()
    roster: ActorHandle | None = None
    _asked_to_stop: bool = False
    _desk: Any = None  # an ``ActorHandle`` once ``run`` has started it
    _left: dict[int, str] = field(default_factory=dict)

    @property
    def asked(self) -> RayConfig:
        """The Ray settings of the run."""
        return self.config.launch.ray

    def run(self) -> Summary:
        """Start the ranks, restart them when some are lost, and return the result of rank 0."""
        self._desk = beside_driver(EventQueue)
        while True:
            try:
                return self.attempt()
            except RankLost as lost:
                self.losses += 1
                self.after(lost)

    def after(self, lost: RankLost) -> None:
        """Log the loss of a rank. Raises ``RankError`` when no restart is left or the run is
        stopping.
        """
        if self.stop:
            raise RankError(f"{lost}, while the run was being stopped. {RESUMES}")
        if self.losses > self.asked.restarts:
            raise RankError(
                f"{lost}; the ranks were restarted launch.ray.restarts = {self.asked.restarts} "
                f"times. {RESUMES}"
            )
        log.warning(
            "%s; all ranks start again from the last checkpoint (%d of %d)",
            lost,
            self.losses,
            self.asked.restarts,
        )

    def attempt(self) -> Summary:
        """Place the ranks and workers once, run them and return the result of rank 0."""
        plan = plan_placement(self.config.launch, uses_devices(self.config))
        with create_placement_group(plan, self.config.launch, self.stop) as group:
            host = str(Path.cwd()), self.asked.environment, self._desk
            self.roster = None
            if plan.workers:
                seconds = 60 * self.asked.placement_timeout_minutes
                self.roster = beside_driver(WorkerRegistry, group, seconds, host)
            actors = [start_actor(RankActor, group, slot) for slot in plan.ranks]
            try:
                return self.see_through(actors, plan)
            finally:
                # Ranks that still live would keep their devices and the lock of the run folder.
                for one in actors:
                    package().kill(one)
                if self.roster is not None:
                    package().kill(self.roster)

    def see_through(self, actors: list[ActorHandle], plan: PlacementPlan) -> Summary:
        """Assign a rank and an order to every actor, and wait for all of them."""
        before, self._left = self.places, {}
        folder = str(Path.cwd())
        found = self.all_of(actors, [one.place.remote(folder) for one in actors], "start")
        order = side_by_side(found)
        actors = [actors[i] for i in order]
        self.places = tuple(found[i] for i in order)
        # Before the program runs: otherwise every rank would load the model first, and then fail.
        self.check_shared(actors)
        (port,) = self.all_of(actors[:1], [actors[0].free_port.remote()], "find a port")
        orders = self.orders(port, plan, before)
        waiting: dict[ResultRef, int] = {}
        for rank, (one, task) in enumerate(zip(actors, orders)):
            waiting[one.run.remote(task)] = rank
        return self.outcome(self.watch(waiting))

    def orders(
        self, port: int, plan: PlacementPlan, before: tuple[RankPlacement, ...] = ()
    ) -> list[RankTask]:
        """Return the order of each rank, in rank order.

        Args:
            port: rendezvous port on the node of rank 0.
            plan: slots of the workers.
            before: places of the lost ranks that these ranks replace.
        """
        common = RankTask(
            path=self.path,
            kind=type(self.config).__name__,
            tree=to_yaml(self.config),
            environment={},
            desk=self._desk,
            again=self.began,
            before=before,
            roster=self.roster,
            slots=plan.workers,
        )
        environment = {**self.asked.environment, "TORCHELASTIC_RESTART_COUNT": str(self.losses)}
        return [
            replace(common, environment={**environment, **own})
            for own in environments(self.places, port)
        ]

    def all_of(self, actors: Sequence[ActorHandle], refs: list[ResultRef], what: str) -> list[Any]:
        """Return the results of ``refs``.

        Args:
            actors: actors that were called, for the message.
            refs: Ray references of the calls.
            what: action of the ranks, for the message.

        Raises:
            RankLost: a result does not arrive within ``launch.ray.placement_timeout_minutes``
            minutes, or an actor died. UserError: the call raised it.
        """
        ray = package()
        try:
            return ray.get(refs, timeout=60 * self.asked.placement_timeout_minutes)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except ray.exceptions.GetTimeoutError:
            raise RankLost(
                f"{len(actors)} ranks did not {what} within launch.ray.placement_timeout_minutes "
                f"= {self.asked.placement_timeout_minutes:g} minutes"
            ) from None
        except ray.exceptions.RayError as error:
            # An actor died, or a node or a connection is gone.
            raise RankLost(f"a rank ended before it could {what} ({reason_of(error)})") from None

    def check_shared(self, actors: list[ActorHandle]) -> None:
        """Raise ``ConfigError`` when a node does not see a file that rank 0 writes."""
        folder = str(Path(self.config.run.dir).expanduser())
        # One rank per node is enough. Ranks of one node see the same file systems.
        others = {p.node: i for i, p in enumerate(self.places) if p.node != self.places[0].node}
        if not others:
            return
        (mark,) = self.all_of(actors[:1], [actors[0].put_mark.remote(folder)], "write to run.dir")
        seen = self.all_of(
            actors,
            [actors[i].sees.remote(mark, SETTLING) for i in others.values()],
            "look at run.dir",
        )
        # Also if a node does not see it: the file must not stay in the user's folder.
        self.all_of(actors[:1], [actors[0].remove_mark.remote(mark)], "write to run.dir")
        for rank, found in zip(others.values(), seen):
            if not found:
                raise ConfigError(
                    f"run.dir = {self.config.run.dir!r}: rank {rank} on {self.places[rank]} does "
                    f"not see what rank 0 on {self.places[0]} writes there; set run.dir to a "
                    "folder of a file system that all nodes share"
                )

    def watch(self, waiting: dict[ResultRef, int]) -> dict[int, RankResult]:
        """Forward events of ranks until each has ended, or until ``GRACE`` seconds after a failure.

        Raises ``RankLost`` for a rank that is gone.
        """
        ray = package()
        ended: dict[int, RankResult] = {}
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
                    # First the events: the last message of the rank tells why it ended.
                    self.pass_on([*ray.get(news), *ray.get(self._desk.news.remote(0.0))])
                    raise self.lost(rank, reason_of(error)) from None
                if ended[rank].error:
                    # The others get time to end by themselves: their errors may be the cause.
                    until = min(until, time.monotonic() + GRACE)
        self.pass_on([*ray.get(news), *ray.get(self._desk.news.remote(0.0))])
        return ended

    def pass_on(self, events: Sequence[Event]) -> None:
        """Forward the events of rank 0 to the observer, and the log records of all ranks to the
        log.
        """
        for kind, value in events:
            if kind == "log":
                logging.getLogger(ROOT).log(*value)
            elif kind == "update":
                self.observer.update(value)
            elif kind == "note":
                self.observer.note(value)
            elif kind == "left":
                self._left[value[0]] = value[1]
            else:
                # From here on there may be a run folder, so that ranks that restart must resume.
                self.began = True
                self.observer.begin(*value)

    def lost(self, rank: int, reason: str) -> RankLost:
        """Build the error of a lost ``rank``, from its last message if there is one, else
        ``reason``.
        """
        place = f"rank {rank} on node {self.places[rank]}"
        said = self._left.get(rank)
        if said:
            return RankLost(f"{place} has given up: {without_way_on(said)}")
        return RankLost(f"{place} was lost: {reason}")

    def outcome(self, ended: Mapping[int, RankResult]) -> Summary:
        """Return the result of rank 0, or raise the error of the rank that caused the failure.

        Errors that only report another rank's failure are considered last.
        """
        failed = {rank: one for rank, one in ended.items() if one.error}
        silent = [rank for rank in range(len(self.places)) if rank not in ended]
        for rank, one in sorted(failed.items()):
            # A worker that was given up may start on another node if all ranks start again.
            if one.kind is WorkerError:
                raise RankLost(one.text)
            if one.kind is None or not issubclass(one.kind, RankError):
                raise self.as_error(rank, one)
        if silent:
            where = ", ".join(f"rank {rank} on node {self.places[rank]}" for rank in silent)
            raise RankLost(
                f"{where} did not respond after another ended "
                f"({without_way_on(next(iter(failed.values())).text)})"
            )
        if failed:
            raise RankLost(f"ranks lost one another: {without_way_on(failed[min(failed)].text)}")
        return ended[0].result

    def as_error(self, rank: int, one: RankResult) -> Exception:
        """Rebuild the error of a rank, in its original class if it is a ``UserError``."""
        if one.kind is not None:
            return one.kind(one.text)
        # The command line gives advice for this class.
        if one.error == MemoryError.__name__:
            return MemoryError(one.text)
        return RuntimeError(
            f"{one.error} on rank {rank}, node {self.places[rank]}: {one.text}\n{one.trace}"
        )


def without_way_on(text: str) -> str:
    """Return ``text`` without its advice on how to resume, which the launcher adds itself."""
    return text.partition(f". {RESUMES}")[0]
