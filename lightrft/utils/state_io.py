"""Nested state as JSON and safetensors.

Values are restored exactly, and reading executes no code.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightrft.utils.errors import CheckpointError

TAG = "$"  # an object whose only key starts with TAG encodes a value that JSON cannot express


def save_state(path: Path, tree: Any) -> None:
    """Write ``tree`` as ``<path>.json`` and, if it contains tensors, ``<path>.safetensors``.

    A tree consists of dictionaries, lists, tuples, str, int, float, bool, None and dense tensors.
    Keys are str, int, float, bool or None. Tensors may share storage.

    Raises ``TypeError`` with the location of any other value.
    """
    packer = _Packer()
    plain = packer.pack(tree, "")
    with _with_suffix(path, ".json").open("w", encoding="utf-8") as file:
        json.dump({"tensors": bool(packer.tensors), "tree": plain}, file, allow_nan=False)
    if packer.tensors:
        from safetensors.torch import save_file

        save_file(packer.tensors, _with_suffix(path, ".safetensors"))


def load_state(path: Path, device: str = "cpu") -> Any:
    """Return the tree that ``save_state`` wrote at ``path``, bit for bit.

    Tensors are placed on ``device``. Tensors that were one object are one object again.

    Raises ``CheckpointError`` if a file is missing or malformed.
    """
    plain, where = _with_suffix(path, ".json"), _with_suffix(path, ".safetensors")
    tensors: dict[str, Any] = {}
    try:
        document = json.loads(plain.read_text(encoding="utf-8"))
        if document["tensors"]:
            from safetensors.torch import load_file

            # Copied, because tensors in a file are not aligned, and the rounding of a sum depends
            # on the alignment of its tensor.
            tensors = {name: tensor.clone() for name, tensor in load_file(where, device=device).items()}
        return _unpack(document["tree"], tensors)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{plain} is not a state that can be read: {type(error).__name__}: {error}") from error
    except Exception as error:
        # safetensors is imported only when needed, and its error class derives from Exception alone
        if type(error).__name__ != "SafetensorError":
            raise
        raise CheckpointError(f"{where} is truncated or not safetensors: {error}") from error


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


class _Packer:
    """Converts a tree to JSON values and collects its tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # id of a tensor object that is kept alive by ``tree``
        self._storages: set[int] = set()

    def pack(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, dict):
            return self._pack_dict(value, place)
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{place}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        return self._pack_tensor(value, place)

    def _pack_dict(self, value: dict[Any, Any], place: str) -> Any:
        if all(isinstance(key, str) and not key.startswith(TAG) for key in value):
            return {key: self.pack(item, f"{place}.{key}") for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if not (key is None or isinstance(key, str | int | float)):
                raise TypeError(f"state{place}: a key of type {type(key).__name__} cannot be saved: {key!r}")
            pairs.append([self.pack(key, place), self.pack(item, f"{place}.{key}")])
        return {"$dict": pairs}

    def _pack_tensor(self, value: Any, place: str) -> Any:
        import torch

        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise TypeError(f"state{place}: {type(value).__name__} cannot be saved: {value!r:.80}")
        name = self._names.get(id(value))
        if name is None:
            name = place.lstrip(".") or "value"
            while name in self.tensors:
                name += "'"
            self._names[id(value)] = name
            self.tensors[name] = self._own(value.detach())
        return {"$tensor": name}

    def _own(self, tensor: Any) -> Any:
        """Return ``tensor`` contiguous and without shared storage, as safetensors requires."""
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage()
        shared = storage.data_ptr() in self._storages or storage.nbytes() != tensor.numel() * tensor.element_size()
        if shared and tensor.numel():
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor


def _unpack(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith(TAG):
        return {key: _unpack(item, tensors) for key, item in value.items()}
    inner = value[kind]
    if kind == "$tensor":
        return tensors[inner]
    if kind == "$float":
        return float(inner)
    if kind == "$tuple":
        return tuple(_unpack(item, tensors) for item in inner)
    if kind == "$dict":
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in inner}
    raise ValueError(f"unknown kind {kind!r}")
