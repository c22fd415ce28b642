"""Generation by an endpoint that returns text alone, for evaluation and inference.

Its responses are encoded here. They have no log-probs, so nothing can be trained on them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrft.config.base import changed_fields
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.base import Engine, Fingerprint, never_stop
from lightrft.engines.requests import (
    check_requests,
    refuse_native_settings,
    response_limit,
    rollout_of,
)
from lightrft.engines.served.served_engine import LOOK_SECONDS, failure
from lightrft.engines.stop_strings import end_ids
from lightrft.types import FinishReason, Prompt, Request, Rollout
from lightrft.utils.chat_template import turn_ends
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client.server_client import OpenStream, ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

EXTRA = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that are sent if they are set. Few endpoints know all of them."""
PATH = "/v1/completions"
"""Path of the completions."""
REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}
"""The finish reasons of a whole response."""
WITHHELD = "content_filter"
"""The finish reason of a response that the endpoint does not show. Others may still succeed."""
SHOWN = 200
"""Most characters of an answer in a message."""


@dataclass(slots=True)
class _Answer:
    """The response of a stream so far.

    Attributes:
        texts: Its parts.
        reason: Why it ended. ``None`` while it grows.
        last: The last event.
        most: Most characters of any trial.
    """

    texts: list[str] = field(default_factory=list)
    reason: str | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    most: int = 0

    def restart(self) -> None:
        """Forget the parts of a stream that broke."""
        self.texts, self.reason = [], None

    def take(self, event: Mapping[str, Any]) -> bool:
        """Add an event. Return True if it brings something new.

        Raises:
            ModelError: It has several choices.
        """
        choices = event.get("choices") or []
        # the last event may have the usage alone
        if not choices and self.texts:
            return False
        self.last = event
        if len(choices) > 1 or (choices and choices[0].get("index")):
            raise ModelError(f"several choices, and one was asked for: {self.shown}")
        for choice in choices:
            if isinstance(choice.get("text"), str):
                self.texts.append(choice["text"])
            self.reason = choice.get("finish_reason") or self.reason
        size = sum(map(len, self.texts))
        is_new = size > self.most or self.reason is not None
        self.most = max(self.most, size)
        return is_new

    @property
    def shown(self) -> str:
        """The start of the last event, for messages."""
        return f"{dict(self.last)!r:.{SHOWN}}"

    def problem(self) -> str:
        """Return why this is no response of a model, or an empty text."""
        if self.reason == WITHHELD:
            return ""
        if not self.texts:
            return f"no text, as an endpoint of completions sends it: {self.shown}"
        if self.reason not in REASONS:
            return f"finish_reason {self.reason!r}, and not stop or length: {self.shown}"
        return ""


