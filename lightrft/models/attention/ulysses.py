"""Sequence parallelism by exchange of heads (Ulysses, arXiv 2309.14509).

A group of ranks shards the tokens of one row. Outside of attention each token is independent, so
each rank holds only its tokens. For attention the ranks exchange tokens for heads. Each rank then
attends over the whole row in its block of heads, by the unchanged plan of the row. A second
exchange returns each output to the rank that holds its token. Rank ``i % size`` holds token ``i``,
so prompts and responses are spread evenly.

Each rank computes the whole loss, and the gradient through its tokens only. The sum over ranks is
the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from lightrft.distributed.process_group import ModelParallelGroup
from lightrft.models.attention.interface import AttentionPlan
from lightrft.utils.errors import ModelError


@dataclass(frozen=True, slots=True)
class SequencePart:
    """This rank's part of ``count`` items of a sequence-parallel group.

    ``which [n]`` are its indices, ``None`` for all.
    """

    ranks: ModelParallelGroup
    count: int
    which: Tensor | None = None

    def of(self, column: Tensor) -> Tensor:
        """Return this rank's rows ``[n, ...]`` of ``column [count, ...]``."""
        return column if self.which is None else column.index_select(0, self.which)

    def whole(self, own: Tensor) -> Tensor:
        """Gather the column ``[count, ...]`` from each rank's ``own [n, ...]``, on every rank.

        The gradient flows to ``own`` alone, since every rank computes the same loss from the
        column.
        """
        if self.which is None:
            return own
        return _Sum.apply(self._column(own, self.which), self.ranks.group)

    def spread(self, own: Tensor) -> Tensor:
        """Gather as ``whole`` does, for a column of which each rank uses its own rows alone.

        The gradient is summed over ranks, since each rank computes a part of it.
        """
        if self.which is None:
            return own
        return _SumBothWays.apply(self._column(own, self.which), self.ranks.group)

    def _column(self, own: Tensor, which: Tensor) -> Tensor:
        # every entry is set by one rank and 0 elsewhere, so the sum over ranks is a gather
        return own.new_zeros(self.count, *own.shape[1:]).index_copy(0, which, own)

    @staticmethod
    def rows(ranks: ModelParallelGroup, count: int, device: torch.device) -> SequencePart:
        """Return this rank's share of rows, which are dealt to the ranks of a group in turn.

        Args:
            ranks: The group.
            count: Number of rows.
            device: Device of the indices.
        """
        if ranks.size == 1:
            return SequencePart(ranks, count)
        which = torch.arange(ranks.place, count, ranks.size, device=device)
        return SequencePart(ranks, count, which)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of ``tokens`` tokens, of which rank ``i % size`` holds the i-th.

    It is padded so that all ranks hold equally many.
    """

    ranks: ModelParallelGroup
    tokens: int

    @property
    def each(self) -> int:
        """Tokens per rank, including padding."""
        return -(-self.tokens // self.ranks.size)

    def own(self, x: Tensor, fill: int = 0) -> Tensor:
        """Return this rank's columns ``[..., each]`` of ``x [..., tokens]``."""
        full = F.pad(x, (0, self.each * self.ranks.size - self.tokens), value=fill)
        return full[..., self.ranks.place :: self.ranks.size].contiguous()

    def reads(self, places: Tensor) -> tuple[SequencePart, Tensor]:
        """Return the subset of ``places [N]`` that this rank holds.

        Also return their indices ``[n]`` among its tokens.
        """
        which = (places % self.ranks.size == self.ranks.place).nonzero()[:, 0]
        return SequencePart(self.ranks, len(places), which), places[which] // self.ranks.size


