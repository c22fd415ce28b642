"""The main module of a process that serves a policy by SGLang for the run that started it.

The run writes a JSON object to its standard input: the run's process id, the key by which
``torch.multiprocessing`` lets another process open a shared tensor, and the words of the command
line. They are not on the command line itself, which every user of the machine can read.
"""

from __future__ import annotations

import json
import multiprocessing
import runpy
import sys

from lightrft.distributed.guarded.guardian import become_guardian

MODULE = "sglang.launch_server"


def main() -> None:
    """Run SGLang's own main module, below a guardian that ends it with the run."""
    given = json.loads(sys.stdin.read())
    # before a package is imported, which may start processes
    become_guardian(given["parent"])
    # SGLang's processes inherit it
    multiprocessing.current_process().authkey = bytes.fromhex(given["authkey"])
    sys.argv = [MODULE, *given["words"]]
    # in the place of this module, so that SGLang's processes import SGLang's as their main module
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
