"""Messages about settings in the form of Python, for programs and notebooks."""

from __future__ import annotations

import ast
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import ParamSpec, TypeVar

import yaml

from lightrft.utils.errors import UserError
from lightrft.utils.yaml_text import parse_yaml
from lightrft.verbs import VERBS

P = ParamSpec("P")
R = TypeVar("R")

SHORT = {
    "data": ("data.sources", "eval.data.sources"),
    "validation": ("validation.sources",),
    "eval": ("eval.data.sources",),
    "rewards": ("reward.terms",),
    "reward": ("reward.terms",),
    "steps": ("train.steps",),
    "epochs": ("train.epochs",),
    "lr": ("optimizer.lr",),
    "name": ("run.name",),
    "dir": ("run.dir",),
}
"""Keyword to the setting that its value is for, unless it is a table of settings. Of several, the
first one that the verb has."""
_VALUES = {
    **{SHORT[name][0]: name for name in ("data", "validation", "eval", "rewards")},
    "model.path": "model",
}
"""Settings whose value a program has in memory, with the keyword that takes it."""
_VERB = "|".join(name for name, verb in VERBS.items() if verb.function)
_FUNCTION = re.compile(
    rf"\blightrft (?P<verbs>(?:{_VERB})(?: and (?:{_VERB}))?)(?![\w/-]| [^\s(,;]*[/.=]| [A-Z])"
)
"""A verb without arguments, which is a function too."""
_FILE = re.compile(
    r"""[^\s'"(]*\binputs/(?P<name>\w+?)-[0-9a-f]{12}(?:-here)?
    (?: \.py:(?P=name) | \.(?:jsonl|parquet),\ (?:line|row)\ (?P<line>\d+) )""",
    re.VERBOSE,
)
"""A function of the program, or a row of it, by the file that it became."""
_GIVEN = re.compile(
    r"""
    (?P<command>\blightrft\ [a-z-]+\ [^;`\n]*)   # of a shell, which stays as it is
    | ^(?P<subject>data\.sources|reward\.terms)(?P<index>(?:\.\d+)*)(?=:|\ =)
    | \bis\ (?P<setting>[a-z_]\w*(?:\.[a-z_]\w*)+)\ here\b
    | (?<=\bin\ )(?P<column>data\.columns\.\w+)
    | \bset\ (?P<yaml>[a-z_]\w*(?:\.[a-z_]\w*)+):\ (?P<word>\w+)
    | (?P<table>(?<![\w"'{=])\{[a-z_]\w*:\ (?:[^{}\n]|\{[^{}\n]*\})*\})
    | (?<![\w.'"<-])(?P<name>[a-z_]\w*(?:\.\w+)*)=(?P<value>
        '[^']*' | "[^"]*" | \.\.\. | \.(?=[,;)])
        | \[(?:[^\[\]]|\[[^\[\]]*\])*\] | \{(?:[^{}]|\{[^{}]*\})*\}
        | (?:[\w/~]|\.{1,2}/)[^\s,;()'"\[\]{}<>]*?(?=[.:]?(?:[\s,;)`]|$))
    )
    """,
    re.VERBOSE | re.MULTILINE,
)
"""A setting with its value, as on the command line."""
_WORDS = (
    (re.compile(r" \(from Python\)"), ""),
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
    text = _FILE.sub(_given, text)
    text = _FUNCTION.sub(
        lambda found: f"lightrft.{found['verbs'].replace(' and ', ' and lightrft.')}", text
    )
    text = _GIVEN.sub(_rewritten, text)
    for pattern, word in _WORDS:
        text = pattern.sub(word, text)
    return text


def error_in_python(error: UserError) -> UserError:
    """Return ``error`` with its message rewritten by ``in_python``."""
    error.args = (in_python(str(error)), *error.args[1:])
    return error


def python_messages(function: Callable[P, R]) -> Callable[P, R]:
    """Rewrite the messages of errors of ``function`` by ``in_python``, and drop its stack frames.

    The message says all that a user needs. A notebook would show a dozen frames before it.
    """

    @functools.wraps(function)
    def called(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except UserError as error:
            raise error_in_python(error).with_traceback(None) from error.__cause__

    return called


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


def _given(found: re.Match[str]) -> str:
    """Return the name of a function of the program, or the index of a row."""
    return found["name"] if found["line"] is None else f"row {int(found['line']) - 1}"


def _rewritten(found: re.Match[str]) -> str:
    if found["subject"]:
        return _VALUES[found["subject"]] + re.sub(r"\.(\d+)", r"[\1]", found["index"])
    if found["setting"]:
        return f"is {_keyword(found['setting'], '...')} here"
    if found["column"]:
        return _keyword(found["column"], "...")
    if found["yaml"]:
        return f"set {_keyword(found['yaml'], found['word'])}"
    if found["table"]:
        return _literal(found["table"])
    return found["command"] or _keyword(found["name"], found["value"])


def _keyword(name: str, value: str) -> str:
    """Return ``a={"b": 1}`` of the name ``a.b`` and the value ``1`` of a command line."""
    if name in _VALUES:
        return f"{_VALUES[name]}={_literal(value)}"
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
    if value.isupper() or ("..." in value and value[0] not in "[{"):
        return value  # it stands for a value of the reader
    try:
        return _written(parse_yaml(value)).replace('"..."', "...")
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
