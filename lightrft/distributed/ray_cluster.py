"""Connect to a Ray cluster, reserve resources and create actors. Only this file imports ray."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol

from lightrft.config.launch import LaunchConfig, RayConfig
from lightrft.config.verbs import TrainingConfig
from lightrft.distributed.placement import Bundle, BundleSlot, PlacementPlan
from lightrft.utils.cpu import set_thread_policy
from lightrft.utils.errors import ConfigError, RankError, ResourceError, first_line, install_extra
from lightrft.utils.stop_signal import StopFlag

log = logging.getLogger(__name__)

JOIN_SECONDS = 30.0
"""Longest wait in seconds for a cluster that does not answer at its address."""
INSTALL = install_extra("ray")


class ResultRef(Awaitable[Any], Protocol):
    """A reference to the result of a remote call. ``package().get`` waits for the result."""

    def future(self) -> Future[Any]:
        """Return a future of the result."""
        ...


class RemoteMethod(Protocol):
    """A method of an actor."""

    def remote(self, *args: object) -> ResultRef:
        """Start a call, without waiting for it."""
        ...


class ActorHandle(Protocol):
    """A handle of an actor, which has the methods of its class.

    Ray types every attribute of its own handle as ``Never``, so that no call could be checked.
    """

    def __getattr__(self, name: str) -> RemoteMethod: ...


def package() -> ModuleType:
    """Import and return the package ray. Raises ``ConfigError`` with the install command."""
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"launch.kind = 'ray' needs the package ray ({error}): {INSTALL}"
        ) from None
    return ray


@contextmanager
def cluster(config: RayConfig) -> Generator[None]:
    """Connect to the cluster of ``config``, unless this program is already connected to one.

    Raises:
        ConfigError: there is no cluster at ``address``.
        ResourceError: a cluster of this machine alone does not start in time.
    """
    if (config.address or "").startswith("ray://"):
        raise ConfigError(
            f"launch.ray.address = {config.address!r}: the ranks' driver must run on a node of "
            "the cluster; start the command there (ray job submit does that) with "
            "launch.ray.address=auto"
        )
    # By default Ray reports usage to its developers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray hides all devices from actors that ask for none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = package()
    if ray.is_initialized():
        yield
        return
    with _token(ray) if config.address is None else nullcontext():
        if config.address is None:
            _start(ray, config.placement_timeout_minutes)
        else:
            _join(ray, config.address, min(JOIN_SECONDS, 60 * config.placement_timeout_minutes))
        try:
            yield
        finally:
            ray.shutdown()


def _join(ray: ModuleType, address: str, seconds: float) -> None:
    """Connect to the cluster at ``address``. Raises ``ConfigError``.

    Ray itself tries for many minutes to reach a cluster that is not there. So the connection to
    ``host:port`` is tried first, for ``seconds`` at most.
    """
    try:
        if address != "auto":
            _reach(address, seconds)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ``Exception`` as well as connection errors
        ray.shutdown()
        raise ConfigError(
            f"launch.ray.address = {address!r}: no Ray cluster could be joined "
            f"({first_line(error)}); start one with ray start --head, or leave the address out "
            "for a cluster of this machine alone"
        ) from error


def _reach(address: str, seconds: float) -> None:
    """Return once ``host:port`` accepts a connection. Raises ``OSError`` or ``ValueError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("it is neither auto nor host:port")
    until = time.monotonic() + seconds
    while True:
        try:
            left = max(0.1, until - time.monotonic())
            socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
            return
        except OSError as error:
            # A name without an address does not get one.
            if isinstance(error, socket.gaierror) or time.monotonic() + 1 > until:
                raise
            time.sleep(1)


def _start(ray: ModuleType, minutes: float) -> None:
    """Start a cluster of this machine alone. Raises ``ResourceError``.

    Ray allows a node 30 s to start, which is too short on a busy machine. It is restarted until
    ``minutes`` are over.
    """
    until = time.monotonic() + 60 * minutes
    while True:
        try:
            ray.init(
                address="local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
            )
            return
        except Exception as error:  # Ray raises plain ``Exception`` for a node that starts too late
            ray.shutdown()
            late = isinstance(error, TimeoutError) or "timed out" in str(error)
            if late and time.monotonic() < until:
                log.warning(
                    "Ray did not start in time (%s); it is started again", first_line(error)
                )
                continue
            limit = ""
            if late:
                limit = f" within launch.ray.placement_timeout_minutes = {minutes:g} minutes"
            raise ResourceError(
                f"launch.kind = 'ray': Ray did not start on this machine{limit} "
                f"({first_line(error)}); free processors and memory, raise "
                "launch.ray.placement_timeout_minutes, or start it with ray start --head and "
                "set launch.ray.address=auto"
            ) from error


