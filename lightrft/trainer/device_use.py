"""Measure the use of a device by training: model FLOPs utilization (MFU), and load and memory."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

from lightrft.models.actor import Actor
from lightrft.models.attention.training_flops import TrainingFlops, has_formula
from lightrft.observability.metrics import Last, Metrics
from lightrft.roles import TrainableModel
from lightrft.strategy.gpu_use import GPUUse, gpu_of


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
