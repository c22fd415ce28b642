"""``python killing.py config.yaml WHERE NTH [RANK] [HOW] [VERB]``: a run with which something happens.

It happens at the NTH call of WHERE, on one rank. VERB may have two words, such as ``grm rl``.

HOW is ``kill`` (SIGKILL), ``stop`` (SIGSTOP, for ever), ``stop:SECONDS``, ``terminate`` (SIGTERM), ``full`` (the disk) or ``unanswered``
(the error of an engine whose server is gone). When it happened is written to ``happened`` beside the config.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def happen(how: str, file: Path) -> None:
    """What happens to this process."""
    file.with_name("happened").write_text(str(time.time()))
    kind, _, seconds = how.partition(":")
    if kind == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "unanswered":
        from lightrft.utils.errors import RESUMES, ResourceError

        raise ResourceError(f"engine.url = 'x': no answer. {RESUMES}")
    if seconds:
        subprocess.Popen(
            ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True
        )
    os.kill(
        os.getpid(),
        {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[kind],
    )


def at_call(
    nth: int, function: Callable[..., Any], after: bool, action: Callable[[], None]
) -> Callable[..., Any]:
    """``function`` with ``action`` before its ``nth`` call, or ``after`` it."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == nth
        if now and not after:
            action()
        result = function(*args, **kwargs)
        if now and after:
            action()
        return result

    return wrapped


def main() -> int:
    rest = ("0", "kill", "rl")[len(sys.argv) - 4 :]
    file, where, nth, rank, how, verb = [*sys.argv[1:], *rest]
    from lightrft.cli.main import main as lightrft
    from lightrft.rollout import collect, generation
    from lightrft.strategy import single
    from lightrft.strategy.checkpoint import CheckpointStore
    from lightrft.trainer.pipelines import generate
    from lightrft.trainer.pipelines.journal import Journal
    from lightrft.trainer.run_session import RunSession

    places: dict[str, tuple[Any, str, bool]] = {
        "generation": (collect, "_admit_group", True),
        "an answer": (generation._GroupScorer, "take", False),
        "backward": (single.SingleStrategy, "backward", True),
        "update": (single.SingleStrategy, "step", True),
        "checkpoint files": (single.SingleStrategy, "save", True),
        "checkpoint writing": (single, "save_file", False),
        "checkpoint manifest": (CheckpointStore, "_seal", False),
        "checkpoint publishing": (CheckpointStore, "_publish", False),
        "checkpoint published": (CheckpointStore, "_publish", True),
        "after checkpoint": (RunSession, "record", True),
        "a group of responses": (Journal, "add", True),
        "rows written": (generate, "write_output", True),
    }
    if where != "never" and rank == os.environ.get("RANK", "0"):
        owner, name, after = places[where]
        wrapped = at_call(int(nth), getattr(owner, name), after, lambda: happen(how, Path(file)))
        setattr(owner, name, staticmethod(wrapped) if owner is CheckpointStore else wrapped)
    return lightrft([*verb.split(), file])


if __name__ == "__main__":
    sys.exit(main())