@dataclass(slots=True)
class Exchanged:
    """``AttentionPlan`` of one rank's tokens of ``row``.

    ``plan``, of the whole row, attends in this rank's heads.
    """

    plan: AttentionPlan
    row: Row

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
        """Return ``[1, t, H, d]`` for this rank's tokens: see ``AttentionPlan.attend``.

        Args:
            layer: Index of the layer.
            query: ``[1, H, t, d]`` of this rank's tokens.
            key: ``[1, H_kv, t, d]`` of this rank's tokens.
            value: ``[1, H_kv, t, d]`` of this rank's tokens.
            scale: Factor of the scores.
            softcap: Soft-cap of the scores. ``None`` for none.
            window: Number of keys that a query attends to, itself included. ``None`` is unlimited.
        """
        size = self.row.ranks.size
        # with fewer key heads than ranks, several ranks read the same key head
        copies = _copies(query.shape[1], key.shape[1], self.row.ranks)
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        # [size, h, t, d], a block of heads for each rank
        parts = [x[0].unflatten(0, (size, -1)) for x in (query, key, value)]
        sizes = [part[0].numel() for part in parts]
        # one exchange for all three: each exchange waits for every rank
        sent = torch.cat([part.reshape(size, -1) for part in parts], 1)
        got = exchange(sent, self.row.ranks.group).split(sizes, 1)
        rows = []
        for x, part in zip(got, parts):
            # [h, t, size, d]: token i of the row is token i // size of rank i % size
            by_token = x.view_as(part).permute(1, 2, 0, 3)
            rows.append(by_token.flatten(1, 2)[None, :, : self.row.tokens])
        # [tokens, h, d]
        out = self.plan.attend(layer, *rows, scale=scale, softcap=softcap, window=window)[0]
        padding = self.row.each * size - self.row.tokens
        # [t, size, h, d]
        out = F.pad(out, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, size))
        # [size, t, h, d], a block of heads from each
        back = exchange(out.transpose(0, 1).contiguous(), self.row.ranks.group)
        return back.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def check_heads(config: PreTrainedConfig, ranks: ModelParallelGroup) -> int:
    """Return the copies of each key head that sharding over ``ranks`` needs.

    ``config`` is the config of the language model. Raises ``ModelError`` if they cannot shard the
    heads that ``ranks.tensor`` leaves to each rank.
    """
    heads: object = None
    keys: object = None
    # not by to_dict(), which does not know the names of a config's attribute_map
    if hasattr(config, "num_attention_heads"):
        heads = config.num_attention_heads
    if hasattr(config, "num_key_value_heads"):
        keys = config.num_key_value_heads
    keys = keys or heads
    if not isinstance(heads, int) or not isinstance(keys, int):
        problem = f"model type {config.model_type!r} does not say how many heads it has"
        raise ModelError(f"strategy.sequence_parallel = {ranks.size}: {problem}; set it to 1")
    return _copies(heads // ranks.tensor, keys // ranks.tensor, ranks)


def _copies(heads: int, keys: int, ranks: ModelParallelGroup) -> int:
    """Return the number of copies of each key head with which every rank gets equally many query
    heads and their key heads."""
    size = ranks.size
    copies = size // math.gcd(keys, size)
    if heads % size == 0 and heads % (keys * copies) == 0:
        return copies
    left = "of the model"
    if ranks.tensor > 1:
        left = f"{left} that strategy.tensor_parallel = {ranks.tensor} leaves to each rank"
    fits = [1]
    for smaller in range(2, size):
        own_copies = smaller // math.gcd(keys, smaller)
        if heads % smaller == 0 and heads % (keys * own_copies) == 0:
            fits.append(smaller)
    problem = f"does not divide the {heads} heads {left} (with {keys} of keys)"
    way_out = f"set it to {' or '.join(map(str, fits))}"
    raise ModelError(f"strategy.sequence_parallel = {size} {problem}; {way_out}")


def exchange(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send entry ``i`` of ``x [size, ...]`` to rank ``i`` of ``group``.

    Return one entry from each rank. Differentiable.
    """
    return _Exchange.apply(x, group)


class _Exchange(torch.autograd.Function):
    """All-to-all of ``x [size, ...]``, one entry per rank. Its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0].contiguous(), ctx.group), None


def _exchanged(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    got = torch.empty_like(x)
    dist.all_to_all_single(got, x, group=group)
    return got


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # all_reduce writes in place, and autograd may still need ``x``
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # no sum over ranks: each computes the same loss, so it would count ``size`` times
        return grads[0], None


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
