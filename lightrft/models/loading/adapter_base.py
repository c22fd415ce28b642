"""The base model of a folder of adapters. It loads in an instant, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lightrft.config.model import ModelConfig
from lightrft.utils.atomic_files import looks_like_path
from lightrft.utils.errors import ModelError, first_line
from lightrft.utils.peft_folder import ADAPTER_CONFIG, named_base

SWITCHED = (
    "its adapters act on prompts with sounds alone (has_lora_adapter of its config.json), which no "
    "batch with other prompts can follow; write the model that hears, by lightrft merge FOLDER "
    "base_model=COPY output=..., where COPY is the folder without the files of adapters. COPY "
    "itself is the model that reads text"
)
"""Reason and fix for a whole model with adapters that its class switches on and off."""

_WAY_OUT = (
    "set model.base (base_model in lightrft merge) to the folder or name of the model that the "
    "adapters were trained on"
)


class SavedAdapters(NamedTuple):
    """A folder of adapters.

    Attributes:
        base: Settings of the base model.
        folder: Folder of the adapters.
    """

    base: ModelConfig
    folder: Path


def saved_adapters(config: ModelConfig) -> SavedAdapters | None:
    """Return the base model and the folder of a folder of adapters; ``None`` for another folder.

    Raises:
        ModelError: The folder names no base, its base is no model folder, or its config cannot be
            read. ``config.base`` is set for a folder without adapters.
    """
    where = f"model.path = {config.path!r}"
    file = Path(config.path).expanduser() / ADAPTER_CONFIG
    if not file.is_file():
        if config.base is not None:
            raise ModelError(
                f"model.base = {config.base!r} is the base model of adapters, and {where} holds no "
                "adapters; leave it out"
            )
        return None
    try:
        named, revision = named_base(file.parent)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{where}: its {ADAPTER_CONFIG} cannot be read ({first_line(error)})"
        ) from error
    if config.base is None and _has_switched_adapters(file.parent):
        raise ModelError(f"{where}: {SWITCHED}")
    if not (named or config.base):
        raise ModelError(
            f"{where}: its {ADAPTER_CONFIG} does not name a base model (base_model_name_or_path); "
            + _WAY_OUT
        )
    own: dict[str, Any] = {"path": config.base or named, "base": None, "lora": None}
    if config.revision is None and config.base is None:
        own["revision"] = revision
    base = config.model_copy(update=own)
    _check_base(base, where, "" if config.base else f"{file}, base_model_name_or_path = {named!r}")
    return SavedAdapters(base, file.parent)


def _has_switched_adapters(folder: Path) -> bool:
    """Return ``True`` if the class of the whole model in ``folder`` switches its adapters."""
    file = folder / "config.json"
    return file.is_file() and bool(json.loads(file.read_text("utf-8")).get("has_lora_adapter"))


def _check_base(base: ModelConfig, where: str, source: str) -> None:
    """Raise ``ModelError`` if ``base`` is a path without a model."""
    folder = Path(base.path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        problem = "is a folder of adapters too; write it whole by lightrft merge"
    elif folder.is_dir() and not (folder / "config.json").is_file():
        problem = "is no model folder, since it has no config.json"
    elif not folder.is_dir() and (looks_like_path(base.path) or folder.exists()):
        problem = "is not there"
    else:
        return
    named = source or f"model.base = {base.path!r}"
    raise ModelError(f"{where}: its base model {problem}: {named}; {_WAY_OUT}")


def base_of(config: ModelConfig) -> ModelConfig:
    """Return the settings of the folder that holds config and weights of the model.

    It is the base of a folder of adapters, and ``config`` itself for another folder. Raises
    ``ModelError`` as ``saved_adapters`` does.
    """
    found = saved_adapters(config)
    return config if found is None else found.base


def has_adapters(config: ModelConfig) -> bool:
    """Return ``True`` if the model of ``config`` has adapters, new ones or those of a folder."""
    return config.lora is not None or saved_adapters(config) is not None


def adds_adapters(config: ModelConfig) -> bool:
    """Return ``True`` if the model of ``config`` gets new adapters, and is its start without them.

    Adapters of a folder are trained further: without them, the model is not what it started from.
    """
    return config.lora is not None and saved_adapters(config) is None
