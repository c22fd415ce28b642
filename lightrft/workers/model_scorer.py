"""Score responses by reward models, on top of reward functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.reward_terms.combination import gated, worst
from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig, ScoringModelConfig
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.process_form import PROCESS_FILE
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.rewards.base import RewardScorer
from lightrft.roles import HasEventCounts
from lightrft.types import Batch, Rollout, Segments
from lightrft.utils.errors import ConfigError, ModelError, did_you_mean
from lightrft.workers.process_scorer import StepScoringModel, step_scoring_model


@dataclass(frozen=True, slots=True)
class ScoringModel:
    """A reward model whose score is a term of the reward.

    Attributes:
        model: The model, in evaluation mode.
        name: Name of the term.
        term: The setting ``reward.models.<n>``.
        head: Head whose score it is.
    """

    model: RewardModel
    name: str
    term: ScoringModelConfig
    head: str

    @torch.no_grad()
    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> list[float]:
        """Return the score of each response.

        Args:
            rollouts: The responses.
            batch: Their prompts and tokens.
        """
        found = torch.zeros(len(batch), dtype=torch.float64)
        budget = self.term.max_tokens_per_micro_batch
        for index in micro_batches(batch, budget, self.model.layout):
            part = self.model.score(batch.select(index).to(self.model.device))
            found[index] = part[self.head].scores.double().cpu()
        return found.tolist()


AnyScoringModel = ScoringModel | StepScoringModel
"""A model whose score is a term of the reward."""


@contextmanager
def on_device(model: AnyScoringModel, device: torch.device) -> Generator[None]:
    """Place ``model`` on ``device`` inside the context, if it is offloaded outside of it."""
    if not model.term.offload:
        yield
        return
    model.model.to(device)
    try:
        yield
    finally:
        model.model.to("cpu")


class ModelScorer:
    """A scorer that adds the scores of reward models to the rewards of another scorer.

    Responses are collected and scored together, so that a model computes each prompt once. A score
    that is not finite fails its response.

    Args:
        inner: Scores responses by functions. Its rewards are 0 without functions.
        models: The reward models.
        device: Device of the reward models.
        budget: Number of tokens that are collected before they are scored.

    Attributes:
        counts: Number of responses ``scored`` and ``nonfinite``.
    """

    def __init__(
        self,
        inner: RewardScorer,
        models: Sequence[AnyScoringModel],
        device: torch.device,
        budget: int = 2**17,
    ) -> None:
        self.inner = inner
        self.models = models
        self.device = device
        self.budget = budget
        self.counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
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
            if self._tokens >= self.budget:
                yield from self._score()
        if wait:
            yield from self._score()

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``. The counts of ``inner`` are among them."""
        found = dict(self.counts - self._taken)
        self._taken = self.counts.copy()
        inner = self.inner.take_counts() if isinstance(self.inner, HasEventCounts) else {}
        return {**dict.fromkeys(("scored", "nonfinite"), 0), **inner, **found}

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        self.inner.close()

    def _score(self) -> Iterator[Rollout]:
        """Score all collected responses, and yield them."""
        rollouts, self._waiting, self._tokens = self._waiting, [], 0
        if not rollouts:
            return
        for rollout in rollouts:
            rollout.step_rewards = []
        for model in self.models:
            sources = model.term.sources
            own = [r for r in rollouts if not sources or r.prompt.data_source in sources]
            if not own:
                continue
            with on_device(model, self.device):
                found = model.scores(own, batch_of(own))
            for rollout, score in zip(own, found, strict=True):
                self._add(rollout, model, score)
        yield from rollouts

    def _add(self, rollout: Rollout, model: AnyScoringModel, score: float) -> None:
        """Add a score to the reward of ``rollout``."""
        self.counts["scored"] += 1
        if not math.isfinite(score):
            self.counts["nonfinite"] += 1
            rollout.failed = f"reward model {model.name}: its score is {score}"
            rollout.reward = None
            rollout.step_rewards = []
        if rollout.failed:
            return
        rollout.terms[model.name] = score
        if model.term.aggregate == "tokens":
            # Each step has its own reward, so the term is only reported.
            rollout.reward = rollout.reward or 0.0
            return
        rollout.weights[model.name] = model.term.weight
        rollout.reward = (rollout.reward or 0.0) + model.term.weight * score


