"""End a process that a guardian guards, from the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

from lightrft.distributed.guarded.guardian import SUPPORTED, end_descendants

END_SECONDS = 15.0
"""Seconds in which a guardian must end everything, before it is killed itself."""


class GuardedProcess:
    """A worker below its guardian, see ``become_guardian``.

    Args:
        process: The guardian, started in a session of its own.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.reaping = threading.Lock()

    def interrupt(self) -> None:
        """Kill everything that the worker started. Return at once; any thread may call it."""
        with self.reaping:
            # The id of a process that was waited for may belong to another process by now.
            if self.process.returncode is None:
                if SUPPORTED:
                    self.process.terminate()  # the guardian, which then ends all
                else:
                    self._kill_session()

    def status(self, patience: float) -> int | None:
        """Return the exit status of a worker that ends within ``patience`` seconds, else ``None``.

        A signal gives minus its number.
        """
        ends = time.monotonic() + patience
        while True:
            with self.reaping:
                status = self.process.poll()
                if status is not None:
                    if not SUPPORTED:
                        self._kill_session()
                    return status
            if time.monotonic() >= ends:
                return None
            time.sleep(0.001)

    def end(self) -> None:
        """Kill the worker and wait for it."""
        self.interrupt()
        with self.reaping:
            try:
                self.process.wait(END_SECONDS if SUPPORTED else None)
            except subprocess.TimeoutExpired:  # a function has stopped its guardian
                end_descendants(self.process.pid)
                self._kill_session()
                self.process.wait()

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing is left of it
            os.killpg(self.process.pid, signal.SIGKILL)
