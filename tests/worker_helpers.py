"""Workers that are processes of this machine, for tests and benchmarks: they can be killed, and stopped."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import pickle
import queue
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from lightrft.distributed.worker_api import Maker, WorkerLost
from lightrft.workers.worker_group import WorkerGroup
from tests import warm

_SERVER = mp.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["lightrft.workers.engine_workers", "lightrft.workers.model_workers", *warm.IMPORTED]
)


def time_out_after(seconds: float, group: WorkerGroup, worker: ProcessWorker) -> None:
    """Make calls of ``group`` time out after ``seconds``, until ``worker`` is restarted.

    A worker that loads a model on a busy machine needs more time than a test has to wait for a stopped one.
    """
    limits, restart = group.limits, worker.restart

    def restart_with_patience() -> None:
        group.limits = limits
        restart()

    worker.restart = restart_with_patience  # type: ignore[method-assign]
    group.limits = replace(limits, call_timeout=seconds)


def serve(made: bytes, connection: Connection) -> None:
    """What the process of a worker does."""
    held = pickle.loads(made)()
    while True:
        try:
            number, method, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = number, True, getattr(held, method)(*args)
        except Exception as error:
            answer = number, False, error
        connection.send_bytes(pickle.dumps(answer))


class ProcessWorker:
    """``Worker`` over a process and a pipe."""

    def __init__(self, name: str, make: Maker) -> None:
        self.name = name
        self.starts = 0
        self._made = pickle.dumps(make)
        self._lock = threading.Lock()
        self._begin()
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._gone:
                future.set_exception(WorkerLost("its process is gone"))
                return future
            self._number += 1
            self._under_way[self._number] = future
            self._outbox.put(pickle.dumps((self._number, method, args)))
        return future

    def restart(self) -> None:
        self.close()
        self._begin()

    def close(self) -> None:
        if self._threads:
            self.signal(signal.SIGKILL)
            self._process.join()
            self._outbox.put(None)
            for thread in self._threads:
                thread.join()
            self._threads = []
            self._connection.close()
            self._process.close()

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is there."""
        if self._threads and self._process.is_alive():
            # It ended meanwhile: its server knows that some time before this process does.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _begin(self) -> None:
        ours, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=serve, args=(self._made, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        self.starts += 1
        with self._lock:  # others may call meanwhile
            self._gone, self._number = False, 0
            self._under_way: dict[int, Future[Any]] = {}
            self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._write, args=(ours, self._outbox), daemon=True),
            threading.Thread(target=self._read, args=(ours,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _write(connection: Connection, outbox: queue.SimpleQueue[bytes | None]) -> None:
        while (data := outbox.get()) is not None:
            try:
                connection.send_bytes(data)
            except OSError:
                return

    def _read(self, connection: Connection) -> None:
        while True:
            try:
                number, well, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._under_way.pop(number)
            if well:
                future.set_result(value)
            else:
                future.set_exception(value)
        with self._lock:
            self._gone = True
            lost, self._under_way = list(self._under_way.values()), {}
        for future in lost:
            future.set_exception(WorkerLost("its process ended"))
