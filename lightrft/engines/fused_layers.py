"""Layers that vLLM and SGLang fuse into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parts of each fused layer, in order. Classes of vLLM may list others."""
