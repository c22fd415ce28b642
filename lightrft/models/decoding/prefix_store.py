"""Keys and values of finished prompts and responses, for prompts that begin with their tokens.

The attention plan of such prompts computes only the rest of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lightrft.models.decoding.plans import Rectangle
from lightrft.utils.device_transfer import to_device

LayerCache = tuple[Tensor, Tensor]
"""Keys and values ``[H_kv, T, d]`` of a layer."""
SHORTEST = 8
"""Tokens below which a prefix is computed again: copying it would cost as much."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a prompt, with their keys and values.

    Attributes:
        length: Number of tokens. The first so many columns of ``layers`` are theirs.
        layers: Keys and values by the index of the layer.
    """

    length: int
    layers: Mapping[int, LayerCache]


class PrefixStore:
    """Keys and values of the sequences that were used last.

    Attributes:
        held: Number of tokens of all sequences.
    """

    def __init__(self) -> None:
        self.held = 0
        # by their tokens, the least recently used one first
        self._kept: dict[bytes, tuple[np.ndarray, Mapping[int, LayerCache]]] = {}

    def clear(self) -> None:
        """Drop everything, since the weights or the memory are needed for something else."""
        self._kept.clear()
        self.held = 0

    def shrink(self, room: int) -> None:
        """Drop the least recently used sequences until at most ``room`` tokens are held."""
        while self._kept and self.held > room:
            self._drop(next(iter(self._kept)))

    def put(self, token_ids: Sequence[int], layers: Mapping[int, LayerCache], room: int) -> None:
        """Keep a sequence. Sequences that it begins with are dropped.

        Args:
            token_ids: ``T`` tokens.
            layers: Keys and values ``[H_kv, T, d]`` by layer.
            room: Most tokens of all sequences. The least recently used ones are dropped.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        if not SHORTEST <= len(ids) <= room:
            return
        for key, (other, _) in list(self._kept.items()):
            if common_length(ids, other) == len(other):
                self._drop(key)
        self._kept[ids.tobytes()] = ids, layers
        self.held += len(ids)
        self.shrink(room)

    def longest(self, token_ids: Sequence[int]) -> Prefix | None:
        """Return the longest kept prefix of a prompt, without its last token, or ``None``.

        The last token is always computed, since the logits after it are needed.
        """
        ids = np.asarray(token_ids[:-1], dtype=np.int64)
        shared = {key: common_length(ids, other) for key, (other, _) in self._kept.items()}
        key = max(shared, key=shared.__getitem__, default=None)
        if key is None or shared[key] < SHORTEST:
            return None
        # the newest again
        self._kept[key] = found = self._kept.pop(key)
        return Prefix(shared[key], found[1])

    def _drop(self, key: bytes) -> None:
        ids, _ = self._kept.pop(key)
        self.held -= len(ids)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of equal tokens that both ``[n]`` and ``[m]`` begin with."""
    n = min(len(one), len(other))
    unequal = np.flatnonzero(one[:n] != other[:n])
    return int(unequal[0]) if len(unequal) else n


class ResumedPrefillPlan:
    """The rests of prompts, one after another. Each attends to its prefix and to itself.

    Keys and values of prefix and rest are stored in the slot of the prompt.

    Args:
        store: Keys and values of prompts.
        first: Slot of the first prompt.
        prefixes: The prefix of each prompt.
        lengths: ``[P]``. Number of tokens of each prompt with its prefix.
        device: Device of the model.

    Attributes:
        positions: ``[1, T]``. Position of each token in its prompt.
        last: ``[P]``. Index of the last token of each prompt.
    """

    def __init__(
        self,
        store: Rectangle,
        first: int,
        prefixes: Sequence[Prefix],
        lengths: np.ndarray,
        device: torch.device,
    ) -> None:
        self._store, self._first, self._prefixes = store, first, prefixes
        starts = np.array([prefix.length for prefix in prefixes], dtype=np.int64)
        rests = lengths - starts
        self._runs = list(zip((np.cumsum(rests) - rests).tolist(), rests.tolist()))
        places = np.concatenate([np.arange(a, b) for a, b in zip(starts, lengths)])
        self.positions = to_device(torch.from_numpy(places), device)[None]
        self.last = to_device(torch.from_numpy(np.cumsum(rests) - 1), device)
        self._shown: dict[tuple[int, int | None], Tensor] = {}

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
        stores = self._store.layer(layer, key, value)
        parts = []
        for number, (prefix, (start, length)) in enumerate(zip(self._prefixes, self._runs)):
            end = prefix.length + length
            held = []
            for store, old, new in zip(stores, prefix.layers[layer], (key, value)):
                slot = store[self._first + number]
                slot[:, : prefix.length] = old[:, : prefix.length]
                slot[:, prefix.length : end] = new[0, :, start : start + length]
                held.append(slot[None, :, :end])
            shown = self._mask(number, window)
            own = query[:, :, start : start + length]
            parts.append(_attention(own, held[0], held[1], shown, scale, softcap))
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _mask(self, number: int, window: int | None) -> Tensor:
        """Return ``[n, m]`` bool, the keys that the tokens of a prompt attend to."""
        found = self._shown.get((number, window))
        if found is None:
            start, length = self._runs[number]
            at = self.positions[0, start : start + length, None]
            columns = torch.arange(self._prefixes[number].length + length, device=at.device)
            found = columns <= at
            if window is not None:
                found &= columns > at - window
            self._shown[number, window] = found
        return found


def _attention(
    query: Tensor, key: Tensor, value: Tensor, shown: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return ``[1, H, n, d_v]`` of queries ``[1, H, n, d]`` over keys ``[1, H_kv, m, d]``."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=shown, scale=scale, enable_gqa=True
        )
    times = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(times, 1).transpose(2, 3) * scale
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~shown, -torch.inf)
    # in float32 as in transformers' own attention
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return weights @ value.repeat_interleave(times, 1)
