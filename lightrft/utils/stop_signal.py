"""Stop a program by a signal or Ctrl-C: at once, or by a flag at a safe point of a loop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Self

TERMINATING = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals that stop a program as SIGTERM does. By default each ends it at once.

A terminal that closes sends SIGHUP. SLURM sends what ``--signal`` names, such as USR1, before the
time limit of a job.
"""


REPEAT_SECONDS = 0.05
"""Time after which a signal is sent again whose exception was ignored."""


class Terminated(KeyboardInterrupt):
    """A signal of ``TERMINATING``, raised in the main thread.

    It is a ``KeyboardInterrupt``, so that the program cleans up as after Ctrl-C.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Generator[None]:
    """Handle signals by ``handler`` within this context, and restore the handlers before.

    A signal that is ignored stays ignored: ``nohup`` starts programs that way. Outside the main
    thread Python cannot handle signals, and nothing changes.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.signal(number, handler)
            for number in numbers
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
        }
    try:
        yield
    finally:
        for number, handler_before in before.items():
            # None stands for a handler that was not set from Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler_before is None else handler_before)


@contextmanager
def raised_again(sent: Sequence[KeyboardInterrupt]) -> Generator[None]:
    """Raise the exception of a signal in place of an error that a library made of it.

    An import that the signal breaks off ends in such an error.

    Args:
        sent: The exceptions of the signals that have come.
    """
    try:
        yield
    except Exception as error:
        if sent:
            raise sent[-1] from error
        raise


@contextmanager
def raise_at_termination() -> Generator[None]:
    """Raise ``Terminated`` at signals of ``TERMINATING`` that have no handler of the caller.

    Python ignores an exception that is raised in a ``__del__`` or in a callback of C. A signal that
    comes there is sent again.
    """
    sent: list[KeyboardInterrupt] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        sent.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        raise sent[-1]

    def repeat(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            hook_before(ignored)
            return
        number = getattr(ignored.exc_value, "number", signal.SIGINT)
        # Later, since Python still ignores exceptions here.
        again = threading.Timer(REPEAT_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    hook_before, sys.unraisablehook = sys.unraisablehook, repeat
    free = [number for number in TERMINATING if signal.getsignal(number) is signal.SIG_DFL]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        free.append(signal.SIGINT)
    try:
        with handling(free, terminate), raised_again(sent):
            yield
    finally:
        sys.unraisablehook = hook_before


class StopFlag:
    """A flag that the first SIGINT or signal of ``TERMINATING`` sets in the context.

    A second SIGINT raises ``KeyboardInterrupt`` immediately. The previous handlers are restored on
    exit. Outside the main thread Python cannot handle signals, and only ``request`` sets the flag.

    Example::

        with StopFlag() as stop:
            for step in steps:
                ... if stop:
                    break
    """

    def __init__(self) -> None:
        self.reason = ""
        self._interrupts = 0
        self._at_once = False
        self._sent: list[KeyboardInterrupt] = []
        self._handlers = ExitStack()

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Raise at the first signal within this context, in which nothing can be lost.

        SIGINT raises ``KeyboardInterrupt``, and the others raise ``Terminated``.
        """
        if self:
            raise Terminated
        self._at_once = True
        try:
            with raised_again(self._sent):
                yield
        finally:
            self._at_once = False

    def request(self, reason: str) -> None:
        """Set the flag. Only the first reason is kept."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def __enter__(self) -> Self:
        self._handlers.enter_context(handling((*TERMINATING, signal.SIGINT), self._handle))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handlers.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        interrupted = number == signal.SIGINT
        if self._at_once:
            _say(f"{name}: stopping before the first step")
            self.request(name)
            self._sent.append(KeyboardInterrupt() if interrupted else Terminated(number))
            raise self._sent[-1]
        self._interrupts += interrupted
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if not self:
            button = "the interrupt button" if in_notebook() else "Ctrl-C"
            often = "again" if interrupted else "twice"
            _say(f"{name}: stopping at the next safe point; {button} {often} stops at once")
        self.request(name)


def in_notebook() -> bool:
    """Return True in the kernel of a notebook. IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


def _say(line: str) -> None:
    """Write ``line`` to stderr. A signal may come in the middle of a write to a buffered stream."""
    os.write(2, f"\n{line}\n".encode())
