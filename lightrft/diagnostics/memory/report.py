"""Report the predicted memory of a run, and compare it with that of the device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightrft.config.launch import LaunchConfig
from lightrft.config.verbs import TrainingConfig
from lightrft.diagnostics.findings import Finding
from lightrft.diagnostics.memory.estimate import ROLES, MemoryEstimate
from lightrft.diagnostics.memory.formulas import shares_of, shown
from lightrft.diagnostics.memory.phases import Device
from lightrft.distributed.placement import plan_placement

ROOM = 0.85
"""The fraction of device memory that a prediction may use, given its error of up to 15 %."""
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"
KEPT = 2.5
"""The largest measured ratio of resident memory to memory in use (docs/verbs/doctor.md)."""
WAYS = {
    "generation": "lower engine.max_cache_tokens or engine.max_num_seqs",
    "loading": "load fewer models: algorithm.kl, critic, teacher",
    "models": "set model.lora or model.load_in_4bit, take a smaller model, or spread it over more "
    "processes (launch.processes)",
    "passes": "lower train.max_tokens_per_micro_batch, set model.gradient_checkpointing=true or "
    "model.lora, or raise launch.processes",
}
"""Advice to reduce the memory of a phase. ``models`` applies if the models alone are too large."""


def _resident() -> int:
    """Return the resident bytes of this process, which a run uses before it loads any model."""
    file = Path("/proc/self/statm")
    if not file.is_file():
        return 0
    # The fields of ``statm`` are total and resident size, in pages.
    pages = int(file.read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_findings(
    found: MemoryEstimate,
    device: Device,
    config: TrainingConfig,
) -> Iterator[Finding]:
    """Check the memory of each rank.

    Args:
        found: Memory of each rank.
        device: The device of each rank.
        config: Settings of the run.
    """
    yield from _parts(found, "memory")
    if device.processes > 1:
        yield Finding("memory", "ok", "spread", _spread(config, device))
    if device.kind != "cpu":
        place = " on each device,"
    elif device.processes > 1:
        place = " on each process,"
    else:
        place = " on the process,"
    total, says = _peak(found, device, place)
    yield _fits("memory", says, total, device, _way(found, device))
    if device.kind == "cpu" and sys.platform == "linux" and ALLOCATOR not in os.environ:
        says = (
            f"the C library keeps freed memory: runs may take up to {KEPT:g} times "
            f"this; {ALLOCATOR}=262144 and MALLOC_TRIM_THRESHOLD_=262144 give it back"
        )
        tight = device.memory and KEPT * total > device.memory
        yield Finding("memory", "warn" if tight else "ok", "allocator", says)


def worker_findings(
    found: dict[str, MemoryEstimate],
    ranks: MemoryEstimate | None,
    device: Device,
    config: TrainingConfig,
) -> Iterator[Finding]:
    """Check the memory of workers with a model, and of devices shared by several processes.

    Args:
        found: Memory of each worker, by role.
        ranks: Memory of each rank, or None if it is unknown.
        device: The device of each process.
        config: Settings of the run.
    """
    for role, needed in found.items():
        section = f"memory of each {role}"
        yield from _parts(needed, section)
        total, says = _peak(needed, device)
        yield _fits(section, says, total, device, _way(needed, device))
    if ranks is None or device.kind == "cpu":
        return
    peaks = {"rank": ranks.peak, **{role: needed.peak for role, needed in found.items()}}
    for tenants in _shared(config.launch):
        total = sum(peaks.get(role, 0.0) for role in tenants)
        says = f"{shown(total)} on a device of {' and '.join(tenants)}"
        way = "give workers separate devices (launch.ray.engine_devices, model_devices)"
        yield _fits("devices", says, total, device, way)


def _parts(found: MemoryEstimate, section: str) -> Iterator[Finding]:
    """Report the memory of models, and the additional memory of each phase."""
    for name, model in found.models.items():
        counts = found.parameters.get(name)
        if counts is None:
            says = shown(model.total)
        else:
            parameters, trained = counts
            kinds = {
                "weights": model.weights,
                "float32 masters": model.masters,
                "moments": model.moments,
            }
            says = f"{parameters / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained: "
            # Everything may be offloaded.
            says += _sum(kinds) or "nothing on the device"
        yield Finding(section, "ok", name, says)
    for phase in found.phases:
        parts = _sum(phase.parts)
        says = f"{shown(sum(phase.parts.values()))}: {parts}" if parts else "nothing more"
        if phase.resting:
            says += f"; {shown(phase.resting)} of the models rest in the memory of the host"
        yield Finding(section, "ok", phase.name, says)
    if found.host:
        says = f"{_sum(found.host)} for each process, in the memory of the host"
        yield Finding(section, "ok", "host", says)
    for problem in found.problems:
        yield Finding(section, "warn", "not traced", problem)


def _sum(sizes: Mapping[str, float]) -> str:
    """Format the sizes that are not zero as terms of a sum."""
    return " + ".join(f"{shown(size)} {name}" for name, size in sizes.items() if size)


def _peak(found: MemoryEstimate, device: Device, place: str = "") -> tuple[float, str]:
    """Return the largest number of bytes and its description.

    On a CPU the memory of the program counts too.

    Args:
        found: Memory of a process.
        device: Its device.
        place: Words that follow the number.
    """
    program = _resident() if device.kind == "cpu" else 0
    total = found.peak + program
    says = f"{shown(total)}{place} in {found.largest.name}"
    if program:
        says += f" ({shown(program)} of it the program)"
    return total, says


def _shared(launch: LaunchConfig) -> list[tuple[str, ...]]:
    """Return the kinds of processes that share a device, as placed by ``launch.ray``."""
    # True: without accelerators there is no device to share.
    plan = plan_placement(launch, True)
    living: list[list[str]] = [[] for _ in plan.bundles]
    for slot in plan.ranks:
        living[slot.bundle].append("rank")
    for name, slot in plan.workers.items():
        if slot.devices:
            kind = name.rpartition(" ")[0]
            living[slot.bundle].append(ROLES.get(kind, kind))
    # Each combination once, since it may stand on many devices.
    return list(dict.fromkeys(tuple(each) for each in living if len(each) > 1))


def _spread(config: TrainingConfig, device: Device) -> str:
    """Describe the part of a trained model that each process stores."""
    shares = shares_of(config.strategy, device.processes, device.kind, trained=True)
    parts = {
        "weights": shares.weights,
        "masters and moments": shares.state,
        "gradients": shares.gradients,
    }
    fractions = []
    for part, count in parts.items():
        fraction = "whole" if count == 1 else f"1/{count}"
        fractions.append(f"{part} {fraction}")
    says = f"of each trained model, a process holds {', '.join(fractions)}"
    if shares.cut > 1:
        says += f", each layer cut over {shares.cut} (strategy.tensor_parallel)"
    if config.strategy.sequence_parallel > 1:
        sequence = config.strategy.sequence_parallel
        says += f", the tokens of a row over {sequence} (strategy.sequence_parallel)"
    if shares.precise:
        says += "; trained weights are held in float32 only"
    if shares.on_host:
        names = {"state": "masters and moments"}
        away = ", ".join(names.get(part, part) for part in shares.on_host)
        says += f"; {away} are in the memory of the host"
    return says


def _way(found: MemoryEstimate, device: Device) -> str:
    """Return advice to reduce the largest use of memory."""
    models = sum(model.total for model in found.models.values())
    if models > ROOM * device.memory:
        return WAYS["models"]
    for kind in ("generation", "loading"):
        if found.largest.name.startswith(kind):
            return WAYS[kind]
    return WAYS["passes"]


def _fits(section: str, says: str, total: float, device: Device, way: str) -> Finding:
    """Compare a need with the memory of a device.

    Args:
        section: Section of the finding.
        says: Description of the need.
        total: Bytes needed.
        device: The device.
        way: Advice to reduce the need.
    """
    if not device.memory:
        return Finding(section, "ok", "peak", f"{says}; set doctor.device_memory to compare")
    share = total / device.memory
    says += f"; there are {shown(device.memory)} for it"
    if share <= ROOM:
        return Finding(section, "ok", "peak", f"{says}: it fits ({share:.0%})")
    if share <= 1:
        says += f": tight ({share:.0%}, and the prediction may be off by 15 %); {way}"
        return Finding(section, "warn", "peak", says)
    return Finding(section, "bad", "peak", f"{says}: it does not fit ({share:.0%}); {way}")
