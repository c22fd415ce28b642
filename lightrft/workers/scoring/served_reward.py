"""Score responses by a reward model behind ``lightrft serve-rm``."""

from __future__ import annotations

import functools
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.reward import ScoringModelConfig
from lightrft.learner.micro_batches import micro_batches
from lightrft.types import Batch, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered, check_digest
from lightrft.workers.scoring.reward_wire import PATH, batch_to_json, vocabulary_digest


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
        client: Asks the server.
    """

    term: ScoringModelConfig
    key: str
    name: str
    head: str
    digest: str
    layout: str
    client: ServerClient

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
        header = functools.partial(_bearer, term, key)
        client = ServerClient(str(term.url), term.deadline, term.max_in_flight, header)
        found = ServedRewardModel(term, key, "", "", "", "", client)
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
        answers = self.client.together(lambda index: self._part(batch.select(index)), parts)
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
        self.client.counts["requests"] += 1
        try:
            answer = self.client.ask("POST", PATH, body, headers)
        except Unanswered as error:
            self.client.counts["unanswered"] += 1
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

    def _about(self) -> Mapping[str, Any]:
        """Return the entry of the server's model."""
        try:
            answer = self.client.ask("GET", "/v1/models")
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
        where = f"{self.key}.url = {self.term.url!r}"
        self.digest, self.layout = entry["digest"], entry["layout"]
        check_digest(self.term.digest, self.digest, entry["id"], self.key)
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
