"""Generation by a server, over streams that are asked for again when they break."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.growing_response import GrowingResponse
from lightrft.engines.requests import (
    check_longest,
    check_requests,
    refuse_native_settings,
    response_limit,
)
from lightrft.engines.sending.merged_adapters import noted, whole_weights
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.served.start_checks import open_client
from lightrft.engines.stop_strings import StopStrings, end_ids
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import RESUMES, ConfigError, ModelError, ResourceError
from lightrft.utils.http_client.server_client import OpenStream, ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOK_SECONDS = 1.0
"""Longest time between two calls of ``stopped`` while no token comes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of a response.

    Attributes:
        index: Index of the response among those that were asked for.
        token_ids: The tokens.
        logprobs: Their log-probs.
        version: Version of the policy that sampled them.
        reason: Why the response ended. ``None`` while it grows.
    """

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    reason: str | None = None


class ServedEngine(Engine):
    """An engine behind HTTP. A subclass knows the protocol of its server.

    Any number of ``generate`` iterators may be open.

    Args:
        client: Sends requests to the server.
        tokenizer: Decodes responses and finds stop strings.
        config: Settings of the engine.
        ends: Token ids that end a response.

    Attributes:
        context: Most tokens of a prompt with its response. ``None`` for no limit.
        version: Version of the weights.
        model: Name of the served model.
        vocabulary: Number of token ids that the policy knows. ``None`` if that is unknown.
        banned: Token ids that are never sampled.
        counts: Number of events, by name.
        cost: Bytes and seconds of weight updates.
        lora: Settings of the policy's adapters, which are merged before weights are sent. ``None``
            without adapters.
    """

    def __init__(
        self,
        client: ServerClient,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        ends: Sequence[int],
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.version = 0
        self.context: int | None = None
        self.model = ""
        self.vocabulary: int | None = None
        self.banned: tuple[int, ...] = ()
        self.counts: Counter[str] = Counter()
        self.cost = UpdateCost()
        self.lora: LoRAConfig | None = None
        self._ends = sorted(set(ends))
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._open: set[_Call] = set()
        self._is_asleep = False

    @classmethod
    def connect(
        cls,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        vocabulary: int | None = None,
    ) -> Self:
        """Return an engine over the server ``engine.url``, after checks.

        Args:
            config: Settings of the engine.
            tokenizer: Tokenizer of the model.
            ends: Token ids that end a response.
            vocabulary: Number of token ids that the policy knows. ``None`` if that is unknown.

        Raises:
            ConfigError: The server has another model or tokenizer, or returns no token ids, or
                log-probs of another distribution.
            ModelError: It returns token ids that the policy does not know.
            ResourceError: It does not answer before ``engine.deadline``.
        """
        made = cls(open_client(config), tokenizer, config, ends)
        made.vocabulary = vocabulary
        return made.checked()

    def checked(self) -> Self:
        """Return this engine after checks of its server, see ``connect``."""
        try:
            self.check_server()
        except BaseException as error:
            self.close()
            if isinstance(error, Unanswered):
                raise failure(error, self.where) from error
            raise
        return self

    @abstractmethod
    def check_server(self) -> None:
        """Check the server, see ``connect``."""

    @property
    def where(self) -> str:
        """The setting that names the server, for messages."""
        return f"engine.url = {self.config.url!r}"

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses, see ``Engine.generate``.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. ``True`` aborts unfinished responses.

        Raises:
            ConfigError: The server cannot sample by ``sampling``, or cannot read a prompt. Raised
                at once, as is the next one.
            ResourceError: A request is too long for ``max_cache_tokens`` or for the server.
        """
        wanted = list(requests)
        refuse_native_settings(sampling, self.config.kind)
        self.check_sampling(sampling)
        check_requests(wanted, sampling, self.config)
        self._check_prompts(wanted, sampling)
        return self._answers(wanted, sampling, stopped)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """Raise ``ConfigError`` if the server cannot generate for prompts with media.

        Args:
            what: The prompts, for the message.
            kinds: Kinds of media of the prompts.
        """
        raise ConfigError(
            f"engine.kind = {self.config.kind} cannot generate for {what}; set engine.kind=native"
        )

    def check_media(self, prompt: Prompt) -> None:
        """Raise ``ConfigError`` if the server cannot generate for ``prompt``, which has media."""
        self.refuse_media(f"prompt {prompt.id!r}, which has media", ())

    def check_limits(self, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
        """See ``Engine.check_limits``.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """
        self.check_sampling(sampling, key)
        if self.context is not None:
            check_longest(longest, sampling, self.context, self.where, key, data)

    @abstractmethod
    def check_sampling(self, sampling: SamplingConfig, key: str = "sampling") -> None:
        """Raise ``ConfigError`` for settings that the server would apply in another way.

        ``key`` is the name of the setting that holds ``sampling``, for the message.
        """

    @abstractmethod
    def shared_calls(self, responses: Sequence[GrowingResponse]) -> list[list[GrowingResponse]]:
        """Return the responses that are asked for in one call each."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The path that generates."""

    def prepare_trial(self) -> None:
        """Prepare the server for a call. It is called before each trial, from several threads.

        Raises ``ModelError`` if the server has other weights than this run.
        """

    @abstractmethod
    def body(self, responses: Sequence[GrowingResponse]) -> dict[str, Any]:
        """Return the JSON object that asks for the ``responses`` of one call."""

    def headers(self, responses: Sequence[GrowingResponse]) -> Mapping[str, str]:
        """Return further headers of the call that asks for ``responses``."""
        return {}

    @abstractmethod
    def pieces(self, event: Mapping[str, Any], known: Mapping[int, int]) -> list[Piece]:
        """Return the new tokens of an event.

        Args:
            event: The event.
            known: Number of tokens that earlier events had, by the index of the response.

        Raises:
            ModelError: Tokens or log-probs are missing, or of other weights.
            Passing: The call must be repeated.
        """

    def whole(
        self, weights: Iterable[tuple[str, Tensor]], read: Fingerprint
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` with adapters merged, by names of the model without adapters.

        Args:
            weights: Parameters of the policy, by name.
            read: Gets the checksum of each of them.
        """
        return whole_weights(noted(chain(self.frozen.items(), weights), read), self.lora)

    @abstractmethod
    def require_updates(self) -> None:
        """Raise ``ConfigError`` unless the server takes new weights from this run."""

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``. It frees nothing, since the memory is that of the server."""
        self._is_asleep = True

    def wake(self) -> None:
        """See ``Engine.wake``."""
        self._is_asleep = False

    def close(self) -> None:
        """Close all connections."""
        for call in list(self._open):
            call.handle.close()
        self.client.close()

    def take_counts(self) -> dict[str, float]:
        """See ``HasEventCounts``."""
        retries, self.client.counts["retries"] = self.client.counts["retries"], 0
        found, self.counts = self.counts, Counter()
        return {"retries": retries, **found, **self.cost.take()}

    def ends(self, sampling: SamplingConfig) -> set[int]:
        """Return the token ids that end a response."""
        return set(end_ids(self.tokenizer, self._ends, sampling))

    def check_idle(self) -> None:
        """Raise ``RuntimeError`` if a response is unfinished, before weights are replaced."""
        if self._open:
            raise RuntimeError(
                f"{len(self._open)} requests are unfinished; finish or abort them before new "
                "weights are loaded"
            )

    def _check_prompts(self, requests: Sequence[Request], sampling: SamplingConfig) -> None:
        for request in requests:
            if request.prompt.media:
                self.check_media(request.prompt)
            tokens = len(request.prompt.token_ids) + response_limit(request, sampling)
            if self.context is not None and tokens > self.context:
                raise ResourceError(
                    f"prompt {request.prompt.id!r} and its response reach {tokens} tokens, and "
                    f"{self.where} holds {self.context}; lower max_new_tokens or the prompt length"
                )

    def _answers(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool],
    ) -> Iterator[Rollout]:
        if sampling.stop and sampling.stop not in self._stops:
            self._stops[sampling.stop] = StopStrings(self.tokenizer, sampling.stop)
        stops = self._stops.get(sampling.stop)
        responses = [GrowingResponse.of(request, sampling, stops) for request in requests]
        news: SimpleQueue[_News] = SimpleQueue()
        waiting = deque(_Call(self, group, news) for group in self.shared_calls(responses))
        mine: set[_Call] = set()
        left, is_new = len(responses), True
        try:
            while left:
                if self._is_asleep:
                    raise RuntimeError("the engine sleeps; call wake() before the next response")
                self._begin(waiting, mine)
                if is_new and stopped():
                    yield from self._abort(responses)
                    return
                try:
                    one = news.get(timeout=LOOK_SECONDS)
                except Empty:
                    is_new = True
                    self._refuse_silence(mine)
                    continue
                is_new = one.piece is not None
                for response in one.call.taken(one):
                    left -= 1
                    yield response.rollout(self.tokenizer)
                if one.is_last:
                    mine.discard(one.call)
                    self._open.discard(one.call)
        finally:
            for call in mine:
                call.handle.close()
            self._open -= mine

    def _refuse_silence(self, calls: Iterable[_Call]) -> None:
        """Raise ``ResourceError`` if nothing new came for ``engine.deadline`` seconds."""
        try:
            self.client.refuse_silence(max(call.begun for call in calls))
        except Unanswered as error:
            raise failure(error, self.where) from error

    def _begin(self, waiting: deque[_Call], mine: set[_Call]) -> None:
        """Begin calls while fewer responses than ``engine.max_num_seqs`` grow."""
        growing = sum(len(call.responses) for call in mine)
        while waiting and (
            not growing or growing + len(waiting[0].responses) <= self.config.max_num_seqs
        ):
            call = waiting.popleft()
            growing += len(call.responses)
            call.begun = time.monotonic()
            mine.add(call)
            self._open.add(call)
            threading.Thread(target=call.run, daemon=True, name="served engine").start()

    def _abort(self, responses: Sequence[GrowingResponse]) -> list[Rollout]:
        """Return all responses that are not finished, as they are."""
        found = []
        for response in responses:
            if response.reason is None:
                response.reason = "abort"
                found.append(response.rollout(self.tokenizer))
        return found


def failure(error: Exception, where: str) -> Exception:
    """Return the error that a failed request ends the run with.

    Args:
        error: The error of the request.
        where: The setting that names the server.
    """
    if not isinstance(error, Unanswered):
        return error
    if error.refused:
        return ConfigError(f"{where}: {error}")
    return ResourceError(f"{where}: {error}. {RESUMES}")


@dataclass(frozen=True, slots=True)
class _News:
    """A message of a thread to its iterator: a piece, a new trial, or the end of a call."""

    call: _Call
    response: GrowingResponse | None = None
    piece: Piece | None = None
    restarted: Sequence[GrowingResponse] = ()
    error: Exception | None = None
    is_last: bool = False


class _Call:
    """A call for some responses, in a thread.

    Args:
        engine: The engine.
        responses: The responses.
        news: Gets their tokens.
    """

    def __init__(
        self,
        engine: ServedEngine,
        responses: Sequence[GrowingResponse],
        news: SimpleQueue[_News],
    ) -> None:
        self.engine = engine
        self.responses = list(responses)
        self.news = news
        self.handle = OpenStream()
        # when its thread started
        self.begun = 0.0
        # of the thread: responses of this trial, tokens of each in it, and most tokens in any
        self._asked: list[GrowingResponse] = []
        self._known: Counter[int] = Counter()
        self._most: Counter[int] = Counter()
        self._ended: set[int] = set()

    def run(self) -> None:
        """Pass all tokens on. For a thread."""
        error: Exception | None = None
        engine = self.engine
        try:
            engine.client.stream(
                engine.path,
                self._body,
                self._take,
                engine.config.timeout,
                self.handle,
                engine.prepare_trial,
                engine.headers(self.responses),
            )
            if not self.handle.is_closed and (missing := len(self._unfinished())):
                problem = f"the server ended the answer, and {missing} responses have no end"
                raise ModelError(f"{engine.where}: {problem}")
        except Exception as caught:
            error = caught
        self.news.put(_News(self, error=error, is_last=True))

    def taken(self, news: _News) -> list[GrowingResponse]:
        """Return the responses that ``news`` finishes. For the iterator."""
        if news.error is not None and not self.handle.is_closed:
            raise failure(news.error, self.engine.where) from news.error
        for response in news.restarted:
            if response.reason is None:
                response.restart()
        response, piece = news.response, news.piece
        if response is None or piece is None or response.reason is not None:
            return []
        ends = self.engine.ends(response.sampling)
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            response.append(token, logprob, piece.version, ends)
            if response.reason is not None:
                break
        if response.reason is None and piece.reason is not None:
            response.end(piece.reason, self.engine.where)
        if response.reason is None:
            return []
        if all(one.reason is not None for one in self.responses):
            # nobody reads the rest
            self.handle.close()
        return [response]

    def _unfinished(self) -> list[GrowingResponse]:
        return [
            response
            for k, response in enumerate(self.responses)
            if k not in self._ended and response.reason is None
        ]

    def _body(self) -> dict[str, Any]:
        """Return the body of the next trial, which asks for the unfinished responses again."""
        self._asked = self._unfinished()
        self._known = Counter()
        self.news.put(_News(self, restarted=self._asked))
        return self.engine.body(self._asked)

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Pass the tokens of an event on. Return True if any is new."""
        is_new = False
        for piece in self.engine.pieces(event, self._known):
            if not 0 <= piece.index < len(self._asked):
                raise ModelError(f"{self.engine.where}: no response {piece.index} was asked for")
            _check_tokens(piece, self.engine)
            _check_logprobs(piece, self.engine.where)
            response = self._asked[piece.index]
            k = self.responses.index(response)
            self._known[piece.index] += len(piece.token_ids)
            is_new |= self._known[piece.index] > self._most[k]
            self._most[k] = max(self._most[k], self._known[piece.index])
            if piece.reason is not None:
                self._ended.add(k)
            self.news.put(_News(self, response, piece))
        return is_new


def _check_tokens(piece: Piece, engine: ServedEngine) -> None:
    """Raise ``ModelError`` unless all tokens are ids that the policy knows."""
    size, ids = engine.vocabulary, piece.token_ids
    if not isinstance(ids, list | tuple):
        raise ModelError(f"{engine.where} returned {ids!r:.100} in place of a list of token ids")
    for token in ids:
        # the exact type: ``True`` is an int
        if type(token) is not int or token < 0 or (size is not None and token >= size):
            known = "" if size is None else f" to {size - 1}, its vocabulary of {size}"
            raise ModelError(
                f"{engine.where} returned token id {token!r:.100}, and model.path knows whole "
                f"numbers from 0{known}; serve the model of model.path"
            )


def _check_logprobs(piece: Piece, where: str) -> None:
    """Raise ``ModelError`` unless each token has a log-prob."""
    if len(piece.logprobs) != len(piece.token_ids):
        raise ModelError(
            f"{where} returned {len(piece.token_ids)} tokens with {len(piece.logprobs)} "
            "log-probs; training needs the log-prob of each token"
        )
    for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
        if not math.isfinite(logprob):
            raise ModelError(
                f"{where} returned log-prob {logprob} for token {token}: the policy gives no valid "
                "distribution; check the weights and the learning rate"
            )
