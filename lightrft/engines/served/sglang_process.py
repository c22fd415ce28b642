"""An SGLang server that a run starts, keeps alive and ends."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lightrft.distributed.guarded.process import GuardedProcess
from lightrft.distributed.local_store import LOOPBACK
from lightrft.utils.errors import ResourceError
from lightrft.utils.lazy_imports import httpx

log = logging.getLogger(__name__)

CHILD = "lightrft.engines.served.sglang_child"
MOST_RESTARTS = 3
"""Restarts in a row, without a finished response or an update between them."""
LOOK_SECONDS = 0.2
"""Time between two looks at a server that starts."""
TELL_SECONDS = 30.0
"""Time between two messages about a server that starts."""
HEALTH_SECONDS = 5.0
TAIL_BYTES = 4000
"""Bytes of the server's last messages in an error."""
OF_THE_RUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "TORCHELASTIC_"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    # SGLang frees memory by an allocator that expandable segments exclude
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)
"""Variables, or their first letters, that the server must not inherit: it would join the ranks."""


class SGLangProcess:
    """A server of SGLang on a port of the loopback interface, started again when it ends.

    A guardian ends it with this process, however this process ends.

    Args:
        options: Options of ``sglang.launch_server``, without address and key.
        seconds: Longest time of a start.

    Attributes:
        url: Address of the server. It stays the same after a restart.
        starts: Number of starts.
    """

    def __init__(self, options: Sequence[str], seconds: float) -> None:
        self.starts = 0
        self._seconds = seconds
        # Bound and not listening: only a server that sets SO_REUSEADDR, as SGLang does, gets it.
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((LOOPBACK, 0))
        number = self._port.getsockname()[1]
        self.url = f"http://{LOOPBACK}:{number}"
        # other users of the machine reach the port too
        self._key = secrets.token_hex(32)
        address = ["--host", LOOPBACK, "--port", str(number), "--api-key", self._key]
        self._words = [*options, *address]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``end``)
        self._process: GuardedProcess | None = None
        self._lock = threading.Lock()
        # set also when no server will be ready any more
        self._ready, self._needed, self._over = (threading.Event() for _ in range(3))
        self._needed.set()
        self._in_a_row = 0
        self._ended = 0
        self._restarts = 0
        self._problem = ""
        # A thread of its own: Linux ends a guardian when the thread that started it ends.
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="SGLang")

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ResourceError: It has ended, or does not answer in time.
        """
        self._keeper.start()
        self._ready.wait()
        if self._problem:
            raise ResourceError(self._problem)

    def authorization(self) -> dict[str, str]:
        """Return the header with the server's key, once the server is ready.

        Raises ``ResourceError`` if the server ended too often.
        """
        self._ready.wait()
        if self._problem:
            raise ResourceError(self._problem)
        return {"Authorization": f"Bearer {self._key}"}

    def progressed(self) -> None:
        """Take note that the server finished a response or an update."""
        self._in_a_row = 0

    def rest(self) -> None:
        """Start no new server until ``need`` is called, since its memory is used for training."""
        self._needed.clear()

    def need(self) -> None:
        """Start a new server if the last one has ended, now and from now on."""
        self._needed.set()

    def has_ended(self, start: int, patience: float = HEALTH_SECONDS) -> bool:
        """Return whether the server of ``start`` has ended.

        Args:
            start: The value of ``starts`` while it ran.
            patience: Seconds to wait: a connection may break before the process has ended.
        """
        until = time.monotonic() + patience
        while self._ended < start and time.monotonic() < until:
            time.sleep(LOOK_SECONDS / 10)
        return self._ended >= start

    def take_restarts(self) -> int:
        """Return the number of restarts since the last call."""
        with self._lock:
            found, self._restarts = self._restarts, 0
        return found

    def end(self) -> None:
        """End the server and all of its processes."""
        self._over.set()
        self._needed.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.end()
        if self._keeper.is_alive():
            self._keeper.join()
        self._port.close()
        self._output.close()

    def _keep(self) -> None:
        """Run servers, one after another. For a thread."""
        try:
            while not self._over.is_set() and self._run():
                self._needed.wait()
        except Exception as error:
            self._problem = f"SGLang cannot be started: {error!r}"
        finally:
            self._ready.set()

    def _run(self) -> bool:
        """Run a server until it ends. Return whether another one may be started."""
        with self._lock:
            if self._over.is_set():
                return False
            self._process = process = GuardedProcess(self._begin())
            self.starts += 1
        problem = self._wait_until_ready(process)
        was_ready = not problem
        if was_ready:
            self._ready.set()
            while (status := process.status(0)) is None:
                time.sleep(LOOK_SECONDS)
            problem = f"ended with status {status}"
            self._ready.clear()
        process.end()
        self._ended = self.starts
        if self._over.is_set():
            return False
        self._in_a_row += 1
        if (self.starts == 1 and not was_ready) or self._in_a_row > MOST_RESTARTS:
            again = "" if self.starts == 1 else f", {self._in_a_row} times in a row"
            self._problem = (
                f"the SGLang server of this run {problem}{again}. Its last messages:\n"
                f"{self._tail()}\n"
                "lower engine.max_cache_tokens or engine.max_num_seqs if memory is short, raise "
                f"engine.deadline = {self._seconds:g} if it needs longer to start, set other options "
                "by engine.server_options, or start SGLang yourself and name it by engine.url"
            )
            return False
        log.warning(
            "the SGLang server of this run %s, and is started again. Its last messages:\n%s",
            problem,
            self._tail(),
        )
        with self._lock:
            self._restarts += 1
        return True

    def _begin(self) -> subprocess.Popen[bytes]:
        """Start the process, and tell it what to serve."""
        paths = [str(Path(entry or ".").absolute()) for entry in sys.path]
        variables = {k: v for k, v in os.environ.items() if not k.startswith(OF_THE_RUN)}
        # without the current folder, whose files would be imported in the place of packages
        command = [sys.executable, "-P", "-m", CHILD]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**variables, "PYTHONPATH": os.pathsep.join(paths)},
        )
        key = multiprocessing.current_process().authkey
        given = {"parent": os.getpid(), "authkey": key.hex(), "words": self._words}
        assert process.stdin is not None
        # one that has ended already is found by its status
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(given).encode())
        return process

    def _wait_until_ready(self, process: GuardedProcess) -> str:
        """Wait until the server is healthy. Return why it is not, or an empty string."""
        began = told = time.monotonic()
        while not self._is_healthy():
            time.sleep(LOOK_SECONDS)
            if (status := process.status(0)) is not None:
                return f"ended with status {status} before it was ready"
            now = time.monotonic()
            if now > began + self._seconds:
                return f"was not ready after {self._seconds:g} s"
            if now > told + TELL_SECONDS:
                told = now
                last = self._tail().rpartition("\n")[2][-200:]
                log.info("SGLang has been starting for %.0f s: %s", now - began, last)
        return ""

    def _is_healthy(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/health", timeout=HEALTH_SECONDS, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    def _tail(self) -> str:
        """Return the server's last messages, without its key."""
        size = os.fstat(self._output.fileno()).st_size
        data = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        return data.decode(errors="replace").replace(self._key, "...").strip()
