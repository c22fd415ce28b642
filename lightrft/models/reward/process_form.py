"""Files of a process reward model next to the weights of its language model.

``process_reward_model.json`` holds the settings, ``step_head.safetensors`` the head. Without them,
a head of another framework is read under these names:

* ``score.0`` and ``score.2``: Qwen2.5-Math-PRM
* ``score`` or ``classifier``: transformers' ``AutoModelForTokenClassification``, and TRL
* ``v_head.summary``: Skywork-o1-Open-PRM
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightrft.config.base import build
from lightrft.config.data import SpecialTokens
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, StepHeadKind
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.from_pretrained import where_of
from lightrft.models.loading.sharded_read import StoredTensor
from lightrft.models.merging.stored_model import stored_tensors
from lightrft.models.reward.saved_form import PROCESS_FILE
from lightrft.utils.errors import ConfigError, ModelError, first_line

STEP_HEAD_FILE = "step_head.safetensors"
PREFIXES = {
    "score.0": "layers.0",
    "score.2": "layers.2",
    "score": "layers",
    "classifier": "layers",
    "v_head.summary": "layers",
}
"""Module of a head, by its name in files of other frameworks."""


@dataclass(frozen=True, slots=True)
class Separator:
    """The text after each step, and how the steps before it are encoded.

    Attributes:
        text: The text.
        ids: Its tokens.
        special_tokens: What a special token that a step spells is: ``data.special_tokens``.
    """

    text: str
    ids: tuple[int, ...]
    special_tokens: SpecialTokens = "responses"


@dataclass(frozen=True, slots=True)
class ProcessForm:
    """A process reward model as its folder describes it.

    Attributes:
        settings: Its settings.
        separator: Text after each step and its tokens. ``None`` if unknown.
        verdicts: Ids of the tokens of a right and of a wrong step.
        tensors: Weights of the head, by name.
    """

    settings: ProcessModelConfig
    separator: Separator | None = None
    verdicts: tuple[int, int] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def read_process_form(config: ModelConfig) -> ProcessForm | None:
    """Return the process reward model in ``config.path``; ``None`` if it holds none.

    Raises ``ModelError`` if its files are damaged.
    """
    folder = Path(config.path).expanduser()
    file = folder / PROCESS_FILE
    if not file.is_file():
        return _other_form(config)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        settings = build(ProcessModelConfig, tree["settings"])
        tensors = {} if settings.head == "tokens" else load_file(folder / STEP_HEAD_FILE)
        separator, verdicts = tree["separator"], tree["verdicts"]
        return ProcessForm(
            settings,
            None if separator is None else _separator(**separator),
            None if verdicts is None else (int(verdicts[0]), int(verdicts[1])),
            tensors,
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, ConfigError) as error:
        raise ModelError(
            f"{folder}: {PROCESS_FILE} and {STEP_HEAD_FILE} cannot be read ({first_line(error)}); "
            "copy both again"
        ) from error


def write_process_form(form: ProcessForm, path: str | Path) -> None:
    """Write ``form`` to folder ``path``."""
    folder = Path(path)
    separator = form.separator
    tree: dict[str, Any] = {
        "settings": form.settings.model_dump(mode="json"),
        "separator": None,
        "verdicts": form.verdicts,
    }
    if separator is not None:
        tree["separator"] = asdict(separator)
    text = json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    (folder / PROCESS_FILE).write_text(text, encoding="utf-8")
    if form.tensors:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in form.tensors.items()}
        save_file(whole, folder / STEP_HEAD_FILE)


def _separator(text: str, ids: list[int], special_tokens: SpecialTokens = "text") -> Separator:
    """Return the separator of a folder. Older folders do not say how steps are encoded."""
    return Separator(text, tuple(ids), special_tokens)


def _other_form(config: ModelConfig) -> ProcessForm | None:
    """Return the head of another framework; ``None`` if there is none.

    Adapters and revisions of the hub are not searched.
    """
    if saved_adapters(config) is not None or config.revision is not None:
        return None
    tensors: dict[str, Tensor] = {}
    for name, source, _ in stored_tensors(where_of(config), config.path):
        prefix, _, kind = name.rpartition(".")
        if prefix in PREFIXES and kind in ("weight", "bias"):
            whole = source.whole() if isinstance(source, StoredTensor) else source
            tensors[f"{PREFIXES[prefix]}.{kind}"] = whole
    weight = tensors.get("layers.2.weight", tensors.get("layers.weight"))
    if weight is None:
        return None
    kind: StepHeadKind = "mlp" if "layers.2.weight" in tensors else "classes"
    if kind == "classes" and len(weight) == 1:
        kind = "linear"
    if len(weight) != (1 if kind == "linear" else 2):
        raise ModelError(
            f"model.path = {config.path!r} holds a head with {len(weight)} outputs; a process "
            "reward model has one or two"
        )
    return ProcessForm(ProcessModelConfig(head=kind), tensors=tensors)