@contextmanager
def _token(ray: ModuleType) -> Generator[None]:
    """Set an authentication token of the local cluster, unless the user has set one.

    Without it Ray would generate a token and write it into the user's home directory. The token is
    removed afterwards. Otherwise this process would send it to the next cluster it joins.
    """
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        yield
        return
    mode = os.environ.get("RAY_AUTH_MODE")  # Ray sets it together with the token
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _reread(ray)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
        os.environ.pop("RAY_AUTH_MODE", None)
        if mode is not None:
            os.environ["RAY_AUTH_MODE"] = mode
        _reread(ray)


def _reread(ray: ModuleType) -> None:
    """Clear Ray's caches of the authentication mode and of the token.

    The mode comes first: threads of Ray that are still ending would fail without a token.
    """
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def uses_devices(config: TrainingConfig) -> bool:
    """Return True if ranks compute on accelerators of the cluster."""
    if config.strategy.device == "cpu":
        return False
    return (
        config.strategy.device != "auto"
        or config.launch.ray.devices is not None
        or "GPU" in package().cluster_resources()
    )


@contextmanager
def create_placement_group(
    plan: PlacementPlan, launch: LaunchConfig, stop: StopFlag
) -> Generator[object]:
    """Reserve a placement group for ``plan`` and remove it on exit.

    Args:
        plan: bundles of the run.
        launch: settings with the time to wait and the placement strategy.
        stop: flag of a stop request, which ends the wait.

    Raises:
        ResourceError: the cluster has no room for the group in time.
        RankError: the run was stopped while it waited.
    """
    groups = package().util
    group = groups.placement_group(
        [dict(bundle) for bundle in plan.bundles], strategy=launch.ray.placement
    )
    try:
        until = time.monotonic() + 60 * launch.ray.placement_timeout_minutes
        own = launch.ray.address is None  # a local cluster does not grow, so waiting is pointless
        while not group.wait(1):
            if stop:
                raise RankError("stopped before the ranks had a place")
            there = cluster_resources()
            hopeless = own and any(there.get(name, 0.0) < n for name, n in plan.asked.items())
            if hopeless or time.monotonic() > until:
                raise ResourceError(no_room(plan, launch))
        yield group
    finally:
        groups.remove_placement_group(group)


def cluster_resources() -> Bundle:
    """Return the resources of all nodes of the cluster, used or free."""
    there = package().cluster_resources()
    return {name: there[name] for name in ("CPU", "GPU") if name in there}


def no_room(plan: PlacementPlan, launch: LaunchConfig) -> str:
    """Return an error message: the requested and available resources, and what to change."""
    ray = package()
    free = ray.available_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    asked = ", ".join(f"{value:g} {name}" for name, value in plan.asked.items())
    there = ", ".join(
        f"{value:g} {name} ({free.get(name, 0.0):g} free)"
        for name, value in cluster_resources().items()
    )
    way = "add nodes" if launch.ray.address else "join a cluster with more (launch.ray.address)"
    return (
        f"launch.ray: {launch.processes} ranks and {len(plan.workers)} workers ask for {asked} "
        f"in {len(plan.bundles)} bundles ({launch.ray.placement}), and the cluster has {there} "
        f"on {nodes} node{'s' if nodes != 1 else ''}: no room within "
        f"launch.ray.placement_timeout_minutes = {launch.ray.placement_timeout_minutes:g} "
        "minutes; lower launch.processes or launch.ray.cpus, choose another "
        f"launch.ray.placement, or {way}"
    )


def start_actor(kind: type, group: object, slot: BundleSlot, *args: object) -> ActorHandle:
    """Start an actor that is scheduled in ``slot``, without automatic restarts.

    Args:
        kind: plain Python class.
        group: placement group of the run.
        slot: bundle index and resources of the actor.
        args: arguments of ``kind``.
    """
    ray = package()
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=slot.bundle
    )
    actor_class = ray.remote(kind).options(
        num_cpus=slot.cpus,
        num_gpus=slot.devices,
        # This package restarts actors itself: Ray would start them without their weights.
        max_restarts=0,
        max_task_retries=0,
        scheduling_strategy=scheduling,
    )
    return actor_class.remote(*args)


def beside_driver(kind: type, *args: object) -> ActorHandle:
    """Start an actor on the driver's node."""
    ray = package()
    node = ray.get_runtime_context().get_node_id()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    # Each rank keeps a call open that waits for news, so many calls run at the same time.
    options = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": here}
    return ray.remote(kind).options(**options).remote(*args)


def adopt(environment: Mapping[str, str]) -> None:
    """Apply ``environment`` in a process that Ray has started.

    It also sets the variables that the command line sets before torch is imported.
    """
    os.environ.update(environment)
    set_thread_policy()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def reason_of(error: BaseException) -> str:
    """Return the part of Ray's error message that gives the cause."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    causes = [row for row in rows if "because" in row or "exit detail" in row]
    telling = " ".join(causes or rows[:1])
    return telling.partition(" Some common causes")[0].rstrip(".")[:400]
