"""The parts of a model that can be trained separately.

These are the language model, towers, and projectors between the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedConfig

from lightrft.models.families import Family, family_of
from lightrft.utils.errors import ModelError

LANGUAGE, TOWER, PROJECTOR = "language", "tower", "projector"
PARTS = (LANGUAGE, TOWER, PROJECTOR)


def parts_of(family: Family) -> tuple[str, ...]:
    """Return the parts that models of ``family`` have."""
    return (LANGUAGE,) if family.reader is None else (LANGUAGE, *family.reader.parts)


def part_of(family: Family, name: str) -> str:
    """Return the part that a parameter belongs to.

    It is the part with the longest matching prefix, or ``language`` if none matches. ``name`` is
    the name in the transformers model, in a peft model, or in a module that contains one.
    """
    name = name.removeprefix("base_model.model.")
    if family.reader is None:
        return LANGUAGE
    longest = ""
    found = LANGUAGE
    for part, prefixes in family.reader.parts.items():
        for prefix in prefixes:
            # a projector may lie inside a tower: the longer prefix decides
            if name.startswith(prefix) and len(prefix) > len(longest):
                longest = prefix
                found = part
    return found


def is_selected(family: Family, name: str, what: str) -> bool:
    """Return ``True`` if ``model.freeze = what`` selects the parameter ``name``.

    Args:
        family: Family of the model.
        name: Name in the transformers model.
        what: A part, or a prefix of names with or without a leading ``model.``.
    """
    if what in PARTS:
        return part_of(family, name) == what
    return name.startswith(what) or name.removeprefix("model.").startswith(what)


def check_parts(config: PreTrainedConfig, setting: str, names: Iterable[str]) -> None:
    """Raise ``ModelError`` for a name that is not a part of models of ``config``.

    Args:
        config: Config of the model.
        setting: Name of the setting, for the message.
        names: Parts to check.
    """
    known = parts_of(family_of(config))
    for name in names:
        if name not in known:
            kind = f"a model of type {config.model_type!r}"
            have = ", ".join(known)
            raise ModelError(f"{setting} = {name!r}: {kind} has no such part; it has {have}")
