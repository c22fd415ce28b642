"""Score responses by a reward model behind ``lightrft serve-rm``."""

from __future__ import annotations

import functools
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.reward import ScoringModelConfig
from lightrft.datasets.judgement.chat_messages import chat_messages
from lightrft.datasets.row_tables import MalformedRow
from lightrft.learner.micro_batches import micro_batches
from lightrft.rollout.generation import LARGEST_REWARD
from lightrft.types import Batch, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered, check_digest
from lightrft.utils.http_client.server_pool import ServerPool
from lightrft.workers.scoring.own_tokens import asked
from lightrft.workers.scoring.reward_wire import (
    PATH,
    ServedAnswer,
    answers_to_json,
    batch_to_json,
    template_digest,
    vocabulary_digest,
)

Messages = list[dict[str, Any]] | str
"""Messages of a prompt as plain data, or the reason why it has none."""


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
        reencodes: True if the server gets conversations, because its vocabulary or template is not
            the policy's.
        client: Asks the servers.
    """

    term: ScoringModelConfig
    key: str
    name: str
    head: str
    digest: str
    layout: str
    client: ServerPool
    reencodes: bool = False

    @staticmethod
    def of(
        term: ScoringModelConfig, key: str, tokenizer: PreTrainedTokenizerBase
    ) -> ServedRewardModel:
        """Ask each server for its model and check it.

        Args:
            term: Settings of the term.
            key: Key of ``term``, for messages.
            tokenizer: Tokenizer of the policy.

        Raises:
            ConfigError: The server has another model or no such head, or cannot read the policy's
                responses.
            ResourceError: It does not answer before ``deadline``.
        """
        client = open_pool(term, key)
        found = ServedRewardModel(term, key, "", "", "", "", client)
        try:
            for one in client.clients:
                found._check(found._about(one), one.url, tokenizer)
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
        messages = messages_of(rollouts) if self.reencodes else {}

        def part(index: Tensor) -> list[float | str]:
            if self.reencodes:
                return self._conversations([rollouts[k] for k in index.tolist()], messages)
            return self._asked(batch_to_json(batch.select(index)), len(index))

        answers = self.client.send_all(part, parts)
        for index, answer in zip(parts, answers, strict=True):
            for row, score in zip(index.tolist(), answer, strict=True):
                found[row] = score
        return found

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _conversations(
        self, rollouts: Sequence[Rollout], messages: Mapping[int, Messages]
    ) -> list[float | str]:
        """Return the scores of one request of conversations.

        Args:
            rollouts: The responses.
            messages: The result of ``messages_of``.
        """
        found: list[float | str] = [""] * len(rollouts)
        answers: dict[int, ServedAnswer] = {}
        for k, rollout in enumerate(rollouts):
            origin = id(rollout.prompt)
            known = messages[origin]
            if isinstance(known, str):
                found[k] = known
            else:
                is_cut = rollout.finish_reason == "length"
                answers[k] = ServedAnswer(known, rollout.text, is_cut, origin)
        if answers:
            scores = self._asked(answers_to_json(list(answers.values())), len(answers))
            for k, score in zip(answers, scores, strict=True):
                where = f"prompt {rollouts[k].prompt.id}"
                found[k] = f"{where}: {score}" if isinstance(score, str) else score
        return found

    def _asked(self, body: Mapping[str, Any], count: int) -> list[float | str]:
        """Return the scores of one request, or the reason of each response that has none.

        Args:
            body: The request.
            count: Number of its responses.
        """
        # one id for all repetitions: a server that has computed the scores does not do so again
        headers = {"X-Request-Id": uuid.uuid4().hex}
        self.client.counts["requests"] += 1
        try:
            answer = self.client.ask("POST", PATH, body, headers)
        except Unanswered as error:
            self.client.counts["unanswered"] += 1
            return [str(error)] * count
        if answer.get("digest") != self.digest:
            raise ConfigError(
                f"{self.key}.url = {self.term.url!r}: the server has replaced its model "
                f"{self.digest} by {answer.get('digest')}; serve the first one again and resume"
            )
        scores = answer.get("scores", {}).get(self.head)
        if not isinstance(scores, list) or len(scores) != count:
            return [f"the server sent no score of {self.head!r} for each response"] * count
        found = [score_of(one) for one in scores]
        for place, problem in (answer.get("problems") or {}).items():
            found[int(place)] = str(problem)
        return found

    def _about(self, client: ServerClient) -> Mapping[str, Any]:
        """Return the entry of the model of a server."""
        try:
            answer = client.ask("GET", "/v1/models")
        except Unanswered as error:
            raise ResourceError(
                f"{self.key}.url: {error}; start it by lightrft serve-rm, and give its address"
            ) from error
        entries = answer.get("data")
        entry = entries[0] if isinstance(entries, list) and entries else {}
        if not entry.get("digest") or not entry.get("heads"):
            raise ConfigError(
                f"{self.key}.url = {client.url!r} serves no reward model with heads; start one "
                f"by lightrft serve-rm, or set {self.key}.protocol to openrlhf or lightrft"
            )
        return entry

    def _check(
        self, entry: Mapping[str, Any], url: str, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Keep what a server says about its model, or raise ``ConfigError``."""
        where = f"{self.key}.url = {url!r}"
        if self.digest and entry["digest"] != self.digest:
            raise ConfigError(
                f"{where} serves a model of digest {entry['digest']}, and the servers before it "
                f"one of {self.digest}; serve one model, or give each its own entry"
            )
        self.digest, self.layout = entry["digest"], entry["layout"]
        check_digest(self.term.digest, self.digest, entry["id"], self.key)
        self.reencodes = self._is_other(entry, tokenizer, where)
        self.head = self.term.head or entry["reward"]
        if self.head not in entry["heads"]:
            known = ", ".join(entry["heads"])
            raise ConfigError(
                f"{self.key}.head = {self.term.head!r}: the served model has {known}; name one"
            )
        self.name = self.term.name or self.head

    def _is_other(
        self, entry: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
    ) -> bool:
        """Return True if the server must encode conversations by itself.

        Args:
            entry: What the server says about its model.
            tokenizer: Tokenizer of the policy.
            where: Key and address of the server, for messages.

        Raises:
            ConfigError: It must, and cannot; or must not, and has another vocabulary.
        """
        differs = entry["vocabulary"] != vocabulary_digest(tokenizer)
        wanted = self.term.reencode
        if wanted is False and differs:
            raise ConfigError(
                f"{where}: the tokenizer of {entry['id']!r} has another vocabulary than the "
                f"policy's; leave out {self.key}.reencode = false"
            )
        if wanted is None:
            template = entry.get("template")
            # Without a template of its own, a model of the same vocabulary reads the policy's.
            wanted = differs or (bool(template) and template != template_digest(tokenizer))
        if wanted and "template" not in entry:
            raise ConfigError(
                f"{where}: the server is of a version that reads token ids alone, and the "
                f"tokenizer of {entry['id']!r} is not the policy's; upgrade the server"
            )
        if wanted and entry["template_problem"]:
            raise ConfigError(f"{where}: {entry['template_problem']}")
        return wanted


