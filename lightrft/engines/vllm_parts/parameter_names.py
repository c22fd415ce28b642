"""Names of parameters for classes of vLLM that do not know those of transformers 5."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

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
"""Prefixes in transformers and in vLLM 0.32, by model type. Other classes map names themselves."""
REPEATED = ("language_model.model.model.", "language_model.model.")
"""Prefix that transformers 5.19 writes into folders of Qwen2-Audio, and the right one."""


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
