"""The attention plan of prompts whose first tokens have keys and values already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lightrft.models.decoding.plans import Rectangle
from lightrft.models.decoding.prefix_store import Prefix
from lightrft.utils.device_transfer import to_device


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
