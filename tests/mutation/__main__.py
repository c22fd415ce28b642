"""Which wrong changes to the numerical core do the tests see?

    python -m tests.mutation [modules ...] [--report]

The tests of a module are collected and run once, to learn which of them enter which function and how long each takes. Then each mutant
gets a process forked from that one, its code put into the functions of the module in place, and the tests that enter the changed
function, the quick ones first, until one fails. A mutant that takes ``--seconds`` of CPU is killed too: it does not end. Results are lines
of ``build/mutation.jsonl``; a mutant of a source and of tests that have not changed since is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = ROOT / "lightrft" / "algorithms"
EVERY = ["contracts/test_registered_functions.py"]
PREFERENCE = [
    f"preference.{name}"
    for name in (
        *("registry", "inputs", "log_ratio_losses", "reference_free_losses", "extended_losses"),
        *("labelled_losses", "ranked_losses", "objective", "requirements"),
        "compatibility",
    )
]
REWARD_MODEL = [
    f"reward_model.{name}"
    for name in (
        *("registry", "inputs", "pair_losses", "tie_losses", "rating_losses", "objective"),
        *("requirements", "compatibility", "step_scores", "benchmarks", "quality"),
    )
]
OF_REWARD_MODEL = (
    *("inputs", "by_hand", "objective", "reward_requirements", "compatibility"),
    *("step_scores", "benchmarks", "declared_needs", "quality"),
)
OWN = (
    *("by_hand", "identities", "declared_reads", "modifiers", "objective"),
    *("preference_requirements", "compatibility", "inputs"),
)
TESTS = {
    "advantages": [
        "unit/algorithms/test_declared.py",
        "unit/algorithms/test_advantages.py",
        "numbers/test_advantages.py",
        "numbers/test_more_advantages.py",
        "numbers/test_prime.py",
        "numbers/test_reward_scales.py",
        "numbers/test_distill.py",
        "numbers/test_peers.py",
        "unit/algorithms/test_requirements.py",
        "unit/learner/test_critic.py",
    ],
    "policy_losses": [
        "unit/algorithms/test_declared.py",
        "unit/algorithms/test_policy_losses.py",
        "numbers/test_policy_loss.py",
        "numbers/test_more_losses.py",
        "numbers/test_ratio_levels.py",
        "numbers/test_extreme_ratios.py",
        "numbers/test_peers.py",
        "unit/algorithms/test_requirements.py",
    ],
    "aggregation": [
        "unit/algorithms/test_aggregation.py",
        "numbers/test_aggregation.py",
        "numbers/test_objective.py",
    ],
    "kl": [
        "unit/algorithms/test_kl.py",
        "numbers/test_kl.py",
        "numbers/test_controllers.py",
        "numbers/test_extreme_ratios.py",
        "unit/learner/test_controllers.py",
        "numbers/test_objective_parts.py",
    ],
    "importance_sampling": [
        "unit/algorithms/test_declared.py",
        "unit/algorithms/test_importance_sampling.py",
        "numbers/test_corrections.py",
        "numbers/test_extreme_ratios.py",
        "numbers/test_objective_parts.py",
        "numbers/test_peers.py",
        "unit/algorithms/test_requirements.py",
    ],
    **{key: [f"unit/algorithms/preference/test_{name}.py" for name in OWN] for key in PREFERENCE},
    **{
        key: [
            *(f"unit/algorithms/reward_model/test_{name}.py" for name in OF_REWARD_MODEL),
            "numbers/test_reward_losses.py",
        ]
        for key in REWARD_MODEL
    },
    **{
        f"process_reward.{name}": [
            "numbers/test_step_losses.py",
            "unit/algorithms/process_reward/test_step_quality.py",
        ]
        for name in ("losses", "objective", "quality")
    },
    "constrained.lagrangian": ["numbers/test_lagrangian.py"],
    "reward_terms.combination": ["unit/algorithms/reward_terms/test_combination.py"],
    "reward_terms.text_steps": ["unit/algorithms/reward_terms/test_text_steps.py"],
}
"""Below ``tests/``."""


def source_of(module: str) -> Path:
    return ALGORITHMS / f"{module.replace('.', '/')}.py"


def tests_of(module: str) -> list[str]:
    return [f"tests/{t}" for t in [*TESTS[module], *EVERY]]


def fingerprint(module: str) -> str:
    """Of the module and its tests."""
    texts = [source_of(module).read_bytes()] + [(ROOT / t).read_bytes() for t in tests_of(module)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def key_of(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.code.encode()).hexdigest()[:12]


def lines_of(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["module"], row["mutant"]): row for row in map(json.loads, lines)}


def left(module: str, file: Path) -> list[Mutant]:
    """The mutants without a result. One that survived tests which have changed since has none."""
    there, now = lines_of(file), fingerprint(module)
    found = []
    for mutant in mutants(source_of(module).read_text(encoding="utf-8")):
        row = there.get((module, key_of(mutant)))
        if row is None or (row["outcome"] == "survived" and row["tests"] != now):
            found.append(mutant)
    return found


def run_module(module: str, args: argparse.Namespace) -> None:
    """Every mutant of ``module`` that has no result yet, in a process of its own: modules that are imported stay imported."""
    todo = left(module, args.results)
    if not todo:
        return
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"{module}: the tests fail without any change")
        return
    import pytest

    from tests.mutation.runner import Runner

    def write(mutant: Mutant, outcome: str, seconds: float) -> None:
        row = {
            "module": module,
            "mutant": key_of(mutant),
            "tests": now,
            "line": mutant.line,
            "text": mutant.text,
        }
        with args.results.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "outcome": outcome, "seconds": round(seconds, 2)}) + "\n")
        if outcome == "survived":
            print(f"{module}.py:{mutant.line} survived: {mutant.text}", flush=True)

    now = fingerprint(module)
    runner = Runner(f"lightrft.algorithms.{module}", source_of(module), todo, write, args.seconds)
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *tests_of(module)],
        plugins=[runner],
    )
    sys.stdout.flush()
    os._exit(int(status))


def summary(modules: Sequence[str], file: Path) -> Iterator[str]:
    """A markdown table, then the survivors."""
    there = lines_of(file)
    yield "| module | mutants | killed | of these without an end | survived | killed, share |"
    yield "|---|---|---|---|---|---|"
    survivors, total, killed = [], 0, 0
    for module in modules:
        source = source_of(module).read_text(encoding="utf-8")
        rows = [there.get((module, key_of(m))) for m in mutants(source)]
        known = [row for row in rows if row is not None]
        alive = [row for row in known if row["outcome"] == "survived"]
        slow = sum(row["outcome"] == "endless" for row in known)
        unknown = f" ({len(rows) - len(known)} not run)" if len(known) < len(rows) else ""
        dead = len(known) - len(alive)
        yield (
            f"| {module} | {len(rows)}{unknown} | {dead} | {slow} | {len(alive)} | "
            f"{dead / max(1, len(known)):.1%} |"
        )
        survivors += [f"* `{module}.py`, line {row['line']}: `{row['text']}`" for row in alive]
        total, killed = total + len(known), killed + dead
    yield f"| all | {total} | {killed} | | {total - killed} | {killed / max(1, total):.1%} |"
    yield ""
    yield from survivors


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "modules", nargs="*", default=list(TESTS), metavar="module", help=", ".join(TESTS)
    )
    parser.add_argument("--seconds", type=int, default=60, help="CPU time that a mutant may take")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutation.jsonl")
    parser.add_argument(
        "--report", action="store_true", help="only print the table and the survivors"
    )
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for module in args.modules:
            run_module(module, args)
    print("\n".join(summary(args.modules, args.results)))


if __name__ == "__main__":
    main()
