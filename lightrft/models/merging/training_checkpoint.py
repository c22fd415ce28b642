"""Weights in the checkpoints of DeepSpeed and FSDP, as LightRFT and OpenRLHF write them.

Such files are pickles. They are read as tensors and plain data alone: no class of a file is
called, but for those of ``_INERT``, which hold data, and the forms of torch's own metadata.

Sources of the layouts: ``deepspeed/utils/zero_to_fp32.py`` of DeepSpeed, and
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import collections
import itertools
import math
import pathlib
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    filesystem,
    load,
    metadata,
)

from lightrft.config.model import ModelConfig
from lightrft.models.loading.from_pretrained import model_settings, where_of
from lightrft.models.merging.stored_model import StoredModel, check_plain, stored_tensors
from lightrft.models.reward.other_layouts import NAME, PREFIXES
from lightrft.utils.atomic_files import is_gguf
from lightrft.utils.errors import ModelError, first_line

Layout = Literal["model", "deepspeed", "fsdp", "gguf"]
TRAINING: tuple[Layout, ...] = ("deepspeed", "fsdp")
"""Layouts of checkpoints."""
MODEL_FILES, OPTIMIZER_FILES = "*_model_states.pt", "*_optim_states.pt"
METADATA = ".metadata"


class _Inert:
    """A class that holds what a pickle says of an object, and does nothing."""

    def __init__(self, *args: object) -> None:
        self.args = args


_INERT = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "argparse.Namespace",
)
"""Classes of objects next to the weights that DeepSpeed writes."""


def layout_of(path: str) -> Layout:
    """Return the layout of ``path``: a checkpoint of training, a GGUF file, or a model."""
    folder = Path(path).expanduser()
    if is_gguf(folder):
        return "gguf"
    if (folder / METADATA).is_file():
        return "fsdp"
    if (folder / "latest").is_file() or any(folder.glob(MODEL_FILES)):
        return "deepspeed"
    return "model"


def open_training_checkpoint(path: str, layout: Layout, base: str) -> StoredModel:
    """Return the weights of a checkpoint, under the names that ``base`` has for them.

    The whole model is in memory, in the types of the checkpoint.

    Args:
        path: Folder of the checkpoint.
        layout: ``deepspeed`` or ``fsdp``.
        base: Model folder, or name on the hub, that the training started from. It gives the
            config, the tokenizer and the processor.

    Raises:
        ModelError: The folder holds no such checkpoint, more than tensors and plain data, only a
            part of the weights, or those of another model.
    """
    read = read_deepspeed if layout == "deepspeed" else read_fsdp
    try:
        tensors = read(Path(path).expanduser())
    except (OSError, KeyError, TypeError, AttributeError, RuntimeError, EOFError) as error:
        raise ModelError(
            f"{path}: it cannot be read as a checkpoint of {layout} ({first_line(error)}); copy "
            "it again"
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: its files hold more than tensors and plain data, which is not read "
            f"({_refused_name(error)}); convert it by the framework that wrote it"
        ) from error
    own = _renamed(tensors, base, path)
    folder = Path(where_of(ModelConfig(path=base)))
    if not folder.is_dir():
        raise ModelError(f"base = {base!r} is no folder here; download the model first")
    check_plain(folder, base)
    specs = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    return StoredModel(path, folder, folder, specs, own)


def read_deepspeed(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint of ZeRO 0 to 3 by name; trained ones in float32.

    Args:
        folder: Folder with the files of the ranks, or the one above it with the file ``latest``.
    """
    if (folder / "latest").is_file():
        folder /= (folder / "latest").read_text(encoding="utf-8").strip()
    states = [_loaded(file) for file in _sorted(folder.glob(MODEL_FILES))]
    if not states:
        raise ModelError(
            f"{folder} holds no {MODEL_FILES}; name the folder of a step, or the one above it "
            "with the file latest"
        )
    first = states[0]
    if first.get("mp_world_size", 1) != 1 or any(folder.glob("*expert_*")):
        raise ModelError(
            f"{folder}: its weights are split by tensor or expert parallelism, which is not read; "
            "write it whole by the framework that trained it"
        )
    optimizers = [_loaded(file) for file in _sorted(folder.glob(OPTIMIZER_FILES))]
    shards = [one["optimizer_state_dict"] for one in optimizers]
    if not shards or "zero_stage" not in shards[0]:
        return {name: t for name, t in first["module"].items() if isinstance(t, Tensor)}
    ranks = shards[0]["partition_count"]
    ranks = max(ranks) if isinstance(ranks, list) else ranks
    if len(shards) != ranks:
        raise ModelError(
            f"{folder} holds the {OPTIMIZER_FILES} of {len(shards)} ranks, and {ranks} wrote it; "
            "copy all of them"
        )
    is_sharded = "fp32_flat_groups" in shards[0]
    buffers = set(first["buffer_names"])
    # Without shards, the module has the weights that are not trained too.
    found = {
        name: tensor
        for name, tensor in first["module"].items()
        if isinstance(tensor, Tensor) and (name in buffers or not is_sharded)
    }
    found |= _frozen(states if is_sharded else states[:1])
    found |= _of_stage_3(first, shards) if is_sharded else _of_stage_2(first, shards)
    for alias, name in first["shared_params"].items():
        if name in found:
            found[alias] = found[name]
    return found


