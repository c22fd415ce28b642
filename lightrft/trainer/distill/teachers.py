"""Look at the teachers of a distillation before their weights are loaded."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.config.train import DistillTeacherConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.models.processors import Processor
from lightrft.trainer.distill.checks import named_teachers
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import compared_tokenizer, teacher_model, teacher_settings


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
