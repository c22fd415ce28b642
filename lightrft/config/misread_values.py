"""Values and names of settings that would be taken for others.

A flag in place of a number would be 1 or 0, and an empty name the same as no name. An unknown name
may be misspelled, shortened, or belong to another section.
"""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from lightrft.config.setting_paths import branch_of

if typing.TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def misread(field: FieldInfo, value: object, is_text: bool) -> str:
    """Return why ``value`` would be read as another value, or "" if it would not.

    Args:
        field: The field that it is given for.
        value: A plain value, or a list of such.
        is_text: An empty text is a value of the field.
    """
    is_empty = isinstance(value, str) and not value
    is_none = isinstance(value, str) and value.lower() == "none"
    given = value if isinstance(value, list | tuple) else [value]
    if not is_empty and not is_none and not any(isinstance(one, bool) for one in given):
        return ""
    kinds = _kinds(field.annotation)
    if object in kinds:
        return ""
    if is_none:
        # A user who wants no reference would get a model of this name.
        if types.NoneType in kinds:
            return "it is a text; give null for none"
        return "it is a text; leave it out for none" if field.default == "" else ""
    if not is_empty:
        is_number = not kinds.isdisjoint({int, float})
        return "a number is needed, not a flag" if is_number and bool not in kinds else ""
    if is_text or str not in kinds:
        return ""
    if field.is_required():
        return "it is empty"
    # Where the default is empty, so may be what is given.
    if types.NoneType in kinds and field.default != "":
        return "it is empty; leave it out, or give null for none"
    return f"it is empty; leave it out for {field.default!r}" if field.default else ""


def is_text(field: FieldInfo | None) -> bool:
    """Return True if ``field`` takes text, or null, and nothing else."""
    # With ``| None`` a single type is a union too.
    options = typing.get_args((object if field is None else field.annotation) | None)  # ty: ignore[unsupported-operator]
    return set(options) <= {str, types.NoneType}


@functools.cache
def _kinds(annotation: object) -> frozenset[object]:
    """Return the types of an annotation at any depth, without their containers.

    ``object`` stands for a type that takes anything.
    """
    kinds = set()
    waiting = [annotation]
    while waiting:
        kind = waiting.pop()
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is Annotated:
            inner = inner[:1]
        if typing.get_origin(kind) is not typing.Literal:
            waiting += inner
        if not inner:
            kinds.add(object if kind is Any else kind)
    return frozenset(kinds)


if typing.TYPE_CHECKING:
    from lightrft.config.base import Settings


def nearest(cls: type[Settings], path: Sequence[str]) -> str:
    """Return the settings that the unknown ``path`` may mean, as ``a or b``, or "".

    Args:
        cls: Settings class of the whole tree.
        path: The parts of the dotted name. Its section exists.
    """
    *above, last = path
    if above and last in cls.model_fields:
        return last
    known = functools.reduce(branch_of, above, cls).model_fields
    near = difflib.get_close_matches(last, known, n=1, cutoff=0.8)
    # Alone, ``rewards`` may be a setting of a section, or ``reward`` with a letter too many.
    others = [] if above and near else _elsewhere(cls, last, above)
    if not near and (above or not others):
        near = difflib.get_close_matches(last, known, n=1)
    if not near and not others:
        # ``coefficient`` is ``coef``, which too few of its letters spell.
        near = [key for key in known if _is_begun(key, last)][:1]
    found = [*(".".join([*above, one]) for one in near), *others][:6]
    return f"one of {', '.join(found)}" if found[2:] else " or ".join(found)


def _elsewhere(cls: type[Settings], name: str, above: Sequence[str]) -> list[str]:
    """Return the settings ``name`` of other sections, as for ``group_size=8`` or ``train.lr=1``.

    Those below the section ``above`` come first, then those with the shortest names.
    """
    found = [key for key in leaves(cls) if f".{key}".endswith(f".{name}")]
    # ``critic.optimizer.lr`` is meant only by who names the critic.
    inside = [key for key in found if above and key.startswith(f"{'.'.join(above)}.")]
    outside = [key for key in found if not any(key.endswith(f".{one}") for one in found)]
    by_depth = sorted(outside, key=lambda key: key.count("."))
    return [*inside, *(key for key in by_depth if key not in inside)]


def leaves(cls: type[Settings], above: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of ``cls``, lists of tables included."""
    for name in cls.model_fields:
        yield f"{above}{name}"
        below = branch_of(cls, name)
        if below is not cls:
            yield from leaves(below, f"{above}{name}.")


def _is_begun(a: str, b: str) -> bool:
    return min(len(a), len(b)) > 2 and (a.startswith(b) or b.startswith(a))
