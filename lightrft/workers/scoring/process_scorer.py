"""Score the steps of responses by a process reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.reward_model.step_scores import aggregate_steps
from lightrft.algorithms.reward_terms.text_steps import last_tokens, split_steps
from lightrft.config.data import DataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward import ScoringModelConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.learner.micro_batches import micro_batches
from lightrft.models.families import context_length
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.types import Batch, Rollout, Segments
from lightrft.utils.errors import ConfigError, ModelError, path_of
from lightrft.workers.scoring.own_tokens import OwnTokens, own_tokens


@dataclass(frozen=True, slots=True)
class StepScoringModel:
    """A process reward model whose scores of steps are a term of the reward.

    Steps are split from the text of a response, and encoded one by one with the separator of the
    model, as ``ProcessDataset`` encodes them for training. Special tokens in them are what they
    were in that training, and tokens for a model of another framework.

    Attributes:
        model: The model, in evaluation mode.
        name: Name of the term.
        term: The setting ``reward.models.<n>``.
        tokenizer: Tokenizer of the policy.
        separator: Text and tokens after each step that the model reads.
        own: Reads prompts and steps in the tokens of the model. ``None`` if these are the policy's.
    """

    model: ProcessRewardModel
    name: str
    term: ScoringModelConfig
    tokenizer: PreTrainedTokenizerBase
    separator: Separator
    own: OwnTokens | None = None

    @torch.no_grad()
    def scores(self, rollouts: Sequence[Rollout], batch: Batch) -> list[float | str]:
        """Return the score of each response, and set ``step_rewards`` for ``aggregate: tokens``.

        The score is NaN for a response without a step, or with a step whose score is not finite.

        Args:
            rollouts: The responses.
            batch: Their prompts and tokens.
        """
        data = DataConfig(special_tokens=self.separator.special_tokens)
        encoder = ChatEncoder(data, self.tokenizer)
        prompts, prompt_of = batch.prompts, batch.prompt_of
        problems: dict[int, str] = {}
        if self.own is not None:
            encoder = self.own.encoder.encoder
            prompts, prompt_of, problems = self.own.prompts(rollouts)
        ends: list[list[int]] = []
        ids: list[list[int]] = []
        closing: list[bool] = []
        sizes = prompts.sizes
        for k, rollout in enumerate(rollouts):
            steps, own = split_steps(rollout.text, self.term.separator)
            row = [] if k in problems else self._encoded(encoder, steps)
            length = sum(map(len, row)) + sizes[int(prompt_of[k])]
            if self.own is not None and self.own.context and length > self.own.context:
                problems[k] = f"prompt and steps have {length} tokens of the reward model"
            if k in problems:
                row, own = [], []
            ends.append(own)
            ids.append([token for step in row for token in step])
            for step in row:
                closing += [False] * (len(step) - 1) + [True]
        steps_batch = Batch(
            prompts,
            Segments.of(ids),
            prompt_of,
            step_ends=torch.tensor(closing, dtype=torch.bool),
        )
        found = self._scores_of_steps(steps_batch, [len(own) for own in ends])
        for rollout, own, scores in zip(rollouts, ends, found, strict=True):
            finite = all(map(math.isfinite, scores))
            if self.term.aggregate == "tokens" and scores and finite:
                rollout.step_rewards += self._token_rewards(rollout, own, scores)
        return [problems.get(k) or self._aggregated(scores) for k, scores in enumerate(found)]

    def _encoded(self, encoder: ChatEncoder, steps: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each step, with the separator at its end."""
        return [[*step, *self.separator.ids] for step in encoder.encode_answers(steps)]

    def close(self) -> None:
        """See ``TermModel.close``: there are none."""

    def _scores_of_steps(self, batch: Batch, counts: Sequence[int]) -> list[list[float]]:
        """Return the scores of the steps of each response of ``batch``."""
        found: list[list[float]] = [[] for _ in counts]
        scored = torch.tensor([k for k, count in enumerate(counts) if count], dtype=torch.long)
        if not len(scored):
            return found
        batch = batch.select(scored)
        budget = self.term.max_tokens_per_micro_batch
        for index in micro_batches(batch, budget, self.model.layout):
            part = batch.select(index).to(self.model.device)
            scores = self.model.score_steps(part)
            pieces = scores.scores.double().cpu().split(scores.steps.tolist())
            for row, own in zip(scored[index].tolist(), pieces, strict=True):
                found[row] = own.tolist()
        return found

    def _aggregated(self, scores: list[float]) -> float:
        if not scores or not all(map(math.isfinite, scores)):
            return math.nan
        assert self.term.aggregate is not None
        # The reward at each step is its own, so the mean is only reported.
        how = "mean" if self.term.aggregate == "tokens" else self.term.aggregate
        steps = torch.tensor([len(scores)])
        return float(aggregate_steps(torch.tensor(scores, dtype=torch.float64), steps, how)[0])

    def _token_rewards(
        self, rollout: Rollout, ends: Sequence[int], scores: Sequence[float]
    ) -> list[tuple[int, float]]:
        """Return the index of the last token of each step, and the weighted score of the step."""
        ids = rollout.token_ids
        lengths = []
        for count in range(1, len(ids) + 1):
            # Not the text of each token: a character may have several.
            text = str(self.tokenizer.decode(ids[:count]))
            lengths.append(len(text.rstrip("\ufffd")))
        places = last_tokens(lengths, ends)
        return [(place, self.term.weight * score) for place, score in zip(places, scores)]


def step_scoring_model(
    term: ScoringModelConfig,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    key: str,
) -> StepScoringModel:
    """Load the process reward model of a term.

    Args:
        term: The setting ``reward.models.<n>``.
        config: Settings of the model.
        tokenizer: Tokenizer of the policy.
        device: Device of the model.
        key: Name of the setting, for messages.

    Raises:
        ConfigError: The model cannot be loaded, names no separator, or its scores cannot be
            aggregated as ``term`` asks for.
    """
    try:
        with path_of(f"{key}.path"):
            model = ProcessRewardModel.load(config, device=device).requires_grad_(False).eval()
    except ModelError as error:
        raise ConfigError(str(error)) from error
    if term.aggregate is None:
        raise ConfigError(
            f"{key}.path = {term.path!r} is a process reward model, which scores steps; say how "
            f"they become a reward, e.g. {key}.aggregate=min"
        )
    if term.head is not None:
        raise ConfigError(
            f"{key}.head = {term.head!r}: a process reward model has no named heads; leave it out"
        )
    if term.aggregate == "product" and model.settings.head == "regression":
        raise ConfigError(
            f"{key}.aggregate = 'product' multiplies probabilities, and {term.path} has a "
            f"regression head; set {key}.aggregate=min"
        )
    name = term.name or "steps"
    separator = model.separator
    spelled = separator.special_tokens if separator else None
    context = context_length(model.base.config)
    own = own_tokens(term, config, tokenizer, key, context, spelled)
    if separator is None:
        # A published head does not name its separator.
        encoder = ChatEncoder(DataConfig(), tokenizer) if own is None else own.encoder.encoder
        separator = Separator(term.separator, tuple(encoder.encode([term.separator])[0]))
    return StepScoringModel(model, name, term, tokenizer, separator, own)
