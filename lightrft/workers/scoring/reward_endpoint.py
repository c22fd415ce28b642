"""Score responses by a server of rewards in the protocol of OpenRLHF or of LightRFT.

Sources: ``openrlhf/utils/agent.py`` and ``openrlhf/cli/serve_rm.py`` of OpenRLHF, and
``lightrft/utils/remote_rm_utils.py`` of LightRFT.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.reward import ScoringModelConfig
from lightrft.datasets.judgement.reward_request import (
    TEXTS,
    PromptForm,
    media_form,
    request_fields,
)
from lightrft.learner.micro_batches import micro_batches
from lightrft.types import Batch, Prompt, Rollout
from lightrft.utils.errors import ConfigError, ResourceError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered
from lightrft.utils.http_client.server_pool import ServerPool
from lightrft.workers.scoring.own_tokens import asked
from lightrft.workers.scoring.served_reward import open_pool, score_of

log = logging.getLogger(__name__)

BROKEN = 500
"""HTTP status of a server that failed while it computed an answer."""
WORDS = 300
"""Most characters of an answer that a message quotes."""
SCORES = ("rewards", "scores")
"""Fields of an answer that may hold the scores, in order of preference."""


@dataclass(slots=True)
class RewardEndpoint:
    """A server that answers texts with rewards, as a term of the reward.

    Attributes:
        term: Its settings.
        key: Key of ``term``, for messages.
        tokenizer: Tokenizer of the policy.
        client: Asks the servers.
        name: Name of the term.
    """

    term: ScoringModelConfig
    key: str
    tokenizer: PreTrainedTokenizerBase
    client: ServerPool
    name: str
    _said: set[str] = field(default_factory=set)

    @staticmethod
    def of(
        term: ScoringModelConfig, key: str, tokenizer: PreTrainedTokenizerBase
    ) -> RewardEndpoint:
        """Ask each server once, and check its answer.

        Args:
            term: Settings of the term.
            key: Key of ``term``, for messages.
            tokenizer: Tokenizer of the policy.

        Raises:
            ConfigError: An address takes no such request, or its answer has no rewards.
            ResourceError: A server does not answer before ``deadline``.
        """
        client = open_pool(term, key)
        found = RewardEndpoint(term, key, tokenizer, client, str(term.label))
        try:
            for one in client.clients:
                found._try(one)
        except BaseException:
            client.close()
            raise
        return found

    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> list[float | str]:
        """Return the score of each response, or the reason why it has none.

        Other numbers of an answer become terms that are only reported.

        Args:
            rollouts: The responses.
            batch: Their prompts and tokens.
        """
        prompts = {id(r.prompt): r.prompt for r in rollouts}
        forms = {key: self._form(prompt) for key, prompt in prompts.items()}
        found: list[float | str] = [forms[id(r.prompt)].problem for r in rollouts]
        parts = [
            [k for k in index.tolist() if not found[k]]
            for index in micro_batches(batch, self.term.max_tokens_per_micro_batch, "packed")
        ]
        parts = [part for part in parts if part]

        def ask(part: list[int]) -> tuple[list[float | str], dict[str, list[float]]]:
            return self._asked([rollouts[k] for k in part], forms)

        for part, (scores, logs) in zip(parts, self.client.send_all(ask, parts), strict=True):
            for place, k in enumerate(part):
                found[k] = scores[place]
                rollouts[k].terms |= {name: values[place] for name, values in logs.items()}
        return found

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def body(
        self, rollouts: Sequence[Rollout], forms: Mapping[int, PromptForm]
    ) -> dict[str, object]:
        """Return the request for the rewards of responses.

        Args:
            rollouts: The responses.
            forms: The form of each prompt, by the identity of the prompt.
        """
        own = [forms[id(r.prompt)] for r in rollouts]
        texts = [self._text(r, form) for r, form in zip(rollouts, own, strict=True)]
        return request_fields(self.term.protocol, texts, own, [r.prompt for r in rollouts])

    def _asked(
        self, rollouts: Sequence[Rollout], forms: Mapping[int, PromptForm]
    ) -> tuple[list[float | str], dict[str, list[float]]]:
        """Return the scores of one request, and its other numbers by name of their term."""
        count = len(rollouts)
        self.client.counts["requests"] += 1
        try:
            answer = self.client.ask("POST", "", self.body(rollouts, forms))
        except Unanswered as error:
            self.client.counts["unanswered"] += 1
            return [str(error)] * count, {}
        scores = scores_of(answer, count)
        if isinstance(scores, str):
            self.client.counts["unanswered"] += 1
            return [scores] * count, {}
        logs = logged_numbers(answer, count, lambda name: self._say_unread(name))
        return scores, {f"{self.name}/{name}": values for name, values in logs.items()}

    def _say_unread(self, name: str) -> None:
        """Log once that a field of the answers is not reported."""
        if name not in self._said:
            self._said.add(name)
            log.warning(
                "%s: the answers have %r, which is neither a number nor a number for each "
                "response; it is not reported",
                self.key,
                name,
            )

    def _form(self, prompt: Prompt) -> PromptForm:
        """Return a prompt as it is sent."""
        if not prompt.media:
            return PromptForm(self._decoded(prompt.token_ids))
        form = media_form(prompt, asked(prompt), self.term.protocol)
        self._say_media(prompt, form.unsent)
        return form

    def _say_media(self, prompt: Prompt, kinds: Sequence[str]) -> None:
        """Log once that the protocol has no field for media of a prompt."""
        if kinds and "media" not in self._said:
            self._said.add("media")
            log.warning(
                "%s.protocol = %s sends no %s of prompt %s to the server, and of other prompts",
                self.key,
                self.term.protocol,
                ", ".join(kinds),
                prompt.id,
            )

    def _text(self, rollout: Rollout, form: PromptForm) -> str:
        """Return the text of prompt and response, which begins with the text of the prompt."""
        if not rollout.prompt.media:
            whole = self._decoded([*rollout.prompt.token_ids, *rollout.token_ids])
            if whole.startswith(form.text):
                return whole
        return form.text + self._decoded(rollout.token_ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _try(self, client: ServerClient) -> None:
        """Ask a server for the reward of a short text. Raise an error if it cannot give one."""
        where = f"{self.key}.url = {client.url!r}"
        body = {
            TEXTS[self.term.protocol]: ["1+1=2"],
            "prompts": ["1+1="],
            "labels": ["2"],
            "references": ["2"],
        }
        try:
            answer = self._first(client, body)
        except Unanswered as error:
            if error.refused:
                raise ConfigError(
                    f"{where}: {error}; give the whole address that takes a POST of "
                    f"{TEXTS[self.term.protocol]}, such as http://host:5000/get_reward"
                ) from error
            if error.status:
                # The rule of a server may fail for labels that no row has.
                log.warning("%s could not score a query without a row: %s", where, error)
                return
            raise ResourceError(f"{where}: {error}; start the server first") from error
        scores = scores_of(answer, 1)
        if isinstance(scores, str) or isinstance(scores[0], str):
            problem = scores if isinstance(scores, str) else scores[0]
            raise ConfigError(
                f"{where}: {problem}; the protocol {self.term.protocol!r} has a list rewards or "
                "scores with a number for each text"
            )

    def _first(self, client: ServerClient, body: Mapping[str, object]) -> Mapping[str, Any]:
        """Return the first answer of a server, which may still start."""
        try:
            return client.ask("POST", "", body, once=True)
        except Unanswered as error:
            if error.refused or error.status == BROKEN:
                raise
        return client.ask("POST", "", body)


def scores_of(answer: object, count: int) -> list[float | str] | str:
    """Return the score of each response, or the reason why the answer has none.

    Args:
        answer: The JSON of the answer.
        count: Number of responses of the request.
    """
    if not isinstance(answer, Mapping):
        return f"the server sent no object with rewards: {_words(answer)}"
    given = next((name for name in SCORES if answer.get(name) is not None), None)
    if given is None:
        return f"the answer of the server has no rewards and no scores: {_words(answer)}"
    values = answer[given]
    if count == 1 and not isinstance(values, list):
        values = [values]
    if not isinstance(values, list):
        return f"the server sent {given} that are no list: {_words(answer)}"
    if len(values) != count:
        return f"the server sent {len(values)} {given} for {count} responses: {_words(answer)}"
    return [score_of(one) for one in values]


def logged_numbers(
    answer: Mapping[str, Any], count: int, unread: Callable[[str], object]
) -> dict[str, list[float]]:
    """Return the other numbers of an answer by name, one for each response.

    A single number holds for each response of the request.

    Args:
        answer: The JSON of the answer.
        count: Number of responses of the request.
        unread: Called with the name of each field that holds something else.
    """
    extra = answer.get("extra_logs")
    fields = {name: value for name, value in answer.items() if name not in ("extra_logs", *SCORES)}
    if isinstance(extra, Mapping):
        fields |= extra
    elif extra is not None:
        unread("extra_logs")
    rewards, scores = (answer.get(name) for name in SCORES)
    if rewards is not None and scores is not None and scores != rewards:
        fields["scores"] = scores
    found = {}
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value] * count
        if len(values) == count and all(map(_is_number, values)):
            found[str(name)] = [float(one) for one in values]
        else:
            unread(str(name))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _words(answer: object) -> str:
    """Return the beginning of an answer, for messages."""
    text = json.dumps(answer, ensure_ascii=False)
    return text if len(text) <= WORDS else f"{text[:WORDS]}..."
