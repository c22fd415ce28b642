"""One attention layer over a row whose tokens are sliced over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.distributed.process_group import ModelParallelGroup
from lightrft.models.attention.segment_plan import SegmentPlan
from lightrft.models.attention.ulysses import check_heads, exchange
from lightrft.utils.errors import ModelError


class Slices:
    """The ranks of ``group`` and the attention plan of the row that they shard.

    Layers of one call share the plan.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._positions: Tensor | None = None
        self._plan: SegmentPlan | None = None

    @property
    def size(self) -> int:
        """Number of ranks. It is 1 until a process group exists."""
        # asked again each time: the process group may be created after the patch
        running = dist.is_available() and dist.is_initialized()
        return dist.get_world_size(self.group) if running else 1

    def plan(self, positions: Tensor, rows: int) -> SegmentPlan:
        """Build the attention plan of ``rows`` concatenated rows.

        ``positions [1 or B, t]`` belong to this rank's tokens.
        """
        # all layers of one model call pass the same positions object
        if self._plan is None or self._positions is not positions:
            own = positions.expand(rows, -1).contiguous()
            every = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(every, own, group=self.group)
            whole = torch.cat(every, 1)
            begins = whole == 0
            # a row may begin in the middle of a sample
            begins[:, 0] = True
            starts = [*begins.flatten().nonzero()[:, 0].tolist(), whole.numel()]
            runs = [(a, b - a) for a, b in itertools.pairwise(starts)]
            self._positions, self._plan = positions, SegmentPlan(runs, [], whole.flatten())
        return self._plan


def attend(
    layer: Any,
    slices: Slices,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    position_ids: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute ``layer``'s attention for this rank's slice.

    Return ``[B, t, H]``, and ``None`` for the attention weights.

    Args:
        layer: The attention layer.
        slices: The group and its plan.
        rotate: Applies rotary embeddings to query and key.
        hidden_states: ``[B, t, H]``, this rank's slice of each row.
        position_embeddings: Cosines and sines ``[B, t, d]`` of this rank's tokens.
        attention_mask: Not read; the plan follows from the positions.
        past_key_values: Must be ``None``.
        position_ids: ``[B, t]``, positions of this rank's tokens within their samples.

    Raises:
        ModelError: There are no positions, there is a cache or dropout, or the ranks do not divide
            the heads.
    """
    if position_ids is None:
        raise ModelError(
            "the patched attention needs position_ids: pass those of this rank's tokens"
        )
    copies = _check(layer, slices, past_key_values)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (
        p(hidden_states).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for p in projections
    )
    query, key = rotate(query, key, *position_embeddings)
    repeated = [x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)]
    flat = [_gather_rows(x, slices) for x in (query, *repeated)]
    window = layer.sliding_window if "sliding_window" in vars(layer) else None
    plan = slices.plan(position_ids, len(hidden_states))
    out = plan.attend(int(layer.layer_idx), *flat, scale=layer.scaling, softcap=None, window=window)
    return layer.o_proj(_scatter_rows(out, slices, len(hidden_states))), None


def _check(layer: Any, slices: Slices, cache: object) -> int:
    """Return the number of copies of each key head that the ranks need."""
    if cache is not None:
        raise ModelError("the patched attention has no cache: pass use_cache=False")
    if layer.training and layer.attention_dropout:
        problem = f"attention_dropout = {layer.attention_dropout}"
        raise ModelError(f"{problem}: the patched attention has none; set it to 0")
    return check_heads(layer.config, ModelParallelGroup(0, slices.size))


def _gather_rows(x: Tensor, slices: Slices) -> Tensor:
    """Exchange ``[B, h, t, d]`` of this rank's tokens for ``[1, h / n, B * L, d]`` of all
    tokens."""
    n = slices.size
    heads = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()  # [n, B, h / n, t, d]
    got = exchange(heads, slices.group)  # [n, ...], a slice of tokens from each rank
    return got.permute(2, 1, 0, 3, 4).flatten(1, 3).unsqueeze(0)


def _scatter_rows(out: Tensor, slices: Slices, rows: int) -> Tensor:
    """Exchange ``[1, B * L, h / n, d]`` of all tokens for ``[B, t, h * d]`` of this rank's
    tokens."""
    # [n, B, t, h / n, d]
    tokens = out[0].unflatten(0, (rows, slices.size, -1)).transpose(0, 1).contiguous()
    got = exchange(tokens, slices.group)  # [n, ...], a block of heads from each rank
    return got.permute(1, 2, 0, 3, 4).flatten(2)
