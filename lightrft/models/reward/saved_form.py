"""Files of a reward model next to the weights of its language model.

``reward_model.json`` holds the settings. ``reward_heads.safetensors`` holds heads, pooling and
normalisation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightrft.config.base import build
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.utils.errors import ConfigError, ModelError, first_line

SETTINGS_FILE = "reward_model.json"
PROCESS_FILE = "process_reward_model.json"
HEADS_FILE = "reward_heads.safetensors"
FORM = ("heads", "gate", "pooling", "layer")
"""Settings that decide which weights a reward model has."""


@dataclass(frozen=True, slots=True)
class SavedForm:
    """A reward model as its folder describes it.

    Attributes:
        settings: Its settings. The layer counts from 0.
        is_cut: The folder holds only the layers up to the pooled one.
        tensors: Weights of heads and pooling, and the normalisation, by name. Empty before
            ``read_heads``.
    """

    settings: RewardModelConfig
    is_cut: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def holds_heads(path: str) -> bool:
    """Return whether folder ``path`` is a saved reward model, of responses or of steps."""
    folder = Path(path).expanduser()
    return any((folder / name).is_file() for name in (SETTINGS_FILE, PROCESS_FILE))


def read_form(path: str | Path) -> SavedForm | None:
    """Return the reward model of folder ``path``; ``None`` if it holds none.

    Raises ``ModelError`` if its files are damaged.
    """
    folder = Path(path).expanduser()
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        settings = build(RewardModelConfig, tree["settings"])
        tensors = load_file(folder / HEADS_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, ConfigError) as error:
        raise ModelError(
            f"{folder}: {SETTINGS_FILE} and {HEADS_FILE} cannot be read ({first_line(error)}); "
            "copy both again"
        ) from error
    return SavedForm(settings, bool(tree.get("is_cut")), tensors)


def write_form(form: SavedForm, path: str | Path) -> None:
    """Write ``form`` to folder ``path``."""
    folder = Path(path)
    tree = {"settings": form.settings.model_dump(mode="json"), "is_cut": form.is_cut}
    text = json.dumps(tree, indent=2) + "\n"
    (folder / SETTINGS_FILE).write_text(text, encoding="utf-8")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in form.tensors.items()}
    save_file(whole, folder / HEADS_FILE)


def check_form(asked: RewardModelConfig, saved: RewardModelConfig, path: str) -> None:
    """Raise ``ModelError`` if settings ask for other weights than the folder ``path`` holds.

    Args:
        asked: The settings of the run.
        saved: The settings of the saved model.
        path: The folder, for the message.
    """
    for name in FORM:
        wanted, there = getattr(asked, name), getattr(saved, name)
        if wanted != there:
            raise ModelError(
                f"reward_model.{name} = {_short(wanted)}, and model.path = {path!r} holds a "
                f"reward model with {_short(there)}; set the same, or start from a language model"
            )


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    # the name is given even where it is the default, which says nothing
    heads = [{"name": head.name, **head.model_dump(exclude_defaults=True)} for head in value]
    return repr(heads)
