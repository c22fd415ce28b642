"""SIGTERM and Ctrl-C become a flag that a loop reads where it is safe to stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopFlag:
    """While entered, the first SIGTERM or SIGINT sets the flag, and a second SIGINT raises ``KeyboardInterrupt`` at once.

    Handlers that were there before are put back on exit. Off the main thread, where Python cannot take signals, only
    ``request`` sets the flag.

        with StopFlag() as stop:
            for step in steps:
                ...
                if stop:
                    break
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.reason = ""
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def request(self, reason: str) -> None:
        """Set the flag; the first reason is kept."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python, which cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if not self:
            # os.write, since a handler may run in the middle of another write to a buffered stream
            os.write(2, f"\n{name}: stopping at the next safe point; Ctrl-C again stops at once\n".encode())
        self.request(name)
