"""The form of a row of the table of names, and the conversions of values that rows share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FRAMEWORKS = {
    "trl": "TRL",
    "verl": "verl",
    "openrlhf": "OpenRLHF",
    "llamafactory": "LLaMA-Factory",
    "ms-swift": "ms-swift",
    "lightrft": "LightRFT",
}
"""Key of a framework in ``import-config`` to its name in texts."""


class Converted(dict[str, Any]):
    """Settings here, by dotted name, that one option of another framework becomes."""


class Unclear(Exception):
    """An option has no one value here. The message says why."""


class NoValue(Unclear):
    """A value itself has no counterpart here, whatever the other options are."""


Options = Mapping[str, Any]
"""All options of a config of another framework, by whole name."""
Convert = Callable[[Any, Options], Any]
"""Return the value of ``NameRow.here``, or ``Converted``, from a value and all options.

``Converted()`` without entries leaves the setting at its default. Raises ``Unclear``.
"""


@dataclass(frozen=True, slots=True)
class NameRow:
    """A row of the table: names in other frameworks, and what they are here.

    Args:
        names: Whole names, separated by spaces. ``{a,b}.c`` stands for ``a.c`` and ``b.c``, ``*``
            for one part of a dotted name, and ``**`` for any parts. ``trl:a`` holds for TRL alone.
        here: Settings that do the same, in order of preference, separated by spaces. A verb has
            the first one that exists in it. Empty if there is none.
        note: The unit, scope or relation that changes with the name, or why there is none here.
        convert: The value here from the value there; None copies it.
    """

    names: str
    here: str = ""
    note: str = ""
    convert: Convert | None = None

    def each_name(self) -> Iterator[tuple[str, str]]:
        """Yield each name with its framework, which is empty for a name of several."""
        for word in self.names.split():
            framework, colon, name = word.rpartition(":")
            for one in _alternatives(name):
                yield framework if colon else "", one.lower()


def _alternatives(name: str) -> list[str]:
    """Return the names that ``name`` with braces stands for."""
    parts = re.split(r"\{([^{}]*)\}", name)
    choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def pattern_of(name: str) -> re.Pattern[str]:
    """Return the regular expression of a whole name in which ``*`` and ``**`` stand for parts."""
    parts = {"**": ".+", "*": "[^.]+"}
    text = "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", name))
    return re.compile(text)


@dataclass(frozen=True, slots=True)
class ValueTable:
    """A conversion that looks values up in a table. Text is compared in lower case."""

    values: Mapping[Any, Any]

    def __call__(self, value: Any, _: Options) -> Any:
        """Return the value here. Raises ``NoValue`` for an unknown one."""
        key = value.lower() if isinstance(value, str) else value
        for known, new in self.values.items():
            # ``1 == True`` in Python, and a number is no flag.
            if known == key and isinstance(known, bool) == isinstance(key, bool):
                return new
        raise NoValue(f"{value!r} is none of {', '.join(str(one) for one in self.values)}")


def when(setting: str, value: Any) -> ValueTable:
    """Return a conversion of a flag: true sets ``setting`` to ``value``, false sets nothing."""
    return ValueTable({True: Converted({setting: value}), False: Converted(), None: Converted()})


def ignore(_: Any, __: Options) -> Converted:
    """Convert any value to no setting: the default here does it already."""
    return Converted()


def counted(_: Any, __: Options) -> Converted:
    """Convert any value to no setting: the conversion of another option reads it."""
    return Converted()


def by_hand(_: Any, __: Options) -> Any:
    """Convert no value: the relation to the value here needs a decision."""
    raise Unclear("set it by hand")


def positive(value: Any, _: Options) -> Any:
    """Convert a number that turns something off at 0, -1 or null."""
    if value is None or (isinstance(value, int | float) and value <= 0):
        return Converted()
    return value


def inverse(value: Any, _: Options) -> bool:
    """Convert a flag that means the opposite here."""
    if not isinstance(value, bool):
        raise Unclear(f"{value!r} is no flag")
    return not value


def as_list(value: Any, _: Options) -> Any:
    """Convert text with commas between items, or one item, to a list. Nothing is no setting."""
    if value in (None, "", [], {}):
        return Converted()
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]
