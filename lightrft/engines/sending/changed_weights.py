"""Weights that an engine lacks, in the dtypes that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import checksum


@dataclass(frozen=True, slots=True)
class HeldDtypes:
    """The dtypes that an engine holds, so that no byte too many is sent.

    Attributes:
        by_name: The dtypes of parameters, by name.
        of_matrices: The dtype of all other matrices. ``None`` if it is unknown. Vectors cost
            nothing, and an engine may hold some with more bits than its matrices.
    """

    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)
    of_matrices: torch.dtype | None = None

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the dtype of parameter ``name``. Integers stay as they are."""
        held = self.by_name.get(name, self.of_matrices if tensor.ndim > 1 else None)
        if held is None or not (held.is_floating_point and tensor.is_floating_point()):
            return tensor
        return tensor.to(held)


def changed_weights(
    weights: Iterable[tuple[str, Tensor]],
    sums: Fingerprint,
    dtypes: HeldDtypes,
    *,
    start: Mapping[str, str] | None = None,
    all_of_them: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``weights`` that an engine lacks, in its dtypes.

    Args:
        weights: Tensors by name.
        sums: Checksums of what was sent, by name. It gets the checksum of each of the ``weights``
            before the tensor is yielded.
        dtypes: The dtypes that the engine holds.
        start: Checksums of what the engine holds of weights that are not in ``sums``.
        all_of_them: Yield the others too.
    """
    for name, tensor in weights:
        tensor = dtypes.convert(name, tensor.detach())
        total = checksum(tensor)
        before = sums.get(name, (start or {}).get(name))
        sums[name] = total
        if all_of_them or total != before:
            yield name, tensor
