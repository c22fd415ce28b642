"""Ask a served teacher for its most probable tokens at the positions of responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrft.config.train import DistillationConfig, DistillTeacherConfig
from lightrft.models.actor import TokenScores
from lightrft.models.divergence.token_divergence import TopTarget
from lightrft.models.sampled_distribution import Distribution
from lightrft.types import Batch
from lightrft.utils.errors import RESUMES, ConfigError, ResourceError
from lightrft.utils.lazy_imports import httpx

WAITS = (1.0, 4.0, 15.0)
"""Seconds before each repetition of a failed request."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses of a server that may answer later."""
NEEDED = (
    "it must be a vLLM server, or one that takes prompt_logprobs in /completions and a prompt of "
    "token ids"
)


@dataclass(slots=True)
class ServedTeacher:
    """A teacher behind an OpenAI-compatible server that returns ``prompt_logprobs``, such as vLLM.

    Attributes:
        settings: The settings ``teacher``.
        key: Key of ``settings``, for messages.
        vocabulary: Number of tokens of the tokenizer.
        client: Keeps connections to the server.
    """

    settings: DistillTeacherConfig
    key: str
    vocabulary: int
    client: httpx.Client

    @staticmethod
    def of(settings: DistillTeacherConfig, key: str, vocabulary: int) -> ServedTeacher:
        """Build a teacher that asks the server ``settings.url``.

        Args:
            settings: The settings ``teacher``.
            key: Key of ``settings``, for messages.
            vocabulary: Number of tokens of the tokenizer.
        """
        limits = httpx.Limits(max_connections=settings.max_in_flight)
        client = httpx.Client(timeout=settings.timeout, limits=limits)
        return ServedTeacher(settings, key, vocabulary, client)

    def score(self, batch: Batch, *, temperature: Distribution) -> TokenScores:
        """Raise ``ConfigError``: no part of distillation by a loss reads these log-probs."""
        raise ConfigError(f"{self.key}.url: a served teacher gives its top tokens alone")

    @torch.no_grad()
    def top_target(self, batch: Batch, settings: DistillationConfig) -> TopTarget:
        """Return the teacher's top k at the response tokens of ``batch``.

        Args:
            batch: Prompts and responses.
            settings: The settings ``distill``.

        Raises:
            ConfigError: If the server cannot return them.
            ResourceError: If it does not answer.
        """
        count = settings.top_k or 0
        prompts = batch.prompts.tokens.split(batch.prompts.sizes)
        responses = batch.responses.tokens.split(batch.responses.sizes)
        asked: list[tuple[list[int], list[int]]] = []
        for group, response in zip(batch.groups, responses, strict=True):
            asked.append((prompts[group].tolist(), response.tolist()))
        with ThreadPoolExecutor(self.settings.max_in_flight) as threads:
            # The list raises the first error of a thread.
            rows = list(threads.map(lambda row: self._top(*row, count), asked))
        tokens = torch.cat([torch.zeros(0, count, dtype=torch.long), *(row[0] for row in rows)])
        logprobs = torch.cat([torch.zeros(0, count).double(), *(row[1] for row in rows)])
        device = batch.responses.tokens.device
        return TopTarget(
            tokens.to(device),
            logprobs.to(device),
            settings.kind,
            settings.tail,
            settings.temperature,
            settings.beta,
        )

    def _top(self, prompt: list[int], response: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Return the ``count`` most probable tokens at each position of ``response``, ``[n, k]``,
        and their log-probs."""
        if not response:
            return torch.zeros(0, count, dtype=torch.long), torch.zeros(0, count).double()
        given = [*prompt, *response]
        answer = self._ask(
            {
                "model": self.settings.served_name or self.settings.path,
                "prompt": given,
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": count,
            }
        )
        found = self._prompt_logprobs(answer)
        if len(found) != len(given):
            raise ConfigError(
                f"{self.key}.url = {self.settings.url!r}: {len(given)} tokens were sent, and the "
                f"server returned log-probs of {len(found)}: it encodes the prompt again; {NEEDED}"
            )
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        for entry, token in zip(found[len(prompt) :], response, strict=True):
            best = self._best(entry, token, count)
            tokens.append([number for number, _ in best])
            logprobs.append([logprob for _, logprob in best])
        return torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float64)

    def _prompt_logprobs(self, answer: Mapping[str, Any]) -> list[Any]:
        """Return the entry of each token that was sent."""
        choices = answer.get("choices") or [{}]
        found = choices[0].get("prompt_logprobs")
        if not isinstance(found, list):
            raise ConfigError(
                f"{self.key}.url = {self.settings.url!r}: the answer has no prompt_logprobs; "
                f"{NEEDED}"
            )
        return found

    def _best(self, entry: Any, token: int, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` most probable tokens of one position with their log-probs.

        Args:
            entry: The server's log-probs by token id.
            token: The token at this position, which every entry has too.
            count: Number of tokens.
        """
        found = entry if isinstance(entry, Mapping) else {}
        pairs = [(int(number), float(about["logprob"])) for number, about in found.items()]
        if token not in dict(pairs) or len(pairs) < count:
            raise ConfigError(
                f"{self.key}.url = {self.settings.url!r}: a position has {len(pairs)} log-probs, "
                f"and distill.top_k = {count} with the token itself are needed; raise the "
                f"server's limit (--max-logprobs of vLLM), or lower distill.top_k"
            )
        beyond = [number for number, _ in pairs if number >= self.vocabulary]
        if beyond:
            raise ConfigError(
                f"{self.key}.url = {self.settings.url!r}: the server's model has the token "
                f"{beyond[0]}, and the tokenizer has {self.vocabulary} tokens; serve a model with "
                "the tokenizer of the student"
            )
        # The lower id first among equals, so that every rank keeps the same tokens.
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]

    def _ask(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the server's answer, after repetitions if it does not answer at once."""
        settings = self.settings
        address = f"{str(settings.url).rstrip('/')}/completions"
        problem = ""
        for wait in (0.0, *WAITS):
            time.sleep(wait)
            try:
                answer = self.client.post(address, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == httpx.codes.OK:
                return answer.json()
            problem = f"status {answer.status_code}: {answer.text[:300]}"
            if answer.status_code not in PASSING:
                raise ConfigError(f"{self.key}.url = {settings.url!r}: {problem}")
        raise ResourceError(
            f"{self.key}.url = {settings.url!r} did not answer {len(WAITS) + 1} times, the last: "
            f"{problem}. {RESUMES}"
        )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
