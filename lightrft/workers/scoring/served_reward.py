"""Score responses by a reward model behind ``lightrft serve-rm``."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from lightrft.config.reward import ScoringModelConfig
from lightrft.learner.micro_batches import micro_batches
from lightrft.types import Batch, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.workers.scoring.circuit_breaker import CircuitBreaker
from lightrft.workers.scoring.reward_wire import PATH, batch_to_json, vocabulary_digest

FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds before the first repetition of a request, and most seconds before a later one."""
CONNECT_SECONDS = 10.0
"""Limit of connecting to the server."""
ALIVE = (401, 408, 425, 429, 503)
"""HTTP statuses of a server that works, and may answer later. 401: tokens may be replaced."""
SHORTEST_PREFIX = len("sha256:") + 12
"""Fewest characters of a digest that names a model."""


class Unanswered(Exception):
    """A request failed, or was not answered before its deadline."""


@dataclass(slots=True)
class ServedRewardModel:
    """A reward model behind HTTP whose score is a term of the reward.

    Attributes:
        term: Its settings.
        key: Key of ``term``, for messages.
        name: Name of the term.
        head: Head whose score it is.
        digest: Digest of the model at start. Every answer must have it.
        layout: Layout of the model's inputs.
        client: Keeps connections to the server.
        breaker: Holds requests back while the server does not answer.
        counts: Number of ``requests``, ``retries`` and ``unanswered`` ones.
    """

    term: ScoringModelConfig
    key: str
    name: str
    head: str
    digest: str
    layout: str
    client: httpx.Client
    breaker: CircuitBreaker
    counts: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(
        term: ScoringModelConfig, key: str, tokenizer: PreTrainedTokenizerBase
    ) -> ServedRewardModel:
        """Ask the server for its model and check it.

        Args:
            term: Settings of the term.
            key: Key of ``term``, for messages.
            tokenizer: Tokenizer of the policy, whose tokens the model reads.

        Raises:
            ConfigError: The server has another model, another vocabulary or no such head.
            ResourceError: It does not answer before ``deadline``.
        """
        limits = httpx.Limits(max_connections=term.max_in_flight)
        client = httpx.Client(base_url=str(term.url).rstrip("/"), limits=limits)
        found = ServedRewardModel(term, key, "", "", "", "", client, CircuitBreaker())
        try:
            found._check(found._about(), tokenizer)
        except BaseException:
            client.close()
            raise
        return found

    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> list[float | str]:
        """Return the score of each response, or the reason why it has none.

        Args:
            rollouts: The responses.
            batch: Their prompts and tokens.

        Raises:
            ConfigError: The server has replaced its model.
        """
        parts = micro_batches(batch, self.term.max_tokens_per_micro_batch, self.layout)
        found: list[float | str] = [""] * len(batch)
        with ThreadPoolExecutor(self.term.max_in_flight) as threads:
            answers = threads.map(lambda index: self._part(batch.select(index)), parts)
            for index, answer in zip(parts, answers, strict=True):
                for row, score in zip(index.tolist(), answer, strict=True):
                    found[row] = score
        return found

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _part(self, batch: Batch) -> list[float | str]:
        """Return the scores of one request."""
        body = batch_to_json(batch)
        # one id for all repetitions: a server that has computed the scores does not do so again
        headers = {"X-Request-Id": uuid.uuid4().hex}
        self.counts["requests"] += 1
        try:
            answer = self._ask("POST", PATH, body, headers)
        except Unanswered as error:
            self.counts["unanswered"] += 1
            return [str(error)] * len(batch)
        if answer.get("digest") != self.digest:
            raise ConfigError(
                f"{self.key}.url = {self.term.url!r}: the server has replaced its model "
                f"{self.digest} by {answer.get('digest')}; serve the first one again and resume"
            )
        scores = answer.get("scores", {}).get(self.head)
        if not isinstance(scores, list) or len(scores) != len(batch):
            return [f"the server sent no score of {self.head!r} for each response"] * len(batch)
        return [math.nan if score is None else float(score) for score in scores]

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """Return the server's answer, after repetitions. Raises ``Unanswered``."""
        start = time.monotonic()
        deadline = start + self.term.deadline
        if self.breaker.silent_for > self.term.deadline:
            # others have waited for it that long already: one trial only
            deadline = start
        wait, problem = FIRST_WAIT, ""
        while self.breaker.enter(deadline):
            # the last trial too has some time
            shortest = min(CONNECT_SECONDS, self.term.deadline)
            left = max(shortest, deadline - time.monotonic())
            timeout = httpx.Timeout(left, connect=min(left, CONNECT_SECONDS))
            pause = wait
            try:
                sent = {**(headers or {}), **self._authorization()}
                answer = self.client.request(method, path, json=body, headers=sent, timeout=timeout)
                problem = self._problem(answer)
                if not problem:
                    self.breaker.succeeded()
                    return answer.json()
                pause = max(wait, _seconds(answer.headers.get("retry-after", "")))
            except (httpx.TransportError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                self.breaker.failed(problem)
            if time.monotonic() + pause >= deadline:
                break
            self.counts["retries"] += 1
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)
        raise Unanswered(
            f"{self.term.url} did not answer within deadline = {self.term.deadline:g} s: "
            f"{problem or self.breaker.problem}"
        )

    def _problem(self, answer: httpx.Response) -> str:
        """Return the reason to repeat a request, or an empty text.

        Raises ``Unanswered`` for a refusal that a repetition would not change.
        """
        if answer.status_code == httpx.codes.OK:
            return ""
        problem = f"status {answer.status_code}: {answer.text[:300]}"
        if answer.status_code in ALIVE:
            self.breaker.succeeded()
            return problem
        if answer.status_code >= 500:
            self.breaker.failed(problem)
            return problem
        self.breaker.succeeded()
        raise Unanswered(f"{self.term.url} refused the request: {problem}")

    def _authorization(self) -> dict[str, str]:
        """Return the header with the token. The file is read each time, as tokens are replaced."""
        if self.term.token_file is None:
            return {}
        file = Path(self.term.token_file).expanduser()
        try:
            words = file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self.key}.token_file = {str(file)!r}: {error}") from error
        if not words:
            raise ConfigError(f"{self.key}.token_file = {str(file)!r} is empty; write the token")
        return {"Authorization": f"Bearer {words[0]}"}

    def _about(self) -> Mapping[str, Any]:
        """Return the entry of the server's model."""
        try:
            answer = self._ask("GET", "/v1/models")
        except Unanswered as error:
            raise ResourceError(
                f"{self.key}.url: {error}; start it by lightrft serve-rm, and give its address"
            ) from error
        entries = answer.get("data")
        entry = entries[0] if isinstance(entries, list) and entries else {}
        if not entry.get("digest") or not entry.get("heads"):
            raise ConfigError(
                f"{self.key}.url = {self.term.url!r} serves no reward model with heads; start one "
                "by lightrft serve-rm"
            )
        return entry

    def _check(self, entry: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep what the server says about its model, or raise ``ConfigError``."""
        where, wanted = f"{self.key}.url = {self.term.url!r}", self.term.digest
        self.digest, self.layout = entry["digest"], entry["layout"]
        if wanted is not None:
            is_named = len(wanted) >= SHORTEST_PREFIX and self.digest.startswith(wanted)
            if not is_named:
                raise ConfigError(
                    f"{where} serves the model {entry['id']!r} of digest {self.digest}, and "
                    f"{self.key}.digest = {wanted!r}; serve the named model, or name this one"
                )
        if entry["vocabulary"] != vocabulary_digest(tokenizer):
            raise ConfigError(
                f"{where}: the tokenizer of {entry['id']!r} has another vocabulary than the "
                "policy's; serve a reward model of the policy's tokenizer"
            )
        self.head = self.term.head or entry["reward"]
        if self.head not in entry["heads"]:
            known = ", ".join(entry["heads"])
            raise ConfigError(
                f"{self.key}.head = {self.term.head!r}: the served model has {known}; name one"
            )
        self.name = self.term.name or self.head


def _seconds(text: str) -> float:
    """Return the seconds of a header ``Retry-After``, or 0 for a date."""
    return min(float(text), LONGEST_WAIT) if text.isdigit() else 0.0