def messages_of(rollouts: Sequence[Rollout]) -> dict[int, Messages]:
    """Return the messages of each prompt by its identity, or the reason why it cannot be sent."""
    found: dict[int, Messages] = {}
    for rollout in rollouts:
        prompt = rollout.prompt
        if id(prompt) not in found:
            try:
                found[id(prompt)] = chat_messages(asked(prompt))
            except MalformedRow as error:
                found[id(prompt)] = f"prompt {prompt.id}: {error}"
    return found


def open_pool(term: ScoringModelConfig, key: str) -> ServerPool:
    """Return the clients of the servers of ``term``.

    Args:
        term: Settings of the term.
        key: Key of ``term``, for messages.
    """
    header = functools.partial(_bearer, term, key)
    return ServerPool(term.urls, term.deadline, term.max_in_flight, header)


def _bearer(term: ScoringModelConfig, key: str) -> dict[str, str]:
    """Return the header with the token. The file is read each time, as tokens are replaced."""
    if term.token_file is None:
        return {}
    file = Path(term.token_file).expanduser()
    try:
        words = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{key}.token_file = {str(file)!r}: {error}") from error
    if not words:
        raise ConfigError(f"{key}.token_file = {str(file)!r} is empty; write the token")
    return {"Authorization": f"Bearer {words[0]}"}


def score_of(sent: object) -> float | str:
    """Return a score of an answer, NaN for null, or why it is none."""
    if sent is None:
        return math.nan
    # true is a number for Python
    if isinstance(sent, bool) or not isinstance(sent, int | float):
        return f"the server sent the score {sent!r}, a {type(sent).__name__} and not a number"
    if abs(sent) > LARGEST_REWARD:
        return f"the server sent a score beyond +-{LARGEST_REWARD:g}"
    return float(sent)
