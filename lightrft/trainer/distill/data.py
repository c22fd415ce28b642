"""Find the teachers of a distillation, and load its rows and the prompts that teachers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.data import SFTDataConfig
from lightrft.config.model import ModelConfig
from lightrft.config.train import DistillTeacherConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.datasets.chat_encoder import ChatEncoder
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.row_warnings import check_rows
from lightrft.datasets.sampler import report
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.learner.distillation.alignment import Translation, translate
from lightrft.models.families import context_length
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.models.processors import Processor
from lightrft.trainer.checks.preflight import check_enough
from lightrft.trainer.distill.checks import named_teachers
from lightrft.trainer.sft import load_examples
from lightrft.types import Batch, Prompt, Segments
from lightrft.utils.errors import ConfigError, DataError
from lightrft.workers.local import compared_tokenizer, teacher_model, teacher_settings


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
        examples = load_examples(config, tokenizer, processor)
        check_enough("batch_size", config.batch_size, len(examples), "examples")
        return examples
    prompts = PromptDataset(config.data, tokenizer, seed=config.run.seed, processor=processor)
    report("data", prompts.counts, prompts.first_problem)
    check_rows(prompts, "data.sources")
    check_enough("batch_size", config.batch_size, len(prompts), "prompts")
    return prompts


class View(NamedTuple):
    """The rows as one teacher sees them.

    Attributes:
        prompts: The prompts that it sees.
        translates: Its tokenizer is not the student's.
        context: Largest number of tokens of a row. None for no bound.
    """

    prompts: PromptDataset
    translates: bool
    context: int | None = None


def load_views(
    config: DistillVerbConfig,
    data: SFTDataConfig,
    dataset: SFTDataset | PromptDataset,
    teachers: Mapping[str, NamedTeacher],
    processor: Processor | None,
) -> dict[str, View]:
    """Return the view of each teacher that does not see what the student sees, by its name.

    Args:
        config: settings of the run.
        data: settings of the rows.
        dataset: rows of the student.
        teachers: the teachers by the data source that they teach, "" for all others. Without any,
            the student teaches itself.
        processor: prepares media, or None for a text-only model.

    Raises:
        ConfigError: a row has no prompt for a teacher, or a teacher cannot follow its turns.
    """
    views: dict[str, View] = {}
    own = dataset.encoder.tokenizer
    usual: PromptDataset | None = None
    if config.distill.teacher_sees_more:
        usual = load_shown(config, data, dataset, own, processor)
    for name in teachers or ("",):
        other = teachers[name].tokenizer if name in teachers else None
        if other is not None:
            prompts = load_shown(config, data, dataset, other, None)
            views[name] = View(prompts, True, context_length(model_settings(teachers[name].model)))
        elif usual is not None:
            views[name] = View(usual, False)
    return views


def load_shown(
    config: DistillVerbConfig,
    data: SFTDataConfig,
    dataset: SFTDataset | PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    processor: Processor | None,
) -> PromptDataset:
    """Return the prompts that a teacher sees.

    Args:
        config: settings of the run.
        data: settings of the rows.
        dataset: rows of the student.
        tokenizer: encodes the prompts.
        processor: prepares media, or None for a text-only model.

    Raises:
        ConfigError: a row has no prompt for the teacher, or several trained turns.
        DataError: no row has a prompt for the teacher.
    """
    settings = config.distill
    if isinstance(dataset, SFTDataset):
        check_turns(data, dataset)
    own = {
        # The template must not change whether the chat template is used.
        "apply_chat_template": dataset.encoder.chat,
        "template": settings.teacher_template or data.template,
        "system": settings.teacher_system or data.system,
    }
    settings_of_prompts = data.model_copy(update=own)
    try:
        shown = PromptDataset(
            settings_of_prompts, tokenizer, seed=config.run.seed, processor=processor
        )
    except DataError as error:
        raise DataError(f"the prompts of the teacher: {error}") from error
    missing = sorted(set(dataset.ids) - set(shown.ids))
    if missing:
        raise ConfigError(
            f"{len(missing)} rows, the first of them {missing[0]!r}, have no prompt for the "
            "teacher: it is longer than data.max_prompt_tokens, or the row has several trained "
            "turns; raise data.max_prompt_tokens, or set data.turns=last"
        )
    return shown


def check_turns(data: SFTDataConfig, dataset: SFTDataset) -> None:
    """Raise ``ConfigError`` if a response is more than one turn.

    The teacher sees another prompt, which ends where the last turn begins.
    """
    if data.loss_on == "all":
        raise ConfigError(
            "data.loss_on = all: the teacher sees another prompt than the student, so prompts "
            "cannot be compared; set data.loss_on=assistant"
        )
    if dataset.has_untrained_tokens:
        raise ConfigError(
            "data.sources: a conversation has several trained turns, and the teacher sees another "
            "prompt, or has another tokenizer, for the last turn alone; set data.turns=last"
        )


def shown_batch(
    views: Mapping[str, View],
    encoder: ChatEncoder,
    prompts: Sequence[Prompt],
    sources: Sequence[str],
    batch: Batch,
) -> tuple[Batch, Batch | None]:
    """Return ``batch`` and the same responses as the teachers see them, or None.

    If a teacher has another tokenizer, both have the column ``aligned``.

    Args:
        views: the views by the names of teachers.
        encoder: encoder of the student's tokenizer.
        prompts: the student's prompt of each response.
        sources: name of the teacher of each response.
        batch: the responses after the student's prompts.
    """
    if not views:
        return batch, None
    seen = seen_prompts(views, prompts, sources)
    if not any(view.translates for view in views.values()):
        return batch, Batch(Segments.of_prompts(seen), batch.responses, batch.prompt_of)
    responses = [row.tolist() for row in batch.responses.tokens.split(batch.responses.sizes)]
    trained = [row.tolist() for row in batch.mask.split(batch.responses.sizes)]
    rows: list[Translation] = []
    for prompt, name, response, mask in zip(seen, sources, responses, trained, strict=True):
        view = views.get(name)
        if view is None or not view.translates:
            rows.append(Translation(response, mask, mask))
            continue
        room = None if view.context is None else view.context - len(prompt.token_ids)
        rows.append(translate(response, encoder, view.prompts.encoder, room))
    own = [flag for row in rows for flag in row.student_aligned]
    theirs = [flag for row in rows for flag in row.aligned]
    shown = Batch(
        Segments.of_prompts(seen),
        Segments.of([row.tokens for row in rows]),
        torch.arange(len(rows)),
        aligned=torch.tensor(theirs, dtype=torch.bool),
    )
    return batch.replace(aligned=torch.tensor(own, dtype=torch.bool)), shown


def seen_prompts(
    views: Mapping[str, View], prompts: Sequence[Prompt], sources: Sequence[str]
) -> list[Prompt]:
    """Return the prompt that the teacher of each row sees.

    Args:
        views: the views by the names of teachers.
        prompts: the student's prompts.
        sources: name of the teacher of each prompt.
    """
    seen = list(prompts)
    for name, view in views.items():
        places = [k for k, source in enumerate(sources) if source == name]
        found = view.prompts.fetch(view.prompts.places([prompts[k].id for k in places]))
        for k, entry in zip(places, found, strict=True):
            if isinstance(entry, MalformedRow):
                raise entry
            seen[k] = entry
    return seen


class NamedTeacher(NamedTuple):
    """A teacher that a setting names.

    Attributes:
        key: Key of ``settings``, for messages.
        settings: The settings of the teacher.
        model: The settings of its model.
        tokenizer: Its tokenizer. None if that is the student's.
    """

    key: str
    settings: DistillTeacherConfig
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None


def find_teachers(
    config: DistillVerbConfig, tokenizer: PreTrainedTokenizerBase, processor: Processor | None
) -> dict[str, NamedTeacher]:
    """Return the teachers by the data source that they teach, "" for all other rows.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the student.
        processor: prepares media, or None for a text-only model.

    Raises:
        ConfigError: a teacher cannot be compared with the student.
    """
    found: dict[str, NamedTeacher] = {}
    for key, own in named_teachers(config).items():
        if not own.path:
            continue
        if processor is not None and own.url:
            raise ConfigError(
                f"{key}.url: the model reads media, which are not sent to a server; leave url out, "
                "so that the run loads the teacher"
            )
        name = key.removeprefix("teachers.") if key != "teacher" else ""
        found[name] = find_teacher(config, key, own, tokenizer)
        if found[name].tokenizer is not None:
            check_other_tokenizer(config, key, processor)
    return found


def find_teacher(
    config: DistillVerbConfig,
    key: str,
    settings: DistillTeacherConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> NamedTeacher:
    """Return a teacher, after a comparison of its tokenizer with the student's.

    Args:
        config: settings of the run.
        key: key of the teacher.
        settings: the teacher, at ``key``.
        tokenizer: tokenizer of the student.

    Raises:
        ConfigError: the tokenizers differ, and the divergence compares tokens one by one.
    """
    if config.distill.kind != "uld":
        way_out = ", or set distill.kind=uld, which compares teachers of any tokenizer"
        model = teacher_model(config.model, settings, tokenizer, key, way_out)
        return NamedTeacher(key, settings, model, None)
    model = teacher_settings(config.model, settings)
    theirs = compared_tokenizer(model, f"{key}.path")
    is_same = theirs.get_vocab() == tokenizer.get_vocab()
    return NamedTeacher(key, settings, model, None if is_same else theirs)


def check_other_tokenizer(config: DistillVerbConfig, key: str, processor: Processor | None) -> None:
    """Raise ``ConfigError`` if the run cannot align the tokens of another tokenizer.

    Args:
        config: settings of the run.
        key: key of the teacher.
        processor: prepares media, or None for a text-only model.
    """
    if processor is not None:
        raise ConfigError(
            f"{key}.path: it has another tokenizer, and the model reads media, whose tokens cannot "
            "be translated; take a teacher of the same tokenizer"
        )
    parts = config.strategy.sequence_parallel
    if parts > 1:
        raise ConfigError(
            f"strategy.sequence_parallel = {parts}: {key}.path has another tokenizer, and spans of "
            "text cannot be split over ranks; set strategy.sequence_parallel=1"
        )
