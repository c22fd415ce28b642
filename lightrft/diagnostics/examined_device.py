"""The devices that ``lightrft doctor`` examines a run for."""

from __future__ import annotations

import torch

from lightrft.config.verbs import DoctorConfig, TrainingConfig
from lightrft.diagnostics.memory.formulas import size_of
from lightrft.diagnostics.memory.phases import Device
from lightrft.models.attention import varlen_cuda
from lightrft.utils.cpu import free_memory
from lightrft.utils.errors import ConfigError


def device_of(config: TrainingConfig, options: DoctorConfig) -> Device:
    """Return the device of each process, as given or as found on this machine.

    Raises ``ConfigError`` for an invalid memory size.
    """
    processes = config.launch.processes
    kind = options.device
    if kind == "auto":
        kind = config.strategy.device
        if kind == "auto":
            kind = str(torch.accelerator.current_accelerator() or "cpu")
        kind = kind.partition(":")[0]
    if options.device_memory != "auto":
        try:
            return Device(kind, size_of(options.device_memory), processes, _kernel())
        except ValueError as error:
            raise ConfigError(f"doctor.device_memory = {error}") from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and kind == accelerator.type:
        memory = _free_on_device()
    elif kind == "cpu":
        memory = free_memory() // processes  # ranks on a CPU share its memory
    else:
        memory = 0
    return Device(kind, memory, processes, _kernel())


def _kernel() -> bool:
    """Return True if torch has the GPU kernel for sequences of different lengths."""
    return varlen_cuda.kernel() is not None


def _free_on_device() -> int:
    """Return the free bytes of the current accelerator, or 0 if torch cannot tell."""
    try:
        return torch.accelerator.get_memory_info()[0]
    except (NotImplementedError, RuntimeError):  # not every backend reports its memory
        return 0
