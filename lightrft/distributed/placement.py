"""Resource bundles that a run requests from a cluster, and the placement of processes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightrft.config.launch import LaunchConfig

Bundle = dict[str, float]
"""Resources on one node, by Ray's names: ``CPU``, ``GPU``."""


ROUNDING = 1e-6
"""Tolerance for sums of device fractions."""


@dataclass(frozen=True, slots=True)
class BundleSlot:
    """The share of a bundle that one process uses: CPU cores and (fractional) devices."""

    bundle: int
    cpus: float
    devices: float


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """All bundles of a run, the slot of each rank, and worker slots by name (``engine 0``)."""

    bundles: tuple[Bundle, ...]
    ranks: tuple[BundleSlot, ...]
    workers: Mapping[str, BundleSlot] = field(default_factory=dict)

    @property
    def asked(self) -> Bundle:
        """The sum of all bundles, by resource."""
        asked: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                asked[name] = asked.get(name, 0.0) + amount
        return asked


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The place of a started rank: node id and address in Ray, process id, and assigned devices."""

    node: str
    address: str
    pid: int
    devices: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.address} ({self.node[:8]})"


def plan_placement(launch: LaunchConfig, accelerated: bool) -> PlacementPlan:
    """Build one bundle per rank, with a whole device each if ``accelerated``.

    A worker is placed in the bundle of a rank if its share of a device fits there. Otherwise it
    gets a new bundle.
    """
    asked = launch.ray
    devices = _share(asked.devices, accelerated)
    # The bundle reserves a whole device, whatever part the rank takes: workers may get the rest.
    whole = 1.0 if devices else 0.0
    bundles = [_bundle(asked.cpus, whole) for _ in range(launch.processes)]
    left = [whole - devices] * launch.processes
    workers: dict[str, BundleSlot] = {}
    for kind, (count, share) in asked.workers.items():
        takes = _share(share, accelerated)
        for number in range(count):
            # The emptiest device, so that workers spread over the ranks' devices.
            place = max(range(launch.processes), key=lambda i: left[i])
            if 0.0 < takes <= left[place] + ROUNDING:
                left[place] -= takes
                bundles[place]["CPU"] += asked.worker_cpus
            else:
                place = len(bundles)
                bundles.append(_bundle(asked.worker_cpus, takes))
            workers[f"{kind} {number}"] = BundleSlot(place, asked.worker_cpus, takes)
    ranks = tuple(BundleSlot(rank, asked.cpus, devices) for rank in range(launch.processes))
    return PlacementPlan(tuple(bundles), ranks, workers)


def _share(asked: float | None, accelerated: bool) -> float:
    """Return the share of a device that a process gets. ``asked`` is None for a whole device."""
    if not accelerated:
        return 0.0
    return 1.0 if asked is None else asked


def _bundle(cpus: float, devices: float) -> Bundle:
    return {"CPU": cpus, "GPU": devices} if devices else {"CPU": cpus}


def side_by_side(places: Sequence[RankPlacement]) -> list[int]:
    """Return the indices of ``places`` in rank order: ranks of one node are consecutive."""
    nodes = {node: i for i, node in enumerate(dict.fromkeys(place.node for place in places))}
    # Model-parallel groups are consecutive ranks, so this keeps each within one node where it fits.
    return sorted(range(len(places)), key=lambda i: (nodes[places[i].node], i))


def environments(places: Sequence[RankPlacement], port: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank.

    The ranks meet at the node of rank 0. Every rank sees the devices of all ranks of its node. Its
    own device is the one with its local rank.
    """
    found = []
    nodes = list(dict.fromkeys(place.node for place in places))
    for rank, place in enumerate(places):
        here = [i for i, other in enumerate(places) if other.node == place.node]
        # Ray shows each actor its own devices only, but LOCAL_RANK counts those of the whole node.
        devices = [device for i in here for device in places[i].devices]
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(here.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "GROUP_RANK": str(nodes.index(place.node)),
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": ",".join(devices),
            }
        )
    return found
