"""Manage a reward worker from the parent: start it, send work, receive results, end it."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time

from lightrft.distributed.guarded.process import GuardedProcess
from lightrft.rewards.sandbox.protocol import Unreadable, WorkerMessage, message_of
from lightrft.rewards.sandbox.worker import HEADER, WorkBatch, WorkerInit

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightrft.rewards.sandbox.worker import main; main({fd}, {parent})"
)
START_SECONDS = 300.0  # a user's file may import something large
SEND_SECONDS = 60.0
LINE_BYTES = 16 << 20
"""Longest line that a worker may send, far more than the terms of one call."""


class WorkerDied(Exception):
    """The process has ended, or does not read its messages."""


class Garbled(WorkerDied):
    """The worker's socket received something that the worker's own code never sends."""


class WorkerProcess(GuardedProcess):
    """A worker in a fresh interpreter and session.

    Neither the threads nor the ``__main__`` of the parent affect it.
    """

    def __init__(self, folder: str) -> None:
        ours, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(p) if p else folder for p in sys.path])  # noqa: PTH100 (zip files and hooks stay)
        command = [
            sys.executable,
            "-c",
            _PROGRAM.format(fd=theirs.fileno(), parent=os.getpid()),
            path,
        ]
        # Each worker would else start one thread per core as soon as it loads numpy.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=folder,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise WorkerDied(f"cannot start {sys.executable}: {error}") from None
        finally:
            # Only the worker may have it open: its end is then the end of the stream here.
            theirs.close()
        super().__init__(process)
        self.connection = ours
        self.buffer = b""
        self.stray: Garbled | None = None

    def begin(self, start: WorkerInit) -> str:
        """Block until the worker is ready, and return an empty string.

        Return the worker's own message if it cannot serve.

        Raises:
            WorkerDied: If the worker has ended, or is not ready after ``START_SECONDS``.
        """
        self.send(start)
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            for message in self.receive(1.0):
                if not message.ready and not message.error:
                    raise Garbled("its socket brought a line out of turn before it was ready")
                return message.error
        raise WorkerDied(f"it was not ready after {START_SECONDS:g} s")

    def send(self, value: WorkerInit | WorkBatch) -> None:
        """Send a message to the worker.

        Raises:
            WorkerDied: If the worker has ended, or does not read the message.
        """
        frame = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self.connection.settimeout(SEND_SECONDS)
        try:
            self.connection.sendall(HEADER.pack(len(frame)) + frame)
        except OSError as error:
            raise WorkerDied(str(error)) from None

    def receive(self, timeout: float) -> list[WorkerMessage]:
        """Return the messages of the worker, waiting at most ``timeout`` seconds for the first.

        Raises:
            WorkerDied: If the worker has ended.
            Garbled: If a line is too long or is not one of the worker's messages.
        """
        if self.stray is not None:  # after the messages that came before it
            raise self.stray
        self.connection.settimeout(max(timeout, 0.001))
        try:
            data = self.connection.recv(1 << 20)
        except TimeoutError:
            return []
        except OSError as error:
            raise WorkerDied(str(error)) from None
        if not data:
            raise WorkerDied("it hung up")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        found: list[WorkerMessage] = []
        try:
            if len(self.buffer) > LINE_BYTES:
                raise Unreadable(f"it is longer than {LINE_BYTES} bytes")
            found += map(message_of, lines)
        except Unreadable as error:
            # The messages before it are valid. The next call raises.
            self.stray = Garbled(f"its socket brought a stray line: {error}")
        if self.stray is not None and not found:
            raise self.stray
        return found

    def end(self) -> None:
        """Kill the worker, wait for it and close the connection."""
        super().end()
        self.connection.close()
