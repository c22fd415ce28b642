"""Explicit patches of transformers classes, for loops that call transformers models directly.

lightrft's trainers need none of them. Importing this package changes nothing; each ``apply_*``
function logs its change.
"""

from __future__ import annotations

from lightrft.models.monkey_patch.apply import (
    MONKEY_PATCH_FUNC,
    apply_monkey_patch_to_llama,
    apply_monkey_patch_to_qwen2,
    remove_monkey_patches,
)
from lightrft.models.monkey_patch.hf_generate_patch import apply_monkey_patch_to_generation_mixin

__all__ = [
    "MONKEY_PATCH_FUNC",
    "apply_monkey_patch_to_generation_mixin",
    "apply_monkey_patch_to_llama",
    "apply_monkey_patch_to_qwen2",
    "remove_monkey_patches",
]
