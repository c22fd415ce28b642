"""Tables of the fields that requests may have, and the types of their values."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrft.serving.problems import bad
from lightrft.utils.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class JSONType:
    """A type of JSON values.

    Attributes:
        name: The type, as messages say what is expected.
        holds: Returns True for a value of this type.
        items: Types that the items of a list may have. Empty if they are not checked.
        fields: Fields of an object. ``None`` if they are not checked.
    """

    name: str
    holds: Callable[[object], bool]
    items: Types = ()
    fields: RequestFields | None = None


Types = tuple[JSONType, ...]
"""The types that a value may have."""


def _is_number(value: object) -> bool:
    # Python counts True and False as numbers
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    # as in JSON Schema, 2.0 is a whole number
    return _is_number(value) and value % 1 == 0


NULL = JSONType("null", lambda value: value is None)
BOOLEAN = JSONType("true or false", lambda value: isinstance(value, bool))
NUMBER = JSONType("a number", _is_number)
INTEGER = JSONType("a whole number", _is_whole)
TEXT = JSONType("a text", lambda value: isinstance(value, str))
LIST = JSONType("a list", lambda value: isinstance(value, list))
OBJECT = JSONType("an object", lambda value: isinstance(value, Mapping))


def list_of(*items: JSONType) -> JSONType:
    """Return the type of lists whose items have one of the types ``items``."""
    return JSONType(LIST.name, LIST.holds, items)


def object_of(fields: RequestFields) -> JSONType:
    """Return the type of objects that have these ``fields``."""
    return JSONType(OBJECT.name, OBJECT.holds, fields=fields)


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields that a request, or an object in it, may have.

    Attributes:
        read: Fields that this server reads, with the types of their values.
        unread: Fields that change no answer, whatever their value is.
        neutral: Fields that this server does not follow, to the value that asks for nothing. So
            does ``null``, and every empty value where this one is empty.
    """

    read: Mapping[str, Types]
    unread: Collection[str] = ()
    neutral: Mapping[str, object] = field(default_factory=dict)

    def check(self, body: Mapping[str, Any], where: str = "") -> None:
        """Check names and types of the fields of ``body``, and values that would be ignored.

        Args:
            body: The request, or an object in it.
            where: Path of the object, with a dot at its end. Empty for the request.

        Raises:
            HTTPProblem: A field is unknown, has the wrong type, or asks for something that this
                server does not do.
        """
        for name, value in body.items():
            path = f"{where}{name}"
            if name in self.read:
                _check_type(value, self.read[name], path)
            elif name in self.neutral:
                if not _is_neutral(value, self.neutral[name]):
                    given = f"{path} = {reprlib.repr(value)}"
                    raise bad(
                        f"{given} is not supported, and would change the answer; leave it out"
                    )
            elif name not in self.unread:
                near = did_you_mean(name, [*self.read, *self.unread, *self.neutral])
                inside = f" of {where[:-1]}" if where else ""
                raise bad(f"unknown field {reprlib.repr(name)}{inside}{near or '; leave it out'}")


def _check_type(value: Any, types: Types, path: str) -> None:
    """Raise ``HTTPProblem`` unless ``value`` has one of ``types``."""
    found = next((one for one in types if one.holds(value)), None)
    if found is None:
        expected = " or ".join(one.name for one in types)
        raise bad(f"{path} = {reprlib.repr(value)}: it should be {expected}")
    if found.items:
        for k, item in enumerate(value):
            _check_type(item, found.items, f"{path}.{k}")
    if found.fields is not None:
        found.fields.check(value, f"{path}.")


def _is_neutral(value: object, neutral: object) -> bool:
    # Python takes True for 1
    is_equal = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
    # where none is neutral, 0 and false are values
    is_empty = neutral is not None and not neutral and not value
    return value is None or is_equal or is_empty
