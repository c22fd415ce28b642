"""``lightrft chat``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightrft.cli.common import asked_for_help, memory_errors, parse, set_threads
from lightrft.config import ChatConfig


def run(arguments: Sequence[str]) -> int:
    """Read lines, answer each; ``/clear`` starts anew, ``/exit`` or the end of input leaves."""
    if asked_for_help("chat", ChatConfig, arguments, "Talk to a model. /clear starts anew, /exit leaves."):
        return 0
    config = parse(ChatConfig, arguments).settings
    set_threads(config.run.threads)
    from lightrft.trainer.inference import Chat

    with memory_errors():
        chat = Chat(config)
        while True:
            if sys.stdin.isatty():
                sys.stdout.write("> ")
                sys.stdout.flush()
            line = sys.stdin.readline()
            text = line.strip()
            if not line or text in ("/exit", "/quit"):
                return 0
            if text == "/clear":
                chat.clear()
            elif text:
                sys.stdout.write(chat.say(text).text.strip() + "\n")
                sys.stdout.flush()
