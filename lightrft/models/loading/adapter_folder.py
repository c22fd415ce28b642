"""Folders of adapters as peft writes them, and the base models that they name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.loading.adapter_base import SavedAdapters, saved_adapters
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.models.loading.packaged import packaged_path
from lightrft.models.lora import share_configs
from lightrft.observability.input_digests import digest_of
from lightrft.utils.atomic_files import write_json
from lightrft.utils.errors import ModelError, whole_message
from lightrft.utils.peft_folder import ADAPTER_CONFIG

if TYPE_CHECKING:
    from peft import PeftConfig

log = logging.getLogger(__name__)

BASE_FILE = "lightrft_base.json"
"""Digest of the weights that adapters were trained on, next to the adapters."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN = "pytorch_model.bin"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PAIRS = ((SINGLE, INDEX), (BIN, f"{BIN}.index.json"))
_UNSERVED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "lora_bias",
    "fan_in_fan_out",
)
"""Settings of peft whose adapters are more than one product of two matrices for a linear layer."""
_KEEPS_BASE = ("gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base as they are."""
_LORA_FIELDS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "dora": "use_dora",
    "rslora": "use_rslora",
}
"""Setting of ``model.lora`` to its name in peft."""
_REFUSED = {
    "layer_replication": "repeats layers of the base",
    "alora_invocation_tokens": "starts at a token of the prompt",
    "arrow_config": "chooses between several adapters",
}
"""Settings of peft that change the model in a way that adapters of single layers do not."""


def lora_of(config: ModelConfig) -> LoRAConfig | None:
    """Return the settings of the adapters of ``config``, new ones or those of a folder.

    Raises ``ModelError`` for adapters that ``LoRAConfig`` cannot describe.
    """
    found = saved_adapters(config)
    if found is None:
        return config.lora
    settings: Any = peft_settings(found.folder)
    fields = vars(settings)
    odd = {name: fields[name] for name in _UNSERVED if fields.get(name)}
    if fields.get("bias", "none") != "none":
        odd["bias"] = fields["bias"]
    if settings.peft_type != "LORA":
        odd["peft_type"] = str(settings.peft_type.value)
    if odd:
        values = ", ".join(f"{name} = {value!r}" for name, value in odd.items())
        raise ModelError(
            f"model.path = {config.path!r}: another engine than the native one cannot be sent "
            f"these adapters ({ADAPTER_CONFIG}: {values}); set engine.kind=native, or write the "
            "model whole by lightrft merge"
        )
    whole = tuple(sorted(fields.get("modules_to_save") or ()))
    given = {name: fields[own] for name, own in _LORA_FIELDS.items()}
    return LoRAConfig(**given, modules_to_save=whole)


def weight_files(where: str, name: str, revision: str | None = None) -> list[str]:
    """Return the files of weights of a folder, or of a name on the hub.

    Raises ``ModelError`` if there are none.

    Args:
        where: Folder, or name on the hub.
        name: Path or name that the user gave, for messages.
        revision: Revision on the hub. ``None`` for the newest.
    """
    options: dict[str, Any] = {"revision": revision}
    options["_raise_exceptions_for_missing_entries"] = False
    for single, index in _PAIRS:
        if (file := cached_file(where, single, **options)) is not None:
            return [file]
        if (file := cached_file(where, index, **options)) is not None:
            file_of = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"]
            parts = sorted(set(file_of.values()))
            return [str(cached_file(where, part, revision=revision)) for part in parts]
    raise ModelError(f"{name}: it has no weights ({SINGLE}, {BIN}, or their index)")


def base_digest(base: ModelConfig) -> str | None:
    """Return a digest of config and weights of ``base``; ``None`` if there are no such files."""
    where = str(packaged_path(base.path) or Path(base.path).expanduser())
    try:
        files = weight_files(where, base.path, base.revision)
        config = cached_file(where, "config.json", revision=base.revision)
    except (*BROKEN, ModelError):
        return None
    paths = [Path(file) for file in (str(config), *files)]
    return _digest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@lru_cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    return digest_of([path for path, *_ in files])


def write_base(folder: Path, base: ModelConfig) -> None:
    """Name ``base`` in a written folder of adapters, with the digest of its weights.

    A folder in the cache of the hub has its name there and its commit.
    """
    file = folder / ADAPTER_CONFIG
    fields = json.loads(file.read_text(encoding="utf-8"))
    name, revision = _hub_name(base)
    fields |= {"base_model_name_or_path": name, "revision": revision}
    write_json(file, fields)
    digest = base_digest(base)
    write_json(folder / BASE_FILE, {"base_model_name_or_path": name, "digest": digest})
    card = folder / "README.md"
    card.write_text(_card(fields, is_hub=not Path(name).expanduser().is_dir()), encoding="utf-8")


def _hub_name(base: ModelConfig) -> tuple[str, str | None]:
    """Return the name of ``base`` and its revision: on the hub if that is known."""
    path = Path(base.path).expanduser()
    *_, cached, snapshots, commit = ("", "", "", *path.absolute().parts)
    if path.is_dir() and snapshots == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/"), commit
    return base.path, base.revision


