"""The process between a run and a reward worker. It ends every process that the worker started, also after the run was killed.

A worker's children may leave its session, and their parents may end. The kernel gives such orphans to the guardian, which is a
child subreaper (``man 2 prctl``). So all of them stay its descendants, and it can find and kill them.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

SUPPORTED = sys.platform == "linux"
LOOK_SECONDS = 0.5
MOST = 1000
"""Processes below one worker, beyond which it is taken for a fork bomb."""
BOMB_STATUS = 119
"""Exit status of a guardian that found more than ``MOST``."""
PATIENCE = 10.0
"""Seconds after which processes that a SIGKILL does not end, such as those in a system call, are left alone."""
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def become_guardian(parent: int, fd: int) -> None:
    """Fork. Return in the child, which is the worker; the calling process guards it and never returns.

    The guardian exits as the worker did. It also ends everything at SIGTERM and when process ``parent`` ends.

    On systems other than Linux it only returns.

    Args:
        parent: process id of the run.
        fd: the worker's socket, which the guardian closes.
    """
    if not SUPPORTED:
        if os.getppid() != parent:
            os._exit(0)
        return
    _prctl(_CHILD_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGTERM)
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    guardian = os.getpid()
    worker = os.fork()
    if worker:
        os.close(fd)
        _guard(parent, worker, signals)
    os.setsid()  # a worker that signals its own process group must not reach the guardian
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(0)


def descendants(pid: int) -> Iterator[int]:
    """Yield the children of ``pid``, theirs, and so on, each after its parent."""
    todo = [pid]
    while todo:
        children = _children(todo.pop())
        todo += children
        yield from children


def has_more_descendants(pid: int, count: int) -> bool:
    """Return whether ``pid`` has more than ``count`` descendants, without looking at all of them."""
    return next(islice(descendants(pid), count, None), None) is not None


def end_descendants(pid: int, patience: float = PATIENCE) -> None:
    """Kill all descendants of ``pid`` until none is left, for at most ``patience`` seconds."""
    ends = time.monotonic() + patience
    own = os.getpgid(0)
    while True:
        _reap(0)
        left = False
        for child in descendants(pid):
            left = True
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(child)
                if group not in (own, os.getpgid(pid)):
                    os.killpg(group, signal.SIGKILL)  # at one stroke: a group that forks cannot outrun it
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not left or time.monotonic() > ends:
            return
        time.sleep(0.001)


def _guard(parent: int, worker: int, signals: set[signal.Signals]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a worker's end is repeated here, without a second core file
    own = os.getpid()
    while True:
        got = signal.sigtimedwait(signals, LOOK_SECONDS)
        status = _reap(worker)
        bomb = has_more_descendants(own, MOST)
        if status is not None or bomb or os.getppid() != parent or (got is not None and got.si_signo == signal.SIGTERM):
            end_descendants(own)
            _leave(BOMB_STATUS if bomb else status or 0)


def _reap(worker: int) -> int | None:
    """Collect children that have ended. Return the status of ``worker`` if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == worker:
                found = os.waitstatus_to_exitcode(status)
    return found


def _leave(status: int) -> None:
    if status < 0:
        with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP have no handler to take away
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(max(status, 0))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    tasks = Path(f"/proc/{pid}/task")
    with suppress(OSError):  # it has ended
        for task in tasks.iterdir():
            with suppress(FileNotFoundError):
                found += map(int, (task / "children").read_text().split())
    if found or (Path("/proc/thread-self/children")).exists():
        return found
    return [child for child in _all_processes() if _parent_of(child) == pid]


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
