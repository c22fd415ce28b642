"""Show the first rows of a config as a run reads them: tokens, trained tokens, media, columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.algorithms.reward_model.requirements import reward_requirements
from lightrft.config.data import (
    DataConfig,
    PreferenceDataConfig,
    ProcessDataConfig,
    RewardDataConfig,
    SFTDataConfig,
)
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    PRMVerbConfig,
    RLConfig,
    RMConfig,
    TrainingConfig,
)
from lightrft.datasets.media.fetch import shown
from lightrft.datasets.media.items import Item
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.process.process_dataset import ProcessDataset
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.diagnostics.prompts.prompt_texts import validation_of
from lightrft.models.processors import load_processor
from lightrft.trainer.preference.base import load_preferences
from lightrft.trainer.process_model.run import load_steps
from lightrft.trainer.reward_model.run import load_examples as load_rewarded
from lightrft.utils.chat_template import special_tokens
from lightrft.workers.local import local_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyDataset = PromptDataset | SFTDataset | PreferenceDataset | ProcessDataset


@dataclass(frozen=True, slots=True)
class Span:
    """A text of some tokens of a row.

    Args:
        text: the text, with special tokens. The placeholders of media are replaced by a name.
        trained: True if the tokens carry loss.
    """

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One sequence of a row.

    Args:
        name: id of the row, with the name of the response where a row has several.
        spans: the texts of its tokens, in order.
        tokens: number of tokens.
        facts: further values, such as the label.
    """

    name: str
    spans: list[Span]
    tokens: int
    facts: dict[str, object]


@dataclass(frozen=True, slots=True)
class ShownSection:
    """The rows of one section of data.

    Args:
        key: key of the section, such as ``eval.data``.
        rows: the first rows.
        read: number of rows that were read.
        unread: columns that nothing reads with their numbers of rows, by source.
        feeds_rewards: True if reward functions get these columns.
    """

    key: str
    rows: list[ShownRow]
    read: int
    unread: dict[str, dict[str, int]]
    feeds_rewards: bool


