"""The verb ``lightrft data``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightrft.api.start import memory_errors, quick_imports, set_threads
from lightrft.cli.arguments import show_help, split_settings
from lightrft.cli.verbs import config_of
from lightrft.config.config_tools import ShowConfig

if TYPE_CHECKING:
    from lightrft.diagnostics.prompts.shown_rows import ShownSection, Span

MARK = "show."
GREEN, RESET = "\x1b[32m", "\x1b[0m"
SAFE = {number: f"\\x{number:02x}" for number in (*range(32), 127) if chr(number) not in "\n\t"}
"""Control characters, which a terminal might obey, to their escapes."""


def run(arguments: Sequence[str]) -> int:
    """Print the first rows of a config as a run reads them."""
    if {"-h", "--help"} & set(arguments):
        about = "Print the first rows of a config as a run reads them: tokens, media, columns."
        show_help("data", ShowConfig(), about, prefix=MARK)
        return 0
    options, others = split_settings(ShowConfig, MARK, arguments)
    config = config_of(options.verb, others).settings
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.diagnostics.prompts.shown_rows import shown_sections
    on_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    is_colored = options.color == "always" or (options.color == "auto" and on_terminal)
    with memory_errors():
        for section in shown_sections(config, options.rows, options.read):
            sys.stdout.write("\n".join(_lines(section, is_colored)) + "\n\n")
    return 0


def _lines(section: ShownSection, is_colored: bool) -> Iterator[str]:
    """Yield the lines about a section of data."""
    from lightrft.datasets.row_warnings import unread_problem

    yield f"== {section.key}: the first of {section.read} rows that were read"
    for row in section.rows:
        facts = "".join(f", {name} {value!r}" for name, value in row.facts.items())
        yield f"-- {row.name}: {row.tokens} tokens{facts}"
        yield "".join(_text(span, is_colored) for span in row.spans)
    if not section.unread:
        yield "-- every column with text, lists or media is read"
    for path, columns in section.unread.items():
        yield f"-- {unread_problem(path, columns, rewards=section.feeds_rewards)}"


def _text(span: Span, is_colored: bool) -> str:
    text = span.text.translate(SAFE)
    if not span.trained:
        return text
    return f"{GREEN}{text}{RESET}" if is_colored else f"[[{text}]]"
