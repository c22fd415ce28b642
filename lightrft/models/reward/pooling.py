"""Pooling: the states of a row's tokens become one state.

Rows are concatenated without padding. The pooled state of a row does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.actor import HiddenStates
from lightrft.models.attention.layouts import Packed
from lightrft.models.logprobs import wide
from lightrft.models.reward.heads import LearnedVector, WideLinear
from lightrft.types import Batch
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ModelError
from lightrft.utils.seeding import seeded_weights, torch_generator

HEADS_OF_POOLING = 4
QUERY_STD = 0.02


class RaggedAttentionPooling(nn.Module):
    """Attention of one learned query to all tokens of a row, as in LightRFT.

    Keys and values are linear in the states, without bias. There are no projections of the query
    and of the output. The softmax runs over the row's tokens, with scale ``d ** -0.5`` for heads of
    width ``d``.

    Args:
        width: Width H of the states.
        seed: Seed of the initial weights.

    Raises:
        ModelError: The width is not a multiple of the number of heads.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        if width % HEADS_OF_POOLING:
            raise ModelError(
                f"reward_model.pooling = 'attention' has {HEADS_OF_POOLING} heads, which do not "
                f"divide the model's width {width}; take last, mean or token"
            )
        drawn = torch.randn(width, generator=torch_generator(seed))
        self.query = LearnedVector(drawn * QUERY_STD)
        with seeded_weights(seed):
            self.k = WideLinear(width, width, bias=False)
            self.v = WideLinear(width, width, bias=False)

    def forward(self, read: HiddenStates, lengths: Tensor) -> Tensor:
        """Return the pooled states ``[B, H]`` of all rows, on every rank.

        Args:
            read: States ``[M, H]`` of the tokens of all rows, or this rank's part of them.
            lengths: ``[B]`` tokens of each row.
        """
        split = (HEADS_OF_POOLING, -1)
        keys = self.k(read.states).unflatten(-1, split)
        query = self.query().unflatten(0, split)
        own = (keys * query).sum(-1) * keys.shape[-1] ** -0.5
        # only now are parts of ranks joined: each rank has the gradient of its own tokens
        logits = read.part.spread(own)
        values = read.part.spread(self.v(read.states)).unflatten(-1, split)
        weights = _row_softmax(logits, lengths)
        return row_sums((weights[..., None] * values).flatten(1), lengths)


def mean_pooling(read: HiddenStates, lengths: Tensor) -> Tensor:
    """Return the mean ``[B, H]`` of the states of each row, on every rank.

    It is computed in float32 at least.

    Args:
        read: States ``[M, H]`` of the tokens of all rows, or this rank's part of them.
        lengths: ``[B]`` tokens of each row.
    """
    states = read.part.spread(read.states.to(wide(read.states.dtype)))
    return row_sums(states, lengths) / lengths[:, None]


def row_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum ``[B, C]`` over each row of ``values [M, C]``; ``lengths [B]`` are positive.

    Each row is summed by itself, so other rows do not change the last bits.
    """
    if not len(lengths):
        # empty, and still a function of the states, so that zero gradients flow
        return values[:0]
    return _reduced(values, "sum", lengths)


def _reduced(values: Tensor, by: str, lengths: Tensor) -> Tensor:
    # torch's type stubs lack the function
    reduce: Any = vars(torch)["segment_reduce"]
    # unsafe: the check of lengths would wait for the device
    return reduce(values, by, lengths=lengths, axis=0, unsafe=True)


def _row_softmax(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return the softmax of ``logits [M, h]`` over the tokens of each row."""
    if not len(lengths):
        return logits
    row = torch.repeat_interleave(
        torch.arange(len(lengths), device=logits.device), lengths, output_size=len(logits)
    )
    highest = _reduced(logits.detach(), "max", lengths)
    weights = (logits - highest[row]).exp()
    return weights / row_sums(weights, lengths)[row]


def prompt_ends(packed: Packed, batch: Batch) -> Tensor:
    """Return the places ``[B]`` of the last prompt token of each row in the call ``packed``.

    Args:
        packed: A call that computes the last token of each response.
        batch: Prompts and responses of the call.
    """
    assert packed.final is not None
    read = torch.cat([packed.gather, packed.final])
    index = []
    start = 0
    for row, length in enumerate(batch.responses.sizes):
        # the prompt's last state predicts the first response token, or is the row's last state
        index.append(start if length else len(packed.gather) + row)
        start += length
    return read[to_device(torch.tensor(index, dtype=torch.long), read.device)]


def row_places(packed: Packed, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the places ``[M]`` of all tokens of each row, and the lengths ``[B]`` of the rows.

    A row is a prompt with its response. Rows that share a prompt share its places.

    Args:
        packed: A call that computes the last token of each response.
        batch: Prompts and responses of the call.
    """
    assert packed.final is not None
    prompts = batch.prompts.sizes
    pieces = []
    for p, length in zip(batch.groups, batch.responses.sizes):
        pieces += [prompts[p], length]
    # in every layout, the tokens of a prompt and of a response are consecutive
    ends = torch.stack([prompt_ends(packed, batch), packed.final], 1).flatten()
    sizes = torch.tensor(pieces, dtype=torch.long)
    piece = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    within = torch.arange(len(piece)) - (sizes.cumsum(0) - sizes)[piece]
    back = within - sizes[piece] + 1
    device = ends.device
    places = ends[to_device(piece, device)] + to_device(back, device)
    return places, to_device(sizes.view(-1, 2).sum(1), device)
