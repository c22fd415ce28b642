"""Find models whose towers compute the same features during a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.actor import Backbone
from lightrft.models.multimodal.submodules import LANGUAGE
from lightrft.utils.module_tensors import plain_name

ShardsOf = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
"""Maps a model to this rank's part of every parameter, by name. See ``Strategy.shards``."""


def has_constant_towers(model: Backbone) -> bool:
    """Return ``True`` if the features of equal media are equal in every call of a run.

    No part between the media and the language model may be trained, have adapters, or depend on
    training mode.
    """
    if model.family.reader is None:
        return False
    for name, parameter in model.named_parameters():
        if model.part_of(name) == LANGUAGE:
            continue
        if parameter.requires_grad or plain_name(name.removeprefix("model.")) is None:
            return False
    # Without ``model.dropout``, all parts stay in evaluation mode.
    return not (model.config.dropout and any(_has_modes(module) for _, module in _modules(model)))


def _modules(model: Backbone) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside of the language model, by name."""
    for name, module in model.named_modules():
        if model.part_of(f"{name}.") != LANGUAGE:
            yield name, module


def _has_modes(module: nn.Module) -> bool:
    """Return ``True`` if ``module`` may have dropout, or normalizes by the batch in training.

    transformers' modules keep the rate of dropout in an attribute or in their config.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    rates: dict[str, Any] = {name: value for name, value in vars(module).items() if "drop" in name}
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates["p"] = module.p
    config = getattr(module, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if "drop" in name:
            rates[f"config.{name}"] = value
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates.values())


def has_same_towers(first: Backbone, second: Backbone, shards_of: ShardsOf) -> bool:
    """Return ``True`` if the towers of two models compute the same features.

    Both have constant towers. A difference of any weight, buffer, dtype or setting gives ``False``.

    Args:
        first: A model.
        second: Another model, or the same.
        shards_of: Gives this rank's part of each parameter. Only these parts are compared.
    """
    if first is second:
        return True
    if type(first.base) is not type(second.base) or _settings(first) != _settings(second):
        return False
    # a sharded model may compute in the dtype of its trained weights
    if len({p.dtype for p in second.parameters() if p.is_floating_point()}) != 1:
        return False
    for tensors_of in (shards_of, _buffers):
        ours = dict(_of_towers(first, tensors_of(first)))
        theirs = dict(_of_towers(second, tensors_of(second)))
        if ours.keys() != theirs.keys():
            return False
        for name, tensor in ours.items():
            if not _equal(tensor, theirs[name]):
                return False
    return True


def _settings(model: Backbone) -> list[object]:
    """Return the settings of all modules of the towers."""
    found: list[object] = []
    for _, module in _modules(model):
        config: Any = getattr(module, "config", None)
        found.append(type(module))
        if config is not None:
            named = dict(config.to_dict())
            named.pop("_name_or_path", None)
            found += [named, config._attn_implementation]
    return found


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return model.named_buffers()


def _of_towers(
    model: Backbone, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors outside of the language model, by their name without adapters."""
    for name, tensor in tensors:
        if model.part_of(name) != LANGUAGE:
            yield name.removeprefix("model.").removeprefix("base_model.model."), tensor


def _equal(first: Tensor, second: Tensor) -> bool:
    # of a DTensor, this rank's shard
    ours, theirs = (getattr(t, "to_local", lambda t=t: t)().detach() for t in (first, second))
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.device != theirs.device:
        return False
    return torch.equal(ours, theirs)