def _of_stage_2(first: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the weights of ZeRO 1 and 2: each rank has a part of each flat group."""
    found = {}
    groups = zip(*(shard["single_partition_of_fp32_groups"] for shard in shards), strict=True)
    paddings = shards[0].get("param_alignment_paddings") or itertools.repeat(None)
    for shapes, parts, padding in zip(first["param_shapes"], groups, paddings, strict=False):
        flat, start = torch.cat([part.detach() for part in parts]), 0
        gaps = padding or itertools.repeat(0)
        for (name, shape), gap in zip(shapes.items(), gaps, strict=False):
            count = math.prod(shape)
            found[name] = flat[start : start + count].view(shape)
            start += count + gap
    return found


def _of_stage_3(first: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the weights of ZeRO 3: each rank has a part of each weight."""
    flats = [torch.cat([g.detach() for g in shard["fp32_flat_groups"]]) for shard in shards]
    found, start = {}, 0
    for name, shape in itertools.chain.from_iterable(s.items() for s in first["param_shapes"]):
        size = math.ceil(math.prod(shape) / len(flats))
        found[name] = _joined([flat[start : start + size] for flat in flats], shape)
        start += size
    return found


def _frozen(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return the weights that are not trained, of one rank or in a part of each rank."""
    shapes = states[0].get("frozen_param_shapes") or {}
    return {
        name: _joined([state["frozen_param_fragments"][name].flatten() for state in states], shape)
        for name, shape in shapes.items()
    }


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return torch.cat([part.detach() for part in parts])[: math.prod(shape)].view(tuple(shape))


def _sorted(files: Iterable[Path]) -> list[Path]:
    """Return ``files`` in the order of the ranks in their names."""

    def place(file: Path) -> list[tuple[int, str]]:
        return [(int(part or 0), "") if part.isdigit() else (0, part) for part in
                re.split(r"(\d+)", file.name)]  # fmt: skip

    return sorted(files, key=place)


def _loaded(file: Path) -> dict[str, Any]:
    inert: Any = [(type(name.rpartition(".")[2], (_Inert,), {}), name) for name in _INERT]
    with torch.serialization.safe_globals(inert):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


class _MetadataReader(FileSystemReader):
    """Reads a checkpoint of ``torch.distributed.checkpoint``, and calls nothing that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"a {type(found).__name__} in place of metadata")
        found.storage_meta = None
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of a checkpoint: dataclasses of torch, shapes, types and paths."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the metadata. Raise ``pickle.UnpicklingError`` for any other name."""
        known: Any = None
        if module == metadata.__name__ and name in _FORMS:
            known = getattr(metadata, name)
        elif module == filesystem.__name__ and name in ("_StorageInfo", "_StoragePrefix"):
            known = getattr(filesystem, name)
        elif (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            known = torch.Size if name == "Size" else collections.OrderedDict
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        elif (module, name) == ("torch.serialization", "_get_layout"):
            known = _layout
        elif module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            known = pathlib.PurePath
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return known


_FORMS = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
"""Classes of ``torch.distributed.checkpoint.metadata`` that a checkpoint holds."""


def _layout(name: str) -> torch.layout:
    """Return a layout of tensors by its name, such as ``torch.strided``."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"the layout {name!r}")
    return found


def read_fsdp(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of ``torch.distributed.checkpoint`` by name.

    Args:
        folder: Folder with the file ``.metadata``.
    """
    if not (folder / METADATA).is_file():
        raise ModelError(
            f"{folder} holds no {METADATA}; name the folder of the checkpoint of a step"
        )
    reader = _MetadataReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            load(found, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None
    return found


def _renamed(tensors: Mapping[str, Tensor], base: str, path: str) -> dict[str, Tensor]:
    """Return the weights of the model without the prefix of the training framework.

    Args:
        tensors: Tensors of the checkpoint by name.
        base: The model that the training started from.
        path: The checkpoint, for messages.
    """
    wanted = _names(base)
    adapters = sorted(name for name in tensors if ".lora_" in name)
    if adapters:
        raise ModelError(
            f"{path} holds {len(adapters)} tensors of adapters, e.g. {adapters[0]}; write them by "
            "the framework that trained them, and merge that folder by lightrft merge"
        )
    heads = heads_in(tensors, base)
    prefixes = {name.removesuffix(one) for one in wanted for name in tensors if name.endswith(one)}
    # As ``model.`` may begin names of the model too, the one that fits most names.
    prefix = max(
        sorted(prefixes), key=lambda p: sum(p + one in tensors for one in wanted), default=None
    )
    if prefix is None:
        raise ModelError(
            f"{path}: none of its tensors is one of base = {base!r}; it has, e.g., "
            f"{', '.join(sorted(tensors)[:2])}; name the model that the training started from"
        )
    own = {prefix + one for one in wanted} | heads
    # An actor may hold more, which the check of the written folder names.
    others = sorted(
        name for name in tensors if name not in own and (heads or not name.startswith(prefix))
    )
    optimizer = [name for name in others if name.startswith(("optim", "state."))]
    if len(others) > len(optimizer):
        other = next(name for name in others if name not in optimizer)
        raise ModelError(
            f"{path}: {other} is no weight of base = {base!r}, and no head of a critic or a reward "
            "model that is known here; convert it by the framework that wrote it"
        )
    return {
        name if name in heads else name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name not in optimizer
    }


def heads_in(names: Iterable[str], base: str) -> set[str]:
    """Return those of ``names`` that are of heads of critics or reward models.

    Args:
        names: Names in a checkpoint.
        base: The model that the training started from, whose config may name the head.
    """
    fields = model_settings(ModelConfig(path=base, unproved_family="allow")).to_dict()
    prefixes = (fields.get("value_head_prefix") or PREFIXES[0], *PREFIXES)
    linear = {f"{prefix}.{part}" for prefix in prefixes for part in ("weight", "bias")}
    return {name for name in names if name in linear or NAME.fullmatch(name)}


def _names(base: str) -> set[str]:
    """Return the names of the weights of ``base``, in its files and in memory."""
    found: set[str] = set()
    config = ModelConfig(path=base, unproved_family="allow")
    settings = model_settings(config)
    architecture = next(iter(settings.architectures or ()), "")
    model: Any = getattr(transformers, architecture, None)
    if model is not None:
        with torch.device("meta"):
            found |= set(model(settings).state_dict())
    try:
        found |= {name for name, _, _ in stored_tensors(where_of(config), base)}
    except ModelError:  # a folder of the config and the tokenizer alone
        if not found:
            raise
    return found


def _refused_name(error: pickle.UnpicklingError) -> str:
    """Return the name of the class that a file may not call, from torch's long message."""
    match = re.search(r"(?:global|GLOBAL) ([\w.]+)", str(error))
    return match[1] if match else first_line(error)
