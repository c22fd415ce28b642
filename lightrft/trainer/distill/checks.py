"""Reject settings of distillation that cannot work, or with which nothing would be learned."""

from __future__ import annotations

from collections.abc import Collection

from lightrft.config.base import changed_fields
from lightrft.config.train import DistillationConfig, DistillTeacherConfig
from lightrft.config.verbs import DistillVerbConfig
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loading.adapter_base import adds_adapters
from lightrft.trainer.supervised import READ_SAMPLED, check_supervised
from lightrft.utils.errors import ConfigError


def check_distill(config: DistillVerbConfig) -> None:
    """Raise ``ConfigError`` for problems that can be found without a model or data."""
    settings = config.distill
    reads = set(READ_SAMPLED) if settings.on_policy else set()
    # It bounds the rows where they are prompts. With uld a teacher may need prompts of its own.
    if settings.on_policy == 1 or settings.teacher_sees_more or settings.kind == "uld":
        reads.add("data.max_prompt_tokens")
    check_supervised(config, reads)
    if not settings.on_policy and (changed := changed_fields(config.sampling)):
        name = changed[0]
        raise ConfigError(
            f"sampling.{name} = {getattr(config.sampling, name)} changes nothing: "
            "distill.on_policy is 0, so every step learns from given responses; raise it, e.g. "
            "distill.on_policy=0.5"
        )
    for source, teacher in config.teachers.items():
        if not teacher.path:
            raise ConfigError(
                f"teachers.{source}.path is empty; name the model to learn from on rows of "
                f"{source!r}"
            )
    for key, teacher in named_teachers(config).items():
        check_served(key, teacher, settings)
    if config.teacher.path:
        if config.distill.refresh_every:
            raise ConfigError(
                f"distill.refresh_every = {config.distill.refresh_every} moves the teacher towards "
                f"the student, and teacher.path = {config.teacher.path!r} names another model; leave "
                "teacher.path out, or set distill.refresh_every=0"
            )
    elif not config.teachers:
        check_self_distillation(config)


def named_teachers(config: DistillVerbConfig) -> dict[str, DistillTeacherConfig]:
    """Return the teachers by their keys."""
    return {
        "teacher": config.teacher,
        **{f"teachers.{source}": teacher for source, teacher in config.teachers.items()},
    }


def check_served(key: str, teacher: DistillTeacherConfig, settings: DistillationConfig) -> None:
    """Raise ``ConfigError`` if settings do not fit a teacher, be it served or loaded.

    Args:
        key: key of the teacher, for messages.
        teacher: the teacher.
        settings: the settings ``distill``.
    """
    if teacher.url is None:
        for name in ("served_name", "timeout", "max_in_flight"):
            if name in changed_fields(teacher):
                raise ConfigError(f"{key}.{name} changes nothing without {key}.url; leave it out")
        return
    if not teacher.path:
        raise ConfigError(
            f"{key}.path is empty; with {key}.url it names the tokenizer of the served model, which "
            "must be the student's"
        )
    for name in ("dtype", "load_in_4bit"):
        if name in changed_fields(teacher):
            raise ConfigError(
                f"{key}.{name} changes nothing with {key}.url: the server has loaded the model; "
                "leave it out"
            )
    if settings.kind == "uld":
        raise ConfigError(
            f"{key}.url: distill.kind = uld compares whole distributions, and a server returns the "
            f"most probable tokens alone; leave {key}.url out, so that the run loads the teacher"
        )
    if settings.top_k is None:
        raise ConfigError(
            f"{key}.url: a server returns the most probable tokens alone; set distill.top_k, e.g. "
            "to 20"
        )
    if settings.tail == "bucket" and settings.temperature != 1:
        raise ConfigError(
            f"distill.temperature = {settings.temperature} with {key}.url: the share of the other "
            "tokens is known at temperature 1 alone; set distill.tail=renormalised, or "
            "distill.temperature=1"
        )


def check_self_distillation(config: DistillVerbConfig) -> None:
    """Raise ``ConfigError`` if the start model has nothing to teach, or cannot follow adapters."""
    settings = config.distill
    if changed := changed_fields(config.teacher):
        name = changed[0]
        raise ConfigError(
            f"teacher.{name} = {getattr(config.teacher, name)} changes nothing without "
            "teacher.path; name the model to learn from"
        )
    if not settings.teacher_sees_more and not settings.nll_coef:
        raise ConfigError(
            "teacher.path is empty; name the model to learn from, e.g. teacher=path/to/model. For "
            "self-distillation, show the teacher more: set distill.teacher_template or "
            "distill.teacher_system"
        )
    if settings.refresh_every and adds_adapters(config.model):
        raise ConfigError(
            f"distill.refresh_every = {settings.refresh_every}: with model.lora the teacher is the "
            "model without its adapters, which cannot move; set distill.refresh_every=0, or train "
            "all weights (model.lora=null)"
        )


def check_weights(config: DistillVerbConfig, dataset: SFTDataset, key: str) -> None:
    """Raise ``ConfigError`` if rows have weights that the mean of the loss does not read.

    Args:
        config: settings of the run.
        dataset: the rows.
        key: the setting that names them.
    """
    aggregation = config.distill.aggregation
    if aggregation != "token" and dataset.is_weighted:
        raise ConfigError(
            f"distill.aggregation = {aggregation}: rows or turns of {key}.sources have weights, "
            "which weight a mean over tokens; set distill.aggregation=token, or remove the weights"
        )


def check_sources(config: DistillVerbConfig, sources: Collection[str]) -> None:
    """Raise ``ConfigError`` if a teacher has no rows, or a data source has no teacher."""
    if not config.teachers:
        return
    names = ", ".join(map(repr, sorted(sources)))
    for source in config.teachers:
        if source not in sources:
            raise ConfigError(
                f"teachers.{source}: no row of the data is of the source {source!r}; the sources "
                f"are {names}"
            )
    check_taught(config, sources, "data")


def check_taught(config: DistillVerbConfig, sources: Collection[str], key: str) -> None:
    """Raise ``ConfigError`` if a data source has no teacher.

    Args:
        config: settings of the run.
        sources: the data sources.
        key: the setting that names the rows.
    """
    if config.teacher.path or not config.teachers:
        return
    for source in sorted(sources):
        if source not in config.teachers:
            raise ConfigError(
                f"{key}.sources: rows of the data source {source!r} have no teacher; set "
                f"teachers.{source}, or teacher.path for all other rows"
            )
