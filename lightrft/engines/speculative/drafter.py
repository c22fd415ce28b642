"""Drafters of tokens: their interface, the number of tokens that they draft, and the kinds.

One kind drafts by n-grams: what followed the last tokens where they occurred before (prompt
lookup). The other samples from a small model, with the random numbers of the places that the
drafts are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.decoder_protocol import DecoderProtocol, RollbackSession
from lightrft.engines.native_parts.token_sampler import Places, TokenSampler
from lightrft.types import Prompt
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ConfigError

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


def check_speculative(decoder: DecoderProtocol, draft: DecoderProtocol | None) -> None:
    """Raise ``ConfigError`` if a model decodes in a way that cannot remove tokens again.

    Args:
        decoder: The policy.
        draft: The draft model. ``None`` without one.
    """
    named = {"this policy": decoder, "the model engine.speculative.path": draft}
    for name, model in named.items():
        if model is not None and not isinstance(model.session(), RollbackSession):
            raise ConfigError(
                f"engine.speculative: {name} decodes by its own cache, from which rejected tokens "
                "cannot be removed; leave out engine.speculative, or take a model with "
                "attention alone"
            )


def drafts_of(
    config: EngineConfig, draft: DecoderProtocol | None, sampling: SamplingConfig, vocabulary: int
) -> Drafts | None:
    """Return the drafts of a call, without any row. ``None`` without speculative decoding.

    Args:
        config: Settings of the engine.
        draft: The draft model. ``None`` without one.
        sampling: The sampling settings.
        vocabulary: Number of tokens of the tokenizer.

    Raises:
        ConfigError: ``draft`` is missing.
    """
    settings = config.speculative
    if settings is None:
        return None
    drafter: Drafter = NgramDrafter(settings.longest_match)
    if settings.kind == "draft":
        if draft is None:
            raise ConfigError(
                "engine.speculative.kind = draft: this verb loads no draft model; set "
                "engine.speculative.kind=ngram"
            )
        session = draft.session()
        assert isinstance(session, RollbackSession)
        budget = config.max_cache_tokens
        drafter = ModelDrafter(session, sampling, settings.tokens, vocabulary, budget, draft.device)
    return Drafts(drafter, settings.tokens)


def drafting(draft: DecoderProtocol | None) -> AbstractContextManager[None]:
    """Return the context manager inside which the draft model may be called."""
    return nullcontext() if draft is None else draft.running()


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


class ModelDrafter:
    """Samples drafts from another model of the same vocabulary.

    Its tokens are sampled by the same settings and the same random numbers as the policy's. Models
    that agree on the distribution then agree on the token.

    Args:
        session: Empty cache over the draft model.
        sampling: The sampling settings.
        tokens: Most tokens of a draft.
        vocabulary: Number of tokens of the tokenizer. Policy and draft model may have different
            numbers of rows beyond it, which no draft has.
        budget: Upper bound of cached tokens.
        device: Device of the draft model.
    """

    def __init__(
        self,
        session: RollbackSession,
        sampling: SamplingConfig,
        tokens: int,
        vocabulary: int,
        budget: int,
        device: torch.device,
    ) -> None:
        self._session, self._budget, self._device = session, budget, device
        self._tokens, self._vocabulary = tokens, vocabulary
        # penalties and limits need the whole response, and a guess may do without them
        self._sampler = TokenSampler(sampling, np.zeros(0, dtype=np.int64), device)
        self._handles: list[int] = []  # by row
        self._prompts: dict[int, int] = {}  # tokens of the prompt of each handle
        self._rooms: list[int] = []
        self._missing: list[list[int]] = []  # by row: tokens that the cache does not hold
        self._ahead: list[int] = []  # by row: drafted tokens that the cache holds

    def append(self, prompts: Sequence[Prompt], rooms: Sequence[int]) -> None:
        """See ``Drafter.append``. A prompt is computed once for the rows that begin together."""
        fresh = list({id(prompt): prompt for prompt in prompts}.values())
        for prompt in fresh:
            if prompt.media:
                raise ConfigError(
                    f"engine.speculative.kind = draft cannot read the media of prompt "
                    f"{prompt.id!r}; set engine.speculative.kind=ngram"
                )
        sizes = [*self._prompts.values(), *(len(prompt.token_ids) for prompt in fresh)]
        self._rooms += rooms
        # a row that needs no draft is fed those of the others' length too
        room = max(self._rooms) + self._tokens
        self._session.reserve(len(sizes), max(sizes), len(self._rooms), room, self._budget)
        handles, _ = self._session.prefill(fresh)
        of = {id(prompt): handle for prompt, handle in zip(fresh, handles, strict=True)}
        self._prompts.update(zip(handles, (len(prompt.token_ids) for prompt in fresh)))
        own = [of[id(prompt)] for prompt in prompts]
        self._session.admit(own, sorted(set(own)))
        self._handles += own
        self._missing += [[] for _ in own]
        self._ahead += [0] * len(own)

    def propose(self, most: np.ndarray, places: Places) -> list[list[int]]:
        """See ``Drafter.propose``. Rows get equally many tokens, and use as many as they need."""
        counts = np.array([len(tokens) for tokens in self._missing], dtype=np.int64)
        fed = torch.tensor(list(chain.from_iterable(self._missing)))
        # after a token that the draft model may lack, any draft will do
        flat = to_device(fed.clamp(max=self._vocabulary - 1), self._device)
        logits = self._session.feed(flat, counts)
        last = to_device(torch.from_numpy(np.cumsum(counts) - 1), self._device)
        tokens = [self._sampled(logits[last], places, 0)]
        while len(tokens) < int(most.max()):
            logits = self._session.step(tokens[-1])
            tokens.append(self._sampled(logits, places, len(tokens)))
        drafts = torch.stack(tokens, 1).tolist()
        self._missing = [[] for _ in self._missing]
        self._ahead = [len(tokens) - 1] * len(drafts)
        return [draft[:n] for draft, n in zip(drafts, most.tolist(), strict=True)]

    def extend(self, token_ids: Sequence[Sequence[int]]) -> None:
        """See ``Drafter.extend``. Drafted tokens that were not sampled leave the cache."""
        rejected = np.zeros(len(token_ids), dtype=np.int64)
        for row, own in enumerate(token_ids):
            # all sampled tokens but the last are those that were drafted
            held = min(self._ahead[row], len(own) - 1)
            rejected[row] = self._ahead[row] - held
            self._missing[row] += own[held:]
            self._ahead[row] = 0
        self._session.roll_back(rejected)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """See ``Drafter.evict``. A prompt is dropped with its last row."""
        self._session.evict(moves, rows)
        for column in (self._handles, self._rooms, self._ahead):
            for dst, src in moves:
                column[dst] = column[src]
            del column[rows:]
        for dst, src in moves:
            self._missing[dst] = self._missing[src]
        del self._missing[rows:]
        for handle in sorted(set(self._prompts) - set(self._handles)):
            self._session.release(handle)
            del self._prompts[handle]

    def _sampled(self, logits: Tensor, places: Places, ahead: int) -> Tensor:
        logits = logits[:, : self._vocabulary]
        tokens, _ = self._sampler.sample(logits, places._replace(steps=places.steps + ahead))
        return tokens
