"""Score responses by reward models, on top of reward functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.reward_model import RewardModel
from lightrft.rewards.base import RewardScorer
from lightrft.types import Batch, Rollout, Segments
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.workers.served_reward import ServedRewardModel


class TermModel(Protocol):
    """A reward model, in this process or served, whose score is a term of the reward."""

    @property
    def name(self) -> str:
        """Name of the term."""
        ...

    @property
    def weight(self) -> float:
        """Factor of the score."""
        ...

    def scores(self, batch: Batch) -> Sequence[float | str]:
        """Return the score of each response, or the reason why it has none."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A reward model whose score is a term of the reward.

    Attributes:
        model: The model, in evaluation mode.
        name: Name of the term.
        head: Head whose score it is.
        weight: Factor of the score.
        budget: Largest number of tokens that it scores at once.
    """

    model: RewardModel
    name: str
    head: str
    weight: float
    budget: int

    @torch.no_grad()
    def scores(self, batch: Batch) -> list[float]:
        """Return the score of each response of ``batch``."""
        found = torch.zeros(len(batch), dtype=torch.float64)
        for index in micro_batches(batch, self.budget, self.model.layout):
            part = self.model.score(batch.select(index).to(self.model.device))
            found[index] = part[self.head].scores.double().cpu()
        return found.tolist()

    def close(self) -> None:
        """See ``TermModel.close``: there are none."""


class CollectingScorer:
    """A scorer that collects the responses of another scorer, and scores them together.

    Args:
        inner: Scores responses first. A response that it fails is not collected.
        budget: Number of tokens that are collected before they are scored. ``None`` waits for all
            responses.

    Attributes:
        counts: Number of events by name.
    """

    def __init__(self, inner: RewardScorer, budget: int | None) -> None:
        self.inner = inner
        self.budget = budget
        self.counts: Counter[str] = Counter()
        self._waiting: list[Rollout] = []
        self._tokens = 0

    def check_sources(self, sources: Iterable[str]) -> None:
        """See ``RewardScorer.check_sources``."""
        self.inner.check_sources(sources)

    def submit(self, rollout: Rollout) -> None:
        """See ``RewardScorer.submit``."""
        self.inner.submit(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        """See ``RewardScorer.results``."""
        for rollout in self.inner.results(wait):
            # a response that a function could not score has no reward, whatever the models say
            if rollout.failed:
                yield rollout
                continue
            self._waiting.append(rollout)
            self._tokens += len(rollout)
            if self.budget is not None and self._tokens >= self.budget:
                yield from self._collected()
        if wait:
            yield from self._collected()

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        self.inner.close()

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Add terms to the rewards of ``rollouts``, or fail them."""
        raise NotImplementedError

    def _collected(self) -> Iterator[Rollout]:
        """Score all collected responses, and yield them."""
        rollouts, self._waiting, self._tokens = self._waiting, [], 0
        if rollouts:
            self.score(rollouts)
        yield from rollouts


class ModelScorer(CollectingScorer):
    """A scorer that adds the scores of reward models to the rewards of another scorer.

    Responses are collected and scored together, so that a model computes each prompt once. A score
    that is not finite fails its response.

    Args:
        inner: Scores responses by functions. Its rewards are 0 without functions.
        models: The reward models.
        budget: Number of tokens that are collected before they are scored.

    Attributes:
        counts: Number of responses ``scored``, ``nonfinite`` and ``unanswered``.
    """

    def __init__(
        self, inner: RewardScorer, models: Sequence[TermModel], budget: int = 2**17
    ) -> None:
        super().__init__(inner, budget)
        self.models = models

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        super().close()
        for model in self.models:
            model.close()

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """See ``CollectingScorer.score``."""
        batch = batch_of(rollouts)
        for model in self.models:
            for rollout, score in zip(rollouts, model.scores(batch), strict=True):
                self._add(rollout, model, score)

    def _add(self, rollout: Rollout, model: TermModel, score: float | str) -> None:
        """Add a score to the reward of ``rollout``."""
        self.counts["scored"] += 1
        problem = score if isinstance(score, str) else ""
        if problem:
            self.counts["unanswered"] += 1
        elif not math.isfinite(float(score)):
            self.counts["nonfinite"] += 1
            problem = f"its score is {score}"
        if problem:
            rollout.failed = f"reward model {model.name}: {problem}"
            rollout.reward = None
            return
        add_term(rollout, model.name, model.weight, float(score))