class TextEndpoint(Engine):
    """An engine over completions of texts, as in the API of OpenAI.

    Args:
        client: Sends requests to the endpoint.
        tokenizer: Decodes prompts and encodes responses.
        config: Settings of the engine.
        model: Name of the served model.
    """

    def __init__(
        self,
        client: ServerClient,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        model: str,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.model = model
        self._adds_first: dict[bool, bool] = {}
        # the server knows the end token of its model, but not where our template ends a turn
        self._ends = {*turn_ends(tokenizer).ids} - {tokenizer.eos_token_id}
        log.warning(
            "engine.url = %r returns text alone: prompts are sent as text, and nothing compares "
            "its model with model.path",
            config.url,
        )

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield responses, see ``Engine.generate``. Their log-probs are NaN.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: ``True`` drops the responses that are not there yet.

        Raises:
            ConfigError: A request has media, or continues or watches a response. Or the endpoint
                refuses a request.
            ModelError: An answer is no response.
            ResourceError: The endpoint does not answer.
        """
        wanted = list(requests)
        refuse_native_settings(sampling, self.config.kind)
        check_requests(wanted, sampling, self.config)
        for request in wanted:
            if request.prompt.media:
                self.refuse_media(f"prompt {request.prompt.id!r}, which has media", ())
            if request.num_generated or request.watch is not None:
                raise ConfigError(
                    f"engine.url = {self.config.url!r} returns text alone, and prompt "
                    f"{request.prompt.id!r} has a response to continue; set engine.kind=native"
                )
            starts = self._starts_by_bos(request.prompt)
            if starts not in self._adds_first:
                self._adds_first[starts] = self._compared(request.prompt)
        return self._answers(wanted, sampling, stopped)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``Engine.refuse_media``."""
        raise ConfigError(
            f"engine.url = {self.config.url!r} gets prompts as text, and cannot generate for "
            f"{what}; set engine.kind=native"
        )

    def _answers(
        self, requests: Sequence[Request], sampling: SamplingConfig, stopped: Callable[[], bool]
    ) -> Iterator[Rollout]:
        threads = ThreadPoolExecutor(self.config.max_num_seqs)
        streams = [OpenStream() for _ in requests]
        try:
            asked: dict[Future[Rollout], Request] = {
                threads.submit(self._answer, request, sampling, stream): request
                for request, stream in zip(requests, streams, strict=True)
            }
            while asked:
                if stopped():
                    for request in asked.values():
                        yield rollout_of(request, [], [], [], "abort", "", self.tokenizer)
                    return
                done, _ = wait(asked, LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    del asked[future]
                    yield future.result()
        finally:
            for stream in streams:
                stream.close()
            threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: Request, sampling: SamplingConfig, stream: OpenStream) -> Rollout:
        """Return the response to ``request``. A stream that breaks or stalls is repeated."""
        where, prompt = f"engine.url = {self.config.url!r}", request.prompt.id
        found = _Answer()

        def begin() -> Mapping[str, Any]:
            found.restart()
            return self._body(request, sampling)

        try:
            self.client.stream(PATH, begin, found.take, self.config.timeout, stream)
            problem = found.problem()
        except Unanswered as error:
            raise failure(error, where) from error
        except ModelError as error:
            problem = str(error)
        if problem:
            raise ModelError(f"{where} answered prompt {prompt!r} with {problem}")
        text = "".join(found.texts)
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        n = len(ids)
        reason = REASONS.get(str(found.reason), "stop")
        made = rollout_of(request, ids, [math.nan] * n, [0] * n, reason, text, self.tokenizer)
        made.text, made.plain = text, None  # as the endpoint sends it
        if found.reason == WITHHELD:
            made.failed = f"the endpoint withheld the response (finish_reason {WITHHELD})"
        return made

    def _starts_by_bos(self, prompt: Prompt) -> bool:
        """Return whether ``prompt`` begins with the token that many servers add to a text."""
        ids, first = prompt.token_ids, self.tokenizer.bos_token_id
        return first is not None and len(ids) > 1 and ids[0] == first

    def _text(self, prompt: Prompt, *, adds_first: bool) -> str:
        """Return the text of ``prompt``, without a first token that the endpoint adds itself."""
        # special tokens that the text spells are special tokens
        return str(self.tokenizer.decode(prompt.token_ids[int(adds_first) :]))

    def _compared(self, prompt: Prompt) -> bool:
        """Return whether the endpoint adds the first token of prompts like ``prompt`` itself.

        One response of one token shows how many tokens it reads. Warn if they are not ours.
        """
        where, starts = f"engine.url = {self.config.url!r}", self._starts_by_bos(prompt)
        body = {
            "model": self.model,
            "prompt": self._text(prompt, adds_first=starts),
            "max_tokens": 1,
        }
        try:
            answer = self.client.ask("POST", PATH, body, silence=self.config.timeout)
        except Unanswered as error:
            raise failure(error, where) from error
        theirs, ours = (answer.get("usage") or {}).get("prompt_tokens"), len(prompt.token_ids)
        if starts and theirs == ours - 1:
            return False
        if theirs is None and starts:
            log.warning(
                "%s tells no usage.prompt_tokens: prompts are sent without %r, which it must add",
                where,
                self.tokenizer.bos_token,
            )
        elif theirs is not None and theirs != ours:
            log.warning(
                "%s reads prompt %r as %s tokens, and the tokenizer of model.path as %d: it has "
                "another tokenizer, or adds tokens to the text",
                where,
                prompt.id,
                theirs,
                ours,
            )
        return starts

    def _body(self, request: Request, sampling: SamplingConfig) -> Mapping[str, Any]:
        greedy = request.greedy or sampling.temperature == 0
        adds_first = self._adds_first[self._starts_by_bos(request.prompt)]
        body = {
            "model": self.model,
            "prompt": self._text(request.prompt, adds_first=adds_first),
            "max_tokens": response_limit(request, sampling),
            "stream": True,
            "temperature": 0.0 if greedy else sampling.temperature,
            "seed": request.seed & (2**31 - 1),
        }
        extra = {
            name: getattr(sampling, name) for name in EXTRA if name in changed_fields(sampling)
        }
        if sampling.min_new_tokens:
            extra["min_tokens"] = sampling.min_new_tokens
        if sampling.stop:
            extra["stop"] = sampling.stop
        # the text of an answer has no special tokens, so a server would not find them there
        if spelled := end_ids(self.tokenizer, self._ends, sampling):
            extra["stop_token_ids"] = spelled
        return {**body, **extra}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Raise ``ConfigError``: no run trains with this engine."""
        raise ConfigError(
            f"engine.url = {self.config.url!r} returns text alone; set another engine"
        )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
