"""Record the experts that a mixture-of-experts model sends each token to, and replay them.

Sampling and training round differently, so a router near a tie picks other experts. Replay makes
the trainer use the experts of the sampler (R3, arXiv 2510.11370). The weights of the experts are
computed from the trainer's own scores, so the router still gets gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightrft.utils.errors import ModelError

UNKNOWN = -1
"""Expert of a token for which none was recorded. The router picks it."""
_ARGUMENTS = (["hidden_states", "top_k_index"], ["hidden_states", "router_indices"])
"""First arguments of the experts' forward in transformers."""


class _ReplayTopK(TorchFunctionMode):
    """Replaces the experts that a router picks, and gathers their scores.

    Args:
        chosen: ``[T, k]`` experts of each token; ``UNKNOWN`` leaves the router's choice.
        experts: Number of experts.
    """

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.experts = experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, indices = args[0], found[1]
        # a router that first picks groups of experts calls topk on other widths too
        if scores.shape[-1] != self.experts or indices.numel() != self.chosen.numel():
            return found
        chosen = self.chosen.view(indices.shape)
        indices = torch.where(chosen == UNKNOWN, indices, chosen)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


@dataclass(slots=True)
class _Layer:
    """A layer with experts: the module that routes, and the module of the experts."""

    block: nn.Module
    experts: nn.Module
    recorded: Tensor | None = None
    modes: list[_ReplayTopK] = field(default_factory=list)


class ExpertReplay:
    """Records or replays the experts of one model, by hooks on its layers.

    Args:
        model: The transformers model, with or without adapters.

    Raises:
        ModelError: The model has no experts, or computes them in an unknown way.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self._kind: str = config.model_type
        self._layers = _layers_of(model)
        if not self._layers:
            raise self._refusal("it has no mixture of experts that is known here")
        self._chosen: Tensor | None = None
        self._is_recording = False
        self._is_checked = False
        self._handles: list[RemovableHandle] = []
        self._attach()

    def record(self, recording: bool = True) -> None:
        """Start to record the experts of each call, or stop. Recording ends a replay."""
        self._is_recording = recording
        if recording:
            self._chosen = None

    def recorded(self) -> Tensor:
        """Return the experts ``[T, layers, k]`` int16 of the last call, and forget them."""
        found = []
        for layer in self._layers:
            if layer.recorded is None:
                raise self._refusal("a layer with experts did not run in a forward pass")
            found.append(layer.recorded.to(torch.int16))
            layer.recorded = None
        # responses keep it, and tensors of inference mode cannot be used for training
        with torch.inference_mode(False):
            return torch.stack(found, dim=1)

    def replay(self, chosen: Tensor | None) -> None:
        """Use the experts ``chosen [T, layers, k]`` in the calls that follow. ``None`` ends it.

        The first call checks that the experts get the tokens that the replay sends them.
        """
        # kept after the call: gradient checkpointing runs layers again in the backward pass
        self._chosen = None if chosen is None else chosen.long()
        if chosen is not None and chosen.shape[1] != len(self._layers):
            layers = f"the sampler recorded {chosen.shape[1]} layers with experts"
            raise self._refusal(f"{layers}, and the model has {len(self._layers)}")

    @contextmanager
    def detached(self) -> Generator[None]:
        """Remove all hooks inside the context, so that a copy of the model has none."""
        for handle in self._handles:
            handle.remove()
        try:
            yield
        finally:
            self._attach()

    def _attach(self) -> None:
        self._handles = []
        for number, layer in enumerate(self._layers):
            enter, leave, read = self._enter(number), _leave(layer), self._read(number)
            self._handles += [
                layer.block.register_forward_pre_hook(enter),
                layer.block.register_forward_hook(leave, always_call=True),
                layer.experts.register_forward_pre_hook(read, with_kwargs=True),
            ]

    def _enter(self, number: int) -> Callable[..., None]:
        layer = self._layers[number]

        def hook(module: nn.Module, args: object) -> None:
            if self._chosen is not None:
                experts: Any = layer.experts
                mode = _ReplayTopK(self._chosen[:, number], experts.num_experts)
                layer.modes.append(mode)
                mode.__enter__()

        return hook

    def _read(self, number: int) -> Callable[..., None]:
        layer = self._layers[number]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = [kwargs[name] for _, name in _ARGUMENTS if name in kwargs]
            chosen = named[0] if named else args[1]
            if self._is_recording:
                layer.recorded = chosen.detach()
            if self._chosen is not None and not self._is_checked:
                self._check(number, chosen)

        return hook

    def _check(self, number: int, found: Tensor) -> None:
        """Raise ``ModelError`` unless a layer's experts ``found [T, k]`` are those of the
        replay."""
        assert self._chosen is not None
        chosen = self._chosen[:, number]
        if found.shape != chosen.shape:
            raise self._refusal(f"its experts get {list(found.shape)}, not {list(chosen.shape)}")
        unequal = (found != chosen) & (chosen != UNKNOWN)
        if bool(unequal.any()):
            raise self._refusal("its router does not pick experts by one torch.topk of scores")
        self._is_checked = number == len(self._layers) - 1

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"model.replay_routes = true does not work with model type {self._kind!r}: {why}; "
            "set model.replay_routes=false"
        )


def _leave(layer: _Layer) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: object) -> None:
        if layer.modes:
            layer.modes.pop().__exit__(None, None, None)

    return hook


def _layers_of(model: nn.Module) -> list[_Layer]:
    """Return the layers of ``model`` with experts, in order."""
    found = []
    for name, module in model.named_modules():
        named = list(inspect.signature(type(module).forward).parameters)
        if named[1:3] in _ARGUMENTS and hasattr(module, "num_experts"):
            # adapters of experts wrap their module, once for each adapted parameter
            plain = name.replace(".base_layer", "")
            found.append(_Layer(model.get_submodule(plain.rpartition(".")[0]), module))
    return found
