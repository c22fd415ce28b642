"""Responses that an engine without our code grows: stop strings, limits and finish reasons."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.requests import response_limit, response_room, rollout_of
from lightrft.engines.stop_strings import StopStrings
from lightrft.types import FinishReason, Request, Rollout
from lightrft.utils.errors import ModelError
from lightrft.utils.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, eq=False)
class GrowingResponse:
    """A growing response. Lists have one entry per token, resumed tokens included.

    Attributes:
        request: Its request.
        sampling: The sampling settings.
        stops: Finds stop strings. ``None`` without any.
        token_ids: The tokens so far.
        logprobs: Their log-probs.
        versions: Versions of the policy that sampled them.
        reason: Why it ended. ``None`` while it grows.
        text: Its text, if a stop string has ended it.
        watched: Most tokens that ``Request.watch`` has seen.
    """

    request: Request
    sampling: SamplingConfig
    stops: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    text: str | None = None
    watched: int = 0

    @classmethod
    def of(
        cls, request: Request, sampling: SamplingConfig, stops: StopStrings | None
    ) -> GrowingResponse:
        partial = request.partial
        if partial is None:
            return cls(request, sampling, stops)
        return cls(
            request,
            sampling,
            stops,
            list(partial.token_ids),
            list(partial.logprobs),
            list(partial.versions),
        )

    @property
    def seed(self) -> int:
        """The seed of the tokens of this call, from 0."""
        request = self.request
        if not request.num_generated:
            return request.seed & (2**63 - 1)
        # the same seed would repeat the random numbers of the first tokens
        return derive_seed(request.seed, "resumed", request.num_generated) & (2**63 - 1)

    @property
    def fed_ids(self) -> list[int]:
        """The tokens that the engine gets: the prompt, and a response that is resumed."""
        partial = self.request.partial
        return [*self.request.prompt.token_ids, *(partial.token_ids if partial else ())]

    @property
    def filters(self) -> dict[str, Any]:
        """Temperature, filters and repetition penalty. A greedy response has no filters."""
        sampling = self.sampling
        names = ("temperature", "top_p", "top_k", "min_p")
        found = {name: getattr(sampling, name) for name in names}
        if self.request.greedy or sampling.temperature == 0:
            found = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {**found, "repetition_penalty": sampling.repetition_penalty}

    @property
    def min_tokens(self) -> int:
        """The fewest tokens of this call."""
        missing = max(0, self.sampling.min_new_tokens - self.request.num_generated)
        return min(response_room(self.request, self.sampling), missing)

    def append(self, token: int, logprob: float, version: int, ends: Container[int] = ()) -> None:
        """Append a token.

        End the response at an end token, a stop string, or if nobody waits for it.

        Args:
            token: The token.
            logprob: Its log-prob.
            version: Version of the policy that sampled it.
            ends: Tokens that end a response, if its engine does not find them.
        """
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        late = len(self.token_ids) >= self.sampling.min_new_tokens
        if self.stops is not None and late and self.stops.may_end(token):
            self.text = self.stops.cut(np.array(self.token_ids))
        if self.text is not None or (late and token in ends):
            self.reason = "stop"
        elif not self._is_wanted():
            self.reason = "abort"

    def _is_wanted(self) -> bool:
        watch, tokens = self.request.watch, len(self.token_ids)
        # after a restart, the same tokens come again
        if watch is None or tokens <= self.watched:
            return True
        self.watched = tokens
        return watch(list(self.token_ids))

    def restart(self) -> None:
        """Drop the tokens of this call, which are about to be sampled again."""
        count = self.request.num_generated
        del self.token_ids[count:], self.logprobs[count:], self.versions[count:]

    def end(self, reason: str, engine: str) -> None:
        """End the response for the ``reason`` that ``engine`` gives."""
        if reason == "stop":
            self.reason = "stop"
        elif reason == "length":
            # a response before its limit was paused, and can be resumed
            limit = response_limit(self.request, self.sampling)
            self.reason = "length" if len(self.token_ids) >= limit else "abort"
        else:
            raise ModelError(
                f"{engine} ended the response to prompt {self.request.prompt.id!r} with finish reason "
                f"{reason!r} after {len(self.token_ids)} tokens"
            )

    def rollout(self, tokenizer: PreTrainedTokenizerBase) -> Rollout:
        assert self.reason is not None
        return rollout_of(
            self.request,
            self.token_ids,
            self.logprobs,
            self.versions,
            self.reason,
            self.text,
            tokenizer,
        )
