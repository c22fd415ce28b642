"""Turn the fields of a request into sampling settings, requests and answers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from lightrft.config.generation.decoding import ConstraintConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.serving.chat.generation_loop import Asked, GenerationLoop
from lightrft.serving.chat.request_fields import SETTINGS, sampling_problem
from lightrft.serving.chat.response_format import read_constraint
from lightrft.serving.chat.token_logprobs import ChatAnswer, TokenLogprobs
from lightrft.serving.chat.token_stream import TokenStream
from lightrft.serving.problems import HTTPCall, bad
from lightrft.serving.reward_service import ServedModel
from lightrft.serving.server_metrics import ServerMetrics
from lightrft.serving.work_queue import Work
from lightrft.types import Prompt, Request, Rollout
from lightrft.utils.errors import ConfigError
from lightrft.utils.seeding import derive_seed

SEED_BITS = 32
"""Bits of a random seed: every client of JSON reads such a number exactly."""
MOST_CHOICES = 64
"""Largest ``n`` of a request."""
MOST_LIKELY = 20
"""Largest number of likely tokens of a request, as in the API of OpenAI."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings of one request, for each of its prompts.

    Attributes:
        sampling: The sampling settings.
        seeds: Seed of each response to a prompt.
        seed: The seed that they derive from. ``None`` if the request gives each of them.
        likely: Number of likely tokens at each place. ``None`` for no log-probs.
        echo: Log-probs are of the tokens of the prompts too.
        is_stream: The answer is sent as it grows.
        constraint: Form of the responses. ``None`` takes that of the server's settings.
        has_tokens: The events of a stream have the ids of their tokens.
        response_tokens: Number of last tokens of each prompt that are the beginning of a response.
    """

    sampling: SamplingConfig
    seeds: Sequence[int]
    seed: int | None = None
    likely: int | None = None
    echo: bool = False
    is_stream: bool = False
    constraint: ConstraintConfig | None = None
    has_tokens: bool = False
    response_tokens: int = 0

    def seed_field(self) -> dict[str, int]:
        """Return the field of an answer by which its request can be repeated."""
        return {} if self.seed is None else {"seed": self.seed}


class TextGenerator:
    """Generates the answers of every address.

    Args:
        engine: Generates the responses.
        likely: Returns the log-probs of the tokens of responses, and the likeliest tokens.
        tokenizer: The tokenizer of the model.
        vocabulary: Number of token ids that the model knows, which may exceed the tokenizer's.
        sampling: Settings for requests that set nothing else.
        served: Name and digest of the model.
        context: Context length of the model in tokens. ``None`` for no limit.
        metrics: Counters of the server.
    """

    def __init__(
        self,
        engine: NativeEngine,
        likely: Callable[[Sequence[Rollout], int], list[TokenLogprobs]],
        tokenizer: Any,
        vocabulary: int,
        sampling: SamplingConfig,
        served: ServedModel,
        context: int | None,
        metrics: ServerMetrics,
    ) -> None:
        self.engine = engine
        self.likely = likely
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.sampling = sampling
        self.served = served
        self.context = context
        self.loop = GenerationLoop(engine, self._weighed, metrics)

    def wanted(self, call: HTTPCall, likely: int | None = None, echo: bool = False) -> Wanted:
        """Return what ``call`` asks for.

        Args:
            call: The request.
            likely: Number of likely tokens at each place. ``None`` for no log-probs.
            echo: Log-probs are of the tokens of the prompts too.

        Raises:
            HTTPProblem: A field is malformed.
        """
        seed, seeds = seeds_of(call)
        return Wanted(
            self._sampling(call.body),
            seeds,
            seed,
            likely,
            echo,
            bool(call.body.get("stream")),
            self._constraint(call.body),
        )

    def begin(
        self, prompts: Sequence[Prompt], wanted: Wanted, deadline: float
    ) -> tuple[Future[list[ChatAnswer]], TokenStream | None]:
        """Queue the responses to ``prompts``.

        Args:
            prompts: The prompts. Each has a response for each seed, one after another.
            wanted: What the request asks for.
            deadline: Time of ``time.monotonic`` after which nobody waits for the answer.

        Returns:
            The future of the answers, and their stream if one is wanted.

        Raises:
            HTTPProblem: A prompt leaves no room for a response.
        """
        sampling, count = wanted.sampling, len(wanted.seeds)
        stream = None
        if wanted.is_stream:
            total, has_tokens = len(prompts) * count, wanted.has_tokens
            stream = TokenStream(self.tokenizer, total, sampling.stop, has_tokens=has_tokens)
        requests = []
        for p, prompt in enumerate(prompts):
            room = self._room(prompt, sampling)
            for k, seed in enumerate(wanted.seeds, p * count):
                form, held = wanted.constraint, wanted.response_tokens
                requests.append(
                    Request(prompt, seed, k, room, constraint=form, prompt_response_tokens=held)
                )
        # requests with other limits share a batch: each has its own limit
        shared = sampling.model_copy(update={"max_new_tokens": self.sampling.max_new_tokens})
        asked = Asked(requests, shared, wanted.likely, wanted.echo, stream)
        return self.loop.submit(Work(asked, 0, deadline)), stream

    def replaced(self, digest: str) -> None:
        """Note that the weights were replaced by those of ``digest``."""
        self.served = replace(self.served, digest=digest)

    def close(self) -> None:
        """Finish the requests that wait, and stop."""
        self.loop.close()

    def _sampling(self, body: Mapping[str, Any]) -> SamplingConfig:
        given: dict[str, Any] = {}
        fields: dict[str, str] = {}
        for name, setting in SETTINGS.items():
            if (value := body.get(name)) is None:
                continue
            # not ``get(setting, value)``: NaN differs from itself
            if setting in given and given[setting] != value:
                both = f"{fields[setting]} = {given[setting]} and {name} = {value}"
                raise bad(f"{both} are one setting; send one of them")
            if setting == "stop" and isinstance(value, str):
                value = (value,)
            # vLLM's value for all tokens
            if name == "top_k" and value == -1:
                value = 0
            given[setting], fields[setting] = value, name
        try:
            found = SamplingConfig.model_validate({**self.sampling.model_dump(), **given})
        except ValidationError as error:
            raise bad(sampling_problem(error, fields)) from error
        for id in found.stop_token_ids if "stop_token_ids" in given else ():
            if id >= self.vocabulary:
                largest = self.vocabulary - 1
                raise bad(f"stop_token_ids has {id}, and the largest token id is {largest}")
        return found

    def _constraint(self, body: Mapping[str, Any]) -> ConstraintConfig | None:
        """Return the form that a request asks for, compiled, so that it cannot fail later."""
        form = read_constraint(body)
        if form is None:
            return None
        try:
            self.engine.grammars().matcher(form.constraint)
        except ConfigError as error:
            raise bad(re.sub(r"sampling\.constraint(\.\w+)?", form.field, str(error))) from error
        return form.constraint

    def _room(self, prompt: Prompt, sampling: SamplingConfig) -> int:
        """Return the longest response to ``prompt`` in tokens."""
        room = sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - len(prompt.token_ids))
        if room < max(1, sampling.min_new_tokens):
            raise bad(
                f"{len(prompt.token_ids)} tokens of the prompt leave no room in the context of "
                f"{self.context}"
            )
        return room

    def _weighed(self, asked: Asked, rollouts: Sequence[Rollout]) -> list[ChatAnswer]:
        """Return the responses of a request, with log-probs if it asks for them."""
        if asked.likely is None:
            return [ChatAnswer(rollout) for rollout in rollouts]
        shown = [echoed(rollout) for rollout in rollouts] if asked.echo else rollouts
        rows = self.likely(shown, asked.likely)
        return [ChatAnswer(rollout, row) for rollout, row in zip(rollouts, rows, strict=True)]


def seeds_of(call: HTTPCall) -> tuple[int | None, list[int]]:
    """Return the seed of the request, and that of each response to a prompt.

    ``seeds`` gives them. Else they derive from ``seed``, for ``n`` responses. A request with
    neither gets a random seed, or that of its request id, so that its repetition is equal.

    Raises:
        HTTPProblem: A field is malformed, ``seed`` is given too, or ``n`` is not the number of
            ``seeds``.
    """
    given = call.body.get("seeds")
    count = call.number("n", 1, 1, MOST_CHOICES)
    if given is None:
        name = call.id or secrets.token_hex()
        fresh = derive_seed(0, "request", name) % 2**SEED_BITS
        seed = call.number("seed", fresh, 0, 2**63 - 1)
        return seed, [derive_seed(seed, "choice", k) for k in range(count)]
    if (seed := call.body.get("seed")) is not None:
        raise bad(f"seed = {seed} has no effect next to seeds; send one of them")
    if not 1 <= len(given) <= MOST_CHOICES or not all(0 <= one < 2**63 for one in given):
        raise bad(f"seeds must be 1 to {MOST_CHOICES} whole numbers from 0, below 2**63")
    if call.body.get("n") is not None and count != len(given):
        raise bad(f"n = {count}, and seeds has {len(given)} numbers; leave out n")
    return None, [int(one) for one in given]


def echoed(rollout: Rollout) -> Rollout:
    """Return ``rollout`` with all tokens of the prompt but the first as response tokens."""
    first, *rest = rollout.prompt.token_ids
    prompt = Prompt(rollout.prompt.id, [first], media=rollout.prompt.media)
    ids = [*rest, *rollout.token_ids]
    n = len(ids)
    return Rollout(prompt, ids, [True] * n, [0.0] * n, [0] * n, "length", rollout.seed)


def usage(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], *, has_response: bool = True
) -> dict[str, object]:
    """Return the numbers of tokens of a request.

    Args:
        prompts: Its prompts.
        rollouts: Its responses.
        has_response: The tokens of responses count.
    """
    asked = sum(len(prompt.token_ids) for prompt in prompts)
    made = sum(map(len, rollouts)) if has_response else 0
    # all responses to a prompt share its computation
    reused = {id(rollout.prompt): rollout.reused_tokens for rollout in rollouts}
    return {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
        "prompt_tokens_details": {"cached_tokens": sum(reused.values())},
    }


def token_fields(body: Mapping[str, Any], rollout: Rollout) -> dict[str, object]:
    """Return the fields of a choice that training reads, if ``return_token_ids`` is set."""
    if not body.get("return_token_ids"):
        return {}
    return {
        "token_ids": rollout.token_ids,
        # of the distribution that was sampled from, after temperature and filters
        "sampled_logprobs": rollout.logprobs,
        "policy_version": max(rollout.versions, default=0),
    }
