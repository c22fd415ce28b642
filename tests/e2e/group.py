"""``torchrun group.py plan.json``: the RL runs of a plan, one after the other, in one group of processes.

A plan is a list of ``{"config": file}``. With ``"stop": [rank, batch]`` that rank is sent SIGTERM as that batch is about to be drawn,
with ``"fail": [rank, batch]`` drawing it raises there, which ends the run on all ranks; what it ended with is written beside the
config file as ``<name>.<rank>.error``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from lightrft.config import RLConfig
from lightrft.trainer import asynchronous, rl
from lightrft.utils.ranks import joined
from lightrft.utils.settings import load_settings


@contextmanager
def disturbed(entry: dict[str, Any], rank: int) -> Iterator[None]:
    """What the plan asks to go wrong, on the rank that it names."""
    collect = asynchronous.collect
    nobody = [-1, -1]

    def collecting(roles: Any, config: Any, batch: int, *rest: Any) -> Any:
        if [rank, batch] == entry.get("stop", nobody):
            os.kill(os.getpid(), signal.SIGTERM)
        if [rank, batch] == entry.get("fail", nobody):
            roles.engine.generate = broken
        return collect(roles, config, batch, *rest)

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("from the thread")

    with patch.object(asynchronous, "collect", collecting):
        yield


def main() -> None:
    with joined(2.0) as ranks:
        for entry in json.loads(Path(sys.argv[1]).read_text()):
            file = Path(entry["config"])
            with patch.object(rl, "joined", lambda minutes: nullcontext(ranks)), disturbed(entry, ranks.rank):
                try:
                    rl.run_rl(load_settings(RLConfig, [file]).settings)
                except Exception as error:
                    if "fail" not in entry:
                        raise
                    file.with_suffix(f".{ranks.rank}.error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
