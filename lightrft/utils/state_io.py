"""Nested state in one file of ``torch.save``, which is read with ``weights_only=True``.

Values are restored exactly, and reading executes no code.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrft.utils.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".pt"
State = dict[str, Any]
"""Plain values and tensors by name, possibly nested, as ``save_state`` writes them."""


def save_state(path: Path, tree: object) -> None:
    """Write ``tree`` as ``<path>.pt``.

    A tree consists of dictionaries, lists, tuples, str, int, float, bool, None and dense tensors.
    Keys are str, int, float, bool or None. Tensors may share storage.

    Raises ``TypeError`` with the location of any other value.
    """
    import torch

    plain = _Plain().of(tree, "")
    # Given a path, torch reports a full disk without its errno.
    with _file_of(path).open("wb") as file:
        torch.save(plain, file)


def load_state(path: Path) -> Any:
    """Return the tree that ``save_state`` wrote at ``path``, bit for bit, with tensors on the CPU.

    Tensors that were one object are one object again.

    Raises ``CheckpointError`` if the file is missing, damaged or of an earlier version.
    """
    import torch

    file = _file_of(path)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        earlier = path.with_name(f"{path.name}.json")
        reason = "it is missing"
        if earlier.exists():
            reason = f"there is only {earlier.name}, of an earlier version of lightrft"
        raise CheckpointError(f"{file} is not a state that can be read: {reason}") from error
    except pickle.UnpicklingError as error:
        # Torch's own message advises to load the file without the restriction.
        raise CheckpointError(
            f"{file} is damaged, or holds more than plain values and tensors"
        ) from error
    # A damaged file fails with nearly any error, depending on the byte.
    except (
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:
        raise CheckpointError(
            f"{file} is truncated, or no state: {type(error).__name__}: {first_line(error)}"
        ) from error


def _file_of(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


class _Plain:
    """Converts a tree to values that ``weights_only=True`` reads, with tensors of their own
    storage.

    Without that, ``torch.save`` would write the whole storage of a small view.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}  # by id of the original, which ``tree`` keeps alive
        self._storages: set[int] = set()

    def of(self, value: object, place: str) -> object:
        """Return ``value``, found at ``place``, with tensors of their own storage."""
        if isinstance(value, bool | None):
            return value
        # Subclasses, such as numpy's floats, could not be read back.
        for kind in (int, str, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, dict):
            plain: dict[object, object] = {}
            for key, item in value.items():
                if not isinstance(key, str | int | float | None):
                    raise TypeError(
                        f"state{place}: a key of type {type(key).__name__} cannot be saved: {key!r}"
                    )
                plain[self.of(key, place)] = self.of(item, f"{place}.{key}")
            return plain
        if isinstance(value, list | tuple):
            items = [self.of(item, f"{place}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return self._tensor(value, place)

    def _tensor(self, value: object, place: str) -> Tensor:
        import torch

        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise TypeError(f"state{place}: {type(value).__name__} cannot be saved: {value!r:.80}")
        if id(value) not in self._tensors:
            tensor = value.detach().contiguous()
            storage = tensor.untyped_storage()
            # ``torch.save`` writes a storage whole, and once for all tensors that share it.
            is_view = storage.nbytes() != tensor.numel() * tensor.element_size()
            shared = is_view or storage.data_ptr() in self._storages
            # Empty tensors have no memory: the address of each is 0.
            if shared and tensor.numel():
                tensor = tensor.clone()
            self._storages.add(tensor.untyped_storage().data_ptr())
            self._tensors[id(value)] = tensor
        return self._tensors[id(value)]
