"""Folders of adapters as peft writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config.model import ModelConfig
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.utils.errors import ModelError, first_line, whole_message

if TYPE_CHECKING:
    from peft import PeftConfig


def saved_adapters(config: ModelConfig) -> tuple[str, Path] | None:
    """Return base model and folder of a folder of adapters; ``None`` for another folder.

    Raises ``ModelError`` if it names no base, or its config cannot be read.
    """
    file = Path(config.path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"model.path = {config.path!r}: its adapter_config.json cannot be read "
            f"({first_line(error)})"
        ) from error
    if not base:
        raise ModelError(
            f"model.path = {config.path!r}: its adapter_config.json does not name a base model"
        )
    return base, file.parent


def with_saved_adapters(model: PreTrainedModel, folder: Path, config: ModelConfig) -> nn.Module:
    """Return ``model`` with the adapters of ``folder``, trainable.

    Args:
        model: The base model.
        folder: Folder that peft wrote.
        config: Gives the path for error messages.

    Raises:
        ModelError: The adapters cannot be read, the file has no weights for some of them, or it has
            tensors that the model has no place for.
    """
    from peft import get_peft_model

    where = f"model.path = {config.path!r}"
    try:
        with suppress_hf_warnings(local=True):
            settings = peft_settings(folder)
            adapted: Any = get_peft_model(model, settings)
            found = adapted.load_adapter(str(folder), "default", is_trainable=True)
    except (*BROKEN, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {whole_message(error)}"
        raise ModelError(f"{where}: the adapters cannot be read ({problem})") from error
    if found.missing_keys or found.unexpected_keys:
        raise ModelError(
            f"{where}: the adapters do not fit their base model, or are not complete: "
            f"{_misfits(found.missing_keys, found.unexpected_keys)}; "
            + (
                "they are adapters of a classifier, such as a reward model: write it whole by "
                "lightrft merge"
                if settings.task_type == "SEQ_CLS"
                else "name the base that they were trained on"
            )
        )
    return adapted.eval()


def _misfits(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    found = []
    if missing:
        found.append(f"{len(missing)} tensors are missing, e.g. {min(missing)}")
    if unexpected:
        found.append(f"{len(unexpected)} tensors fit no module, e.g. {min(unexpected)}")
    return ", and ".join(found)


def peft_settings(folder: Path) -> PeftConfig:
    """Return the settings of the adapters in ``folder``, for training."""
    from peft import PeftConfig

    settings = PeftConfig.from_pretrained(str(folder))
    # peft saves adapters with inference_mode set, which would freeze them
    settings.inference_mode = False
    # peft sets the base that they are put on, and would warn that the name differs
    settings.base_model_name_or_path = None
    return settings


def adapter_tensors(folder: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors in the folder of adapters ``folder`` by name.

    Raises ``ModelError``, which begins with ``where``, if they cannot be read.
    """
    from peft.utils.save_and_load import load_peft_weights

    try:
        return load_peft_weights(str(folder), device="cpu")
    except (*BROKEN, TypeError) as error:
        problem = whole_message(error)
        raise ModelError(f"{where}: the adapters cannot be read ({problem})") from error
