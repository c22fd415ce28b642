"""A run of several processes: torchrun starts them, each with the same command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lightrft.config import LaunchConfig


def started(verb: str, arguments: Sequence[str], config: LaunchConfig) -> int | None:
    """The exit status of the run, when it takes several processes and this is none of them; else ``None``."""
    if config.processes == 1 or "WORLD_SIZE" in os.environ:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.processes}"]
    return subprocess.run([*torchrun, "-m", "lightrft", verb, *arguments], check=False).returncode
