"""Which wrong changes to the numerical core do the tests see?

    python -m tests.mutation [modules ...] [--jobs 1] [--report]

Each mutant of a module runs the tests of that module in a process forked from one that has torch loaded; the first test that fails kills
it. A mutant that runs longer than ``--timeout`` is killed too: it does not end. Results are lines of ``build/mutation.jsonl``; a mutant of
a source and of tests that have not changed since is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "lightrft" / "trainer"
EVERY = ["contracts/test_registered_functions.py"]
TESTS = {
    "advantages": [
        "unit/trainer/test_advantages.py",
        "numbers/test_advantages.py",
        "numbers/test_more_advantages.py",
        "numbers/test_reward_scales.py",
        "numbers/test_distill.py",
        "unit/trainer/test_parts.py",
        "unit/trainer/test_critic.py",
    ],
    "policy_loss": [
        "unit/trainer/test_policy_loss.py",
        "numbers/test_policy_loss.py",
        "numbers/test_more_losses.py",
        "numbers/test_ratio_levels.py",
        "unit/trainer/test_parts.py",
    ],
    "aggregation": ["unit/trainer/test_aggregation.py", "numbers/test_aggregation.py", "numbers/test_objective.py"],
    "kl": ["unit/trainer/test_kl.py", "numbers/test_kl.py", "numbers/test_controllers.py", "numbers/test_kl_gradients.py"],
    "corrections": [
        "unit/trainer/test_corrections.py",
        "numbers/test_corrections.py",
        "numbers/test_objective_parts.py",
        "unit/trainer/test_parts.py",
    ],
}
"""Below ``tests/``, those first that are quick to see a mistake."""

EXAMPLES = 15
"""Of hypothesis for each property."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a text."""

    def __init__(self, name: str, code: str, file: Path) -> None:
        self.name, self.code, self.file = name, code, file

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.file)) if fullname == self.name else None

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.file)
        exec(compile(self.code, f"<mutant of {self.file.name}>", "exec"), module.__dict__)


def preload() -> None:
    """Load what is large and is not ours, once for all forks."""
    import hypothesis
    import pytest  # noqa: F401
    import torch

    for name in ("lightrft.trainer.rl", "lightrft.models.tiny", "lightrft.trainer.explain"):
        importlib.import_module(name)
    for name in [n for n in sys.modules if n.split(".")[0] in ("lightrft", "tests")]:
        if not name.startswith("tests.mutation"):
            del sys.modules[name]
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutation", max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutation")


def run_tests(files: Sequence[str], name: str, code: str | None, file: Path, quiet: bool = True) -> int:
    """In a fork: pytest's exit status with ``code`` in place of the module ``name``."""
    import pytest

    if quiet:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
    if code is not None:
        sys.meta_path.insert(0, Finder(name, code, file))
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *files]))


def fork(files: Sequence[str], name: str, code: str | None, file: Path, timeout: float, quiet: bool = True) -> tuple[str, float]:
    """``survived``, ``killed`` or ``timeout``, and seconds."""
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            status = run_tests(files, name, code, file, quiet)
        finally:
            os._exit(min(status, 255))
    while time.perf_counter() - began < timeout:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return ("survived" if status == 0 else "killed"), time.perf_counter() - began
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timeout", time.perf_counter() - began


def tests_of(module: str) -> list[str]:
    return [f"tests/{t}" for t in [*TESTS[module], *EVERY] if (ROOT / "tests" / t).exists()]


def fingerprint(module: str) -> str:
    """Of the module and its tests."""
    texts = [(TRAINER / f"{module}.py").read_bytes()] + [(ROOT / t).read_bytes() for t in tests_of(module)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def key_of(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.code.encode()).hexdigest()[:12]


def lines_of(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["module"], row["mutant"]): row for row in map(json.loads, lines)}


def run_module(module: str, args: argparse.Namespace) -> None:
    """Every mutant of ``module`` that has no result yet."""
    file, name, tests = TRAINER / f"{module}.py", f"lightrft.trainer.{module}", tests_of(module)
    print_ = fingerprint(module)
    outcome, seconds = fork(tests, name, None, file, 600, quiet=False)
    if outcome != "survived":
        raise SystemExit(f"{module}: the tests fail without any change")
    print(f"{module}: {seconds:.0f} s for the tests as they are", flush=True)
    there = lines_of(args.results)
    todo = [m for i, m in enumerate(mutants(file.read_text(encoding="utf-8"))) if i % args.parts == args.part]
    for mutant in todo:
        old = there.get((module, key_of(mutant)))
        if old is not None and (old["outcome"] != "survived" or old["print"] == print_):
            continue
        outcome, seconds = fork(tests, name, mutant.code, file, args.timeout)
        row = {"module": module, "mutant": key_of(mutant), "print": print_, "line": mutant.line, "text": mutant.text}
        with args.results.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "outcome": outcome, "seconds": round(seconds, 1)}) + "\n")
        if outcome == "survived":
            print(f"{module}:{mutant.line} survived: {mutant.text}", flush=True)


def summary(modules: Sequence[str], file: Path) -> Iterator[str]:
    """A markdown table, then the survivors."""
    there = lines_of(file)
    yield "| module | mutants | killed | of these by timeout | survived | killed, share |"
    yield "|---|---|---|---|---|---|"
    survivors, total, killed = [], 0, 0
    for module in modules:
        source = (TRAINER / f"{module}.py").read_text(encoding="utf-8")
        rows = [there.get((module, key_of(m))) for m in mutants(source)]
        known = [row for row in rows if row is not None]
        alive = [row for row in known if row["outcome"] == "survived"]
        slow = sum(row["outcome"] == "timeout" for row in known)
        unknown = f" ({len(rows) - len(known)} not run)" if len(known) < len(rows) else ""
        dead = len(known) - len(alive)
        yield f"| {module} | {len(rows)}{unknown} | {dead} | {slow} | {len(alive)} | {dead / max(1, len(known)):.1%} |"
        survivors += [f"* `{module}.py`, line {row['line']}: `{row['text']}`" for row in alive]
        total, killed = total + len(known), killed + dead
    yield f"| all | {total} | {killed} | | {total - killed} | {killed / max(1, total):.1%} |"
    yield ""
    yield from survivors


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="module", help=", ".join(TESTS))
    parser.add_argument("--parts", type=int, default=1, help="cut the mutants into this many parts and run one, --part")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a mutant")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutation.jsonl")
    parser.add_argument("--report", action="store_true", help="only print the table and the survivors")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if not args.report:
        preload()
        for module in args.modules:
            run_module(module, args)
    print("\n".join(summary(args.modules, args.results)))


if __name__ == "__main__":
    main()
