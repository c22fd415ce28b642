"""Errors that the user can fix. The command line shows their text without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

RESUMES = "The same command resumes from the last checkpoint, or starts over if there is none"
"""What to do about an error that ends a run in the middle."""


def without_overwrite(text: str) -> str:
    """Return advice to repeat a command as it holds for one that has ``run.overwrite=true``."""
    return re.sub(r"\b([Tt]he same command)\b", r"\1 without run.overwrite=true", text)


def install_extra(*names: str) -> str:
    """Return the command that installs the extras ``names``.

    It is not ``pip install lightrft[...]``: the index has another project of this name.
    """
    extras = ",".join(names)
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install -e '.[{extras}]' in the checkout of lightrft"
    return f"pip install 'lightrft-rl[{extras}]'"


class UserError(Exception):
    """An error with a cause outside the program.

    The message names the cause, its value and a remedy.

    Attributes:
        is_before_update: It ended a step that had changed no weight yet, see ``before_update``.
        of_ranks: Classes of the errors by which some ranks failed, if every rank left the same work
            because of them, see ``run_on_all_ranks``.
    """

    is_before_update = False
    of_ranks: tuple[type[BaseException], ...] = ()


class ConfigError(UserError):
    """A setting is unknown, has the wrong type, or conflicts with another setting."""


class SettingsError(ConfigError, ValueError):
    """An object of settings that a program builds has a problem.

    It is a ``ValueError``, so that a validator which builds an object reports it as its own.
    """


class DataError(UserError):
    """A data file, row or column is missing or malformed."""


class ModelError(UserError):
    """A model or tokenizer folder cannot be used with the current settings."""


class RewardError(UserError):
    """A reward function cannot be found or returns an invalid reward. All ranks raise it."""

    shared_by_ranks = True  # the other ranks raise this class and not RankError


class CheckpointError(UserError):
    """A checkpoint is missing, truncated, or belongs to another run or model."""


class DamagedError(CheckpointError):
    """The files of a checkpoint differ from the saved files, or the folder is not a checkpoint."""


class RankError(UserError):
    """Another process of the run failed or timed out."""


class LostRankError(RankError):
    """The connection to other processes of the run is lost."""


class WorkerError(UserError):
    """A worker process of a role cannot be kept alive."""


class NothingTrained(UserError):
    """A run ended without learning anything in any step."""


class ResourceError(UserError):
    """Memory or disk space ran out. The message says what to lower or free."""


@contextmanager
def before_update() -> Generator[None]:
    """Mark user errors of the body, in which a step has changed no weight yet.

    The state of the run is then that of the last whole step, and can be saved.
    """
    try:
        yield
    except UserError as error:
        error.is_before_update = True
        raise


@contextmanager
def path_of(setting: str) -> Generator[None]:
    """Name ``setting`` in place of ``model.path`` in user errors of the body.

    A function that loads a model knows a path, and not the setting that it comes from.

    Args:
        setting: Dotted name of the setting; empty keeps ``model.path``.
    """
    try:
        yield
    except UserError as error:
        if setting:
            error.args = (str(error).replace("model.path", setting), *error.args[1:])
        raise


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` with the word of ``known`` closest to ``word``, or "".

    Several known words with commas between them are shown as a list.
    """
    known = list(known)
    parts = [part.strip() for part in word.split(",")]
    if parts[1:] and set(parts) <= set(known):
        return f"; a list is written [{', '.join(parts)}]."
    near = closest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the word of ``known`` closest to ``word``, or ""."""
    # In other letters alone it is the same word, however little the letters look alike.
    by_letters = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_letters, n=1)
    return by_letters[near[0]] if near else ""


class HintedAttributes:
    """An object that answers an attribute which it does not have with the one that is meant."""

    __slots__ = ()
    _meant: ClassVar[Mapping[str, str]] = {}
    """Names of other frameworks, with what they are here."""

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if not name.startswith("_"):
            known = [one for one in dir(type(self)) if not one.startswith("_")]
            hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
        if name in self._meant:
            hint = f"; {self._meant[name]}"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )


class UnknownName(UserError, KeyError):
    """A key is not in a table that the program reads."""

    __str__ = Exception.__str__


class HintedRow(dict[str, Any]):
    """A table that answers a key which it does not have with the nearest ones."""

    def __missing__(self, key: str) -> Any:
        near = [name for name in self if str(key) in name][:3] or [closest(str(key), self)]
        raise UnknownName(f"there is no {key!r}; did you mean {' or '.join(map(repr, near))}?")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of ``error``, or its class name without a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def whole_message(error: BaseException) -> str:
    """Return the message of ``error`` in one line, or its class name without a message."""
    return " ".join(str(error).split()) or type(error).__name__


def is_unicode(text: str) -> bool:
    """Return False if ``text`` has a lone surrogate, which YAML and JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class GenerationInterrupted(Exception):
    """The run was asked to stop during generation. Nothing of the step has been used."""

    shared_by_ranks = True  # the other ranks raise this class and not RankError
