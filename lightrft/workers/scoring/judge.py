"""Judges: models that write judgements, or give the probabilities of verdicts."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightrft.config.data import Columns, DataConfig
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import JudgeConfig, RewardConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.judgement.question import Raw
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.rows.row_reader import read_record
from lightrft.engines.native import NativeEngine
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.rewards.rules.verdicts import VerdictForm
from lightrft.types import Batch, Prompt, Request, Rollout, Segments
from lightrft.utils.errors import ConfigError, ModelError, path_of
from lightrft.utils.http_client.server_client import Unanswered
from lightrft.workers.scoring.collecting import batch_of
from lightrft.workers.scoring.decisive_token import (
    JudgementTokens,
    common_length,
    verdict_names,
    verdict_tokens,
)
from lightrft.workers.scoring.model_scorer import model_settings
from lightrft.workers.scoring.served_judge import ServedJudge

Weights = Sequence[float] | Unanswered | None
"""Probability of each verdict. ``None`` if a judgement has no verdict."""


class Judge(Protocol):
    """The interface of a judge, wherever it runs."""

    @property
    def config(self) -> JudgeConfig:
        """Its settings."""
        ...

    def write(self, questions: Sequence[Raw], seeds: Sequence[int]) -> Sequence[str | Unanswered]:
        """Return one judgement of each question, sampled with its seed."""
        ...

    def reasoned(
        self, questions: Sequence[Raw], seeds: Sequence[int], forms: Sequence[VerdictForm]
    ) -> Sequence[Weights]:
        """Return the probabilities of the verdicts at the end of a sampled judgement.

        Args:
            questions: The questions.
            seeds: Seed of each judgement.
            forms: Form of the verdict of each question.
        """
        ...

    def probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> Sequence[Sequence[Weights]]:
        """Return the probability of each verdict for each question of each group.

        Questions of one group begin alike. The probabilities of the verdicts sum to 1.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...


