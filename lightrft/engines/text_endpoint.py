"""Generation by an endpoint that returns text alone, for evaluation and inference.

Its responses are encoded here. They have no log-probs, so nothing can be trained on them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrft.config.base import changed_fields
from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.base import Fingerprint, never_stop
from lightrft.engines.requests import (
    check_requests,
    refuse_native_settings,
    response_limit,
    rollout_of,
)
from lightrft.engines.served.served_engine import LOOK_SECONDS, failure
from lightrft.types import FinishReason, Request, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

EXTRA = ("top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids")
"""Settings that are sent if they are set. Few endpoints know all of them."""


class TextEndpoint:
    """An engine over completions of texts, as in the API of OpenAI.

    Args:
        client: Sends requests to the endpoint.
        tokenizer: Decodes prompts and encodes responses.
        config: Settings of the engine.
        model: Name of the served model.
    """

    shared_by_all_ranks = False
    tensor_parallel_size = 1
    shares_weights = False

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
            ConfigError: A request has media, or continues or watches a response.
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
        return self._answers(wanted, sampling, stopped)

    def refuse_media(self, what: str, kinds: Collection[str]) -> None:
        """See ``ServedEngine.refuse_media``."""
        raise ConfigError(
            f"engine.url = {self.config.url!r} gets prompts as text, and cannot generate for "
            f"{what}; set engine.kind=native"
        )

    def _answers(
        self, requests: Sequence[Request], sampling: SamplingConfig, stopped: Callable[[], bool]
    ) -> Iterator[Rollout]:
        threads = ThreadPoolExecutor(self.config.max_num_seqs)
        try:
            asked: dict[Future[Rollout], Request] = {
                threads.submit(self._answer, request, sampling): request for request in requests
            }
            while asked:
                if stopped():
                    for request in asked.values():
                        yield rollout_of(request, [], [], [], "abort", "")
                    return
                done, _ = wait(asked, LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    del asked[future]
                    yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: Request, sampling: SamplingConfig) -> Rollout:
        try:
            answer = self.client.ask("POST", "/v1/completions", self._body(request, sampling))
        except Unanswered as error:
            raise failure(error, f"engine.url = {self.config.url!r}") from error
        [choice] = answer.get("choices") or [{}]
        text = str(choice.get("text") or "")
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        n = len(ids)
        reason: FinishReason = "stop" if choice.get("finish_reason") == "stop" else "length"
        return rollout_of(request, ids, [math.nan] * n, [0] * n, reason, text)

    def _body(self, request: Request, sampling: SamplingConfig) -> Mapping[str, Any]:
        greedy = request.greedy or sampling.temperature == 0
        body = {
            "model": self.model,
            # special tokens that the text spells are special tokens
            "prompt": str(self.tokenizer.decode(request.prompt.token_ids)),
            "max_tokens": response_limit(request, sampling),
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
        return {**body, **extra}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Raise ``ConfigError``: no run trains with this engine."""
        raise ConfigError(
            f"engine.url = {self.config.url!r} returns text alone; set another engine"
        )

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``. It frees nothing."""

    def wake(self) -> None:
        """See ``Engine.wake``."""

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
