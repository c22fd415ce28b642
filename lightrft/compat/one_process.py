"""Methods of LightRFT's strategies that need no other process, engine or shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrft.utils.device_transfer import release_cached_memory
from lightrft.utils.errors import ConfigError

OPS = ("mean", "max", "sum")


class OneProcess:
    """Collectives of one rank, models that wait in the memory of the CPU, and moving averages."""

    inner: Any
    accumulated_gradient: int
    steps: dict[str, int]

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Return ``data``, which one process has reduced. A number becomes a float.

        Args:
            data: A tensor, a number, or a dictionary of them.
            op: ``mean``, ``max`` or ``sum``.

        Raises:
            ConfigError: ``op`` is another word.
        """
        if op not in OPS:
            raise ConfigError(f"op = {op!r}: must be one of {', '.join(OPS)}")
        if isinstance(data, dict):
            return {name: self.all_reduce(value, op) for name, value in data.items()}
        return data if isinstance(data, Tensor) else float(data)

    def all_gather(self, data: Any) -> Any:
        """Return the tensor of one process, or a dictionary of them. A number becomes ``[1]``."""
        if isinstance(data, dict):
            return {name: self.all_gather(value) for name, value in data.items()}
        return data if isinstance(data, Tensor) else torch.tensor([float(data)])

    def is_rank_0(self) -> bool:
        """Return True: there is one process."""
        return True

    def get_rank(self) -> int:
        """Return 0: there is one process."""
        return 0

    def get_ds_train_config(self, is_actor: bool) -> None:
        """Return ``None``: DeepSpeed shards over several processes."""

    def get_ds_eval_config(self, offload: bool = False) -> None:
        """Return ``None``, as ``get_ds_train_config``."""

    def prepare_model(
        self,
        model: nn.Module,
        is_training: bool = False,
        shard_size: int = -1,
        reshard_after_forward: bool = True,
    ) -> nn.Module:
        """Move a model to its device. Return it.

        Args:
            model: The model.
            is_training: Not read: ``prepare`` connects a model with its optimizer.
            shard_size: Not read: one process has whole weights.
            reshard_after_forward: Not read, as ``shard_size``.
        """
        self.inner.place(model)
        return model

    def offload_model(self, models: Any, empty_cache: bool = True) -> Any:
        """Move a model, or each of a list, to the memory of the CPU. Return ``models``.

        Args:
            models: The models. One that is trained must be back for its next step.
            empty_cache: Return the free blocks of torch's allocator to the device.
        """
        for model in models if isinstance(models, list) else [models]:
            model.to("cpu")
        if empty_cache:
            release_cached_memory()
        return models

    def reload_model(self, models: Any) -> Any:
        """Move a model, or each of a list, to its device again. Return ``models``."""
        for model in models if isinstance(models, list) else [models]:
            self.inner.place(model)
        return models

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Return ``optimizer``: with ``adam_offload`` it is always in the memory of the CPU."""
        return optimizer

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Return ``optimizer``, as ``maybe_offload_optimizer``."""
        return optimizer

    @torch.no_grad()
    def moving_average(
        self,
        model: nn.Module,
        model_ema: nn.Module,
        beta: float = 0.992,
        device: torch.device | str = "cpu",
    ) -> None:
        """Move the weights of ``model_ema`` to those of ``model``, by the share ``1 - beta``.

        It is called once for each micro-batch, and moves once for each optimizer step.

        Args:
            model: The trained model.
            model_ema: The average. Parameters that are not trained stay.
            beta: Share of the average that stays.
            device: Where the average is computed.
        """
        self.steps["ema"] = (self.steps.get("ema", 0) + 1) % self.accumulated_gradient
        if self.steps["ema"]:
            return
        for own, average in zip(model.parameters(), model_ema.parameters(), strict=True):
            if own.requires_grad:
                mean = average.to(device).lerp(own.to(device, average.dtype), 1 - beta)
                average.copy_(mean)
