"""Drafts by n-grams: what followed the last tokens where they occurred before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightrft.engines.native_parts.token_sampler import Places
from lightrft.types import Prompt

SHORTEST = 2
"""Shortest run of tokens that is looked up. A single token says little about the next one."""

Ends = dict[tuple[int, ...], int]
"""The index after the last occurrence of each n-gram."""


class NgramDrafter:
    """Copies the tokens after the last occurrence of the response's last tokens.

    Args:
        longest: Longest run of last tokens that is looked up.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = tuple(range(longest, min(longest, SHORTEST) - 1, -1))
        self._rows: list[_Text] = []

    def append(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> None:
        """See ``Drafter.append``. Rows of one prompt share its n-grams."""
        known = {id(row.prompt): row.shared for row in self._rows}
        for prompt in prompts:
            if id(prompt) not in known:
                shared: Ends = {}
                for end in range(1, len(prompt.token_ids)):
                    _note(shared, prompt.token_ids, end, self._lengths)
                known[id(prompt)] = shared
            self._rows.append(_Text(prompt, known[id(prompt)], self._lengths))

    def propose(self, most: np.ndarray, places: Places) -> list[list[int]]:
        """See ``Drafter.propose``."""
        return [row.continued(int(n)) for row, n in zip(self._rows, most, strict=True)]

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        """See ``Drafter.extend``."""
        for row, own in zip(self._rows, token_ids, strict=True):
            row.extend(own)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """See ``Drafter.evict``."""
        for dst, src in moves:
            self._rows[dst] = self._rows[src]
        del self._rows[rows:]


class _Text:
    """The tokens of a prompt and its response, and where their n-grams end.

    Args:
        prompt: The prompt.
        shared: N-grams of the prompt, without those at its end.
        lengths: Lengths of n-grams, the longest first.
    """

    def __init__(self, prompt: Prompt, shared: Ends, lengths: Sequence[int]) -> None:
        self.prompt, self.shared = prompt, shared
        self._lengths = lengths
        self._own: Ends = {}
        self._tokens = list(prompt.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token in token_ids:
            # noted once a token follows, so that the last tokens are never found as themselves
            _note(self._own, self._tokens, len(self._tokens), self._lengths)
            self._tokens.append(token)

    def continued(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the last tokens before."""
        for length in self._lengths:
            last = tuple(self._tokens[-length:])
            at = self._own.get(last) or self.shared.get(last)
            if at is not None:
                # a run that reaches the end repeats itself
                period = len(self._tokens) - at
                return [self._tokens[at + k % period] for k in range(most)]
        return []


def _note(ends: Ends, tokens: Sequence[int], end: int, lengths: Sequence[int]) -> None:
    for length in lengths:
        if length <= end:
            ends[tuple(tokens[end - length : end])] = end
