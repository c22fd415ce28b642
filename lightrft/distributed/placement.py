"""What a run asks of a cluster: bundles of processors and devices, and who lives in which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightrft.config.launch import LaunchConfig

Bundle = dict[str, float]
"""Resources that lie on one node, by Ray's names: ``CPU``, ``GPU``."""


ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Slot:
    """A process's share of a bundle."""

    bundle: int
    cpus: float
    devices: float


@dataclass(frozen=True, slots=True)
class Layout:
    """All bundles of a run, the slot of each rank, and those of workers by name, such as ``engine 0``."""

    bundles: tuple[Bundle, ...]
    ranks: tuple[Slot, ...]
    workers: Mapping[str, Slot] = field(default_factory=dict)

    @property
    def asked(self) -> Bundle:
        """The sum of all bundles."""
        names = dict.fromkeys(name for bundle in self.bundles for name in bundle)
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in names}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank came to live: the node by Ray's id and by its address, and the devices there that are its own."""

    node: str
    address: str
    pid: int
    devices: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.address} ({self.node[:8]})"


def layout(launch: LaunchConfig, accelerated: bool) -> Layout:
    """A bundle for each rank, with a whole device if they compute on such (``accelerated``). A worker takes what is left of one of
    those, if its share of a device fits, else it has a bundle of its own."""
    asked = launch.ray
    devices = (1.0 if asked.devices is None else asked.devices) if accelerated else 0.0
    bundles: list[Bundle] = [{"CPU": asked.cpus, **({"GPU": 1.0} if devices else {})} for _ in range(launch.processes)]
    left = [1.0 - devices if devices else 0.0] * launch.processes
    workers: dict[str, Slot] = {}
    for kind, (count, share) in asked.workers.items():
        for number in range(count):
            takes = (1.0 if share is None else share) if accelerated else 0.0
            place = max(range(launch.processes), key=lambda i: left[i])
            if 0.0 < takes <= left[place] + ROUNDING:
                left[place] -= takes
                bundles[place]["CPU"] += asked.worker_cpus
            else:
                place = len(bundles)
                bundles.append({"CPU": asked.worker_cpus, **({"GPU": takes} if takes else {})})
            workers[f"{kind} {number}"] = Slot(place, asked.worker_cpus, takes)
    ranks = tuple(Slot(rank, asked.cpus, devices) for rank in range(launch.processes))
    return Layout(tuple(bundles), ranks, workers)


def side_by_side(places: Sequence[Place]) -> list[int]:
    """Indices of ``places`` in the order in which they become ranks: those of one node follow one another."""
    nodes = {node: i for i, node in enumerate(dict.fromkeys(place.node for place in places))}
    return sorted(range(len(places)), key=lambda i: (nodes[places[i].node], i))


def environments(places: Sequence[Place], port: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank at its place; the first one's node is where they meet.

    Every rank sees the devices of all ranks of its node, and its own is the one with its local number.
    """
    found = []
    nodes = list(dict.fromkeys(place.node for place in places))
    for rank, place in enumerate(places):
        here = [i for i, other in enumerate(places) if other.node == place.node]
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(here.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(here)),
                "GROUP_RANK": str(nodes.index(place.node)),
                "MASTER_ADDR": places[0].address,
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": ",".join(device for i in here for device in places[i].devices),
            }
        )
    return found
