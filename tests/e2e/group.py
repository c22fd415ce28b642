"""``torchrun group.py plan.json``: the RL runs of a plan, one after the other, in one group of processes.

A plan is a list of ``{"config": file}`` with what is to happen to the engine that draws beside training, where ``[rank, batch]`` is a
call of it: ``"stop"`` sends that rank SIGTERM and draws once the main thread has heard it, ``"fail"`` raises the error that comes third
in its list, which ends the run on all ranks (what each ended with is written beside the config file as ``<name>.<rank>.error``), and
``"slow"`` draws nothing until the other rank has begun the batch after that. With ``"of_all"`` the engine of the first rank stands for
all.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightrft.config.base import load_settings
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import init_process_group
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ResourceError, RewardError
from lightrft.workers import local


def disturbed(engine: Any, entry: dict[str, Any], rank: int) -> Any:
    """``engine``, to which happens what the plan asks for, on the rank that it names."""
    generate, calls = engine.generate, itertools.count()
    engine.shared_by_all_ranks = "of_all" in entry
    heard = threading.Event()
    handle: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *at: (handle(*at), heard.set()))
    marks = Path(entry["config"]).parent

    def generating(*arguments: Any) -> Any:
        at = [rank, next(calls)]
        (marks / f"began-{at[1]}-{rank}").touch()
        if at == entry.get("stop"):
            os.kill(os.getpid(), signal.SIGTERM)
            # On a busy machine all would be drawn before the main thread came to look.
            assert heard.wait(300)
        if at == entry.get("fail", [])[:2]:
            known = (RewardError, ResourceError, ZeroDivisionError)
            raise {kind.__name__: kind for kind in known}[entry["fail"][2]]("broken")
        if at == entry.get("slow"):
            deadline = time.monotonic() + 300
            while not (marks / f"began-{at[1] + 1}-{1 - rank}").exists():
                assert time.monotonic() < deadline, "the other rank waits"
                time.sleep(0.01)
        return generate(*arguments)

    engine.generate = generating
    return engine


def main() -> None:
    local_async_engine = local.local_async_engine
    with init_process_group(10.0) as ranks:
        for entry in json.loads(Path(sys.argv[1]).read_text()):
            file = Path(entry["config"])

            def ahead(config: RLConfig, *given: Any, entry: dict[str, Any] = entry) -> Any:
                engine = local_async_engine(config, *given)
                return None if engine is None else disturbed(engine, entry, ranks.rank)

            with patch.object(local, "local_async_engine", ahead):
                try:
                    run_rl(load_settings(RLConfig, [file]).settings)
                except Exception as error:
                    if "fail" not in entry:
                        raise
                    file.with_suffix(f".{ranks.rank}.error").write_text(
                        f"{type(error).__name__}: {error}"
                    )


if __name__ == "__main__":
    main()