@dataclass(slots=True)
class LocalJudge:
    """A judge in this process.

    Args:
        config: Its settings.
        actor: The model, in evaluation mode.
        encoder: Encodes questions by the judge's own template.
        engine: Samples from the model.
        device: Device of the model while it judges.
    """

    config: JudgeConfig
    actor: Actor
    encoder: ChatEncoder
    engine: NativeEngine
    device: torch.device

    def write(self, questions: Sequence[Raw], seeds: Sequence[int]) -> list[str]:
        """See ``Judge.write``. Equal questions are computed once."""
        with self.placed():
            return [one.text for one in self.sampled(questions, seeds)]

    def sampled(self, questions: Sequence[Raw], seeds: Sequence[int]) -> list[Rollout]:
        """Return one judgement of each question, sampled with its seed."""
        known: dict[str, Prompt] = {}
        requests = []
        for k, (question, seed) in enumerate(zip(questions, seeds, strict=True)):
            key = repr(question)
            if key not in known:
                known[key] = self.prompt(question)
            requests.append(Request(known[key], seed, sample=k))
        sampling = SamplingConfig(
            max_new_tokens=self.config.max_new_tokens, temperature=self.config.temperature
        )
        with torch.no_grad():
            found = {one.sample: one for one in self.engine.generate(requests, sampling)}
        return [found[k] for k in range(len(questions))]

    def reasoned(
        self, questions: Sequence[Raw], seeds: Sequence[int], forms: Sequence[VerdictForm]
    ) -> list[list[float] | None]:
        """See ``Judge.reasoned``. Judgements are read together in micro-batches.

        Args:
            questions: The questions.
            seeds: Seed of each judgement.
            forms: Form of the verdict of each question.
        """
        with self.placed():
            judgements = self.sampled(questions, seeds)
            kept: dict[int, list[int]] = {}
            for k, (judgement, form) in enumerate(zip(judgements, forms, strict=True)):
                ended = judgement.finish_reason == "stop"
                ids = judgement.token_ids[:-1] if ended else judgement.token_ids
                tokens = JudgementTokens(self.encoder.tokenizer, ids)
                place = tokens.decisive(form)
                if place is not None:
                    kept[k] = tokens.others(place, verdict_names(form))
                    # Its last token is the verdict, which the state before it predicts.
                    judgement.token_ids = judgement.token_ids[: place + 1]
            found: list[list[float] | None] = [None] * len(judgements)
            rows = self._at_the_end([judgements[k] for k in kept])
            for (k, ids), logits in zip(kept.items(), rows, strict=True):
                found[k] = logits[ids].double().softmax(-1).tolist()
        return found

    @torch.no_grad()
    def _at_the_end(self, judgements: Sequence[Rollout]) -> Iterator[Tensor]:
        """Yield the logits ``[V]`` of the last token of each judgement."""
        if not judgements:
            return
        batch = batch_of(judgements)
        found: dict[int, Tensor] = {}
        for index in micro_batches(
            batch, self.config.max_tokens_per_micro_batch, self.actor.layout
        ):
            part = batch.select(index).to(self.actor.device)
            states, _ = self.actor.hidden(part)
            ends = part.responses.lengths.cumsum(0) - 1
            logits = self.actor.logits(states[ends]).cpu()
            found.update(zip(index.tolist(), logits))
        for k in range(len(judgements)):
            yield found[k]

    def probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> list[list[list[float]]]:
        """See ``Judge.probabilities``. The common beginning of a group is computed once."""
        with self.placed():
            return self._probabilities(groups, verdicts)

    @contextmanager
    def placed(self) -> Generator[None]:
        """Place the model on its device inside the context, if it is offloaded outside of it."""
        if self.config.offload:
            self.actor.to(self.device)
        try:
            yield
        finally:
            if self.config.offload:
                self.actor.to("cpu")

    def close(self) -> None:
        """See ``Judge.close``: there are none."""

    @torch.no_grad()
    def _probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> list[list[list[float]]]:
        start, ids = verdict_tokens(self.encoder, self.config, verdicts)
        prompts: list[Prompt] = []
        responses: list[list[int]] = []
        prompt_of: list[int] = []
        for k, group in enumerate(groups):
            whole = [self.prompt(question) for question in group]
            rows = [prompt.token_ids for prompt in whole]
            # A response must not be empty, since its last state is read.
            shared = min(common_length(rows), min(map(len, rows)) - (not start))
            prompts.append(Prompt(str(k), rows[0][:shared], media=whole[0].media))
            responses += [[*row[shared:], *start] for row in rows]
            prompt_of += [k] * len(rows)
        batch = Batch(Segments.of_prompts(prompts), Segments.of(responses), torch.tensor(prompt_of))
        found = torch.zeros(len(batch), len(ids), dtype=torch.float64)
        for index in micro_batches(
            batch, self.config.max_tokens_per_micro_batch, self.actor.layout
        ):
            part = batch.select(index).to(self.actor.device)
            _, last = self.actor.hidden(part, final=True)
            assert last is not None
            logits = self.actor.logits(last)[:, ids]
            found[index] = logits.double().softmax(-1).cpu()
        rest = iter(found.tolist())
        return [[next(rest) for _ in group] for group in groups]

    def prompt(self, question: Raw) -> Prompt:
        """Return the question in the judge's template.

        Raises ``MalformedRow`` if its media cannot be read.
        """
        where = f"reward.judges, a question to {self.config.path}"
        record = read_record({"prompt": question}, Columns(), where, self.encoder.reads)
        shown = self.encoder.prompt(record)
        (texts,) = self.encoder.expanded([(record, [shown])])
        if isinstance(texts, MalformedRow):
            raise texts
        prompt = Prompt("", self.encoder.encode_prompts(texts)[0], self.encoder.readable(shown))
        self.encoder.attach(prompt, record, shown)
        return prompt


def open_judges(reward: RewardConfig, policy: ModelConfig, device: torch.device) -> list[Judge]:
    """Load the judges of ``reward.judges``, or connect to their servers.

    Args:
        reward: Settings of the rewards.
        policy: Settings of the policy, for the attention and the layout of the judges.
        device: Device of the judges.

    Raises:
        ConfigError: A judge cannot be loaded, has the name of another term, or its server serves
            another model.
        ResourceError: A server does not answer.
    """
    names: list[str] = []
    found: list[Judge] = []
    for i, term in enumerate(reward.judges):
        key = f"reward.judges.{i}"
        if term.name in names:
            raise ConfigError(
                f"{key}: two judges are called {term.name!r}; set {key}.name to tell them apart"
            )
        names.append(term.name)
        if term.url is not None:
            found.append(ServedJudge.of(term, key))
        else:
            found.append(local_judge(term, key, policy, device))
    return found


def local_judge(
    term: JudgeConfig, key: str, policy: ModelConfig, device: torch.device
) -> LocalJudge:
    """Load the judge of ``term``.

    Args:
        term: Settings of the judge.
        key: Key of ``term``, for messages.
        policy: Settings of the policy, for the attention and the layout of the judge.
        device: Device of the judge.

    Raises:
        ConfigError: The judge cannot be loaded.
    """
    model = model_settings(policy, term.path)
    place = torch.device("cpu") if term.offload else device
    try:
        with path_of(f"{key}.path"):
            tokenizer: Any = load_tokenizer(model)
            actor = Actor.load(model, device=place).requires_grad_(False).eval()
    except ModelError as error:
        raise ConfigError(str(error)) from error
    encoder = ChatEncoder(DataConfig(), tokenizer, load_processor(model, tokenizer))
    engine = NativeEngine(KVDecoder(actor.model), tokenizer, EngineConfig())
    return LocalJudge(term, actor, encoder, engine, device)
