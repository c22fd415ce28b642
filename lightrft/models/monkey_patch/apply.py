"""Ulysses sequence parallelism (arXiv 2309.14509) in the attention layers of Llama and Qwen2."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightrft.models.monkey_patch.replaced import original, remove_monkey_patches, replace
from lightrft.models.monkey_patch.ulysses import Slices, attend

__all__ = [
    "MONKEY_PATCH_FUNC",
    "apply_monkey_patch_to_llama",
    "apply_monkey_patch_to_qwen2",
    "remove_monkey_patches",
]


def apply_monkey_patch_to_llama(group: dist.ProcessGroup | None = None) -> None:
    """Make every Llama attention layer shard the tokens of a row over the ranks of ``group``.

    Each of ``n`` ranks calls the model with an equal slice of each row, in the order of ranks.
    ``input_ids`` and ``position_ids`` are ``[B, L / n]``. Attention exchanges tokens for heads,
    attends over the full row in ``1 / n`` of the heads, and exchanges back. Attention is causal
    within a sample. A sample begins at each position 0, so packed rows need no mask, and masks are
    not read. ``None`` stands for the default process group. With one rank, the layers compute as
    before.

    Logs a warning. The layers raise ``ModelError`` for a cache, for dropout and for head counts
    that the ranks do not divide.
    """
    _patch("transformers.models.llama.modeling_llama", "LlamaAttention", group)


def apply_monkey_patch_to_qwen2(group: dist.ProcessGroup | None = None) -> None:
    """Patch every Qwen2 attention layer in the same way as ``apply_monkey_patch_to_llama``."""
    _patch("transformers.models.qwen2.modeling_qwen2", "Qwen2Attention", group)


MONKEY_PATCH_FUNC: dict[str, Callable[..., None]] = {
    "llama": apply_monkey_patch_to_llama,
    "qwen2": apply_monkey_patch_to_qwen2,
}
"""The patch of each model type."""


def _patch(module: str, name: str, group: dist.ProcessGroup | None) -> None:
    modeling = import_module(module)
    owner = getattr(modeling, name)
    # not the current forward, which an earlier call may have patched for another group
    own = original(owner, "forward")
    slices = Slices(group)

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> object:
        if slices.size == 1:
            return own(self, hidden_states, *args, **kwargs)
        return attend(self, slices, modeling.apply_rotary_pos_emb, hidden_states, *args, **kwargs)

    replace(
        owner, "forward", forward, "attention shares each row among the ranks of a process group"
    )
