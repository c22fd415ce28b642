"""Redaction of secrets in settings before a run writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lightrft.config.base import Settings, Tree, dotted
from lightrft.utils.errors import ConfigError

MARK = "<redacted>"
ENVIRONMENT = "environment"
_VARIABLE = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PWD|CREDENTIAL|AUTH|COOKIE)S?(_|$)|(^|_)PASS", re.IGNORECASE
)
_OPTION = re.compile(
    r"(^|[_.-])((api|access|secret|private|auth)[_.-]?key|token|secret|password|passwd|credentials?|auth|authorization)$",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redacted(settings: Settings, *, exclude_defaults: bool = False) -> Tree:
    """Return the tree of ``settings`` with secrets replaced by ``MARK``.

    A table is a setting such as ``launch.ray.environment`` or the options of a function. An entry
    of a table is a secret if its name says so. Names and passwords in URLs are secrets too. The
    fields that ``lightrft`` itself defines contain no other secrets.
    """
    tree = settings.model_dump(mode="json", exclude_defaults=exclude_defaults)
    return {name: _cleaned(getattr(settings, name), value, name) for name, value in tree.items()}


def is_secret(option: str) -> bool:
    """Return whether the value of an option is a secret by the option's name."""
    return _OPTION.search(option) is not None


def check_complete(settings: Settings) -> None:
    """Raise ``ConfigError`` if ``settings`` contain redacted secrets.

    Such settings were read from a file that a run wrote.
    """
    missing = []
    for name, value in _leaves(settings.model_dump(mode="json")):
        if isinstance(value, str) and MARK in value:
            missing.append(name)
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: the secret was left out of the file that these settings come "
            "from; give it again on the command line, or leave it out and set it in the "
            "environment of the command"
        )


def _leaves(tree: Tree) -> Iterator[tuple[str, object]]:
    for name, value in dotted(tree):
        if isinstance(value, list):
            yield from _leaves({f"{name}.{number}": one for number, one in enumerate(value)})
        else:
            yield name, value


def _cleaned(held: object, value: Any, table: str) -> Any:
    """Return ``value`` with its secrets redacted.

    Args:
        held: The setting. Unlike its dump it tells which tables are settings of ours.
        value: The dump of ``held``.
        table: Name of the setting.
    """
    if isinstance(held, Settings):
        cleaned = {}
        for name, one in value.items():
            cleaned[name] = _cleaned(getattr(held, name), one, name)
        return cleaned
    if isinstance(held, Mapping):
        # An option ``key`` may name a column, but a variable ``KEY`` holds a secret.
        secret = _VARIABLE if table == ENVIRONMENT else _OPTION
        cleaned = {}
        for (name, one), old in zip(value.items(), held.values(), strict=True):
            if isinstance(one, str) and one and secret.search(str(name)):
                cleaned[name] = MARK
            else:
                cleaned[name] = _cleaned(old, one, table)
        return cleaned
    if isinstance(held, list | tuple):
        return [_cleaned(old, one, table) for old, one in zip(held, value, strict=True)]
    return _IN_URL.sub(MARK, value) if isinstance(value, str) else value