def shown_sections(config: TrainingConfig, rows: int, read: int) -> Iterator[ShownSection]:
    """Yield the sections of data that have sources.

    Args:
        config: the settings of a run.
        rows: number of rows to show of each section.
        read: number of rows to read of each source, for the counts of columns.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    for key, data in _sections(config):
        sources = tuple(
            source.model_copy(update={"limit": min(source.limit or read, read)})
            for source in data.sources
        )
        limited = data.model_copy(
            update={"sources": sources, "shuffle": False, "blend": "concat", "token_cache": None}
        )
        dataset = _dataset(config, key, limited, tokenizer, processor)
        first: list[ShownRow] = []
        for i in range(min(rows, len(dataset))):
            first += _shown(dataset, i)
        yield ShownSection(
            key, first, dataset.counts["rows"], dataset.unread, dataset.feeds_rewards
        )


def _sections(config: TrainingConfig) -> Iterator[tuple[str, DataConfig]]:
    """Yield key and settings of each section of data that has sources."""
    sections: list[tuple[str, DataConfig]] = [("data", config.data)]
    sections += [("validation", section) for section in validation_of(config)]
    if not isinstance(config, RMConfig | PRMVerbConfig):
        sections.append(("eval.data", config.eval.data))
    yield from ((key, section) for key, section in sections if section.sources)


def _dataset(
    config: TrainingConfig,
    key: str,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any,
) -> AnyDataset:
    """Encode the rows of a section as the run does."""
    seed = config.run.seed
    samples = isinstance(config, RLConfig) or (
        isinstance(config, DPOConfig) and config.online.group_size > 0
    )
    if key == "eval.data" or samples:
        return PromptDataset(data, tokenizer, seed=seed, processor=processor)
    if isinstance(config, PRMVerbConfig) and isinstance(data, ProcessDataConfig):
        return load_steps(config, tokenizer, processor, data, key)
    if isinstance(config, RMConfig) and isinstance(data, RewardDataConfig):
        needs = reward_requirements(config.reward_model)
        return load_rewarded(config, needs, tokenizer, processor, data, key)
    if isinstance(config, DPOConfig) and isinstance(data, PreferenceDataConfig):
        needs = preference_requirements(config.preference)
        return load_preferences(config, data, key, needs, tokenizer, processor)
    if isinstance(config, DistillVerbConfig) and config.distill.on_policy == 1 and key == "data":
        return PromptDataset(data, tokenizer, seed=seed, processor=processor)
    assert isinstance(data, SFTDataConfig)
    return SFTDataset(data, tokenizer, max_tokens=config.max_tokens, seed=seed, processor=processor)


def _shown(dataset: AnyDataset, i: int) -> Iterator[ShownRow]:
    """Yield the sequences of entry ``i``."""
    if isinstance(dataset, PromptDataset):
        prompt = dataset.prompt(i, media=False)
        record, _ = dataset.record(i)
        facts = {"label": prompt.label, **_facts(prompt.data_source, record.media)}
        ids = prompt.token_ids
        yield _row(dataset, prompt.id, ids, [False] * len(ids), facts)
        return
    if isinstance(dataset, SFTDataset):
        example = dataset[i]
        ids = [*example.prompt_ids, *example.response_ids]
        trained = [False] * len(example.prompt_ids) + example.trained
        facts = {"weight": example.weight, **_facts(example.data_source, dataset.items(i))}
        yield _row(dataset, example.id, ids, trained, facts)
        return
    if isinstance(dataset, ProcessDataset):
        steps = dataset[i]
        ids = [*steps.prompt_ids, *steps.response_ids]
        scored = set(steps.separators)
        trained = [False] * len(steps.prompt_ids)
        trained += [k in scored for k in range(len(steps.response_ids))]
        facts = {
            "labels": steps.labels,
            **_facts(steps.data_source, dataset.record(i).record.media),
        }
        yield _row(dataset, steps.id, ids, trained, facts)
        return
    pair = dataset[i]
    row = dataset.record(i)
    for name, record, response in zip(row.names, row.responses, pair.responses):
        ids = [*pair.prompt_ids, *response.token_ids]
        trained = [False] * len(pair.prompt_ids) + response.trained
        judged = {"rank": response.rank, "desirable": response.desirable, "margin": response.margin}
        facts = {key: value for key, value in judged.items() if value is not None}
        facts = {**facts, **_facts(pair.data_source, record.media)}
        yield _row(dataset, f"{pair.id}, {name}", ids, trained, facts)


def _row(
    dataset: AnyDataset,
    name: str,
    ids: Sequence[int],
    trained: Sequence[bool],
    facts: dict[str, object],
) -> ShownRow:
    """Return a sequence, with the special tokens that its text spells and that are text there.

    Args:
        dataset: The rows.
        name: Name of the sequence.
        ids: Its tokens.
        trained: True for the tokens that carry loss.
        facts: Further values.
    """
    special = special_tokens(dataset.encoder.tokenizer)
    control = set(special.values())
    runs = [list(run) for is_control, run in groupby(ids, control.__contains__) if not is_control]
    texts = [dataset.encoder.tokenizer.decode(run) for run in runs]
    spelled = [token for token in special if any(token in text for text in texts)]
    if spelled:
        facts = {**facts, "special tokens that are text here": spelled}
    return ShownRow(name, _spans(dataset, ids, trained), len(ids), facts)


def _facts(data_source: str, media: Sequence[Item]) -> dict[str, object]:
    """Return the data source and the media of a row."""
    names = [f"{item.kind} {shown(item.value)}" for item in media]
    return {"data_source": data_source, **({"media": names} if names else {})}


def _spans(
    dataset: AnyDataset,
    ids: Sequence[int],
    trained: Sequence[bool],
) -> list[Span]:
    """Return the text of tokens, with a kind and a number in place of placeholders of media."""
    processor = dataset.encoder.processor
    kinds = {} if processor is None else {token: k for k, token in processor.tokens.items()}
    tokenizer = dataset.encoder.tokenizer
    places = [kinds.get(i, "") for i in ids]
    spans: list[Span] = []
    runs = groupby(range(len(ids)), key=lambda k: (bool(trained[k]), places[k]))
    for (is_trained, kind), run in runs:
        numbers = [ids[k] for k in run]
        text = f"[{kind}: {len(numbers)} tokens]"
        if not kind:
            text = tokenizer.decode(numbers, skip_special_tokens=False)
        spans.append(Span(text, is_trained))
    return spans
