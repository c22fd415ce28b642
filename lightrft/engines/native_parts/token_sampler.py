"""Sampling of the next token of each response, by the settings of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.engines import sampling as draws
from lightrft.utils.device_transfer import to_device


class Places(NamedTuple):
    """The places whose tokens are sampled, one for each row of logits.

    Attributes:
        keys: ``[T]`` uint64. Key of the response's seed.
        steps: ``[T]``. Number of response tokens before the place.
        greedy: ``[T]`` bool. The request asks for the most likely token.
    """

    keys: np.ndarray
    steps: np.ndarray
    greedy: np.ndarray


class TokenSampler:
    """Samples tokens. Each depends on its logits, its seed and its place alone.

    Args:
        sampling: The sampling settings.
        ends: ``[E]``. Token ids that end a response.
        device: Device of the logits.
        banned: Token ids that are never sampled.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        ends: np.ndarray,
        device: torch.device,
        banned: Sequence[int] = (),
    ) -> None:
        self._sampling, self._device = sampling, device
        self._end_ids = to_device(torch.from_numpy(ends), device)
        self._banned = to_device(torch.tensor(banned, dtype=torch.long), device)
        # temperature 0 turns every filter off
        self._likeliest = sampling.model_copy(update={"temperature": 0.0})
        self._first = draws.of_first_token(sampling)

    def sample(
        self,
        logits: Tensor,
        places: Places,
        seen: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[T]`` and their log-probs ``[T]``.

        Args:
            logits: ``[T, V]``.
            places: Where the tokens are sampled.
            seen: ``[T, V]`` bool, tokens before each place. ``None`` without a repetition penalty.
            allowed: ``[T, V]`` bool, tokens that a constraint allows. ``None`` allows all.
        """
        if len(self._banned):
            # Not in place: a session may keep the logits.
            logits = logits.index_fill(1, self._banned, -torch.inf)
        suppress = self._suppressed(logits, places.steps)
        if allowed is not None:
            suppress = _banned(allowed, suppress)
        u = to_device(torch.from_numpy(draws.uniforms(places.keys, places.steps)), self._device)
        main, *others = self._kinds(places)
        tokens, logprobs = _sample(logits, main[0], u, seen, suppress)
        # one call may mix several kinds: the rarer ones replace tokens sampled for them
        for settings, chosen in others:
            at = to_device(torch.from_numpy(np.flatnonzero(chosen)), self._device)
            part = [None if mask is None else mask[at] for mask in (seen, suppress)]
            tokens[at], logprobs[at] = _sample(logits[at], settings, u[at], *part)
        return tokens, logprobs

    def _kinds(self, places: Places) -> list[tuple[SamplingConfig, np.ndarray]]:
        """Return the settings in use with the places of each, the most frequent first."""
        greedy = places.greedy
        if not greedy.any() and self._sampling.first_token_temperature is None:
            return [(self._sampling, ~greedy)]
        first = np.zeros_like(greedy)
        if self._sampling.first_token_temperature is not None:
            first = (places.steps == 0) & ~greedy
        kinds = [
            (self._sampling, ~(greedy | first)),
            (self._likeliest, greedy),
            (self._first, first),
        ]
        used = [kind for kind in kinds if kind[1].any()]
        return sorted(used, key=lambda kind: -int(kind[1].sum()))

    def _suppressed(self, logits: Tensor, steps: np.ndarray) -> Tensor | None:
        """Return ``[T, V]`` bool, the ends that places below ``min_new_tokens`` must not have."""
        least = self._sampling.min_new_tokens
        if not least or not len(self._end_ids):
            return None
        early = steps < least
        if not early.any():
            return None
        # only the places travel: a mask from the host would be one byte per logit
        rows = to_device(torch.from_numpy(np.flatnonzero(early)), self._device)
        mask = torch.zeros(logits.shape, dtype=torch.bool, device=self._device)
        mask[rows.unsqueeze(1), self._end_ids] = True
        return mask


def _banned(allowed: Tensor, suppress: Tensor | None) -> Tensor:
    """Return ``[T, V]`` bool, the tokens that are not in ``allowed``, and those of ``suppress``.

    Where a constraint leaves nothing but an end token, it ends before ``min_new_tokens``.
    """
    if suppress is None:
        return ~allowed
    both = suppress | ~allowed
    return torch.where(both.all(-1, keepdim=True), ~allowed, both)


def _sample(
    logits: Tensor,
    sampling: SamplingConfig,
    u: Tensor,
    seen: Tensor | None,
    suppress: Tensor | None,
) -> tuple[Tensor, Tensor]:
    processed = draws.process(logits, sampling, seen, suppress)
    if sampling.temperature == 0:
        return draws.greedy(processed)
    return draws.sample_tokens(processed, u)
