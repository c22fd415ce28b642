"""Shared code of the verbs: parse arguments, print help, and explain out-of-memory errors."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from lightrft.config.base import Loaded, Settings, description_of, dotted, load_settings
from lightrft.utils.errors import ConfigError, ResourceError, first_line

S = TypeVar("S", bound=Settings)
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
                f"{argument!r} is neither a .yaml file nor key=value, and no folder that this "
                "verb takes"
            )
    return load_settings(cls, files, overrides)


def positional(arguments: Sequence[str], key: str, *, several: bool = False) -> list[str]:
    """Replace each folder without a key in ``arguments`` by ``key=folder``.

    Args:
        arguments: YAML files, ``key=value`` and folders.
        key: Setting of the folders.
        several: Replace all folders by one list, ``key=[folder, ...]``.

    Raises:
        ConfigError: Several folders are given, and ``several`` is False, or ``key`` is given too.
    """
    named = {}
    for word in arguments:
        # JSON quotes the path, so that YAML does not read e.g. a folder ``1e6`` as a number.
        if is_bare_word(word) and Path(word).expanduser().is_dir():
            named[word] = f"{key}={json.dumps(word)}"
    if several and named:
        rest = [word for word in arguments if word not in named]
        if any(word.startswith(f"{key}=") for word in rest):
            raise ConfigError(f"{key} is given with its key and without; name all folders one way")
        return [*rest, f"{key}={json.dumps(list(named))}"]
    if len(named) > 1:
        raise ConfigError(f"{len(named)} folders are named ({', '.join(named)}); it takes one")
    return [named.get(a, a) for a in arguments]


def wants_usage(words: Sequence[str]) -> bool:
    """Return True if ``words`` are none, or ask for help."""
    return not words or not {"-h", "--help"}.isdisjoint(words)


def is_bare_word(argument: str) -> bool:
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
    if {"-h", "--help"} & set(arguments):
        show_help(verb, parse(cls, preset).settings, about)
        return None
    return parse(cls, [*preset, *arguments]).settings


def show_help(verb: str, defaults: Settings, about: str) -> None:
    """Print the verb's purpose and every setting with its default and its description.

    Args:
        verb: The verb, and the words that it takes.
        defaults: The settings whose values are the defaults.
        about: One line about the verb.
    """
    lines = "\n".join(_setting_lines(defaults, shutil.get_terminal_size().columns))
    sys.stdout.write(
        f"lightrft {verb} [config.yaml ...] [key=value ...]\n\n{about}\n\nsettings and their "
        f"defaults\n{lines}\n"
    )


def _setting_lines(defaults: Settings, columns: int) -> Generator[str]:
    """Yield each key with its value, then its description in lines of ``columns`` characters."""
    rows = list(dotted(defaults.model_dump(mode="json")))
    width = max(len(key) for key, _ in rows)
    wrapper = textwrap.TextWrapper(
        width=max(columns, len(INDENT) + 30),
        initial_indent=INDENT,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    shown = ""
    for key, value in rows:
        yield f"  {key:<{width}}  {value!r}"
        text = description_of(type(defaults), key)
        if text != shown:  # the keys of one table share its description
            yield from wrapper.wrap(text)
        shown = text


@contextmanager
def quick_imports() -> Generator[None]:
    """Disable garbage collection: it takes a fifth of the import time of torch and transformers."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|could not (create|execute) a primitive(?! descriptor)"
)
"""Messages of a ``RuntimeError`` for want of memory: of a GPU, of a CPU, and of oneDNN."""


@contextmanager
def memory_errors() -> Generator[None]:
    """Turn an out-of-memory error into a ``ResourceError`` that names the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            raise ResourceError(
                "out of memory; lower train.max_tokens_per_micro_batch, engine.max_cache_tokens or "
                f"model.logits_mb, or set model.gradient_checkpointing=true ({first_line(error)})"
            ) from error
        raise


def set_threads(threads: int) -> None:
    """Set the number of CPU threads. 0 keeps torch's own choice."""
    if threads:
        import torch

        torch.set_num_threads(threads)
