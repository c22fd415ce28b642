"""Fields that only some kinds of their section read."""

from __future__ import annotations

import functools
import typing

if typing.TYPE_CHECKING:
    from pydantic import BaseModel


class ReadBy:
    """Mark of a field, inside ``Annotated``, that only some kinds of its section read.

    Other kinds refuse it, and its description names the kinds. The refusal proposes the last one.
    """

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def __str__(self) -> str:
        *first, last = self.kinds
        return f"{', '.join(first)} or {last}" if first else last

    def has(self, kind: str) -> bool:
        """Return True for one of the kinds, or a case of one, as in ``sglang with engine.url``."""
        return any(f"{kind} ".startswith(f"{one} ") for one in self.kinds)


@functools.cache
def read_by(cls: type[BaseModel]) -> dict[str, ReadBy]:
    """Return the marks of the fields of ``cls`` that only some kinds read, by name."""
    return {
        name: mark
        for name, info in cls.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, ReadBy)
    }
