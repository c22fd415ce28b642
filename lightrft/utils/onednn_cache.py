"""Limit on the number of compiled matrix products that a process caches on CPU.

oneDNN compiles a half-precision matrix product once per shape. oneDNN and PyTorch each cache up to
1024 compiled products by default. This takes up to 0.6 GiB when response lengths vary. One pass
uses a few dozen shapes, the same in every layer, so both caches are limited to 64.
"""

from __future__ import annotations

import os

import torch

CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
KEPT = 64
BYTES = 0.92 * 2**20
"""Memory of one product in both caches, in bytes, including fragmentation.

Measured over caches of 8 to 128 with 936 shapes.
"""


def bound_products() -> None:
    """Limit both caches of this process to ``KEPT`` products, unless the environment sets a limit.

    Has no effect after the first product.
    """
    for name in CACHES:
        os.environ.setdefault(name, str(KEPT))


def products_bytes(dtype: torch.dtype) -> float:
    """Return an upper bound of the memory of both caches in bytes, for weights of ``dtype``.

    Returns 0 if this CPU does not compile products of ``dtype``.
    """
    compiled = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    if compiled is None or not getattr(torch.ops.mkldnn, compiled)():
        return 0.0
    # ``BYTES`` covers both caches, so the larger limit gives an upper bound.
    return max(int(os.environ.get(name, KEPT)) for name in CACHES) * BYTES
