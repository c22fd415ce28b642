"""The command line as a user meets it: in this process where that will do, in one of its own where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrft.cli.main import main
from tests import warm

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left: its exit status and what it wrote."""

    status: int
    out: str
    err: str


def command(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Outcome:
    """``lightrft words...`` in this process. An exception that ``main`` lets through fails the test."""
    capsys.readouterr()
    status = main([str(w) for w in words])
    captured = capsys.readouterr()
    return Outcome(status, captured.out, captured.err)


def process(
    *words: str | Path, cwd: Path, stdin: str = "", prelude: str = "", fresh: bool = False
) -> Outcome:
    """Run ``lightrft words...`` as a process of its own.

    Args:
        words: the command line.
        cwd: its working directory.
        stdin: what it reads from standard input.
        prelude: Python that runs first in it.
        fresh: start a new interpreter, for tests of imports, start-up time and memory. Otherwise fork one that has torch imported.
    """
    start = f"import sys\n{prelude}\nfrom lightrft.cli.main import main\nsys.exit(main())"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    program = ["-c", start, *(str(w) for w in words)]
    if not fresh:
        done = warm.run(program, env=env, cwd=cwd, input=stdin)
    else:
        command = [sys.executable, *program]
        done = subprocess.run(
            command, env=env, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=1000
        )
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_refused(outcome: Outcome, *said: str) -> None:
    """The command ended with status 2 and a message, without traceback, in which every one of ``said`` occurs."""
    assert outcome.status == 2, outcome
    assert "Traceback" not in outcome.err, outcome.err
    lines = outcome.err.splitlines()  # warnings may come before
    assert any(line.startswith(("lightrft ", "lightrft:")) for line in lines), outcome.err
    missing = [s for s in said if s not in outcome.err]
    assert not missing, f"{missing} not in: {outcome.err}"
