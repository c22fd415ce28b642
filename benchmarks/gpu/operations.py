"""The operations of an update by ``torch.profiler``: what takes the time of the device, and what the host waits for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import common  # first: it says where the rest lies
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHOWN = 20
"""Operations in the table."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Beginnings of the names of calls that launch kernels, with their variants."""


class Profiler:
    """Records from ``start`` to ``stop``. ``result`` is the summary."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self.running = False
        self.result: dict[str, Any] = {}

    def start(self) -> None:
        common.wait()
        self._profile.start()
        self.running = True

    def stop(self) -> None:
        common.wait()
        self._profile.stop()
        self.running = False
        self.result = summary(self._profile.events() or [])


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(events: Sequence[Any]) -> dict[str, Any]:
    """Return numbers and the rows of the most expensive operations. Times are in milliseconds.

    Args:
        events: Events of ``torch.profiler``, with times in microseconds. Operations and calls of
            the driver are on the CPU, kernels on the device.
    """
    host = [e for e in events if e.device_type == DeviceType.CPU]
    # A range that the program names, such as a step of the optimizer, is no kernel.
    kernels = [
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type != DeviceType.CPU and not getattr(e, "is_user_annotation", False)
    ]
    spans = [(e.time_range.start, e.time_range.end) for e in host] + kernels
    whole = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    numbers: dict[str, float] = {"update under the profiler, ms": whole / 1000}
    spent: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in host:
        own = event.self_device_time_total if kernels else event.self_cpu_time_total
        spent[event.name] += own
        calls[event.name] += 1
    if kernels:
        waits = [e for e in host if e.name in WAITS]
        busy = covered(kernels)
        numbers |= {
            "not covered by kernels, ms": (whole - busy) / 1000,
            "share not covered by kernels": (whole - busy) / whole,
            "waits of the host": len(waits),
            "waits of the host, ms": sum(e.time_range.end - e.time_range.start for e in waits)
            / 1000,
            "launches": sum(e.name.startswith(LAUNCHES) for e in host),
        }
    total = sum(spent.values()) or 1.0
    dearest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    rows = [
        [name[:80], str(calls[name]), f"{spent[name] / 1000:.3f}", f"{spent[name] / total:.1%}"]
        for name in dearest
        if spent[name] > 0
    ]
    kind = "CUDA" if kernels else "CPU"
    return {
        "numbers": numbers,
        "heads": ["operation", "calls", f"{kind} ms", "share"],
        "rows": rows,
    }
