"""Models on disk: read tensor by tensor under the names in their files, and written likewise."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightrft.config.model import ModelConfig
from lightrft.models.loading.adapter_base import SavedAdapters, saved_adapters
from lightrft.models.loading.adapter_folder import (
    BASE_FILE,
    BIN,
    INDEX,
    adapter_tensors,
    base_change,
    peft_settings,
    weight_files,
    with_saved_adapters,
)
from lightrft.models.loading.export_check import check_export, probe_logits
from lightrft.models.loading.from_pretrained import (
    TOKENIZER_FILES,
    has_tokenizer,
    load_model,
    model_settings,
    where_of,
)
from lightrft.models.loading.hf_logging import BROKEN
from lightrft.models.loading.processor_files import (
    PROCESSOR_FILES,
    copy_named_files,
    files_named_in,
)
from lightrft.models.loading.save_model import save_model
from lightrft.models.loading.sharded_read import (
    Source,
    StoredTensor,
    build_on_meta,
)
from lightrft.models.reward.saved_form import holds_heads
from lightrft.utils.atomic_files import human_bytes, write_json
from lightrft.utils.errors import ModelError, ResourceError, first_line, whole_message
from lightrft.utils.module_tensors import plain_name
from lightrft.utils.peft_folder import ADAPTER_CONFIG

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.py", *TOKENIZER_FILES)
"""Patterns of the files of a model that are not weights."""
_HEADS = ("lm_head.weight", "embed_out.weight")
_HEAD = re.compile(r"\b(lm_head|embed_out|embed_in|embed_tokens|wte)\.")
_FACTOR = re.compile(r"\.(lora_[AB]\.weight|lora_magnitude_vector)$")
_SCORES = re.compile(r"\b(score|classifier)\.(weight|.*\.weight)$")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Change = Callable[[Tensor], Tensor]
"""Return the weight with adapters added, in float32."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The tensors of a model in its files.

    Attributes:
        name: Path or name that the user gave.
        folder: Folder of ``config.json``.
        tokenizer: Folder of the tokenizer and the processor.
        specs: Shape and dtype of each tensor by name, as tensors on the meta device.
        sources: The place of each tensor in the files.
        changes: Weights that adapters change.
    """

    name: str
    folder: Path
    tokenizer: Path
    specs: dict[str, Tensor]
    sources: Mapping[str, Source]
    changes: Mapping[str, Change] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """Return a tensor, with adapters added in. It may share memory with a file."""
        source = self.sources[name]
        try:
            tensor = source.whole() if isinstance(source, StoredTensor) else source
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.name}: {name} cannot be read ({first_line(error)})") from error
        change = self.changes.get(name)
        return tensor if change is None else change(tensor)


def open_model(name: str, base: str | None = None, scratch: Path | None = None) -> StoredModel:
    """Find the tensors of a model folder, of a name on the hub, or of a folder of adapters.

    Args:
        name: The folder or name.
        base: Folder or name of the base model of adapters. None takes the one that they name.
        scratch: Folder for merged models. Adapters of experts, of embeddings or of a classifier
            are added to the whole model, which is written there.

    Raises:
        ModelError: There is no such model, its weights cannot be read or are quantised, or its
            adapters cannot be merged.
    """
    # The family does not matter: no forward pass runs.
    config = ModelConfig(path=name, unproved_family="allow")
    if (Path(name).expanduser() / ADAPTER_CONFIG).is_file():
        config = config.model_copy(update={"base": base})
    if holds_heads(name):
        raise ModelError(
            f"{name} is a reward model: its heads cannot be merged or converted; take the model "
            "that it was trained from"
        )
    found = saved_adapters(config)
    if found is not None:
        streamed = _with_adapters(config, found)
        if streamed is not None:
            return streamed
        if scratch is None:
            raise ModelError(f"{name}: it is a folder of adapters; merge it by lightrft merge")
        return _merged_whole(config, found, scratch)
    folder = _small_files(where_of(config), name)
    check_plain(folder, name)
    sources, specs = {}, {}
    for key, source, spec in stored_tensors(where_of(config), name):
        sources[key], specs[key] = source, spec
    return StoredModel(name, folder, folder, specs, sources)


def check_plain(folder: Path, name: str) -> None:
    """Raise ``ModelError`` if the weights of the model folder are quantised."""
    if "quantization_config" in read_config(folder, name):
        raise ModelError(
            f"{name}: its weights are quantised, and quantised weights can be neither merged nor "
            "converted; take the model that it was made from"
        )


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the tree of ``config.json``. Raises ``ModelError`` if it cannot be read."""
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: config.json cannot be read ({first_line(error)})") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{name}: config.json is no tree of settings")
    return tree


