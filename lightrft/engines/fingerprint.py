"""Checksums of weights, which prove that two processes hold the same tensors or show changes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lightrft.engines.base import Fingerprint

CHECKSUM_PART = 1 << 22
# by bytes per element. Sums of integers are exact in any order, unlike sums of floats.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> str:
    """Return type, shape and two sums over the raw bits, exact on any device.

    One sum covers all elements. The other is a CRC of about 4096 elements, so it depends on their
    order.
    """
    return checksums([("", tensor)])[""]


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """Return the ``checksum`` of each of the named ``tensors``.

    The host waits once per device, not once per tensor.
    """
    made: dict[torch.device, list[tuple[str, str, Tensor, Tensor]]] = {}
    for name, tensor in tensors:
        # A sharded tensor (DTensor) counts by this rank's shard alone.
        tensor = getattr(tensor, "to_local", lambda t=tensor: t)()
        bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
        # In parts: a sum in another dtype first converts its input, which for a whole embedding is
        # twice its size.
        sums = torch.stack([part.sum(dtype=torch.int64) for part in bits.split(CHECKSUM_PART)])
        sampled = bits[:: max(1, bits.numel() // 4096)].contiguous()
        about = f"{tensor.dtype}{list(tensor.shape)}"
        made.setdefault(tensor.device, []).append((name, about, sums, sampled))
    found: Fingerprint = {}
    for rows in made.values():
        raw = torch.cat([x.view(torch.uint8) for _, _, *both in rows for x in both]).cpu().numpy()
        start = 0
        for name, about, sums, sampled in rows:
            middle, end = start + sums.nbytes, start + sums.nbytes + sampled.nbytes
            total = sum(raw[start:middle].view(np.int64).tolist())
            found[name] = f"{about}:{total:x}:{zlib.crc32(raw[middle:end].tobytes()):x}"
            start = end
    return found


def dtype_of(total: str) -> torch.dtype:
    """Return the dtype of the tensor that ``total`` is the checksum of."""
    return getattr(torch, total.partition("[")[0].removeprefix("torch."))


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
