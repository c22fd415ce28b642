"""Drafts by a small model, sampled with the random numbers of the places that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.decoder_protocol import RollbackSession
from lightrft.engines.native_parts.token_sampler import Places, TokenSampler
from lightrft.types import Prompt
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ConfigError


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
