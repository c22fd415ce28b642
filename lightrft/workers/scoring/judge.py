"""A judge in this process: a model that writes judgements, or gives their probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch

from lightrft.config.data import Columns, DataConfig
from lightrft.config.judgement import QuestionConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import JudgeConfig, RewardConfig
from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.judgement.question import Raw, lead
from lightrft.datasets.row_parser import read_record
from lightrft.datasets.row_tables import MalformedRow
from lightrft.engines.native import NativeEngine
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.actor import Actor
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.types import Batch, Prompt, Request, Segments
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.workers.scoring.model_scorer import model_settings


class Judge(Protocol):
    """The interface of a judge, wherever it runs."""

    config: JudgeConfig

    def write(self, questions: Sequence[Raw], seeds: Sequence[int]) -> list[str]:
        """Return one judgement of each question, sampled with its seed."""
        ...

    def probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> list[list[list[float]]]:
        """Return the probability of each verdict for each question of each group.

        Questions of one group begin alike. The probabilities of the verdicts sum to 1.
        """
        ...


@dataclass(slots=True)
class LocalJudge:
    """A judge in this process.

    Args:
        config: Its settings.
        actor: The model, in evaluation mode.
        encoder: Encodes questions by the judge's own template.
        engine: Samples from the model.
    """

    config: JudgeConfig
    actor: Actor
    encoder: ChatEncoder
    engine: NativeEngine

    def write(self, questions: Sequence[Raw], seeds: Sequence[int]) -> list[str]:
        """See ``Judge.write``. Equal questions are computed once."""
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
            found = {one.sample: one.text for one in self.engine.generate(requests, sampling)}
        return [found[k] for k in range(len(questions))]

    @torch.no_grad()
    def probabilities(
        self, groups: Sequence[Sequence[Raw]], verdicts: Sequence[str]
    ) -> list[list[list[float]]]:
        """See ``Judge.probabilities``. The common beginning of a group is computed once."""
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


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all ``rows`` begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows)))


def verdict_tokens(
    encoder: ChatEncoder, config: QuestionConfig, verdicts: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the tokens before a verdict, and the token of each verdict.

    Args:
        encoder: Encodes texts by the judge's tokenizer.
        config: Place of the verdict.
        verdicts: The verdicts.

    Raises:
        ConfigError: A verdict is not one token of its own.
    """
    before = lead(config)
    start, *rows = encoder.encode([before, *(before + verdict for verdict in verdicts)])
    ids = []
    for verdict, row in zip(verdicts, rows):
        if row[:-1] != start or len(row) != len(start) + 1:
            raise ConfigError(
                f"reward.judges: read = 'probability' needs verdicts of one token, and {verdict!r} "
                f"after {before!r} has {len(row) - len(start)}; set read: text, another verdict "
                "place, or a scale of one digit"
            )
        ids.append(row[-1])
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"reward.judges: two of the verdicts {', '.join(verdicts)} are the same token; set "
            "read: text"
        )
    return start, ids


def local_judges(reward: RewardConfig, policy: ModelConfig, device: torch.device) -> list[Judge]:
    """Load the judges of ``reward.judges``.

    Args:
        reward: Settings of the rewards.
        policy: Settings of the policy, for the attention and the layout of the judges.
        device: Device of the judges.

    Raises:
        ConfigError: A judge cannot be loaded, or has the name of another term.
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
        model = model_settings(policy, term.path)
        try:
            tokenizer: Any = load_tokenizer(model)
            actor = Actor.load(model, device=device).requires_grad_(False).eval()
        except ModelError as error:
            # The message names ``model.path``, which is the policy's.
            raise ConfigError(f"{key}.path = {term.path!r} cannot be loaded: {error}") from error
        encoder = ChatEncoder(DataConfig(), tokenizer, load_processor(model, tokenizer))
        engine = NativeEngine(KVDecoder(actor.model), tokenizer, EngineConfig())
        found.append(LocalJudge(term, actor, encoder, engine))
    return found
