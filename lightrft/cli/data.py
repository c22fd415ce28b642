"""The verb ``lightrft data``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightrft.api.shown_data import MARKS, shown_data
from lightrft.api.start import memory_errors
from lightrft.cli.arguments import show_help, split_settings
from lightrft.cli.verbs import config_of
from lightrft.config.config_tools import ShowConfig
from lightrft.verbs import VERBS

MARK = f"{VERBS['data'].section}."
COLORS = ("\x1b[32m", "\x1b[0m")
"""Green for trained tokens, and the end of a color."""


def run(arguments: Sequence[str]) -> int:
    """Print the first rows of a config as a run reads them."""
    if {"-h", "--help"} & set(arguments):
        show_help("data", ShowConfig(), VERBS["data"].purpose, prefix=MARK)
        return 0
    options, others = split_settings(ShowConfig, MARK, arguments)
    config = config_of(options.verb, others).settings
    on_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    is_colored = options.color == "always" or (options.color == "auto" and on_terminal)
    with memory_errors():
        found = shown_data(config, options)
    sys.stdout.write(found.text(COLORS if is_colored else MARKS))
    if options.page is not None:
        sys.stdout.write(f"page: {options.page}\n")
    return 0