def _card(fields: dict[str, Any], *, is_hub: bool) -> str:
    """Return the model card of adapters with the settings ``fields``."""
    base, names = fields["base_model_name_or_path"], []
    for kind in ("target_modules", "target_parameters", "modules_to_save"):
        given = fields.get(kind) or ()
        names += [given] if isinstance(given, str) else sorted(given)
    about = ["library_name: peft", "pipeline_tag: text-generation", "tags:", "- lora", "- lightrft"]
    kinds = [kind for kind in ("dora", "rslora") if fields.get(f"use_{kind}")]
    lines = [
        "---",
        *([f"base_model: {base}"] if is_hub else []),
        *about,
        "---",
        "",
        "# Adapters",
        "",
        f"Low-rank adapters for `{base}`, trained with LightRFT.",
        "",
        f"* base: `{base}`" + (f" at `{fields['revision']}`" if fields.get("revision") else ""),
        f"* rank {fields.get('r')}, alpha {fields.get('lora_alpha')}"
        + "".join(f", {kind}" for kind in kinds),
        f"* layers: {', '.join(f'`{name}`' for name in names)}",
        "",
        "## Use",
        "",
        "```python",
        "from peft import AutoPeftModelForCausalLM",
        "",
        'model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")',
        "```",
        "",
        "`lightrft chat model=path/to/this/folder` talks to it, and `lightrft merge` writes one",
        "model without adapters.",
        "",
    ]
    return "\n".join(lines)


