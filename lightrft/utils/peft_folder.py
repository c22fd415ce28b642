"""The base model that a folder of adapters names, as peft writes it."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"


def named_base(folder: Path) -> tuple[str | None, str | None]:
    """Return the name or path of the base model in ``folder``, and its revision on the hub.

    Both are ``None`` in a folder without a name. A path may be relative to the working directory or
    to ``folder``.

    Raises:
        OSError: There is no ``adapter_config.json``.
        ValueError: It is no JSON object.
    """
    fields = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    named = fields.get("base_model_name_or_path")
    if not named:
        return None, None
    inside = folder / Path(named).expanduser()
    is_inside = not Path(named).expanduser().is_dir() and inside.is_dir()
    return str(inside) if is_inside else str(named), fields.get("revision")


def merge_hint(path: str) -> str:
    """Return the way from adapters in ``path`` to a reward model, or "" if there are none."""
    if not (Path(path).expanduser() / ADAPTER_CONFIG).is_file():
        return ""
    return (
        f"it has adapters: write those of a classifier whole, by lightrft merge {path} output=..."
    )