def _small_files(where: str, name: str) -> Path:
    """Return the folder of the files that are not weights. Download them for a name on the hub."""
    if Path(where).is_dir():
        return Path(where)
    try:
        folder = Path(snapshot_download(where, allow_patterns=list(SMALL_FILES)))
        if names := files_named_in(folder):
            snapshot_download(where, allow_patterns=sorted(names))
        return folder
    except BROKEN as error:
        raise ModelError(
            f"{name}: there is no folder of that name here, and the model hub did not give it "
            f"either ({first_line(error)}). Give a folder, or check the name and the network"
        ) from error


def stored_tensors(where: str, name: str) -> Iterator[tuple[str, Source, Tensor]]:
    """Yield the name, the source and the shape of each tensor of a model.

    Raises ``ModelError`` if the weights cannot be read, or there are none.

    Args:
        where: Folder, or name on the hub.
        name: Path or name that the user gave, for messages.
    """
    try:
        for file in weight_files(where, name):
            yield from _in_bin(file) if file.endswith(".bin") else _in_safetensors(file)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{name}: {BIN} is damaged, or holds more than tensors, and is not read"
        ) from error
    except (*BROKEN, TypeError) as error:
        raise ModelError(f"{name}: the weights cannot be read ({first_line(error)})") from error


def _in_safetensors(file: str) -> Iterator[tuple[str, Source, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  not a mapping
            part = opened.get_slice(key)
            kind = part.get_dtype()
            if kind not in _DTYPES:
                raise ModelError(
                    f"{file}: {key} is of type {kind}, which can be neither merged nor converted"
                )
            spec = torch.empty(part.get_shape(), dtype=_DTYPES[kind], device="meta")
            yield key, StoredTensor(file, key), spec


def _in_bin(file: str) -> Iterator[tuple[str, Source, Tensor]]:
    try:
        # Memory-mapped, so that a tensor is read when it is used.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file of a torch before 1.6, which cannot be mapped
        state = torch.load(file, map_location="cpu", weights_only=True)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{file}: {key} is no tensor; it is not the weights of a model")
        yield key, value, torch.empty_like(value, device="meta")


def without_tied_copies(model: StoredModel) -> StoredModel:
    """Return ``model`` without an output head that repeats its tied embeddings.

    ``pytorch_model.bin`` holds both, safetensors one of them.
    """
    heads = [name for name in model.specs if name.endswith(_HEADS)]
    if not heads or not _is_tied(model):
        return model
    copies = {head for head in heads if _repeats_another(model, head)}
    specs = {name: spec for name, spec in model.specs.items() if name not in copies}
    return StoredModel(
        model.name, model.folder, model.tokenizer, specs, model.sources, model.changes
    )


def _is_tied(model: StoredModel) -> bool:
    try:
        settings = model_settings(ModelConfig(path=str(model.folder)))
    except ModelError:  # a type that transformers does not know: only its file can tell
        return bool(read_config(model.folder, model.name).get("tie_word_embeddings"))
    return bool(settings.to_dict().get("tie_word_embeddings"))


def _repeats_another(model: StoredModel, head: str) -> bool:
    shape = model.specs[head].shape
    others = [name for name, spec in model.specs.items() if name != head and spec.shape == shape]
    whole = model.read(head)
    return any(torch.equal(whole, model.read(name)) for name in others)


def _with_adapters(config: ModelConfig, found: SavedAdapters) -> StoredModel | None:
    """Return the base model, with the adapters of a folder added when it is read.

    It is ``None`` for adapters of more than single linear layers: they need the whole model.
    """
    if not _are_linear(config, found.folder):
        return None
    plain = open_model(found.base.path)
    tokenizer = found.folder if has_tokenizer(found.folder) else plain.tokenizer
    changes = _changes(config)
    if changes is None or changes.keys() - plain.specs.keys():
        return None
    return StoredModel(config.path, plain.folder, tokenizer, plain.specs, plain.sources, changes)


def _are_linear(config: ModelConfig, adapters: Path) -> bool:
    """Return ``True`` if every tensor is a low-rank factor of one layer, and not of head or
    embeddings, which may be tied."""
    if base_change(adapters):
        return False
    names = adapter_tensors(adapters, config.path)
    return all(_FACTOR.search(name) and not _HEAD.search(name) for name in names)


def tokenizer_folder(name: str) -> Path:
    """Return the folder of the tokenizer of a folder, or of a name on the hub.

    Raises ``ModelError`` if there is none.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _small_files(where_of(ModelConfig(path=name)), name)
    if not has_tokenizer(folder):
        raise ModelError(f"tokenizer_source = {name!r}: the folder holds no tokenizer")
    return folder


def _changes(config: ModelConfig) -> dict[str, Change] | None:
    """Return the change of each weight that the adapters of ``config`` change, by its name.

    It is ``None`` if an adapter changes more than the weight of a linear layer.
    """
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Only adapters have memory.
    model, deferred = build_on_meta(config, torch.float32)
    key_of = {name: source.key for name, source in deferred.stored.items()}
    changes: dict[str, Change] = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, Linear):
            return None
        weight = f"{plain_name(f'{name}.')}weight"
        changes[key_of.get(weight, weight)] = partial(_with_adapter, module)
    return changes


@torch.no_grad()
def _with_adapter(layer: Any, weight: Tensor) -> Tensor:
    """Return ``weight`` with the adapters of a peft layer added, in float32."""
    inner = layer.get_base_layer()
    hollow = inner.weight
    # A copy: peft adds in place, and the tensor may share memory with a file.
    inner.weight = nn.Parameter(weight.float().clone(), requires_grad=False)
    layer.merge()
    merged = inner.weight.detach()
    inner.weight = hollow
    layer.merged_adapters.clear()
    return merged


def _merged_whole(config: ModelConfig, found: SavedAdapters, scratch: Path) -> StoredModel:
    """Return the base model with its adapters added by peft, as a folder in ``scratch``.

    The whole model is in memory. Adapters of a classifier give a classifier.
    """
    of_base, adapters = found
    if peft_settings(adapters).task_type == "SEQ_CLS":
        model = _classifier(of_base, adapters)
    else:
        model = load_model(of_base)
    adapted = with_saved_adapters(model, found, config)
    folder = scratch / f"merged_{len(list(scratch.glob('merged_*')))}"
    tokenizer = adapters if has_tokenizer(adapters) else tokenizer_folder(of_base.path)
    save_model(adapted, None, folder)
    check_export(folder, probe_logits(adapted))
    copied = {file.name for file in folder.iterdir()}
    source = _small_files(where_of(of_base), of_base.path)
    for file in (file for pattern in SMALL_FILES for file in source.glob(pattern)):
        if file.name not in copied:
            shutil.copy(file, folder / file.name)
    copy_named_files(source, folder)
    return replace(open_model(str(folder)), name=config.path, tokenizer=tokenizer)


def _classifier(config: ModelConfig, adapters: Path) -> PreTrainedModel:
    """Return a classifier of transformers over the model of ``config``.

    It has as many scores as the saved head of ``adapters``.
    """
    saved = adapter_tensors(adapters, config.path)
    heads = [tensor for name, tensor in saved.items() if _SCORES.search(name)]
    if not heads:
        raise ModelError(
            f"{adapters}: the adapters of a classifier (task_type SEQ_CLS) hold no head: "
            "score.weight or classifier.weight; train them with modules_to_save=['score']"
        )
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            where_of(config), num_labels=len(heads[0]), dtype="auto"
        )
    except BROKEN as error:
        problem = whole_message(error)
        raise ModelError(f"{config.path}: no classifier can be made of it ({problem})") from error


log = logging.getLogger(__name__)

_CONFIG_FILES = ("config.json", "generation_config.json", "*.py")
"""Files that belong to the weights. The others belong to the tokenizer and the processor."""
_NOT_COPIED = ("*.index.json", "adapter_config.json", BASE_FILE)
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(slots=True)
class WeightWriter:
    """Writes weights to safetensors files of limited size.

    Attributes:
        folder: Folder to write to.
        specs: Shape and dtype of each tensor to write, as tensors on the meta device.
        max_shard_size: Largest size of a file, such as ``5GB``. A larger tensor has a file of its
            own.
        zeroed: Number of values that became 0 because they are too small for their new dtype.
    """

    folder: Path
    specs: dict[str, Tensor]
    max_shard_size: str
    zeroed: int = 0

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def check_space(self) -> None:
        """Raise ``ResourceError`` if the disk has no room for the tensors."""
        free = shutil.disk_usage(self.folder).free
        if self.total_bytes > free:
            raise ResourceError(
                f"the weights need {human_bytes(self.total_bytes)}, and {human_bytes(free)} are "
                f"free on the disk of {self.folder.parent}; free some space, or set output to a "
                "folder on another disk"
            )

    def write(self, make: Callable[[str], Tensor], after: Callable[[], None]) -> None:
        """Write the tensors that ``make`` returns for their names, one file at a time.

        Args:
            make: Returns a tensor of the shape in ``specs``.
            after: Called after each tensor.

        Raises:
            ModelError: A value is too large for the dtype in ``specs``, or is NaN.
        """
        split = split_torch_state_dict_into_shards(
            self.specs,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self.max_shard_size.replace(" ", ""),
        )
        for file, names in split.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = self._cast(name, make(name)).contiguous()
                after()
            save_file(tensors, self.folder / file, metadata={"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(self.folder / INDEX, index)
        if self.zeroed:
            log.warning("%d values are too small for their new type, and became 0", self.zeroed)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        dtype = self.specs[name].dtype
        result = tensor.to(dtype)
        if wrong := int(torch.isnan(tensor).sum()):
            raise ModelError(
                f"{name} has {wrong} values that are no numbers (NaN): a model or adapters that it "
                "is made from are broken; take an earlier checkpoint"
            )
        if dtype == tensor.dtype:
            return result
        too_large = torch.isinf(result) & torch.isfinite(tensor)
        if too_large.any():
            largest = float(tensor[too_large].abs().max())
            limit = torch.finfo(dtype).max
            raise ModelError(
                f"{name} has {int(too_large.sum())} values that are too large for "
                f"{str(dtype).removeprefix('torch.')}, up to {largest:.6g} where the limit is "
                f"{limit:.6g}; set dtype to bfloat16 or float32"
            )
        self.zeroed += int(((result == 0) & (tensor != 0)).sum())
        return result


def written_specs(specs: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return ``specs`` with floating-point tensors in ``dtype``. ``auto`` keeps their types."""
    if dtype == "auto":
        return dict(specs)
    kind: torch.dtype = getattr(torch, dtype)
    return {
        name: spec.to(kind) if spec.is_floating_point() else spec for name, spec in specs.items()
    }


def copy_small_files(config: Path, tokenizer: Path, folder: Path) -> None:
    """Copy the files of a model that are not weights.

    Args:
        config: Folder of ``config.json`` and of the code of the model.
        tokenizer: Folder of the tokenizer and the processor. Without a processor there, as in many
            folders of adapters, that of ``config`` is copied.
        folder: Folder to copy to.
    """
    for file in _matching(config, _CONFIG_FILES):
        shutil.copy(file, folder / file.name)
    skipped = {file.name for file in _matching(tokenizer, (*_CONFIG_FILES, *_NOT_COPIED))}
    for file in _matching(tokenizer, SMALL_FILES):
        if file.name not in skipped:
            shutil.copy(file, folder / file.name)
    if not _matching(folder, PROCESSOR_FILES):
        for file in _matching(config, PROCESSOR_FILES):
            shutil.copy(file, folder / file.name)
    for source in (tokenizer, config):
        copy_named_files(source, folder)
    templates = tokenizer / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]


def set_config_dtype(file: Path, tree: dict[str, Any], dtype: str) -> None:
    """Write ``tree`` to ``file``, with ``dtype`` as the dtype of the model and of its parts.

    Args:
        file: The ``config.json`` to write.
        tree: The settings of the model.
        dtype: Name of the dtype, such as ``bfloat16``.
    """
    changed = {"dtype": dtype, **_with_dtype(tree, dtype)}
    # Not ``write_json``: some configs have infinite numbers, which transformers reads back.
    file.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def _with_dtype(tree: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            changed[key] = _with_dtype(value, dtype)
        else:
            changed[key] = dtype if key in _DTYPE_KEYS else value
    return changed
