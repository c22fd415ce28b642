"""Examine the reward models of a run for ``lightrft doctor``, without their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig, ScoringModelConfig
from lightrft.diagnostics.doctor_parts.server import PATIENCE
from lightrft.diagnostics.findings import Finding
from lightrft.utils.errors import UserError
from lightrft.workers.scoring.model_scorer import scoring_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_model_findings(
    reward: RewardConfig, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Check that each of ``reward.models`` can score, and name what it gives.

    Args:
        reward: Settings of the rewards.
        policy: Settings of the policy.
        tokenizer: Tokenizer of the policy.
    """
    for i, term in enumerate(reward.models):
        key = f"reward.models.{i}"
        try:
            yield Finding("reward", "ok", key, _given(term, key, policy, tokenizer))
        except UserError as error:
            yield Finding("reward", "bad", key, str(error))


def _given(
    term: ScoringModelConfig, key: str, policy: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the name of the score of ``term``, and where it is from."""
    # on the meta device, a model has no weights
    quick = {"offload": False, "deadline": min(term.deadline, PATIENCE)}
    made = scoring_model(
        term.model_copy(update=quick), key, policy, tokenizer, torch.device("meta")
    )
    made.close()
    return f"{made.name}, from {term.url or term.path}"
