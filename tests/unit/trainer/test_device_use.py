"""The use of a device by training, on a GPU that is not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model
from lightrft.models.tiny.text_families import family_model
from lightrft.strategy.gpu_use import GIB, GPUUse, known_peak
from lightrft.trainer.environment import DeviceUse, watched
from tests.unit.models.attention.test_training_flops import BATCH

CPU = torch.device("cpu")


class CountingGPU:
    """Memory of a GPU as ``torch.cuda`` tells it, and its load by torch's own use of NVML."""

    def __init__(self) -> None:
        self.peak = 3 * GIB
        self.utilization = torch.cuda.utilization

    def mem_get_info(self, index: int) -> tuple[int, int]:
        assert index == 0
        return 60 * GIB, 80 * GIB

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = GIB


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install a package ``pynvml``, and return the loads in percent that it will tell."""
    given: list[int] = []
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError_DriverNotLoaded = type("NVMLError_DriverNotLoaded", (Exception,), {})
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=given.pop(0))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "pynvml", nvml, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr("lightrft.strategy.gpu_use.SAMPLE_SECONDS", 900.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return given


def values(use: GPUUse) -> dict[str, float]:
    return dict(use.take().compute())


def test_load_and_memory_are_those_since_the_last_step(loads: list[int]) -> None:
    loads += [10, 90, 50]
    use = GPUUse(CountingGPU(), 0)
    use.sample()
    memory = {"gpu/memory_used": 20.0, "gpu/memory_peak": 3.0}
    assert values(use) == {**memory, "gpu/utilization": pytest.approx(0.5)}
    use.sample()
    assert values(use) == {**memory, "gpu/memory_peak": 1.0, "gpu/utilization": 0.5}
    # NVML tells no more.
    use.sample()
    assert "gpu/utilization" not in values(use)
    use.close()


def test_without_the_package_there_is_no_load_and_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", ImportError("pynvml"), raising=False)
    use = GPUUse(CountingGPU(), 0)
    assert set(values(use)) == {"gpu/memory_used", "gpu/memory_peak"}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


def trained() -> Any:
    actor = Actor(tiny_model("qwen2"))
    return {"policy": SimpleNamespace(model=actor, shapes={})}


def test_mfu_is_the_flops_over_the_time_and_the_peak_and_absent_without_a_peak() -> None:
    roles = trained()
    actor = roles["policy"].model
    with watched(roles, CPU, 0.5) as use:
        assert not use.take(2.0).compute()
        actor.score(BATCH)
        flops = actor.flops.take()
        actor.score(BATCH)
        assert dict(use.take(2.0).compute()) == {"perf/mfu": pytest.approx(flops / 2.0 / 0.5e12)}
        actor.score(BATCH)
        assert not use.take(0.0).compute()
    assert actor.flops is None
    with watched(roles, CPU, None) as use:
        actor.score(BATCH)
        assert not use.take(2.0).compute()


def test_a_model_without_a_formula_has_no_mfu() -> None:
    roles = trained()
    roles["other"] = SimpleNamespace(model=Actor(family_model("gpt_oss")), shapes={})
    use = DeviceUse(roles, None, 1.0)
    roles["policy"].model.score(BATCH)
    assert not use.take(1.0).compute()
