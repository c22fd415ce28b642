"""Models on the meta device: every parameter has shape and dtype, but no memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from lightrft.config.model import ModelConfig
from lightrft.models.families import check_members
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.adapter_folder import checked_settings
from lightrft.models.loading.from_pretrained import (
    freeze,
    from_settings,
    known_settings,
    model_settings,
)
from lightrft.models.loading.hf_logging import suppress_hf_warnings
from lightrft.models.lora import add_adapters, base_model
from lightrft.utils.errors import ModelError


def meta_model(config: ModelConfig) -> nn.Module:
    """Build the model of ``config.path`` on the meta device.

    It has the adapters and frozen parts of training. Only its config is read. Raises ``ModelError``
    as ``load_model`` does for errors that a config can show, and for a class that cannot be built
    without weights.
    """
    if (found := saved_adapters(config)) is not None:
        from peft import get_peft_model

        base = meta_model(found.base)
        saved = checked_settings(found.folder, config)
        with torch.device("meta"), suppress_hf_warnings(local=True):
            return get_peft_model(base_model(base), saved).eval()
    settings = known_settings(config)
    try:
        with torch.device("meta"), suppress_hf_warnings(local=True):
            model = from_settings(settings, dtype_of(config, settings))
            check_members(model, f"model.path = {config.path!r}")
            freeze(model, config.freeze)
            model = model if config.lora is None else add_adapters(model, config.lora)
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        raise ModelError(
            f"model.path = {config.path!r}: no model can be made of its config ({error})"
        ) from error
    return model.eval()


def dtype_of(config: ModelConfig, settings: PreTrainedConfig | None = None) -> torch.dtype:
    """Return the dtype of the weights.

    ``auto`` means the dtype in the model's config, or float32 if there is none.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if settings is None:
        settings = model_settings(config)
    named = settings.to_dict().get("dtype")
    if not named:
        # a multimodal config may name the dtype of its language model alone
        named = settings.get_text_config(decoder=True).to_dict().get("dtype")
    if named is None:
        return torch.float32
    return named if isinstance(named, torch.dtype) else getattr(torch, named)
