"""Record the code and the hardware of a run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

import lightrft
from lightrft.models.actor import Actor
from lightrft.models.attention.training_flops import TrainingFlops, has_formula
from lightrft.observability.metrics import Last, Metrics
from lightrft.roles import TrainableModel
from lightrft.strategy.gpu_use import GPUUse, gpu_of

DISTRIBUTION = "lightrft-rl"
GIT_SECONDS = 10.0
"""Limit of a call of git, which may be slow on a shared file system."""


def environment(device: torch.device, processes: int) -> dict[str, object]:
    """Return the versions of the code, and the hardware of training.

    Commits that are not known are left out: of a package that was installed from an index, or of a
    working directory without a repository.

    Args:
        device: The device of this rank. The other ranks have one of the same kind.
        processes: Number of ranks.
    """
    own = Path(lightrft.__file__).parent
    is_tracked = _git(own, "ls-files", "--error-unmatch", "__init__.py") is not None
    of_package = commit_of(own) if is_tracked else _installed_commit()
    of_code = commit_of(Path.cwd())
    commits = {
        "lightrft_commit": of_package,
        "code_commit": of_code if of_code != of_package else None,
    }
    return {
        "lightrft": lightrft.__version__,
        "torch": str(torch.__version__),
        **{name: commit for name, commit in commits.items() if commit},
        "device": device_name(device),
        "devices": processes if device.type != "cpu" else 1,
        "processes": processes,
    }


def commit_of(folder: Path) -> str | None:
    """Return the commit of the repository of ``folder``, or None without one.

    A commit whose files have changed since is followed by ``with changes``.
    """
    words = ("--always", "--exclude=*", "--abbrev=40", "--dirty= with changes")
    return _git(folder, "describe", *words) or None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor."""
    if device.type == "cpu":
        with suppress(OSError):
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
            if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
                return found[1].strip()
        return platform.processor() or platform.machine() or "cpu"
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints about ``folder``, or None if it fails or is not installed."""
    command = ["git", "-C", str(folder), *words]
    settings = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(
            command, capture_output=True, check=True, env=settings, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return found.stdout.strip()


def _installed_commit() -> str | None:
    """Return the commit that pip has installed the package from, or None."""
    with suppress(PackageNotFoundError, ValueError, KeyError, TypeError):
        told = distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        return str(json.loads(told)["vcs_info"]["commit_id"])
    return None


class DeviceUse:
    """The use of the device of this rank by the steps of a run.

    Args:
        trained: The models that are trained, by name.
        gpu: The GPU. ``None`` without one.
        peak_tflops: Peak of the device in TFLOP/s. ``None`` if it is not known.
    """

    def __init__(
        self, trained: Mapping[str, TrainableModel], gpu: GPUUse | None, peak_tflops: float | None
    ) -> None:
        self.gpu, self.peak_tflops = gpu, peak_tflops
        roles = [] if peak_tflops is None else list(trained.values())
        self.models = [role.model for role in roles]
        for role in roles:
            model, config = role.model, role.model.text_config
            if has_formula(config.model_type, model.family.layout):
                head = model.base.get_output_embeddings() if isinstance(model, Actor) else None
                model.flops = TrainingFlops(model, model.decoder, config, role.shapes, head)

    def take(self, seconds: float) -> Metrics:
        """Return the metrics of a step.

        Args:
            seconds: Time of its updates.
        """
        metrics = Metrics() if self.gpu is None else self.gpu.take()
        # The ranks of a sequence-parallel group share a call.
        flops = sum(
            m.flops.take() / m.model_parallel_group.size for m in self.models if m.flops is not None
        )
        is_whole = all(model.flops is not None for model in self.models)
        if is_whole and flops and seconds and self.peak_tflops is not None:
            metrics.add("perf/mfu", Last(flops / seconds / (1e12 * self.peak_tflops)))
        return metrics


@contextmanager
def watched(
    trained: Mapping[str, TrainableModel], device: torch.device, peak_tflops: float | None
) -> Generator[DeviceUse]:
    """Measure the use of ``device`` within the context.

    Args:
        trained: The models that are trained, by name.
        device: The device of this rank.
        peak_tflops: Its peak in TFLOP/s. ``None`` takes that of a known GPU.
    """
    gpu, known = gpu_of(device)
    use = DeviceUse(trained, gpu, peak_tflops or known)
    try:
        yield use
    finally:
        if gpu is not None:
            gpu.close()
        for model in use.models:
            model.flops = None
