"""Load the rows that a distillation learns from, and the prompts that its teacher sees."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from lightrft.config.verbs import DistillVerbConfig
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_warnings import check_text
from lightrft.datasets.sampler import report
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.processors import Processor
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.sft import load_examples
from lightrft.utils.errors import ConfigError


def load_rows(
    config: DistillVerbConfig, tokenizer: PreTrainedTokenizerBase, processor: Processor | None
) -> SFTDataset | PromptDataset:
    """Return the conversations of ``data``, or its prompts if every response is sampled.

    Args:
        config: settings of the run.
        tokenizer: encodes the rows.
        processor: prepares media, or None for a text-only model.
    """
    if config.distill.on_policy < 1:
        return load_examples(config, tokenizer, processor)
    prompts = PromptDataset(config.data, tokenizer, seed=config.run.seed, processor=processor)
    report("data", prompts.counts, prompts.first_problem)
    check_text(prompts, "data.sources")
    check_enough("batch_size", config.batch_size, len(prompts), "prompts")
    return prompts


def load_shown(
    config: DistillVerbConfig,
    dataset: SFTDataset | PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> PromptDataset | None:
    """Return the prompts that the teacher sees, or None if it sees the student's.

    Args:
        config: settings of the run.
        dataset: rows of the student.
        tokenizer: encodes the prompts.
        processor: prepares media, or None for a text-only model.

    Raises:
        ConfigError: a row has no prompt for the teacher, or all are the student's.
    """
    settings = config.distill
    if not settings.teacher_sees_more:
        return None
    own = {
        # The template must not change whether the chat template is used.
        "apply_chat_template": dataset.encoder.chat,
        "template": settings.teacher_template or config.data.template,
        "system": settings.teacher_system or config.data.system,
    }
    data = config.data.model_copy(update=own)
    shown = PromptDataset(data, tokenizer, seed=config.run.seed, processor=processor)
    missing = sorted(set(dataset.ids) - set(shown.ids))
    if missing:
        raise ConfigError(
            f"{len(missing)} rows, the first of them {missing[0]!r}, have no prompt for the "
            "teacher: it is longer than data.max_prompt_tokens, or the row has several trained "
            "turns; raise data.max_prompt_tokens, or set data.turns=last"
        )
    return shown
