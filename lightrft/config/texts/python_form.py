"""Messages about settings in the form of Python, for programs and notebooks."""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress

import yaml

from lightrft.utils.errors import UserError
from lightrft.utils.yaml_text import parse_yaml

_GIVEN = re.compile(
    r"""
    (?P<command>\blightrft\ [a-z-]+\ [^;`\n]*)   # of a shell, which stays as it is
    | (?<![\w.'"<-])(?P<name>[a-z_]\w*(?:\.\w+)*)=(?P<value>
        '[^']*' | "[^"]*"
        | \[(?:[^\[\]]|\[[^\[\]]*\])*\] | \{(?:[^{}]|\{[^{}]*\})*\}
        | (?:[\w/~]|\.{1,2}/)[^\s,;()'"\[\]{}<>]*?(?=[.:]?(?:[\s,;)`]|$))
    )
    """,
    re.VERBOSE,
)
"""A setting with its value, as on the command line."""
_WORDS = (
    (re.compile(r"\bput quotes inside the quotes\b"), "put it in quotes"),
    (re.compile(r"\b([Tt]he same) command\b"), r"\1 call"),
    (re.compile(r"(?<== )true\b|(?<=\bto )true\b"), "True"),
    (re.compile(r"(?<== )false\b|(?<=\bto )false\b"), "False"),
    (re.compile(r"(?<=as in )\[a, b\]"), '["a", "b"]'),
    (re.compile(r"(?<=as in )\{a: 1\}"), '{"a": 1}'),
    (re.compile(r"(?<![\w\"'])null(?![\w\"'])"), "None"),
)
"""Words of YAML and of the shell, and those of Python."""


def in_python(text: str) -> str:
    """Return a message with its settings as keywords of a function of Python.

    ``optimizer.lr=1e-6`` becomes ``optimizer={"lr": 1e-6}``. Text in this form does not change.
    """
    text = _GIVEN.sub(
        lambda found: found["command"] or _keyword(*found.group("name", "value")), text
    )
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text


@contextmanager
def python_messages() -> Generator[None]:
    """Rewrite the messages of errors of the body by ``in_python``."""
    try:
        yield
    except UserError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise


class PythonFormatter(logging.Formatter):
    """A formatter of a handler that shows messages of the log to a program.

    Args:
        inner: Formatter of the handler. ``None`` is the message alone.
    """

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter("%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``."""
        return in_python(self._inner.format(record))


def _keyword(name: str, value: str) -> str:
    """Return ``a={"b": 1}`` of the name ``a.b`` and the value ``1`` of a command line."""
    key, *below = name.split(".")
    inner = _literal(value)
    for part in reversed(below):
        inner = f"{{{json.dumps(part)}: {inner}}}"
    return f"{key}={inner}"


def _literal(value: str) -> str:
    """Return a value of a command line as Python writes it."""
    is_quoted = value.startswith("'")
    value = value.strip("'") if is_quoted else value
    with suppress(ValueError, SyntaxError):
        ast.literal_eval(value)
        return value if value[0] != "'" else json.dumps(value)
    if value.isupper() or "..." in value:  # it stands for a value of the reader
        return value
    try:
        return _written(parse_yaml(value))
    except yaml.YAMLError:
        return json.dumps(value, ensure_ascii=False)


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_written(k)}: {_written(each)}" for k, each in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
