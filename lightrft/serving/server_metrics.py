"""Counters of a server in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of a time, in seconds."""
PREFIX = "lightrft_"
PAGE = 4096
"""Bytes of a page of memory in ``/proc``."""


class ServerMetrics:
    """Counters, times and gauges. Every method may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, float]] = {}
        self._times: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self.gauges: dict[str, Callable[[], float]] = {"resident_bytes": resident_bytes}

    def count(self, name: str, amount: float = 1, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter.

        Args:
            name: Name of the counter, without prefix and suffix.
            amount: Number to add.
            labels: Labels of the counter. ``None`` for none.
        """
        with self._lock:
            counts, key = self._counts.setdefault(name, {}), _labels(labels or {})
            counts[key] = counts.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to the histogram ``name``."""
        with self._lock:
            buckets = self._times.setdefault(name, [0] * (len(BOUNDS) + 1))
            buckets[bisect_left(BOUNDS, seconds)] += 1
            self._sums[name] = self._sums.get(name, 0.0) + seconds

    def text(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        rows: list[str] = []
        for name, gauge in self.gauges.items():
            rows += [f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {gauge():g}"]
        with self._lock:
            for name, counts in self._counts.items():
                rows.append(f"# TYPE {PREFIX}{name}_total counter")
                rows += [f"{PREFIX}{name}_total{key} {count:g}" for key, count in counts.items()]
            for name, buckets in self._times.items():
                rows += self._histogram(name, buckets)
        return "\n".join(rows) + "\n"

    def _histogram(self, name: str, buckets: list[int]) -> list[str]:
        rows = [f"# TYPE {PREFIX}{name} histogram"]
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), buckets, strict=True):
            total += count
            rows.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}')
        return [*rows, f"{PREFIX}{name}_sum {self._sums[name]:g}", f"{PREFIX}{name}_count {total}"]


def resident_bytes() -> float:
    """Return the memory of this process in bytes, or 0 where the system does not tell."""
    file = Path("/proc/self/statm")
    return float(file.read_text().split()[1]) * PAGE if file.exists() else 0.0


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
