"""Additions to a written model folder, so that transformers 4 reads it as transformers 5 does."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings

_INFINITE = {"__float__": "Infinity"}
_OLD_NAMES = {
    "num_local_experts": "num_experts",
    "vision_feature_layer": "vision_feature_layers",
}
"""Field to its name in transformers 4, for families whose config knows both."""
_OLD_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kind of layer to its name in transformers 4."""
_KINDS = {
    "granitemoehybrid": "layer_types",
    "zamba": "layers_block_type",
    "zamba2": "layers_block_type",
}
"""Family whose kinds of layers transformers 4 knows by the older names alone, to their field."""
_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def add_older_names(folder: Path, *, is_tied: bool | None = None) -> None:
    """Add the settings of ``config.json`` and of the tokenizer under their names of transformers 4.

    transformers 4 has other names for rotary positions, and falls back to its defaults without
    them. ``config.json`` stays as it is if transformers 5 would then read another config.

    Args:
        folder: The model folder.
        is_tied: The output head is the embeddings. Both versions must read it, and transformers 4
            reads it in the text config. ``None`` leaves the settings as they are.
    """
    file = folder / "config.json"
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        before = _config(folder)
        changed = json.dumps(_with_older_names(json.loads(text)), indent=2) + "\n"
        file.write_text(changed, encoding="utf-8")
        if not _agree(before, _config(folder)):
            file.write_text(text, encoding="utf-8")
        if is_tied is not None:
            tree = json.loads(file.read_text(encoding="utf-8"))
            for section in (tree, tree.get("text_config") or {}):
                if "tie_word_embeddings" in section:
                    section["tie_word_embeddings"] = is_tied
            file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    file = folder / "tokenizer_config.json"
    if file.is_file():
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields.get("tokenizer_class") == "TokenizersBackend":
            fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(fields.get("extra_special_tokens"), list):
            fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
        file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def published_layout(model: PreTrainedModel) -> Generator[None]:
    """Save weights in the layout of published folders where transformers 5 also reads its own.

    transformers 5 transposes the experts of Qwen3-VL-MoE on loading if their shape says so, and
    saves them as they are in memory. transformers 4 and vLLM read the published layout alone.
    Square weights stay as they are, since their shape says nothing.

    Args:
        model: A transformers model.
    """
    given: list[Any] | None = getattr(model, "_weight_conversions", None)
    made = get_model_conversion_mapping(model, add_legacy=False) if given is None else given
    conversions = [one for one in made if given or not isinstance(one, PrefixChange)]
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    changed = [
        operation
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        for operation in conversion.operations
        if isinstance(operation, Transpose)
        and operation.check_dims
        and not any(
            name.endswith(conversion.target_patterns[0]) and shape[-1] == shape[-2]
            for name, shape in shapes.items()
        )
    ]
    if not changed:
        yield
        return
    any_model: Any = model
    any_model._weight_conversions = conversions
    for operation in changed:
        operation.check_dims = False
    try:
        yield
    finally:
        any_model._weight_conversions = given
        for operation in changed:
            operation.check_dims = True


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        with suppress_hf_warnings(local=True):
            return AutoConfig.from_pretrained(folder).to_dict()
    except BROKEN:  # a type that comes with code, or of a newer transformers
        return None


def _agree(before: object, after: object) -> bool:
    """Return ``True`` if ``after`` has all that ``before`` has."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return all(key in after and _agree(value, after[key]) for key, value in before.items())
    return before == after


def _with_older_names(section: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    family = section.get("model_type")
    for key, value in section.items():
        if isinstance(value, Mapping) and value != _INFINITE and key != "rope_parameters":
            value = _with_older_names(value)
        if key == _KINDS.get(str(family)) and isinstance(value, list):
            value = [_OLD_KINDS.get(kind, kind) for kind in value]
        found[key] = _finite_names(value)
    for name, value in {**_rotary(section), **_renamed(section)}.items():
        found.setdefault(name, value)
    return found


def _finite_names(value: Any) -> Any:
    """Return ``value`` with infinite numbers as JSON for Python has them."""
    if isinstance(value, list):
        return [_finite_names(each) for each in value]
    return float("inf") if value == _INFINITE else value


def _renamed(section: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(section.get("model_type"))
    known = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return {
        old: section[new]
        for new, old in _OLD_NAMES.items()
        if new in section and known.get(old) == new
    }


def _rotary(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions under their older names."""
    whole = section.get("rope_parameters")
    if not isinstance(whole, Mapping):
        return {}
    found: dict[str, Any] = {}
    rope = whole
    # one set of parameters for each kind of layer
    if isinstance(whole.get("full_attention"), Mapping):
        rope = whole["full_attention"]
        local = whole.get("sliding_attention") or {}
        if "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
    if rope.get("rope_type") == "axial":  # towers compute theirs without settings
        return {}
    own = _NEOX if "neox" in str(section.get("model_type")) else {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            found[own.get(name, name)] = rope[name]
    scaling = {
        key: value
        for key, value in rope.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    if scaling.keys() - {"rope_type"} or scaling.get("rope_type", "default") != "default":
        found["rope_scaling"] = scaling
    return found
