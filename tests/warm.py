"""Python processes that have imported torch, transformers and lightrft when they begin: a program starts in a tenth of a second.

``run`` and ``Process`` stand in for ``subprocess.run`` and ``subprocess.Popen`` of ``python words...``. A server process with the imports
done forks itself for each. With ``seats``, the ranks that torch's launcher starts there are forks too, children of the launcher.

``door`` is the path of a socket through which other processes can ask for a fork: ``tests/warm_client.py`` does, in place of an
interpreter, so that workers of Ray are forks too.

A fork shares the hash seed and the modules of the server. So tests of the imports themselves, of start-up time, of memory, and one run of
every way to start ranks use new interpreters instead.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "lightrft.cli.verbs",
    "lightrft.distributed.torchrun",
    "lightrft.strategy.fsdp2",
    "lightrft.trainer.rl",
    "lightrft.trainer.sft",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
)
LARGEST = 1 << 20
"""Bytes of a request."""


# ------------------------------------------------------------------------------------------------------------------------ in tests


class Process:
    """``python words...``, begun. What it writes goes to files."""

    def __init__(
        self,
        words: Sequence[str | Path],
        env: Mapping[str, str],
        cwd: Path | None = None,
        seats: int = 0,
        input: str = "",
    ):
        self.words = [str(word) for word in words]
        self.returncode: int | None = None
        self._files = [tempfile.TemporaryFile("w+") for _ in range(3)]  # noqa: SIM115  (closed by ``close``)
        self._files[0].write(input)
        self._files[0].seek(0)
        self._status, theirs = socket.socketpair()
        request = {
            "words": self.words,
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "seats": seats,
        }
        with theirs:
            fds = [*(file.fileno() for file in self._files), theirs.fileno()]
            socket.send_fds(_server(), [json.dumps(request).encode()], fds)
        self.pid = int(self._receive(60.0))

    def _receive(self, timeout: float | None) -> bytes:
        self._status.settimeout(timeout)
        said = self._status.recv(64)
        if not said:
            raise RuntimeError(f"the server of warm processes ended while {self.words} ran")
        return said

    def poll(self) -> int | None:
        """Return the exit status, or ``None`` while the process runs."""
        if self.returncode is None:
            try:
                self.wait(0.0)
            except subprocess.TimeoutExpired:
                return None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once the process has ended. Raises ``TimeoutExpired``."""
        if self.returncode is None:
            try:
                self.returncode = int(self._receive(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(
                    self.words, timeout or 0.0, self.said(1), self.said(2)
                ) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self, stream: int) -> str:
        """Return what was written to standard output (1) or standard error (2)."""
        self._files[stream].seek(0)
        return self._files[stream].read()

    def close(self) -> None:
        for file in (*self._files, self._status):
            file.close()


def run(
    words: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    seats: int = 0,
    input: str = "",
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Return what ``python words...`` ended with and wrote. It is killed after ``timeout`` seconds, and ``TimeoutExpired`` raised."""
    process = Process(words, env, cwd, seats, input)
    try:
        status = process.wait(timeout)
        return subprocess.CompletedProcess(process.words, status, process.said(1), process.said(2))
    finally:
        process.send_signal(9)
        process.close()


def spawn(work: Callable[[int, str], None], folder: Path, processes: int = 2) -> None:
    """Call ``work(rank, folder)`` in so many processes at once, as ``torch.multiprocessing.spawn`` does.

    ``work`` is imported by its name. Raises ``AssertionError`` with what a process wrote if it failed.
    """
    code = (
        f"import sys; from {work.__module__} import {work.__name__} as work; "
        "work(int(sys.argv[1]), sys.argv[2])"
    )
    ranks = [Process(["-c", code, str(rank), folder], os.environ) for rank in range(processes)]
    try:
        for rank in ranks:
            assert rank.wait(600) == 0, rank.said(2)
    finally:
        for rank in ranks:
            rank.send_signal(9)
            rank.close()


def interpreter(folder: Path) -> Path:
    """Return a program in ``folder`` to use as ``python``: it has the server of this process run scripts and modules.

    Code given by ``-c`` gets a new interpreter, since reward workers begin that way, with pipes that a fork would not have. With the
    environment variable ``WARM_PYTHON`` set to this program, it is ``sys.executable`` in forks too.
    """
    path = folder / "python"
    new = shlex.quote(sys.executable)
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {new} "$@"\nexec {as_client()} "$@"\n')
    path.chmod(0o700)
    return path


def as_client() -> str:
    """Return the command, for a shell, that takes the words of ``python`` and has the server of this process run them."""
    words = [sys.executable, "-S", "-E", ROOT / "tests" / "warm_client.py", door()]
    return shlex.join(map(str, words))


_servers: list[tuple[socket.socket, Path]] = []


def door() -> Path:
    """Return the path of the socket at which this process's server listens. Only this user can reach it."""
    _server()
    return _servers[0][1]


def _server() -> socket.socket:
    """Return the connection to this process's server, which is started when it is first asked for."""
    if not _servers:
        path = Path(tempfile.mkdtemp(prefix="warm-")) / "door"
        entrance = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        entrance.bind(str(path))
        entrance.listen(64)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LARGEST)
        code = f"from tests.warm import begin; begin({theirs.fileno()}, {entrance.fileno()})"
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        words = [sys.executable, "-c", code]
        server = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno(), entrance.fileno()],
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        entrance.close()
        _servers.append((ours, path))
        atexit.register(lambda: (ours.close(), server.wait(300), shutil.rmtree(path.parent)))
    return _servers[0][0]


