"""Values that pydantic, or the code that reads a setting, would take for other values.

A flag in place of a number would be 1 or 0, and an empty name the same as no name.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Annotated, Any

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
