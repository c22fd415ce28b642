"""The verb ``lightrft chat``."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from lightrft.api.start import memory_errors, quick_imports, set_threads
from lightrft.cli.arguments import positional, settings_of
from lightrft.config.verbs import ChatConfig
from lightrft.utils.errors import DataError, is_unicode
from lightrft.verbs import VERBS


def run(arguments: Sequence[str]) -> int:
    """Read messages line by line and print the responses.

    ``/clear`` clears the conversation. ``/exit`` or the end of input leaves. ``/<kind> path``
    attaches a file to the next message.
    """
    verb = VERBS["chat"]
    words = positional(arguments, verb.path_setting)
    config = settings_of("chat", ChatConfig, words, verb.purpose)
    if config is None:
        return 0
    with quick_imports():
        set_threads(config.run.threads)
        from lightrft.trainer.inference import Chat, attachable

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    with memory_errors():
        chat = Chat(config)
        for path in config.attach:
            chat.attach(path)
        # An empty line still ends in a newline. Only the end of input is "".
        for line in iter(_read_line, ""):
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            word, _, rest = text.partition(" ")
            try:
                if text == "/clear":
                    chat.clear()
                elif word.startswith("/") and word[1:] in attachable():
                    chat.attach(rest.strip(), word[1:])
                elif text:
                    sys.stdout.write(chat.say(text).text.strip() + "\n")
            # A file that cannot be read or a chat that is too long must not end the chat.
            except DataError as error:
                sys.stderr.write(f"{error}; /clear starts a new conversation\n")
            sys.stdout.flush()
    return 0


def _read_line() -> str:
    """Return the next line of the input, with a prompt in a terminal."""
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = sys.stdin.readline()
    # In an ASCII locale, Python reads each other byte as half of a surrogate pair.
    if not is_unicode(line):
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return line
