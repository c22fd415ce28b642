"""Write a model folder from tensors that are made one by one."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from lightrft.models.loading.adapter_folder import BASE_FILE, INDEX
from lightrft.models.loading.processor_files import PROCESSOR_FILES, copy_named_files
from lightrft.models.merging.stored_model import SMALL_FILES
from lightrft.utils.atomic_files import human_bytes, write_json
from lightrft.utils.errors import ModelError, ResourceError

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