def add_term(rollout: Rollout, name: str, weight: float, score: float) -> None:
    """Add a term to the reward of ``rollout``, unless it has failed.

    Args:
        rollout: The response.
        name: Name of the term.
        weight: Factor of the score.
        score: The score.
    """
    if rollout.failed:
        return
    rollout.terms[name] = score
    rollout.weights[name] = weight
    rollout.reward = (rollout.reward or 0.0) + weight * score


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """Collate ``rollouts`` to a batch in which responses to one prompt are a group."""
    prompts: dict[int, int] = {}
    prompt_of: list[int] = []
    distinct = []
    for rollout in rollouts:
        # by identity, since two rows of the data may have equal ids and different media
        key = id(rollout.prompt)
        if key not in prompts:
            prompts[key] = len(distinct)
            distinct.append(rollout.prompt)
        prompt_of.append(prompts[key])
    return Batch(
        Segments.of_prompts(distinct),
        Segments.of([rollout.token_ids for rollout in rollouts]),
        torch.tensor(prompt_of, dtype=torch.long),
    )


def scoring_models(
    terms: Sequence[ScoringModelConfig],
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> list[TermModel]:
    """Load the reward models of ``terms``, or connect to their servers.

    Args:
        terms: The setting ``reward.models``.
        policy: Settings of the policy, for the attention and the layout of the reward models.
        tokenizer: Tokenizer of the policy, whose tokens the models read.
        device: Device of the models.

    Raises:
        ConfigError: A model has another vocabulary, no such head, or the name of another term.
        ResourceError: A server does not answer.
    """
    found: list[TermModel] = []
    for i, term in enumerate(terms):
        key = f"reward.models.{i}"
        if term.url is None:
            model: TermModel = loaded_model(term, key, policy, tokenizer, device)
        else:
            model = ServedRewardModel.of(term, key, tokenizer)
        if model.name in [other.name for other in found]:
            raise ConfigError(
                f"{key}: two reward models are called {model.name!r}; set {key}.name to tell them "
                "apart"
            )
        found.append(model)
    return found


def loaded_model(
    term: ScoringModelConfig,
    key: str,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> ScoringModel:
    """Load the reward model of ``term.path``.

    Args:
        term: Settings of the reward model.
        key: Key of ``term``, for messages.
        policy: Settings of the policy, for the attention and the layout of the reward model.
        tokenizer: Tokenizer of the policy, whose tokens the model reads.
        device: Device of the model.

    Raises:
        ConfigError: The model cannot be loaded, or has another vocabulary or no such head.
    """
    config = model_settings(policy, term.path)
    check_vocabulary(config, tokenizer, key)
    try:
        model = RewardModel.load(config, device=device).requires_grad_(False).eval()
    except ModelError as error:
        # The message names ``model.path``, which is the policy's.
        raise ConfigError(f"{key}.path = {term.path!r} cannot be loaded: {error}") from error
    head = term.head or model.reward_name
    if head not in model.score_names:
        known = ", ".join(model.score_names)
        raise ConfigError(f"{key}.head = {term.head!r}: {term.path} has {known}; name one of them")
    name = term.name or head
    return ScoringModel(model, name, head, term.weight, term.max_tokens_per_micro_batch)


def model_settings(policy: ModelConfig, path: str) -> ModelConfig:
    """Return the model settings of the reward model ``path`` that scores a policy's responses."""
    own = {
        "path": path,
        "tokenizer": None,
        "chat_template": None,
        "lora": None,
        "freeze": (),
        "gradient_checkpointing": False,
        "load_in_4bit": False,
    }
    return policy.model_copy(update=own)


def check_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise ``ConfigError`` if a reward model does not read the policy's tokens.

    Args:
        model: Settings of the reward model.
        tokenizer: Tokenizer of the policy.
        key: Key of the reward model, for messages.
    """
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(model).get_vocab()
    if ours != theirs:
        raise ConfigError(
            f"{key}.path = {model.path!r}: its tokenizer has {len(theirs)} tokens, the policy's "
            f"has {len(ours)}, and {len(ours.items() ^ theirs.items())} differ; take a reward "
            "model of the policy's tokenizer"
        )
