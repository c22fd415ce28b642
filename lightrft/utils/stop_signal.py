"""Stop a program on SIGTERM or Ctrl-C: at once, or by a flag at a safe point of a loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread.

    It is a ``KeyboardInterrupt``, so that the program cleans up as after Ctrl-C.
    """


@contextmanager
def raise_at_sigterm() -> Generator[None]:
    """Raise ``Terminated`` at SIGTERM within this context, unless the caller has its own handler.

    Outside the main thread Python cannot handle signals, and nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopFlag:
    """A flag that the first SIGTERM or SIGINT sets while the context is entered.

    A second SIGINT raises ``KeyboardInterrupt`` immediately. The previous handlers are restored on
    exit. Outside the main thread Python cannot handle signals, and only ``request`` sets the flag.

    Example::

        with StopFlag() as stop:
            for step in steps:
                ... if stop:
                    break
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.reason = ""
        self._interrupts = 0
        self._at_once = False
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Raise at the first signal within this context, in which nothing can be lost.

        SIGTERM raises ``Terminated``, and SIGINT ``KeyboardInterrupt``.
        """
        if self:
            raise Terminated
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def request(self, reason: str) -> None:
        """Set the flag. Only the first reason is kept."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> Self:
        # Python sets and runs handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        interrupted = number == signal.SIGINT
        if self._at_once:
            _say(f"{name}: stopping before the first step")
            self.request(name)
            raise KeyboardInterrupt if interrupted else Terminated
        self._interrupts += interrupted
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if not self:
            again = "Ctrl-C again" if interrupted else "Ctrl-C twice"
            _say(f"{name}: stopping at the next safe point; {again} stops at once")
        self.request(name)


def _say(line: str) -> None:
    """Write ``line`` to stderr. A signal may come in the middle of a write to a buffered stream."""
    os.write(2, f"\n{line}\n".encode())
