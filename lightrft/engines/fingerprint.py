"""Checksums of weights, which prove that two processes hold the same tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
