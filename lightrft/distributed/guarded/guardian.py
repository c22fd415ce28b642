"""Guard a worker: end every process that it started, also after the run was killed.

The guardian is a process between the run and a worker. Children of a worker may leave its session,
and their parents may exit. The guardian is a child subreaper (``man 2 prctl``), so the kernel makes
it the parent of such orphans. They stay its descendants, and it can find and kill them.
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

from lightrft.utils.stop_signal import TERMINATING

SUPPORTED = sys.platform == "linux"
LOOK_SECONDS = 0.5
MOST = 1000
"""Number of processes below one worker, beyond which it counts as a fork bomb."""
BOMB_STATUS = 119
"""Exit status of a guardian that found more than ``MOST`` processes."""
PATIENCE = 10.0
"""Seconds after which processes that survive a SIGKILL, e.g. in a system call, are ignored."""
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def become_guardian(parent: int, fd: int | None = None) -> None:
    """Fork and return in the child, which is the worker; the caller becomes its guardian.

    The guardian never returns and exits as the worker did. It also ends everything at SIGTERM and
    when process ``parent`` ends.

    On systems other than Linux this function only returns.

    Args:
        parent: Process id of the run.
        fd: The worker's socket, which the guardian closes. ``None`` for none.
    """
    if not SUPPORTED:
        if os.getppid() != parent:
            os._exit(0)
        return
    # A terminal that closes, or SLURM before its time limit, signals every process. The run then
    # finishes its step, and needs its workers until then.
    for number in set(TERMINATING) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    _prctl(_CHILD_SUBREAPER, 1)
    _prctl(_PDEATHSIG, signal.SIGTERM)
    # Blocked before the fork, so that the guardian misses no signal.
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    guardian = os.getpid()
    worker = os.fork()
    if worker:
        if fd is not None:
            os.close(fd)
        _guard(parent, worker, signals)
    # The worker. It inherits neither the guardian's parent-death signal nor its pending signals.
    os.setsid()  # a worker that signals its own process group must not reach the guardian
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    # The guardian may have ended before the worker asked to be killed with it.
    if os.getppid() != guardian:
        os._exit(0)


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of ``pid``, each after its parent."""
    todo = [pid]
    while todo:
        children = _children(todo.pop())
        todo += children
        yield from children


def has_more_descendants(pid: int, count: int) -> bool:
    """Return whether ``pid`` has more than ``count`` descendants, without visiting all of them."""
    return next(islice(descendants(pid), count, None), None) is not None


def end_descendants(pid: int, patience: float = PATIENCE) -> None:
    """Kill all descendants of ``pid`` until none is left, for at most ``patience`` seconds."""
    ends = time.monotonic() + patience
    while True:
        # Zombies stay in /proc until they are reaped, and would count as left.
        _reap(0)
        left = False
        for child in descendants(pid):
            left = True
            _kill(child, root=pid)
        if not left or time.monotonic() > ends:
            return
        time.sleep(0.001)


def _kill(child: int, root: int) -> None:
    """Kill ``child`` and its process group, but not the group of ``root`` or of this process."""
    with suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(child)
        if group not in (os.getpgid(0), os.getpgid(root)):
            # The whole group at once, so that forking cannot outrun it.
            os.killpg(group, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)


def _guard(parent: int, worker: int, signals: set[signal.Signals]) -> None:
    """Wait for an event and end everything. Never returns.

    Args:
        parent: Process id of the run.
        worker: Process id of the worker.
        signals: Blocked signals that wake the guardian.
    """
    # The guardian exits with the worker's signal, without a second core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = os.getpid()
    while True:
        # With a timeout: no signal reports a fork bomb, or a run that ended before prctl.
        got = signal.sigtimedwait(signals, LOOK_SECONDS)
        status = _reap(worker)
        bomb = has_more_descendants(own, MOST)
        told_to_end = got is not None and got.si_signo == signal.SIGTERM
        orphaned = os.getppid() != parent
        if status is not None or bomb or orphaned or told_to_end:
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
    # Die of the worker's signal: the scorer reads the cause of a failed call from the status.
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
    # Kernels without CONFIG_PROC_CHILDREN have no such file, so look at the parent of every process.
    if found or (Path("/proc/thread-self/children")).exists():
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent_of(int(entry.name)) == pid:
            found.append(int(entry.name))
    return found


def _parent_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0
    # The name in parentheses may contain spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
