"""Measure the load and the memory of a GPU, and know its peak."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from lightrft.observability.metrics import Last, Metrics

PEAKS = {
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H20": 148.0,
    "H100": 989.0,
    "H100 PCIe": 756.0,
    "H200": 989.0,
    "H800": 989.0,
    "L40S": 362.0,
}
"""Dense TFLOP/s in bfloat16 of GPUs, by a part of their name. The longest part that fits counts."""
SAMPLE_SECONDS = 1.0
"""Seconds between two samples of the load of a GPU."""
GIB = 2**30


def known_peak(name: str) -> float | None:
    """Return the peak of the GPU ``name`` in TFLOP/s, or None if it is not known."""
    parts = [part for part in PEAKS if part in name]
    return PEAKS[max(parts, key=len)] if parts else None


class GPUUse:
    """The load and the memory of one GPU.

    Args:
        cuda: The module ``torch.cuda``. Its ``utilization`` needs the package ``nvidia-ml-py``.
        index: Index of the GPU.
    """

    def __init__(self, cuda: Any, index: int) -> None:
        self._cuda, self._index = cuda, index
        self._loads: list[float] = []
        self._over = threading.Event()
        self.sample()
        if self._loads:
            threading.Thread(target=self._watch, name="gpu use", daemon=True).start()

    def sample(self) -> None:
        """Take a sample of the load, if it is known."""
        # The package may be missing, and NVML refuses some GPUs by errors of its own.
        with suppress(Exception):
            self._loads.append(self._cuda.utilization(self._index) / 100)

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.sample()

    def take(self) -> Metrics:
        """Return the metrics since the last call."""
        free, total = self._cuda.mem_get_info(self._index)
        peak = self._cuda.max_memory_allocated(self._index)
        self._cuda.reset_peak_memory_stats(self._index)
        metrics = Metrics({"gpu/memory_used": Last((total - free) / GIB)})
        metrics.add("gpu/memory_peak", Last(peak / GIB))
        loads, self._loads = self._loads, []
        if loads:
            metrics.add("gpu/utilization", Last(sum(loads) / len(loads)))
        return metrics

    def close(self) -> None:
        """Take no more samples."""
        self._over.set()


def gpu_of(device: torch.device) -> tuple[GPUUse | None, float | None]:
    """Return the use and the known peak in TFLOP/s of a CUDA ``device``, or None and None."""
    if device.type != "cuda":
        return None, None
    index = torch.cuda.current_device() if device.index is None else device.index
    return GPUUse(torch.cuda, index), known_peak(torch.cuda.get_device_name(index))