# -------------------------------------------------------------------------------------------------------------------- in the server


def begin(connection: int, entrance: int) -> None:
    """Serve, and in each fork run the program that was asked for, as the interpreter would."""
    gc.disable()
    for name in IMPORTED:
        __import__(name)
    gc.freeze()
    gc.enable()
    request = serve(socket.socket(fileno=connection), socket.socket(fileno=entrance))
    if request is not None:
        leave(execute(request["words"]))


def serve(connection: socket.socket, entrance: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and report how each fork ended. Returns in a fork its request, and ``None`` once nobody can ask any more."""
    waiting: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(entrance, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is entrance:
                    selector.register(entrance.accept()[0], selectors.EVENT_READ)
                    continue
                if not isinstance(key.fileobj, socket.socket):
                    pid, status = waiting.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    status.close()
                    continue
                data, fds, _, _ = socket.recv_fds(key.fileobj, LARGEST, 4)
                if not data:
                    if key.fileobj is connection:
                        return None
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                request = json.loads(data)
                pid = os.fork()
                if pid == 0:
                    return prepare(request, fds)
                status = socket.socket(fileno=fds.pop())
                for fd in fds:
                    os.close(fd)
                _tell(status, pid)
                watched = os.pidfd_open(pid)
                waiting[watched] = (pid, status)
                selector.register(watched, selectors.EVENT_READ)


def _tell(status: socket.socket, number: int) -> None:
    try:
        status.send(str(number).encode())
    except OSError:
        return  # the test did not wait for it


def prepare(request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
    """Make this fork the process of ``request``. Returns the request, or in a seat that of the rank that takes it."""
    for stream, fd in enumerate(fds[:3]):
        os.dup2(fd, stream)
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    os.setpgid(0, 0)  # Ray kills the process group of a worker that has died
    become(request["words"], request["env"], request["cwd"])
    return take_seats(request["seats"]) or request


def become(words: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # a new interpreter would begin with them
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in given if path not in sys.path]
    sys.executable = env.get("WARM_PYTHON", sys.executable)
    if words[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)  # ty: ignore[unresolved-attribute]
        words = words[1:]
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
    elif words[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *words[2:]], cwd
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).resolve().parent)


def execute(words: Sequence[str]) -> int:
    """Run ``words`` as ``python`` does. Returns the exit status; errors are left to the interpreter."""
    words = words[1:] if words[0] == "-u" else words
    try:
        if words[0] == "-c":
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def leave(status: int) -> NoReturn:
    """End as the interpreter does, but for freeing each object, which copies the pages that forks share and takes a second."""
    threading._shutdown()  # ty: ignore[unresolved-attribute]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def take_seats(seats: int) -> dict[str, Any] | None:
    """Fork ``seats`` processes that wait for the words of a rank, and let torch's launcher use them instead of new interpreters. Returns
    in such a process the request of its rank, and ``None`` in this one."""
    free: list[tuple[int, int]] = []
    for _ in range(seats):
        inlet, outlet = os.pipe()
        pid = os.fork()
        if pid == 0:
            for _, fd in free:
                os.close(fd)
            os.close(outlet)
            with os.fdopen(inlet, encoding="utf-8") as pipe:
                text = pipe.read()
            if not text:
                os._exit(0)  # nobody needed it
            request = json.loads(text)
            os.setsid()
            become(request["words"], request["env"], str(Path.cwd()))
            return request
        os.close(inlet)
        free.append((pid, outlet))
    if seats:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = seated(free)
    return None


def seated(free: list[tuple[int, int]]) -> type[subprocess.Popen[bytes]]:
    """Return the class whose objects are processes of ``free``, as pids and pipes, that become what is asked for."""

    class Seated(subprocess.Popen[bytes]):
        def __init__(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
            self.request = {"words": list(args[1:]), "env": dict(env)}
            super().__init__(args, env=env, **options)

        def _execute_child(self, *given: Any) -> None:
            self.pid, outlet = free.pop(0)
            self._child_created = True
            with os.fdopen(outlet, "w", encoding="utf-8") as pipe:
                json.dump(self.request, pipe)

    return Seated
