"""The parts of a model that can be trained apart: its language model, what reads media, and what lies between the two."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from lightrft.models.families import Family, family_of
from lightrft.utils.errors import ModelError

LANGUAGE, TOWER, PROJECTOR = "language", "tower", "projector"
PARTS = (LANGUAGE, TOWER, PROJECTOR)


def parts_of(family: Family) -> tuple[str, ...]:
    """The parts that models of ``family`` have."""
    return (LANGUAGE,) if family.reader is None else (LANGUAGE, *family.reader.parts)


def part_of(family: Family, name: str) -> str:
    """The part that a parameter belongs to, by its name in the transformers model (in peft's, or in a module that holds it): the one
    with the longest matching prefix, and what matches none is language."""
    name = name.removeprefix("base_model.model.")
    prefixes = {} if family.reader is None else family.reader.parts
    fitting = [(len(prefix), part) for part, some in prefixes.items() for prefix in some if name.startswith(prefix)]
    return max(fitting)[1] if fitting else LANGUAGE


def check_parts(config: PreTrainedConfig, setting: str, names: Iterable[str]) -> None:
    """Raises ``ModelError`` for a name that is not a part of models of ``config``."""
    known = parts_of(family_of(config))
    for name in names:
        if name not in known:
            raise ModelError(
                f"{setting} = {name!r}: a model of type {config.model_type!r} has no such part; it has {', '.join(known)}"
            )
