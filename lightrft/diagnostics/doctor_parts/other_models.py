"""Examine teachers and reward models for ``lightrft doctor``, without their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.config.reward import RewardConfig, ScoringModelConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import Example, SFTDataset
from lightrft.diagnostics.doctor_parts.engine import PATIENCE
from lightrft.diagnostics.findings import Finding, Verdict
from lightrft.learner.distillation.step import alignment_metrics
from lightrft.learner.sft_step import examples_to_batch
from lightrft.models.processors import Processor
from lightrft.trainer.distill.data import View, find_teachers, load_views, shown_batch
from lightrft.trainer.distill.run import as_prompt
from lightrft.utils.errors import UserError
from lightrft.workers.scoring.model_scorer import scoring_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TRIED = 64
"""Number of given responses that are aligned."""
FEW = 0.5
"""Share of aligned tokens below which a finding warns."""


def teacher_findings(
    config: DistillVerbConfig,
    dataset: SFTDataset | PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> Iterator[Finding]:
    """Compare the tokenizer of each teacher with the student's, and align some responses.

    Args:
        config: Settings of the run.
        dataset: Rows of the student.
        tokenizer: Tokenizer of the student.
        processor: Prepares media, or None for a text-only model.

    Raises:
        ConfigError: A teacher cannot be compared with the student.
    """
    teachers = find_teachers(config, tokenizer, processor)
    views = load_views(config, config.data, dataset, teachers, processor)
    for name, teacher in teachers.items():
        about = f"{teacher.key}.path"
        if teacher.tokenizer is None:
            yield Finding("data", "ok", about, "has the tokenizer of the student")
        elif isinstance(dataset, SFTDataset):
            yield _aligned(about, dataset, views[name])
        else:
            says = "has another tokenizer; sampled responses are aligned by their text"
            yield Finding("data", "ok", about, says)


def _aligned(about: str, dataset: SFTDataset, view: View) -> Finding:
    """Report the share of the tokens of given responses that are aligned."""
    examples: list[Example] = []
    for entry in dataset.fetch(range(min(TRIED, len(dataset)))):
        if isinstance(entry, Example):
            examples.append(entry)
    prompts = [as_prompt(example) for example in examples]
    batch = examples_to_batch(examples)
    batch, _ = shown_batch({"": view}, dataset.encoder, prompts, [""] * len(prompts), batch)
    metrics = alignment_metrics(batch).compute()
    share = 1 - metrics["distill/unaligned_share"]
    spans = metrics["distill/spans"]
    tokens = metrics["distill/aligned_tokens"] + metrics["distill/unaligned_tokens"]
    verdict: Verdict = "ok" if share >= FEW else "warn"
    says = (
        f"has another tokenizer; {share:.0%} of the tokens of {len(examples)} responses are "
        f"aligned, in {spans:.0f} spans of {tokens / max(1, spans):.1f} tokens"
    )
    return Finding("data", verdict, about, says)


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
