"""Score responses by reward models, on top of reward functions."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.base import changed_fields
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.families import context_length
from lightrft.models.reward.process_form import PROCESS_FILE
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.reward.saved_form import read_form
from lightrft.rewards.base import RewardScorer
from lightrft.types import Batch, Rollout
from lightrft.utils.errors import ConfigError, ModelError, path_of
from lightrft.workers.scoring.collecting import CollectingScorer, add_term, batch_of
from lightrft.workers.scoring.own_tokens import OwnTokens, own_tokens
from lightrft.workers.scoring.process_scorer import StepScoringModel, step_scoring_model
from lightrft.workers.scoring.reward_endpoint import RewardEndpoint
from lightrft.workers.scoring.served_reward import ServedRewardModel


class TermModel(Protocol):
    """A reward model, in this process or served, whose score is a term of the reward."""

    @property
    def name(self) -> str:
        """Name of the term."""
        ...

    @property
    def term(self) -> ScoringModelConfig:
        """Settings of the term."""
        ...

    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> Sequence[float | str]:
        """Return the score of each response, or the reason why it has none.

        Args:
            rollouts: The responses.
            batch: Their prompts and tokens.
        """
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
        term: The setting ``reward.models.<n>``.
        head: Head whose score it is.
        own: Reads responses in the tokens of the model. ``None`` if these are the policy's.
    """

    model: RewardModel
    name: str
    term: ScoringModelConfig
    head: str
    own: OwnTokens | None = None

    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> Sequence[float | str]:
        """See ``TermModel.scores``."""
        if self.own is None:
            return self._of_batch(batch)
        own, rows, problems = self.own.batch(rollouts)
        scored = [] if own is None else self._of_batch(own)
        found: dict[int, float | str] = {**problems, **dict(zip(rows, scored, strict=True))}
        return [found[k] for k in range(len(rollouts))]

    @torch.no_grad()
    def _of_batch(self, batch: Batch) -> list[float]:
        """Return the score of each response of ``batch``."""
        found = torch.zeros(len(batch), dtype=torch.float64)
        budget = self.term.max_tokens_per_micro_batch
        for index in micro_batches(batch, budget, self.model.layout):
            part = self.model.score(batch.select(index).to(self.model.device))
            found[index] = part[self.head].scores.double().cpu()
        return found.tolist()

    def close(self) -> None:
        """See ``TermModel.close``: there are none."""


@contextmanager
def on_device(model: TermModel, device: torch.device) -> Generator[None]:
    """Place ``model`` on ``device`` inside the context, if it is offloaded outside of it."""
    if not model.term.offload:
        yield
        return
    # A served model cannot be offloaded.
    assert isinstance(model, ScoringModel | StepScoringModel)
    model.model.to(device)
    try:
        yield
    finally:
        model.model.to("cpu")