def check_saved_digest(found: SavedAdapters, config: ModelConfig) -> None:
    """Compare the base of adapters with the digest that was written next to them.

    A base that ``config.base`` names may differ, with a warning.

    Raises ``ModelError`` for another base under the name that the adapters have.
    """
    try:
        expected = json.loads((found.folder / BASE_FILE).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if expected is None or (present := base_digest(found.base)) in (None, expected):
        return
    problem = (
        f"model.path = {config.path!r}: its adapters were trained on other weights than "
        f"{found.base.path!r} holds ({BASE_FILE}: digest {expected}, there {present})"
    )
    if config.base is None:
        raise ModelError(
            f"{problem}; set model.base to the model that they were trained on, or to this one to "
            "take it anyway"
        )
    log.warning("%s; model.base takes it anyway", problem)


def with_saved_adapters(
    model: PreTrainedModel, found: SavedAdapters, config: ModelConfig
) -> nn.Module:
    """Return ``model`` with the adapters of a folder, trainable.

    Args:
        model: The base model.
        found: The folder that peft wrote.
        config: Settings whose path is the folder.

    Raises:
        ModelError: The adapters cannot be read, the file has no weights for some of them, or it has
            tensors that the model has no place for. The base has other weights than in training.
            ``config.lora`` asks for other adapters.
    """
    from peft import get_peft_model

    where, folder = f"model.path = {config.path!r}", found.folder
    check_saved_digest(found, config)
    try:
        with suppress_hf_warnings(local=True):
            settings = checked_settings(folder, config)
            adapted: Any = get_peft_model(model, settings)
            keys = adapted.load_adapter(str(folder), "default", is_trainable=True)
    except (*BROKEN, TypeError, AttributeError) as error:
        if problem := _other_vocabulary(folder, model):
            raise ModelError(f"{where}: {problem}") from error
        problem = f"{type(error).__name__}: {whole_message(error)}"
        raise ModelError(f"{where}: the adapters cannot be read ({problem})") from error
    unexpected = _without_copies(keys.unexpected_keys, folder)
    if (keys.missing_keys or unexpected) and not _read_as_written(adapted, folder):
        raise ModelError(
            f"{where}: the adapters do not fit their base model, or are not complete: "
            f"{_misfits(keys.missing_keys, unexpected)}; "
            + (
                "they are adapters of a classifier, such as a reward model: write it whole by "
                "lightrft merge"
                if settings.task_type == "SEQ_CLS"
                else "name the base that they were trained on"
            )
        )
    share_configs(adapted)
    return adapted.eval()


def _read_as_written(adapted: nn.Module, folder: Path) -> bool:
    """Copy the tensors of ``folder`` if their names and shapes are those that peft would write now.

    peft renames the tensors of some families as it reads them, although the names fit.
    """
    from peft import get_peft_model_state_dict

    places = get_peft_model_state_dict(adapted)
    written = adapter_tensors(folder, str(folder))
    if {k: t.shape for k, t in places.items()} != {k: t.shape for k, t in written.items()}:
        return False
    with torch.no_grad():
        for name, tensor in written.items():
            places[name].copy_(tensor)
    return True


def _other_vocabulary(folder: Path, base: PreTrainedModel) -> str:
    """Return the way out for adapters that hold embeddings or a head of another size than the base,
    or an empty string."""
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    shapes: dict[str, int] = {}
    for name, module in base.named_modules():
        for end in ends:
            if module is end:
                shapes[f"{name}.weight"] = len(end.weight)
    for key, tensor in adapter_tensors(folder, str(folder)).items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        tokens = len(tensor)
        if name in shapes and tokens != shapes[name]:
            return (
                f"its adapters have {tokens} tokens ({name}), and their base has {shapes[name]}; "
                "write the model whole by lightrft merge, or, to train the adapters further, name "
                f"a base with {tokens} tokens in model.base (resize_token_embeddings)"
            )
    return ""


def _without_copies(unexpected: Sequence[str], folder: Path) -> list[str]:
    """Return ``unexpected`` without second copies of modules that are trained whole, which peft
    writes where the vocabulary was enlarged."""
    if not unexpected:
        return []
    tensors = adapter_tensors(folder, str(folder))
    left = []
    for name in unexpected:
        used = tensors.get(name.replace(".modules_to_save.", "."))
        if ".modules_to_save." not in name or used is None or not used.equal(tensors[name]):
            left.append(name)
    return left


def _misfits(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    found = []
    if missing:
        found.append(f"{len(missing)} tensors are missing, e.g. {min(missing)}")
    if unexpected:
        found.append(f"{len(unexpected)} tensors fit no module, e.g. {min(unexpected)}")
    return ", and ".join(found)


def checked_settings(folder: Path, config: ModelConfig) -> PeftConfig:
    """Return ``peft_settings`` of adapters that are added to layers.

    Raises ``ModelError`` for other adapters, and for those that differ from ``config.lora``.
    """
    where = f"model.path = {config.path!r}"
    settings: Any = peft_settings(folder)
    if settings.is_prompt_learning:
        raise ModelError(
            f"{where}: peft_type = {str(settings.peft_type.value)!r} adds tokens to a prompt, and "
            "adapters of layers are needed, such as LORA"
        )
    for name, does in _REFUSED.items():
        if vars(settings).get(name):
            raise ModelError(f"{where}: {name} of {ADAPTER_CONFIG} {does}, which is not supported")
    if config.lora is not None and (other := _other_setting(config.lora, settings, folder)):
        raise ModelError(
            f"{where}: its adapters are trained further as they are, and have {other}; leave "
            "model.lora out, or write a model by lightrft merge to add new adapters to"
        )
    return settings


def _other_setting(lora: LoRAConfig, settings: Any, folder: Path) -> str:
    """Return the first setting of ``lora`` that the adapters in ``folder`` do not have."""
    fields, wanted = vars(settings), lora.model_dump()
    for name, own in _LORA_FIELDS.items():
        if fields.get(own) != wanted[name]:
            return f"{name} = {fields.get(own)}, where model.lora.{name} = {wanted[name]}"
    whole = sorted(fields.get("modules_to_save") or ())
    if whole != sorted(lora.modules_to_save):
        wanted_whole = sorted(lora.modules_to_save)
        return f"modules_to_save = {whole}, where model.lora.modules_to_save = {wanted_whole}"
    if lora.targets == "all-linear":
        return ""
    for tensor in adapter_tensors(folder, str(folder)):
        if ".lora_" not in tensor:
            continue
        layer = tensor.removeprefix("base_model.model.").partition(".lora_")[0]
        if isinstance(lora.targets, str):
            is_target = re.fullmatch(lora.targets, layer) is not None
        else:
            is_target = f".{layer}".endswith(tuple(f".{target}" for target in lora.targets))
        if not is_target:
            return f"one on {layer}, where model.lora.targets = {lora.targets!r}"
    return ""


def base_change(folder: Path) -> str:
    """Return by what peft changes or replaces weights of the base, or an empty string.

    Such adapters need the values of the base when they are loaded.
    """
    fields = vars(peft_settings(folder))
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start not in _KEEPS_BASE:
        return f"init_lora_weights = {start!r}"
    if (bias := fields.get("bias", "none")) != "none":
        return f"bias = {bias!r}"
    if tokens := fields.get("trainable_token_indices"):
        return f"trainable_token_indices = {tokens!r}"
    # peft writes embeddings and head whole where they are adapted, or the vocabulary was enlarged
    whole = tuple(fields.get("modules_to_save") or ())
    for name in adapter_tensors(folder, str(folder)):
        module, _, _ = name.rpartition(".")
        if ".lora_" in name or ".modules_to_save." in name:
            continue
        is_end = module.endswith((".embed_tokens", ".lm_head")) and not module.endswith(whole)
        if ".base_layer." in name or ".original_module." in name or is_end:
            return f"the tensor {name}"
    return ""


def peft_settings(folder: Path) -> PeftConfig:
    """Return the settings of the adapters in ``folder``, for training."""
    from peft import PeftConfig

    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except (*BROKEN, KeyError, TypeError) as error:
        kind = f"{type(error).__name__}: {whole_message(error)}"
        raise ModelError(
            f"{folder}: {ADAPTER_CONFIG} cannot be read ({kind}); it needs a peft_type that the "
            "installed peft has, such as LORA"
        ) from error
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

    if not any((folder / name).is_file() for name in _ADAPTER_FILES):
        raise ModelError(f"{where}: it has no weights of adapters ({' or '.join(_ADAPTER_FILES)})")
    try:
        return load_peft_weights(str(folder), device="cpu")
    except (*BROKEN, TypeError) as error:
        problem = whole_message(error)
        raise ModelError(f"{where}: the adapters cannot be read ({problem})") from error
