"""Attention by plan, passed as a keyword through the model's own forward, without a T x T mask.

``register()`` registers one attention function with transformers under ``NAME``. A model whose text
attention is set to ``NAME`` is called as ``model(..., attention_plan=plan)``. Each layer's
attention is then ``plan.attend(...)``.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from lightrft.utils.errors import ModelError

NAME = "lightrft"


class AttentionPlan(Protocol):
    """The attention pattern of one model call."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Return the attention output ``[S, T, H, d]`` of one layer.

        Args:
            layer: Index of the layer.
            query: ``[S, H, T, d]``, after rotary embedding.
            key: ``[S, H_kv, T, d]``, after rotary embedding.
            value: ``[S, H_kv, T, d]``.
            scale: Factor of the scores.
            softcap: Soft-cap of the scores. ``None`` for none.
            window: Number of keys that a query attends to, itself included. ``None`` is unlimited.
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
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Call the plan's ``attend``. transformers calls this function in every text attention layer.

    Args:
        module: The attention layer.
        query: ``[S, H, T, d]``.
        key: ``[S, H_kv, T, d]``.
        value: ``[S, H_kv, T, d]``.
        attention_mask: Not read; transformers passes it.
        scaling: Factor of the scores. ``None`` for ``d ** -0.5``.
        sliding_window: Number of keys that a query attends to. ``None`` is unlimited.
        softcap: Soft-cap of the scores. ``None`` for none.
        attention_plan: The plan of this model call.
        dropout: Probability of dropping a weight of attention. A plan computes no dropout.

    Raises:
        RuntimeError: The model was called without a plan.
        ModelError: The dropout is not 0.
    """
    if attention_plan is None:
        raise RuntimeError(
            "the model was called without attention_plan while its attention is set to 'lightrft'"
        )
    if dropout:
        raise ModelError(
            f"the model drops {dropout:g} of its attention weights, which only padded rows can do; "
            "set model.layout=padded, or model.dropout=false"
        )
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
    return out.contiguous(), None  # contiguous: some families view the result in another shape


def register() -> None:
    """Register ``NAME`` with transformers.

    It has no mask function, so transformers builds no mask for it. With one, transformers would
    first search the positions for packed samples, and the host would wait for the device in every
    call.
    """
    AttentionInterface.register(NAME, attention)
