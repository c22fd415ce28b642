"""The verb ``lightrft compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrft.api.run import folder_of
from lightrft.cli.arguments import is_word, settings_of
from lightrft.config.config_tools import CompareConfig
from lightrft.utils.atomic_files import disk_errors, write_json
from lightrft.utils.errors import ConfigError
from lightrft.verbs import VERBS

SIDES = ("baseline", "candidate")


def run(arguments: Sequence[str]) -> int:
    """Compare two evaluations, print the result, and write it to ``output`` if one is named."""
    config = settings_of("compare", CompareConfig, named(arguments), VERBS["compare"].purpose)
    if config is None:
        return 0
    # Imported here: the help need not wait for numpy.
    from lightrft.diagnostics.comparison.compare import as_json, run_compare, to_text

    found = run_compare(config)
    said = "output=FILE.json writes the result and every prompt whose score changed"
    if config.output is not None:
        output = Path(config.output).expanduser()
        replaced = output.exists()
        with disk_errors(output, "choose another output"):
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, as_json(found, config))
        said = f"{output} (replaced)" if replaced else str(output)
    sys.stdout.write(f"{to_text(found, config.confidence, config.show)}\n\n{said}\n")
    return 0


def named(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with run folders and files of evaluations as settings.

    Raises ``ConfigError`` if there are more than two, or if a folder does not exist.
    """
    words = [a for a in arguments if is_word(a)]
    if len(words) > len(SIDES):
        raise ConfigError(f"{len(words)} folders are named ({', '.join(words)}); it takes two")
    found = []
    for argument in arguments:
        if not is_word(argument):
            found.append(argument)
            continue
        path = Path(argument).expanduser()
        path = path if path.is_file() else folder_of(argument)
        side = SIDES[words.index(argument)]
        # Each word is taken once: the two sides may be the same run at different steps.
        words[words.index(argument)] = ""
        found.append(f"{side}.path={json.dumps(str(path))}")
    return found
