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
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lightrft.utils.atomic_files import looks_like_path

Change = Callable[[str, str], str]
"""Return the new value of ``(dotted key, old value)``."""


def read_beside(cls: Any, tree: Any, file: Path, problems: list[str]) -> Any:
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

    return _changed(cls, tree, change, folder)


def made_absolute(cls: Any, tree: Any) -> Any:
    """Return ``tree`` of ``cls`` with absolute paths, which mean the same in any folder."""
    # Not ``Path.resolve``, which would follow links: they may be moved to other data on purpose.
    absolute: Change = lambda _, value: os.path.abspath(value)  # noqa: E731, PTH100
    return _changed(cls, tree, absolute, Path())


def branch_of(owner: Any, part: str) -> Any:
    """Return the settings class that one more ``part`` of a dotted key leads to.

    An index of a list or a key of a table leads back to ``owner``.
    """
    if part not in owner.model_fields:
        return owner
    waiting = [owner.model_fields[part].annotation]
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        waiting += typing.get_args(kind)
    return owner


def _changed(cls: Any, tree: Any, change: Change, folder: Path, key: str = "") -> Any:
    """Return ``tree`` with ``change`` made to every relative path, which starts from ``folder``."""
    if isinstance(tree, str) and cls.shorthand:
        return _leaf(cls, cls.shorthand, tree, change, folder, key)
    if isinstance(tree, list | tuple):
        return [_changed(cls, value, change, folder, f"{key}.{i}") for i, value in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    made = {}
    for name, value in tree.items():
        below = f"{key}.{name}".lstrip(".")
        branch = branch_of(cls, str(name))
        if name in (*cls.paths, *cls.functions):
            made[name] = _leaf(cls, name, value, change, folder, below)
        # Unknown keys stay as they are. ``build`` reports them with the nearest name.
        elif branch is cls or name not in cls.model_fields:
            made[name] = value
        elif _is_table(cls, name) and isinstance(value, Mapping):
            table = {}
            for entry, one in value.items():
                table[entry] = _changed(branch, one, change, folder, f"{below}.{entry}")
            made[name] = table
        else:
            made[name] = _changed(branch, value, change, folder, below)
    return made


def _is_table(cls: type[BaseModel], name: str) -> bool:
    """Return True if field ``name`` holds branches by names that the user chooses."""
    return typing.get_origin(cls.model_fields[name].annotation) is dict


def _leaf(cls: Any, name: str, value: Any, change: Change, folder: Path, key: str) -> Any:
    if isinstance(value, list | tuple):
        return [_leaf(cls, name, v, change, folder, key) for v in value]
    if not isinstance(value, str) or not _may_be_relative(value):
        return value
    where, colon, function = value.rpartition(":")
    names_function = bool(colon) and function.isidentifier()
    if names_function and where.endswith(".py"):
        return f"{change(key, where)}:{function}"
    if name in cls.functions:
        return change(key, value) if value.endswith(".py") else value
    if name not in cls.paths or names_function:
        return value
    # A name on the hub, such as ``owner/name``, differs from a path only in what exists here.
    there = glob.has_magic(value) or (folder / value).exists() or Path(value).exists()
    return change(key, value) if there or looks_like_path(value, folder) else value


def _may_be_relative(value: str) -> bool:
    if value in ("", "*") or value.startswith(("~", "/")) or "://" in value:
        return False
    # Templates, e.g. of a chat, may be given in place of the name of their file.
    return not re.search(r"[{<\n]", value)