class CombiningScorer:
    """A scorer that combines the terms of another scorer, see ``reward.gates`` and ``combine``.

    Args:
        inner: Scores the responses.
        config: The settings ``reward``.
        models: The reward models among the terms.

    Raises:
        ConfigError: ``reward.gates`` names an unknown term.
    """

    def __init__(
        self, inner: RewardScorer, config: RewardConfig, models: Sequence[AnyScoringModel] = ()
    ) -> None:
        self.inner = inner
        self.config = config
        names = {model.name for model in models}
        for terms in (config.terms, *config.per_source.values()):
            names |= {term.name or term.function.rpartition(":")[2] for term in terms}
        for gated_term, gate in config.gates.items():
            for name in (gated_term, gate):
                # A function may return several named values: function/value.
                if name.partition("/")[0] not in names:
                    raise ConfigError(
                        f"reward.gates = {{{gated_term}: {gate}}}: there is no term {name!r}"
                        f"{did_you_mean(name, names)}; the terms: {', '.join(sorted(names))}"
                    )

    def check_sources(self, sources: Iterable[str]) -> None:
        """See ``RewardScorer.check_sources``."""
        self.inner.check_sources(sources)

    def submit(self, rollout: Rollout) -> None:
        """See ``RewardScorer.submit``."""
        self.inner.submit(rollout)

    def results(self, wait: bool) -> Iterator[Rollout]:
        """See ``RewardScorer.results``."""
        for rollout in self.inner.results(wait):
            if not rollout.failed and rollout.reward is not None:
                self._combine(rollout)
            yield rollout

    def take_counts(self) -> dict[str, int]:
        """See ``HasEventCounts``."""
        return self.inner.take_counts() if isinstance(self.inner, HasEventCounts) else {}

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        self.inner.close()

    def _combine(self, rollout: Rollout) -> None:
        """Set the reward and the weights of ``rollout``."""
        config, terms = self.config, rollout.terms
        weights = gated(terms, rollout.weights, config.gates, config.gate_threshold)
        if config.combine == "worst":
            weights = worst(terms, weights)
        rollout.weights = weights
        rollout.reward = math.fsum(weight * terms[name] for name, weight in weights.items())


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
) -> list[AnyScoringModel]:
    """Load the reward models of ``terms``.

    Args:
        terms: The setting ``reward.models``.
        policy: Settings of the policy, for the attention and the layout of the reward models.
        tokenizer: Tokenizer of the policy, whose tokens the models read.
        device: Device of the models.

    Raises:
        ConfigError: A model has another vocabulary, no such head, or the name of another term.
    """
    found: list[AnyScoringModel] = []
    for i, term in enumerate(terms):
        key = f"reward.models.{i}"
        config = model_settings(policy, term)
        check_vocabulary(config, tokenizer, key)
        place = torch.device("cpu") if term.offload else device
        if _is_process_model(term, config):
            made: AnyScoringModel = step_scoring_model(term, config, tokenizer, place, key)
        else:
            made = scalar_scoring_model(term, config, place, key)
        if made.name in [other.name for other in found]:
            raise ConfigError(
                f"{key}: two reward models are called {made.name!r}; set {key}.name to tell them "
                "apart"
            )
        found.append(made)
    return found


def scalar_scoring_model(
    term: ScoringModelConfig, config: ModelConfig, device: torch.device, key: str
) -> ScoringModel:
    """Load the reward model of a term, which scores whole responses.

    Args:
        term: The setting ``reward.models.<n>``.
        config: Settings of the model.
        device: Device of the model.
        key: Name of the setting, for messages.

    Raises:
        ConfigError: The model cannot be loaded, or has no such head.
    """
    try:
        model = RewardModel.load(config, device=device).requires_grad_(False).eval()
    except ModelError as error:
        # The message names ``model.path``, which is the policy's.
        raise ConfigError(f"{key}.path = {term.path!r} cannot be loaded: {error}") from error
    if term.aggregate is not None:
        raise ConfigError(
            f"{key}.aggregate = {term.aggregate!r}: {term.path} scores whole responses, not steps; "
            "leave it out"
        )
    head = term.head or model.reward_name
    if head not in model.score_names:
        known = ", ".join(model.score_names)
        raise ConfigError(f"{key}.head = {term.head!r}: {term.path} has {known}; name one of them")
    return ScoringModel(model, term.name or head, term, head)


def _is_process_model(term: ScoringModelConfig, config: ModelConfig) -> bool:
    """Return True if the folder of a term is read as a process reward model.

    A published linear head may be of either kind, so the setting ``aggregate`` decides.
    """
    if (Path(config.path).expanduser() / PROCESS_FILE).is_file():
        return True
    return term.aggregate is not None and read_form(config.path) is None


def model_settings(policy: ModelConfig, term: ScoringModelConfig) -> ModelConfig:
    """Return the model settings of a reward model that scores a policy's responses."""
    own = {
        "path": term.path,
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
