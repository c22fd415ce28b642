"""Show the first rows of a config as a run reads them: tokens, trained tokens, media, columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from lightrft.algorithms.preference.requirements import preference_requirements
from lightrft.config.config_tools import ShowConfig
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
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import unread_problem
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.diagnostics.prompts.prompt_texts import validation_of
from lightrft.models.processors import load_processor
from lightrft.observability.data_record import ShownRow, ShownSection, Span, TokenLengths
from lightrft.trainer.preference.base import load_preferences
from lightrft.trainer.process_model.run import load_steps
from lightrft.trainer.reward_model.run import load_examples as load_rewarded
from lightrft.utils.chat_template import special_tokens
from lightrft.workers.local import local_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyDataset = PromptDataset | SFTDataset | PreferenceDataset | ProcessDataset


def shown_sections(config: TrainingConfig, options: ShowConfig) -> list[ShownSection]:
    """Return the sections of data that have sources, with the rows of each that are shown.

    Args:
        config: the settings of a run.
        options: the numbers of rows to show, and to read.
    """
    tokenizer = local_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer)
    found: list[ShownSection] = []
    learned: dict[bytes, str] = {}
    for key, data in _sections(config):
        sources = tuple(
            source.model_copy(update={"limit": min(source.limit or options.read, options.read)})
            for source in data.sources
        )
        # In this order, the stored rows are those of the dataset.
        limited = data.model_copy(
            update={"sources": sources, "shuffle": False, "blend": "concat", "token_cache": None}
        )
        dataset = _dataset(config, key, limited, tokenizer, processor)
        prompts = [(dataset.ids[k], prompt) for k, prompt in dataset.keyed_prompts()]
        seen: dict[bytes, str] = {}
        repeats = [
            (name, seen[prompt])
            for name, prompt in prompts
            if seen.setdefault(prompt, name) != name
        ]
        is_learned = key == "data"
        learned = seen if is_learned else learned
        rewards = dataset.feeds_rewards
        found.append(
            ShownSection(
                key,
                [row for i in range(min(options.rows, len(dataset))) for row in _shown(dataset, i)],
                dataset.counts["rows"],
                [
                    unread_problem(at, names, rewards=rewards)
                    for at, names in dataset.unread.items()
                ],
                [TokenLengths(kind, all) for kind, all in dataset.token_counts().items() if all],
                len(prompts),
                repeats,
                None if is_learned else [(n, learned[p]) for n, p in prompts if p in learned],
            )
        )
    return found


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
        return load_rewarded(config, tokenizer, processor, data, key)
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
        facts = {"label": prompt.label, "data_source": prompt.data_source}
        ids = prompt.token_ids
        yield _row(dataset, prompt.id, ids, [False] * len(ids), facts, record.media)
        return
    if isinstance(dataset, SFTDataset):
        example = dataset[i]
        ids = [*example.prompt_ids, *example.response_ids]
        trained = [False] * len(example.prompt_ids) + example.trained
        facts = {"weight": example.weight, "data_source": example.data_source}
        yield _row(dataset, example.id, ids, trained, facts, dataset.items(i))
        return
    if isinstance(dataset, ProcessDataset):
        steps = dataset[i]
        ids = [*steps.prompt_ids, *steps.response_ids]
        scored = set(steps.separators)
        trained = [False] * len(steps.prompt_ids)
        trained += [k in scored for k in range(len(steps.response_ids))]
        facts = {"labels": steps.labels, "data_source": steps.data_source}
        yield _row(dataset, steps.id, ids, trained, facts, dataset.record(i).record.media)
        return
    pair = dataset[i]
    row = dataset.record(i)
    for name, record, response in zip(row.names, row.responses, pair.responses):
        ids = [*pair.prompt_ids, *response.token_ids]
        trained = [False] * len(pair.prompt_ids) + response.trained
        judged = {"rank": response.rank, "desirable": response.desirable, "margin": response.margin}
        judged = {key: value for key, value in judged.items() if value is not None}
        facts = {**judged, "data_source": pair.data_source}
        yield _row(dataset, f"{pair.id}, {name}", ids, trained, facts, record.media)


def _row(
    dataset: AnyDataset,
    name: str,
    ids: Sequence[int],
    trained: Sequence[bool],
    facts: Mapping[str, object],
    media: Sequence[Item],
) -> ShownRow:
    """Return a sequence, with the special tokens that its text spells and that are text there.

    Media that cannot be read are named by a fact.

    Args:
        dataset: The rows.
        name: Name of the sequence.
        ids: Its tokens.
        trained: True for the tokens that carry loss.
        facts: Further values.
        media: Its media.
    """
    facts, previews = dict(facts), {}
    if media and (reader := dataset.encoder.media) is not None:
        facts["media"] = [f"{item.kind} {shown(item.value)}" for item in media]
        for item in media:
            try:
                preview = reader.load(item).attachment
                previews[preview.name] = preview.data
            except MalformedRow as error:
                facts["unreadable media"] = str(error)
    special = special_tokens(dataset.encoder.tokenizer)
    control = set(special.values())
    runs = [list(run) for is_control, run in groupby(ids, control.__contains__) if not is_control]
    texts = [dataset.encoder.tokenizer.decode(run) for run in runs]
    spelled = [token for token in special if any(token in text for text in texts)]
    if spelled:
        facts["special tokens that are text here"] = spelled
    return ShownRow(name, _spans(dataset, ids, trained), len(ids), facts, previews)


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
