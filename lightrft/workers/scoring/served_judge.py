"""A judge behind HTTP: any server with chat completions as in the API of OpenAI."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrft.config.reward import JudgeConfig
from lightrft.datasets.judgement.chat_messages import chat_messages
from lightrft.datasets.judgement.question import Raw, lead
from lightrft.datasets.row_tables import MalformedRow
from lightrft.rewards.rules.verdicts import VerdictForm
from lightrft.utils.errors import ConfigError, ResourceError, did_you_mean
from lightrft.utils.http_client.server_client import ServerClient, Unanswered, check_digest
from lightrft.workers.scoring.decisive_token import decisive_token, verdict_names

PATH = "/v1/chat/completions"


@dataclass(slots=True)
class ServedJudge:
    """A judge behind HTTP.

    Attributes:
        config: Its settings.
        key: Key of ``config``, for messages.
        client: Asks the server.
        model: Name of the served model.
        digest: Digest of the model at start. Empty if the server gives none.
    """

    config: JudgeConfig
    key: str
    client: ServerClient
    model: str = ""
    digest: str = ""

    @staticmethod
    def of(config: JudgeConfig, key: str) -> ServedJudge:
        """Ask the server for its models and check them.

        Args:
            config: Settings of the judge.
            key: Key of ``config``, for messages.

        Raises:
            ConfigError: The server has another model, or the key is missing.
            ResourceError: It does not answer before ``deadline``.
        """
        header = functools.partial(_bearer, config, key)
        header()
        url = str(config.url).rstrip("/").removesuffix("/v1")
        client = ServerClient(url, config.deadline, config.max_in_flight, header)
        found = ServedJudge(config, key, client)
        try:
            found._check()
        except BaseException:
            client.close()
            raise
        return found

    def write(self, questions: Sequence[Raw], seeds: Sequence[int]) -> list[str | Unanswered]:
        """See ``Judge.write``."""
        found = self._choices([self._body(q, s) for q, s in zip(questions, seeds, strict=True)])
        return [one if isinstance(one, Unanswered) else _text(one) for one in found]

    def reasoned(
        self, questions: Sequence[Raw], seeds: Sequence[int], forms: Sequence[VerdictForm]
    ) -> list[list[float] | Unanswered | None]:
        """See ``Judge.reasoned``. Likely tokens at the verdict give its probabilities.

        Args:
            questions: The questions.
            seeds: Seed of each judgement.
            forms: Form of the verdict of each question.
        """
        asked = zip(questions, seeds, strict=True)
        bodies = [self._body(question, seed) | self._likely() for question, seed in asked]
        found: list[list[float] | Unanswered | None] = []
        for choice, form in zip(self._choices(bodies), forms, strict=True):
            found.append(choice if isinstance(choice, Unanswered) else at_verdict(choice, form))
        return found

    def probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> list[list[list[float] | Unanswered | None]]:
        """See ``Judge.probabilities``. The server continues an answer up to its verdict."""
        start = lead(self.config)
        bodies = []
        for question in (question for group in groups for question in group):
            body = self._body(question, 0) | self._likely()
            # an end token would have no entry
            body |= {"temperature": 0.0, "max_completion_tokens": 1, "min_tokens": 1}
            if start and isinstance(body["messages"], list):
                body["messages"].append({"role": "assistant", "content": start})
                # names of vLLM, which ``lightrft serve-rm`` has too
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            bodies.append(body)
        rows = iter(self._choices(bodies))
        found: list[list[list[float] | Unanswered | None]] = []
        for group in groups:
            own = [next(rows) for _ in group]
            found.append([_first(one, verdicts) for one in own])
        return found

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _body(self, question: Raw, seed: int) -> dict[str, Any]:
        """Return the request of one judgement. Its messages are the reason if it has none."""
        messages: list[dict[str, Any]] | Unanswered
        try:
            messages = chat_messages(question)
        except MalformedRow as error:
            messages = Unanswered(str(error))
        return {
            "model": self.model,
            "messages": messages,
            "temperature": self.config.temperature,
            "max_completion_tokens": self.config.max_new_tokens,
            "seed": seed,
        }

    def _likely(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": self.config.top_logprobs}

    def _choices(self, bodies: Sequence[dict[str, Any]]) -> list[Mapping[str, Any] | Unanswered]:
        """Return the first choice of the answer to each request."""
        return self.client.send_all(self._choice, bodies)

    def _choice(self, body: dict[str, Any]) -> Mapping[str, Any] | Unanswered:
        if isinstance(body["messages"], Unanswered):
            return body["messages"]
        self.client.counts["requests"] += 1
        try:
            answer = self.client.ask("POST", PATH, body)
        except Unanswered as error:
            self.client.counts["unanswered"] += 1
            return error
        name, digest = str(answer.get("model")), answer.get("system_fingerprint")
        # hosted models answer by a dated name
        is_named = name == self.model or name.startswith(f"{self.model}-")
        if not is_named or (self.digest and digest != self.digest):
            raise ConfigError(
                f"{self.key}.url = {self.config.url!r}: the server has replaced its model "
                f"{self.model} {self.digest} by {name} {digest}; serve the first one again and "
                "resume"
            )
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            return Unanswered(f"{self.config.url} sent no choices")
        return choices[0]

    def _check(self) -> None:
        """Find the model of the server, or raise ``ConfigError``."""
        where = f"{self.key}.url = {self.config.url!r}"
        try:
            answer = self.client.ask("GET", "/v1/models")
        except Unanswered as error:
            raise ResourceError(f"{self.key}.url: {error}; start the server first") from error
        entries = {str(one.get("id")): one for one in answer.get("data") or []}
        wanted = self.config.served_model
        if wanted is None and len(entries) == 1:
            (wanted,) = entries
        if wanted not in entries:
            hint = did_you_mean(wanted, entries) if wanted else "; name one"
            raise ConfigError(
                f"{where} serves {', '.join(entries) or 'no model'}, and {self.key}.served_model = "
                f"{self.config.served_model!r}{hint}"
            )
        self.model, entry = str(wanted), entries[str(wanted)]
        if entry.get("heads"):
            raise ConfigError(
                f"{where} serves a reward model with heads; name it in reward.models, not in "
                "reward.judges"
            )
        self.digest = str(entry.get("digest") or "")
        check_digest(self.config.digest, self.digest, self.model, self.key)


def at_verdict(choice: Mapping[str, Any], form: VerdictForm) -> list[float] | None:
    """Return the probabilities of the verdicts at the token that decides the verdict.

    Args:
        choice: Choice of a chat completion, with log-probs.
        form: Form of the verdict.
    """
    tokens = _tokens(choice)
    texts = [str(one.get("token", "")) for one in tokens]
    place = decisive_token(len(texts), texts.__getitem__, lambda n: "".join(texts[:n]), form)
    if place is None:
        return None
    word = texts[place].strip()
    # an alternative has the spaces that the verdict has
    names = [name.join(texts[place].rsplit(word, 1)) for name in verdict_names(form)]
    return normalized(tokens[place], names)


def normalized(token: Mapping[str, Any], names: Sequence[str]) -> list[float] | None:
    """Return the probabilities of ``names`` among the likely tokens at a place, summing to 1.

    ``None`` if no name is among them.

    Args:
        token: Entry of ``logprobs.content``.
        names: Texts of tokens.
    """
    known: dict[str, float] = {}
    for one in (token, *(token.get("top_logprobs") or ())):
        known.setdefault(str(one.get("token")), float(one.get("logprob", -math.inf)))
    logs = [known.get(name, -math.inf) for name in names]
    largest = max(logs)
    if largest == -math.inf:
        return None
    weights = [math.exp(one - largest) for one in logs]
    return [weight / math.fsum(weights) for weight in weights]


def _first(
    choice: Mapping[str, Any] | Unanswered, names: Sequence[str]
) -> list[float] | Unanswered | None:
    if isinstance(choice, Unanswered):
        return choice
    tokens = _tokens(choice)
    return normalized(tokens[0], names) if tokens else None


def _tokens(choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of the tokens of a choice; none if the server sent no log-probs."""
    given = choice.get("logprobs")
    found = given.get("content") if isinstance(given, Mapping) else None
    return found if isinstance(found, list) else []


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    return str(message.get("content") or "") if isinstance(message, Mapping) else ""


def _bearer(config: JudgeConfig, key: str) -> dict[str, str]:
    """Return the header with the key of ``api_key_env``."""
    name = config.api_key_env
    if name is None:
        return {}
    if not os.environ.get(name):
        raise ConfigError(
            f"{key}.api_key_env = {name!r}: this environment variable is empty; set it to the key"
        )
    return {"Authorization": f"Bearer {os.environ[name]}"}
