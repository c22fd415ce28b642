"""Tables of layouts of rows, which are recognised by their columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightrft.datasets.row_tables import Row

R = TypeVar("R")
Matches = Callable[[Row, Any], bool]


@dataclass(frozen=True, slots=True)
class RowLayout(Generic[R]):
    """One layout.

    Args:
        name: the name, for settings and messages.
        columns: the columns that a row is recognised by, for messages.
        matches: returns True if a row has these columns, by the settings ``data.columns``.
        read: returns the content of a row. Raises ``MalformedRow``.
    """

    name: str
    columns: str
    matches: Matches
    read: Callable[..., R]

    def __str__(self) -> str:
        return f"{self.name}: {self.columns}"


class RowLayouts(dict[str, RowLayout[R]]):
    """RowLayouts by name, in the order in which they are tried."""

    def add(
        self, name: str, columns: str, matches: Matches | None = None
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Return the decorator of the reader of a layout.

        Args:
            name: see ``RowLayout``.
            columns: see ``RowLayout``.
            matches: see ``RowLayout``. None if a row must have each of ``columns``.
        """
        names = set(columns.split(", "))

        def keep(read: Callable[..., R]) -> Callable[..., R]:
            has = matches or (lambda row, _: names <= row.keys())
            self[name] = RowLayout(name, columns, has, read)
            return read

        return keep