class ModelScorer(CollectingScorer):
    """A scorer that adds the scores of reward models to the rewards of another scorer.

    Responses are collected and scored together, so that a model computes each prompt once. A score
    that is not finite fails its response.

    Args:
        inner: Scores responses by functions. Its rewards are 0 without functions.
        models: The reward models.
        device: Device of the reward models.
        budget: Number of tokens that are collected before they are scored.

    Attributes:
        events: Responses that are ``scored``, whose score is ``nonfinite``, and that are
            ``unanswered``: a server did not answer, or the model cannot read them.
    """

    events: ClassVar[tuple[str, ...]] = ("scored", "nonfinite", "unanswered")

    def __init__(
        self,
        inner: RewardScorer,
        models: Sequence[TermModel],
        device: torch.device,
        budget: int = 2**17,
    ) -> None:
        super().__init__(inner, budget)
        self.models = models
        self.device = device

    def close(self) -> None:
        """See ``RewardScorer.close``."""
        super().close()
        for model in self.models:
            model.close()

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """See ``CollectingScorer.score``."""
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
            rollout.step_rewards = []
        elif rollout.failed:
            return
        elif model.term.aggregate == "tokens":
            # Each step has its own reward, so the term is only reported.
            rollout.terms[model.name] = float(score)
            rollout.reward = rollout.reward or 0.0
        else:
            add_term(rollout, model.name, model.term.weight, float(score))


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
        tokenizer: Tokenizer of the policy.
        device: Device of the models.

    Raises:
        ConfigError: A model cannot be loaded, has no such head, or has the name of another term.
        ResourceError: A server does not answer.
    """
    found: list[TermModel] = []
    for i, term in enumerate(terms):
        key = f"reward.models.{i}"
        made = scoring_model(term, key, policy, tokenizer, device)
        if made.name in [other.name for other in found]:
            raise ConfigError(
                f"{key}: two reward models are called {made.name!r}; set {key}.name to tell them "
                "apart"
            )
        found.append(made)
    return found


def scoring_model(
    term: ScoringModelConfig,
    key: str,
    policy: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> TermModel:
    """Load the reward model of ``term``, or connect to its server.

    Args:
        term: Settings of the reward model.
        key: Key of ``term``, for messages.
        policy: Settings of the policy, for the attention and the layout of the reward model.
        tokenizer: Tokenizer of the policy.
        device: Device of the model.

    Raises:
        ConfigError: The model cannot be loaded, or has no such head.
        ResourceError: The server does not answer.
    """
    if term.protocol != "serve-rm":
        return RewardEndpoint.of(term, key, tokenizer)
    if term.urls:
        return ServedRewardModel.of(term, key, tokenizer)
    config = model_settings(policy, term.path)
    place = torch.device("cpu") if term.offload else device
    if _is_process_model(term, config):
        return step_scoring_model(term, config, tokenizer, place, key)
    return scalar_scoring_model(term, config, tokenizer, place, key)


def scalar_scoring_model(
    term: ScoringModelConfig,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    key: str,
) -> ScoringModel:
    """Load the reward model of a term, which scores whole responses.

    Args:
        term: The setting ``reward.models.<n>``.
        config: Settings of the model.
        tokenizer: Tokenizer of the policy.
        device: Device of the model.
        key: Name of the setting, for messages.

    Raises:
        ConfigError: The model cannot be loaded, has no such head, or cannot read the policy's
            tokens and must.
    """
    try:
        with path_of(f"{key}.path"):
            model = RewardModel.load(config, device=device).requires_grad_(False).eval()
    except ModelError as error:
        raise ConfigError(str(error)) from error
    if term.aggregate is not None:
        raise ConfigError(
            f"{key}.aggregate = {term.aggregate!r}: {term.path} scores whole responses, not steps; "
            "leave it out"
        )
    if "separator" in changed_fields(term):
        raise ConfigError(
            f"{key}.separator = {term.separator!r} changes nothing: {term.path} scores whole "
            "responses, not steps; leave it out"
        )
    head = term.head or model.reward_name
    if head not in model.score_names:
        known = ", ".join(model.score_names)
        raise ConfigError(f"{key}.head = {term.head!r}: {term.path} has {known}; name one of them")
    own = own_tokens(term, config, tokenizer, key, context_length(model.base.config))
    return ScoringModel(model, term.name or head, term, head, own)


def _is_process_model(term: ScoringModelConfig, config: ModelConfig) -> bool:
    """Return True if the folder of a term is read as a process reward model.

    A published linear head may be of either kind, so the setting ``aggregate`` decides.
    """
    if (Path(config.path).expanduser() / PROCESS_FILE).is_file():
        return True
    return term.aggregate is not None and read_form(config.path) is None


def model_settings(policy: ModelConfig, path: str) -> ModelConfig:
    """Return the model settings of the reward model ``path`` that scores a policy's responses."""
    own = {
        "path": path,
        "base": None,
        "tokenizer": None,
        "chat_template": None,
        "lora": None,
        "freeze": (),
        "gradient_checkpointing": False,
        "load_in_4bit": False,
    }
    return policy.model_copy(update=own)
