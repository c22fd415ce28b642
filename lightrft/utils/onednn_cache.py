"""How many matrix products a process keeps compiled for a CPU.

oneDNN compiles a product of half-precision matrices anew for each shape, and two caches keep what was compiled: its own, and one by which
torch finds what it asked of it. Either holds 1024 unless told otherwise, which is up to 0.6 GiB once answers have had as many lengths. A
pass asks for each shape in every layer, and for some dozens of shapes in all, so that far fewer are enough.
"""

from __future__ import annotations

import os

import torch

CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
KEPT = 64
BYTES = 0.92 * 2**20
"""Of a product that both caches keep, with what lies free between those that went: measured over caches of 8 to 128, with 936 shapes."""


def bound_products() -> None:
    """Have this process keep no more than ``KEPT``, unless its environment says how many. Acts until the first product."""
    for name in CACHES:
        os.environ.setdefault(name, str(KEPT))


def products_bytes(dtype: torch.dtype) -> float:
    """What those products take in a process with weights of ``dtype`` on a CPU like this one, which compiles them or not."""
    compiled = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if compiled is None or not getattr(torch.ops.mkldnn, compiled)():
        return 0.0
    return max(int(os.environ.get(name, KEPT)) for name in CACHES) * BYTES
