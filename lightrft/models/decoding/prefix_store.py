"""Keys and values of finished prompts and responses, for prompts that begin with their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

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
