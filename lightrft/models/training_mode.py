"""Training mode with or without the random parts of a forward pass, and evaluation inside it.

Dropout, noise of routers and stochastic depth all depend on the mode of their module. Training in
evaluation mode therefore leaves out all of them, whatever a family calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from lightrft.utils.errors import ModelError

Scores = TypeVar("Scores", bound=tuple[Tensor | None, ...])


@dataclass(slots=True, eq=False)
class _CheckpointWithoutNoise:
    """The function that recomputes a layer, around a layer in evaluation mode.

    transformers recomputes only layers in training mode. Without ``noise``, the flag of the layer
    is therefore false while the layer runs, and true before.
    """

    layer: nn.Module
    checkpoint: Callable[..., Any]
    noise: bool = False

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        return self.checkpoint(partial(self._run, run), *args)

    def _run(self, run: Callable[..., Any], *args: Any) -> Any:
        training = self.layer.training
        self.layer.training = training and self.noise
        try:
            return run(*args)
        finally:
            self.layer.training = training


def set_training(model: nn.Module, *, noise: bool, adapter_noise: bool) -> None:
    """Put a transformers model into training mode.

    Args:
        model: The transformers or peft model.
        noise: Keep all random parts of the forward pass. Otherwise every part is in evaluation
            mode, except what gradient checkpointing reads.
        adapter_noise: Keep the dropout of LoRA adapters.
    """
    for module in model.modules():
        module.training = noise
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            inner = cast(Any, module)._gradient_checkpointing_func
            if not isinstance(inner, _CheckpointWithoutNoise):
                inner = _CheckpointWithoutNoise(module, inner)
                cast(Any, module)._gradient_checkpointing_func = inner
            inner.noise = noise
            module.training = True
    for module in model.modules():
        dropout = getattr(module, "lora_dropout", None)
        if isinstance(dropout, nn.Module):
            # DoRA reads the flag of the layer besides that of the dropout.
            module.training = adapter_noise
            dropout.train(adapter_noise)


def attention_dropout(config: PreTrainedConfig) -> str | None:
    """Return the field of ``config`` that drops attention weights, as text; None if none does."""
    for name, rate in vars(config).items():
        if "att" in name and "drop" in name and isinstance(rate, int | float) and rate > 0:
            return f"{name} = {rate:g}"
    return None


def check_layer_drop(model: nn.Module) -> None:
    """Raise ``ModelError`` if a part of ``model`` leaves out whole layers at random."""
    for name, module in model.named_modules():
        rate = getattr(module, "layerdrop", 0.0)
        if isinstance(rate, int | float) and rate > 0:
            raise ModelError(
                f"model.dropout = true: {name} leaves out layers at random (layerdrop = {rate:g} "
                "of the model's config), and processes that share a model must run the same "
                "layers; set model.dropout=false, train in one process, or set that field of "
                "config.json to 0"
            )


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None, None, None]:
    """Put ``model`` into evaluation mode inside the context, and restore the mode of each part."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def values_of_evaluation(model: nn.Module, compute: Callable[[], Scores]) -> Scores:
    """Return the scores of ``compute``, with the numbers that ``model`` gives in evaluation mode.

    Losses compare a model with another one, or with itself before an update. Both sides must be
    deterministic. The gradient is that of ``compute`` as it is, so dropout still regularizes.

    Args:
        model: The model that ``compute`` calls.
        compute: Returns a tuple of tensors, or of None.
    """
    given = compute()
    if not getattr(model, "is_random", False):
        return given
    with torch.no_grad(), evaluation_mode(model):
        exact = compute()
    pairs = zip(given, exact, strict=True)
    joined = [own if own is None else _WithValue.apply(own, value) for own, value in pairs]
    return cast(Any, type(given))(joined) if type(given) is tuple else type(given)(*joined)
