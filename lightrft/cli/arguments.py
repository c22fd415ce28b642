"""Shared code of the verbs: parse arguments and print help."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TypeVar

from lightrft.config.base import (
    Loaded,
    Settings,
    description_of,
    dotted,
    has_setting,
    load_settings,
    section_defaults,
    unknown_setting,
)
from lightrft.utils.atomic_files import is_gguf, nearest_name
from lightrft.utils.errors import ConfigError

S = TypeVar("S", bound=Settings)
HELP = frozenset(("-h", "--help"))
"""Options that print the help of a verb."""
INDENT = 6 * " "
"""Indent of a description in the help of a verb."""


def parse(cls: type[S], arguments: Sequence[str]) -> Loaded[S]:
    """Parse YAML files and ``key=value`` arguments, in any order, into settings of type ``cls``."""
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        # First: the value of a setting may be the name of a .yaml file.
        if "=" in argument:
            overrides.append(argument)
        elif argument.endswith((".yaml", ".yml")):
            files.append(argument)
        else:
            raise ConfigError(
                f"{argument!r} is neither a .yaml file nor key=value, and no folder that this verb "
                f"takes{_way_out(cls, argument)}"
            )
    return load_settings(cls, files, overrides)


def _way_out(cls: type[Settings], word: str) -> str:
    """Return what to write in place of a ``word`` that is no argument of the verb of ``cls``."""
    path = Path(word)
    if not path.exists() and (len(path.parts) > 1 or nearest_name(path)):
        return f"; there is no folder {word}{nearest_name(path)}"
    settings = (name for name in ("output", "model", "path", "data") if has_setting(cls, name))
    return f"; name the setting of a value, as in {next(settings, 'a.b')}={word}"


def without_dashes(words: Sequence[str]) -> list[str]:
    """Replace ``--key value``, ``--key=value`` and ``--key`` by ``key=value`` and ``key=true``.

    ``--config file`` becomes the file. ``--help`` and what follows it stay.
    """
    found: list[str] = []
    waiting = list(words)
    while waiting and waiting[0] not in HELP:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            found.append(word)
            continue
        if not equals:
            has_value = (
                waiting and not waiting[0].startswith("--") and not _SETTING.match(waiting[0])
            )
            value = waiting.pop(0) if has_value else "true"
        name = name.replace("-", "_")
        found.append(value if name in ("config", "config_file") else f"{name}={value}")
    return [*found, *waiting]


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")
"""Start of a setting, in front of which ``--key`` has no value."""


def positional(arguments: Sequence[str], key: str, *, several: bool = False) -> list[str]:
    """Replace each folder or GGUF file without a key in ``arguments`` by ``key=folder``.

    Args:
        arguments: YAML files, ``key=value`` and folders.
        key: Setting of the folders.
        several: Replace all folders by one list, ``key=[folder, ...]``.

    Raises:
        ConfigError: Several folders are given, and ``several`` is False, or ``key`` is given too.
    """
    named = {}
    if not HELP.isdisjoint(arguments):
        return list(arguments)  # a word is then a section to print
    for word in arguments:
        # JSON quotes the path, so that YAML does not read e.g. a folder ``1e6`` as a number.
        path = Path(word).expanduser()
        if is_word(word) and (path.is_dir() or is_gguf(path)):
            named[word] = f"{key}={json.dumps(word)}"
    if several and named:
        rest = [word for word in arguments if word not in named]
        if any(word.startswith(f"{key}=") for word in rest):
            raise ConfigError(f"{key} is given with its key and without; name all folders one way")
        return [*rest, f"{key}={json.dumps(list(named))}"]
    if len(named) > 1:
        raise ConfigError(f"{len(named)} folders are named ({', '.join(named)}); it takes one")
    return [named.get(a, a) for a in arguments]


def with_origin(arguments: Sequence[str], setting: str) -> list[str]:
    """Replace ``from=x``, also given as ``--from x``, by ``setting=x``.

    Args:
        arguments: The words of a verb.
        setting: Setting of the origin.
    """
    return [
        f"{setting}={word.removeprefix('from=')}" if word.startswith("from=") else word
        for word in arguments
    ]


def file_first(arguments: Sequence[str], key: str) -> list[str]:
    """Replace the file that a verb takes by ``key=file``.

    Args:
        arguments: A file of any kind, and ``key=value``.
        key: Setting of the file.
    """
    words, found = list(arguments), []
    while words and HELP.isdisjoint(arguments):
        word = words.pop(0)
        is_setting = "=" in word or word.startswith("-")
        found.append(word if is_setting else f"{key}={json.dumps(word)}")
    if sum(word.startswith(f"{key}=") for word in found) > 1:
        raise ConfigError("several files are named; it takes one")
    return [*found, *words]


def wants_usage(words: Sequence[str]) -> bool:
    """Return True if ``words`` are none, or ask for help."""
    return not words or not HELP.isdisjoint(words)


def is_word(argument: str) -> bool:
    """Return True unless ``argument`` is a setting, an option or a file of settings."""
    if "=" in argument or argument.startswith("-"):
        return False
    return not argument.endswith((".yaml", ".yml"))


def settings_of(
    verb: str, cls: type[S], arguments: Sequence[str], about: str, preset: Sequence[str] = ()
) -> S | None:
    """Return the settings of ``arguments``. With ``--help``, print the help and return None.

    Args:
        verb: name of the verb.
        cls: class of the settings.
        arguments: YAML files and ``key=value``.
        about: purpose of the verb, for the help.
        preset: YAML files that ``arguments`` override.
    """
    if not HELP.isdisjoint(arguments):
        sections = [word for word in arguments if is_word(word)]
        show_help(verb, parse(cls, preset).settings, about, sections)
        return None
    return parse(cls, [*preset, *arguments]).settings


def show_help(
    verb: str, defaults: Settings, about: str, sections: Sequence[str] = (), prefix: str = ""
) -> None:
    """Print the verb's purpose and every setting with its default and its description.

    Args:
        verb: The verb, and the words that it takes.
        defaults: The settings whose values are the defaults.
        about: One line about the verb.
        sections: Sections or settings to print alone, such as ``data.media``; none for all.
        prefix: Start of the name of each setting on the command line.

    Raises:
        ConfigError: A section does not exist.
    """
    cls = type(defaults)
    for section in sections:
        if not has_setting(cls, section):
            raise ConfigError(f"--help {section}: {unknown_setting(cls, section, None)}")
    width = shutil.get_terminal_size().columns
    lines = "\n".join(_setting_lines(defaults, width, sections, prefix))
    sys.stdout.write(
        f"lightrft {verb} [config.yaml ...] [key=value ...]\n\n{about}\n\nsettings and their "
        f"defaults\n{lines}\n"
    )


def split_settings(cls: type[S], prefix: str, arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Return the settings of ``cls`` in ``arguments``, and the other arguments.

    Args:
        cls: The settings of a verb about configs of other verbs.
        prefix: Start of their names on the command line.
        arguments: The words of the command line.

    Raises:
        ConfigError: ``verb`` has no prefix, or a value is malformed.
    """
    own, others = [], []
    for word in arguments:
        if word.startswith(prefix):
            own.append(word.removeprefix(prefix))
            continue
        if word.startswith("verb="):
            raise ConfigError(f"{word}: did you mean {prefix}{word}?")
        others.append(word)
    return parse(cls, own).settings, others


def description_lines(text: str, columns: int) -> list[str]:
    """Return the indented lines of a description in a terminal of ``columns`` characters."""
    return textwrap.wrap(
        text,
        max(columns, len(INDENT) + 30),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _setting_lines(
    defaults: Settings, columns: int, sections: Sequence[str] = (), prefix: str = ""
) -> Generator[str]:
    """Yield each key with its value, then its description in lines of ``columns`` characters.

    Args:
        defaults: The settings.
        columns: Width of the terminal.
        sections: Sections to keep; none keeps all.
        prefix: Start of each key.
    """
    rows = list(dotted(defaults.model_dump(mode="json")))
    if sections:
        starts = tuple(f"{section}." for section in sections)
        rows = [(key, value) for key, value in rows if f"{key}.".startswith(starts)]
        # A section that is null by default, such as ``model.lora``, has the defaults of its class.
        rows = rows if rows[1:] else list(section_defaults(type(defaults), sections[0]).items())
    width = max(len(prefix + key) for key, _ in rows)
    shown = ""
    for key, value in rows:
        yield f"  {prefix + key:<{width}}  {value!r}"
        text = description_of(type(defaults), key)
        if text != shown:  # the keys of one table share its description
            yield from description_lines(text, columns)
        shown = text
