"""Relative paths in a file of settings are relative to that file.

In memory they are relative to the working directory, as on the command line. ``Settings.paths``
names the fields of a branch that hold a path to read, or a name on the hub. ``Settings.functions``
names the fields that hold ``file.py:function``, or the name of a registered function. Folders that
a run writes are always relative to the working directory.
"""

from __future__ import annotations

import glob
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from lightrft.utils.atomic_files import looks_like_path

if typing.TYPE_CHECKING:
    from lightrft.config.base import Settings

Change = Callable[[str, str], str]
"""Return the new value of ``(dotted key, old value)``."""

# ``data.py:12`` and ``C:/data`` have a colon too, and are paths.
_FUNCTION = re.compile(r"(?P<where>.*):(?P<name>[^\W\d]\w*)")

_NOT_RELATIVE = re.compile(
    r"""
      ^\*?$    # nothing, or the "*" of data.media.allow.roots, which allows every folder
    | ^[~/]    # absolute
    | ://      # an address
    | [{<\n]   # a template, e.g. of a chat, given in place of the name of its file
    """,
    re.VERBOSE,
)


def read_beside(
    cls: type[Settings], tree: Mapping[str, object], file: Path, problems: list[str]
) -> dict[str, object]:
    """Return ``tree``, read from ``file``, with its paths relative to the working directory.

    Args:
        cls: Settings class of the tree.
        tree: Plain values of the file.
        file: The file; its relative paths start from its folder.
        problems: Gets an entry for each path that exists only in the working directory.

    Returns:
        A new tree; ``tree`` is not changed.
    """
    folder = file.parent

    def change(key: str, value: str) -> str:
        # Not ``Path.resolve``: the text must stay relative, so that a config means the same on
        # every machine, and links must stay links.
        found = os.path.normpath(folder / value)
        # Silently taking the other file would let one config mean two things.
        only_here = not Path(found).exists() and Path(value).exists()
        if only_here and not glob.has_magic(value):
            problems.append(
                f"{key} = {value!r} (from {file}): relative paths in a file are relative to it, "
                f"and there is no {found}. For the one in the working directory write "
                f"{os.path.relpath(value, folder)}"
            )
        return found

    return _PathChange(folder, change).branch(cls, tree)


def made_absolute(cls: type[Settings], tree: Mapping[str, object]) -> dict[str, object]:
    """Return ``tree`` of ``cls`` with absolute paths, which mean the same in any folder."""
    # Not ``Path.resolve``, which would follow links: they may be moved to other data on purpose.
    absolute: Change = lambda _, value: os.path.abspath(value)  # noqa: E731, PTH100
    return _PathChange(Path(), absolute).branch(cls, tree)


def branch_of(owner: type[Settings], part: str) -> type[Settings]:
    """Return the settings class that one more ``part`` of a dotted key leads to.

    An index of a list or a key of a table leads back to ``owner``.
    """
    if part not in owner.model_fields:
        return owner
    # A branch may be inside a union, a list or a table, as in ``tuple[SourceConfig, ...]``.
    waiting: list[object] = [owner.model_fields[part].annotation]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            # Every branch is a ``Settings``. The class itself is not known here at run time,
            # because its module imports this one.
            return typing.cast("type[Settings]", kind)
        waiting += typing.get_args(kind)
    return owner


def changes_items(value: object) -> typing.TypeGuard[Mapping[str, object]]:
    """Return True if the keys of ``value`` are indices of a list, as those of ``a.0.b=1`` below
    ``a``."""
    is_filled = isinstance(value, Mapping) and bool(value)
    return is_filled and all(isinstance(key, str) and key.isdecimal() for key in value)


@dataclass(frozen=True, slots=True)
class _PathChange:
    """A change of all relative paths in a tree of settings."""

    folder: Path
    """Folder that the relative paths start from."""
    change: Change
    """Function that returns the new path."""

    def branch(
        self, cls: type[Settings], tree: Mapping[str, object], key: str = ""
    ) -> dict[str, object]:
        """Return the branch ``tree`` of class ``cls``, whose dotted key is ``key``, changed."""
        made = {}
        for name, value in tree.items():
            made[name] = self._field(cls, name, value, f"{key}.{name}".lstrip("."))
        return made

    def _field(self, cls: type[Settings], name: str, value: object, key: str) -> object:
        if name in (*cls.paths, *cls.functions):
            return self._paths(cls, name, value, key)
        below = branch_of(cls, name)
        # Unknown keys stay as they are, like plain values. ``build`` reports them.
        if below is cls:
            return value
        # The keys of such a table are names that the user chooses, not fields.
        is_table = typing.get_origin(cls.model_fields[name].annotation) is dict
        if changes_items(value) or (is_table and isinstance(value, Mapping)):
            return {entry: self._value(below, v, f"{key}.{entry}") for entry, v in value.items()}
        return self._value(below, value, key)

    def _value(self, cls: type[Settings], value: object, key: str) -> object:
        """Return ``value``, given where a branch of ``cls`` or a list of them belongs, changed."""
        if isinstance(value, str) and cls.shorthand:
            return self._field(cls, cls.shorthand, value, key)
        if isinstance(value, list | tuple):
            return [self._value(cls, one, f"{key}.{i}") for i, one in enumerate(value)]
        return self.branch(cls, value, key) if isinstance(value, Mapping) else value

    def _paths(self, cls: type[Settings], name: str, value: object, key: str) -> object:
        """Return ``value`` of the field ``name`` changed. A list is changed item by item."""
        if isinstance(value, list | tuple):
            return [self._paths(cls, name, one, key) for one in value]
        if not isinstance(value, str) or _NOT_RELATIVE.search(value):
            return value
        function = _FUNCTION.fullmatch(value)
        if function and function["where"].endswith(".py"):
            return f"{self.change(key, function['where'])}:{function['name']}"
        if name in cls.functions:
            return self.change(key, value) if value.endswith(".py") else value
        if name not in cls.paths or function:
            return value
        if glob.has_magic(value) or looks_like_path(value, self.folder):
            return self.change(key, value)
        # A name on the hub, such as ``owner/name``, differs from a path only in what exists here.
        places = (self.folder / value, Path(value))
        return self.change(key, value) if any(map(Path.exists, places)) else value
