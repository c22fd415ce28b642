"""Attention by plan: what each token may see travels as a keyword through the model's own forward, never as a T x T mask.

``register()`` files one attention function with transformers under ``NAME``. A model whose text attention is set to ``NAME``
is called as ``model(..., attention_plan=plan)``, and each layer's attention becomes ``plan.attend(...)``.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "lightrft"


class AttentionPlan(Protocol):
    """What one call of the model attends to."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, softcap: float | None, window: int | None
    ) -> Tensor:
        """``query [S, H, T, d]``, ``key``/``value [S, H_kv, T, d]`` (after rotary) to ``[S, T, H, d]``.

        ``window`` counts the keys that a query sees, itself included; ``None`` is unlimited.
        """
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every text attention layer."""
    if attention_plan is None:
        raise RuntimeError("the model was called without attention_plan while its attention is set to 'lightrft'")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_plan.attend(
        int(module.layer_idx),  # ty: ignore[invalid-argument-type]
        query,
        key,
        value,
        scale=scale,
        softcap=softcap,
        window=sliding_window,
    )
    return out.contiguous(), None  # some families view the result in another shape


def register() -> None:
    """Make ``NAME`` known to transformers.

    It has no mask function, so transformers makes no mask for it. With one, transformers would first read the positions for
    packed samples, and the host would wait for the device in every call of the model.
    """
    AttentionInterface.register(NAME, attention)
