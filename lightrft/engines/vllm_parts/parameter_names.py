"""Names of parameters for classes of vLLM that do not know those of transformers 5.

Other classes map names themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightrft.utils.errors import ModelError

RENAMED: Mapping[str, Mapping[str, str]] = {
    # the class loads names as transformers 4 wrote them, which checkpoints still have
    "qwen2_audio": {
        "model.language_model.": "language_model.model.",
        "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
}
"""Prefixes in transformers and in vLLM 0.32, by model type."""
REPEATED = ("language_model.model.model.", "language_model.model.")
"""Prefix that transformers 5.19 writes into folders of Qwen2-Audio, and the right one."""


class VLLMNames:
    """Gives tensors of the policy the names that vLLM's class loads.

    transformers 5 keeps the experts of a layer in one tensor. vLLM loads them one by one, as
    checkpoints have them.

    Args:
        about: vLLM's ``ModelConfig``.
    """

    def __init__(self, about: Any) -> None:
        self._family: str = about.hf_config.model_type
        self._mixture: PreTrainedModel | None = None
        if about.is_moe:
            with torch.device("meta"):
                self._mixture = AutoModelForCausalLM.from_config(about.hf_config)

    def named(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return the tensors that vLLM loads for the parameter ``name`` of the policy.

        Raises:
            ModelError: See ``vllm_name``.
        """
        if self._mixture is None:
            return [(vllm_name(self._family, name), tensor)]
        return list(revert_weight_conversion(self._mixture, {name: tensor}).items())


def vllm_name(family: str, name: str) -> str:
    """Return the name that vLLM's class of the model type ``family`` has for a parameter.

    Args:
        family: The model type of the model.
        name: Name of the parameter in transformers.

    Raises:
        ModelError: The table of the family has no such prefix. vLLM ignores unknown biases without
            a message, so that such an update would be lost.
    """
    prefixes = RENAMED.get(family)
    if prefixes is None:
        return name
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    raise ModelError(
        f"vLLM's class of the model type {family} has no known name for the parameter {name!r}, so "
        "it would keep its old weights; set engine.kind=native"
    )


@contextmanager
def reading_repeated_names() -> Generator[None]:
    """Let vLLM load folders of Qwen2-Audio that transformers 5.19 wrote."""
    module = importlib.import_module("vllm.model_executor.models.qwen2_audio")
    kind = module.Qwen2AudioForConditionalGeneration
    load = kind.load_weights
    wrong, right = REPEATED

    def renamed(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield (right + name.removeprefix(wrong) if name.startswith(wrong) else name), tensor

    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load(model, renamed(weights))

    with patch.object(kind, "load_weights", load_weights):
        yield
