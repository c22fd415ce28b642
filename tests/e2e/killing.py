"""``python killing.py WHERE NTH config.yaml``: an RL run that kills itself (SIGKILL) at the NTH call of WHERE, before or halfway."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def die_at(nth: int, function: Callable[..., Any], after: bool) -> Callable[..., Any]:
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def main() -> None:
    where, nth, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    from lightrft.config import RLConfig
    from lightrft.strategy import checkpoint
    from lightrft.strategy.single import SingleStrategy
    from lightrft.trainer import rl, rollout, session
    from lightrft.utils.settings import load_settings

    if where == "generation":
        rollout._settle = die_at(nth, rollout._settle, after=True)
    elif where == "update":
        SingleStrategy.step = die_at(nth, SingleStrategy.step, after=True)  # type: ignore[method-assign]
    elif where == "checkpoint files":
        SingleStrategy.save = die_at(nth, SingleStrategy.save, after=True)  # type: ignore[method-assign]
    elif where == "checkpoint manifest":
        checkpoint.CheckpointStore._seal = staticmethod(die_at(nth, checkpoint.CheckpointStore._seal, after=False))  # type: ignore[method-assign]
    elif where == "after checkpoint":
        session.Session.record = die_at(nth, session.Session.record, after=True)  # type: ignore[method-assign]
    elif where != "never":
        raise SystemExit(f"unknown place {where}")
    rl.run_rl(load_settings(RLConfig, [Path(file)]).settings)


if __name__ == "__main__":
    main()
