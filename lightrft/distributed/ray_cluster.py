"""What is asked of the package ray: a cluster, room in it, and actors there. The one file that imports it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightrft.config.launch import LaunchConfig, RayConfig
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.distributed.placement import Bundle, Layout, Slot
from lightrft.utils.errors import ConfigError, RankError, ResourceError, first_line
from lightrft.utils.stop_signal import StopFlag

log = logging.getLogger(__name__)

INSTALL = "pip install 'lightrft[ray]'"


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

    Raises ``ConfigError`` when none is at ``address``, and ``ResourceError`` when one of this machine alone does not start in time.
    """
    if (config.address or "").startswith("ray://"):
        raise ConfigError(
            f"launch.ray.address = {config.address!r}: the ranks' driver must run on a node of the cluster; start the command there "
            "(ray job submit does that) with launch.ray.address=auto"
        )
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}.items():
        os.environ.setdefault(name, value)
    ray = package()
    if ray.is_initialized():
        yield
        return
    with _token(ray) if config.address is None else nullcontext():
        if config.address is None:
            _start(ray, config.wait)
        else:
            _join(ray, config.address)
        try:
            yield
        finally:
            ray.shutdown()


def _join(ray: Any, address: str) -> None:
    """Connect to the cluster at ``address``. Raises ``ConfigError``."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises plain ``Exception`` too, and errors of its connection
        ray.shutdown()
        raise ConfigError(
            f"launch.ray.address = {address!r}: no Ray cluster could be joined ({first_line(error)}); start one with ray start --head, or "
            "leave the address out for a cluster of this machine alone"
        ) from error


def _start(ray: Any, minutes: float) -> None:
    """Start a cluster of this machine alone. Ray gives a node 30 s to start, which a busy machine may exceed: then it is started
    again, until ``minutes`` are over. Raises ``ResourceError``."""
    until = time.monotonic() + 60 * minutes
    while True:
        try:
            ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            return
        except Exception as error:  # of a node that is late Ray raises plain ``Exception``
            ray.shutdown()
            late = isinstance(error, TimeoutError) or "timed out" in str(error)
            if late and time.monotonic() < until:
                log.warning("Ray did not start in time (%s); it is started again", first_line(error))
                continue
            limit = f" within launch.ray.wait = {minutes:g} minutes" if late else ""
            raise ResourceError(
                f"launch.kind = 'ray': Ray did not start on this machine{limit} ({first_line(error)}); free processors and memory, raise "
                "launch.ray.wait, or start it with ray start --head and set launch.ray.address=auto"
            ) from error


@contextmanager
def _token(ray: Any) -> Generator[None]:
    """A token for a cluster that nobody else may use, unless the user has one: Ray asks for one by itself, and would write it into the
    user's home. It is forgotten afterwards, or whatever this process joined next would be offered it."""
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
        yield
        return
    mode = os.environ.get("RAY_AUTH_MODE")  # which Ray sets beside it
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


def _reread(ray: Any) -> None:
    """Have Ray look anew for a token and whether it wants one, both of which it keeps. The latter first: threads that still end would miss
    a token."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def uses_devices(config: RLConfig | SFTConfig) -> bool:
    """Whether ranks compute on accelerators of the cluster."""
    if config.strategy.device == "cpu":
        return False
    return config.strategy.device != "auto" or config.launch.ray.devices is not None or "GPU" in package().cluster_resources()


@contextmanager
def placed(plan: Layout, launch: LaunchConfig, stop: StopFlag) -> Generator[Any]:
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
        yield group
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
        f"launch.ray: {launch.processes} ranks and {len(plan.workers)} workers ask for {asked} in {len(plan.bundles)} bundles "
        f"({launch.ray.placement}), and the cluster has {there} on {nodes} node{'s' if nodes != 1 else ''}: no room within "
        f"launch.ray.wait = {launch.ray.wait:g} minutes; lower launch.processes or launch.ray.cpus, choose another launch.ray.placement, "
        f"or {way}"
    )


def actor(kind: type, group: Any, slot: Slot) -> Any:
    """``kind`` as an actor class whose actors live in ``slot``; Ray starts none of them again by itself."""
    ray = package()
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=slot.bundle)
    return ray.remote(kind).options(
        num_cpus=slot.cpus, num_gpus=slot.devices, max_restarts=0, max_task_retries=0, scheduling_strategy=scheduling
    )


def beside_driver(kind: type, *args: Any) -> Any:
    """An actor on the driver's own node."""
    ray = package()
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=1000, scheduling_strategy=here).remote(*args)


def adopt(environment: Mapping[str, str]) -> None:
    """Take up ``environment`` in a process that Ray has started, and what the command line sets before torch is imported."""
    os.environ.update(environment)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def reason_of(error: BaseException) -> str:
    """The part of Ray's message that says why."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    telling = " ".join([row for row in rows if "because" in row or "exit detail" in row] or rows[:1])
    return telling.partition(" Some common causes")[0].rstrip(".")[:400]
