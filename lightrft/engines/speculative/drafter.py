"""The interface of a drafter, and the number of tokens that it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightrft.engines.native_parts.token_sampler import Places
from lightrft.types import Prompt
from lightrft.utils.device_transfer import to_device

MOST_PLACES = 256
"""Most rows of logits of a step with drafts. With more rows, a step costs more than it saves."""


class Drafter(Protocol):
    """Guesses the next tokens of growing responses, by row."""

    def append(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> None:
        """Append a row for each prompt.

        Args:
            prompts: The prompts. One that is continued ends with the response so far.
            rooms: Number of tokens that each response may grow by.
        """
        ...

    def propose(self, most: np.ndarray, places: Places) -> list[list[int]]:
        """Return the guessed tokens of each row.

        Args:
            most: ``[R]``. Largest number of tokens of each row.
            places: The next place of each row.
        """
        ...

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Append the sampled tokens of each row."""
        ...

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        ...


class Drafts:
    """The drafted tokens of each row, in numbers that follow how many were accepted.

    Args:
        drafter: Guesses tokens.
        tokens: Most tokens of a draft.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        self._drafter, self._tokens = drafter, tokens
        self._widths = np.zeros(0, dtype=np.int64)
        # counters of the tokens of each row
        self.drafted = np.zeros(0, dtype=np.int64)
        self.accepted = np.zeros(0, dtype=np.int64)

    def append(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> None:
        """Append a row for each prompt. See ``Drafter.append``."""
        self._drafter.append(prompts, rooms)
        count = len(prompts)
        self._widths = np.concatenate([self._widths, np.full(count, self._tokens)])
        self.drafted = np.concatenate([self.drafted, np.zeros(count, dtype=np.int64)])
        self.accepted = np.concatenate([self.accepted, np.zeros(count, dtype=np.int64)])

    def propose(self, rooms: np.ndarray, places: Places) -> list[list[int]]:
        """Return the drafts of each row.

        Args:
            rooms: ``[R]``. Number of tokens that each response may still grow by.
            places: The next place of each row.
        """
        count = len(self._widths)
        most = np.minimum(self._widths, max(0, MOST_PLACES // max(1, count) - 1))
        # the step samples one token after the drafted ones
        most = np.minimum(most, rooms - 1)
        if not most.any():
            return [[] for _ in range(count)]
        return self._drafter.propose(most, places)

    def take(self, found: Acceptance, token_ids: Sequence[Sequence[int]]) -> None:
        """Append the tokens that each row takes, and count the accepted drafts.

        Args:
            found: What each row takes.
            token_ids: Sampled tokens that it takes.
        """
        self._drafter.extend(token_ids)
        for row, draft in enumerate(found.drafts):
            if draft:
                accepted = int(found.counts[row]) - 1
                self.drafted[row] += len(draft)
                self.accepted[row] += accepted
                # a wrong guess costs a place in the step, so drafts are long where they are right
                width = 2 * len(draft) if accepted == len(draft) else max(1, accepted)
                self._widths[row] = min(self._tokens, width)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        self._drafter.evict(moves, rows)
        for name in ("_widths", "drafted", "accepted"):
            column = getattr(self, name)
            for dst, src in moves:
                column[dst] = column[src]
            setattr(self, name, column[:rows])


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The tokens that each row takes of those that were sampled in a step.

    Attributes:
        drafts: Drafted tokens of each row.
        starts: ``[R]``. Index of the first sampled token of each row.
        counts: ``[R]``. Number of sampled tokens that it takes, at least 1.
    """

    drafts: Sequence[Sequence[int]]
    starts: np.ndarray
    counts: np.ndarray

    @property
    def is_drafted(self) -> bool:
        """Return whether some row has drafts."""
        return any(self.drafts)

    @property
    def rejected(self) -> np.ndarray:
        """Return ``[R]``, the number of drafts that each row drops."""
        return np.array([1 + len(draft) for draft in self.drafts]) - self.counts

    def taken(self, tokens: np.ndarray) -> list[list[int]]:
        """Return the tokens of each row of the sampled ``tokens [T]``."""
        ends = self.starts + self.counts
        return [tokens[a:b].tolist() for a, b in zip(self.starts.tolist(), ends.tolist())]


def accepted_tokens(drafts: Sequence[Sequence[int]], sampled: np.ndarray) -> Acceptance:
    """Take the sampled tokens of each row up to the first that differs from its draft.

    Args:
        drafts: Drafted tokens of each row.
        sampled: ``[T]``. Tokens sampled before and after each drafted token, row after row.
    """
    counts = np.ones(len(drafts), dtype=np.int64)
    if not any(drafts):
        return Acceptance(drafts, np.arange(len(drafts)), counts)
    fed = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
    starts = np.cumsum(fed) - fed
    for row in np.flatnonzero(fed > 1).tolist():
        found = sampled[starts[row] : starts[row] + fed[row]].tolist()
        for token, draft in zip(found, drafts[row]):
            if token != draft:
                break
            counts[row] += 1
    return Acceptance(drafts, starts, counts)


def places_after(places: Places, drafts: Sequence[Sequence[int]]) -> Places:
    """Return the places ``[T]`` before and after each drafted token, from the next of each row."""
    fed = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
    row_of = np.repeat(np.arange(len(fed)), fed)
    ahead = np.arange(len(row_of)) - (np.cumsum(fed) - fed)[row_of]
    return Places(places.keys[row_of], places.steps[row_of] + ahead, places.greedy[row_of])


def seen_after(seen: Tensor | None, drafts: Sequence[Sequence[int]]) -> Tensor | None:
    """Return ``[T, V]`` bool, the tokens before each place of ``places_after``.

    Args:
        seen: ``[R, V]`` bool, the tokens before the next place of each row. ``None`` for none.
        drafts: Drafted tokens of each row.
    """
    if seen is None:
        return None
    rows: list[int] = []
    places: list[int] = []
    tokens: list[int] = []
    for row, draft in enumerate(drafts):
        first = len(rows)
        rows += [row] * (1 + len(draft))
        for ahead, token in enumerate(draft, start=1):
            # the token is before all later places of its row
            later = range(first + ahead, first + 1 + len(draft))
            places += later
            tokens += [token] * len(later)
    found = seen[to_device(torch.tensor(rows), seen.device)]
    at = (torch.tensor(column, dtype=torch.long) for column in (places, tokens))
    found[tuple(to_device(column, seen.device) for column in at)] = True
    return found
