"""Several real processes give the numbers of one, whatever they shard, and take up each other's checkpoints: ``benchmarks/parity.py`` in
part, and the comparison itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.parity import (
    BASE,
    CASES,
    LIMIT,
    WAYS,
    checkpoints,
    compared,
    make,
    relative,
    run_way,
    tree_of,
)
from tests import warm
from tests.e2e.several import ENVIRONMENT, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data, and every case on one process."""
    folder = tmp_path_factory.mktemp("parity")
    make(folder)
    run_way("single", list(CASES), folder, warm.run)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if name != "fsdp2x2" else [])
        for name, way in WAYS.items()
        if way.processes > 1 and way.needs == "torch"
    ],
)
def test_every_case_gives_the_numbers_of_one_process(folder, way, subtests):
    """Groups that the ranks do not divide, ranks without rows and without pictures; and run again, bit for bit the same."""
    run_way(way, list(CASES), folder, warm.run)
    for case in [case for case in CASES if case not in WAYS[way].without]:
        with subtests.test(case):
            gap, where = compared(folder / way / case, folder / "single" / case).worst
            assert gap <= LIMIT, where


@pytest.mark.slow
def test_a_command_of_its_own_gives_bit_for_bit_what_a_run_among_others_in_the_same_processes_does(
    folder, tmp_path
):
    tree = tree_of("ppo", "fsdp2x2", folder)
    run_way("fsdp2x2", ["grpo", "ppo"], folder, warm.run)
    alone = train({**tree, "run": {"seed": BASE["run"]["seed"]}}, tmp_path, "alone", 2)
    assert compared(alone, folder / "fsdp2x2" / "ppo").worst[0] == 0


@pytest.mark.slow
def test_checkpoints_of_one_process_and_of_two_are_taken_up_by_each_other(tmp_path, subtests):
    make(tmp_path)
    found = checkpoints(["single", "fsdp2x2"], tmp_path, start=warm.run)
    for saved, taken_up, gaps in found:
        with subtests.test(f"{saved} by {taken_up}"):
            gap, where = gaps.worst
            assert gap <= LIMIT, where
            assert ("export" in gaps.largest) == (saved == taken_up)


def test_differences_are_relative_to_what_is_expected_or_to_the_floor():
    assert relative(1.1, 1.0) == pytest.approx(0.1)
    assert relative(1e-3, 0.0) == pytest.approx(0.05)
    assert relative(math.nan, 1.0) == math.inf
    assert relative(math.nan, math.nan) == 0


def run_folder(path: Path, rows: list[dict[str, Any]], weight: torch.Tensor) -> Path:
    (path / "checkpoints" / "step_000001" / "policy").mkdir(parents=True)
    save_file(
        {"weights/a": weight}, path / "checkpoints" / "step_000001" / "policy" / "state.safetensors"
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_differs_between_two_runs_is_found_and_said_where(tmp_path):
    rows = [
        {
            "step": 1,
            "policy/loss": 1.0,
            "time/step": 3.0,
            "phase": "rl",
            "policy/kl_per_answer": 0.0,
        }
    ]
    one = run_folder(tmp_path / "one", rows, torch.ones(2))
    for name, other, weight, where in (
        ("same", [{**rows[0], "time/step": 4.0}], torch.ones(2), None),
        ("loss", [{**rows[0], "policy/loss": 1.1}], torch.ones(2), ("loss", "step 1 policy/loss")),
        (
            "apart",
            [{**rows[0], "policy/kl_per_answer": 2e-6}],
            torch.ones(2),
            ("other metrics", "step 1 policy/kl_per_answer"),
        ),
        (
            "lacking",
            [{"step": 1, "policy/loss": 1.0, "policy/kl_per_answer": 0.0}],
            torch.ones(2),
            ("other metrics", "step 1 phase"),
        ),
        ("cancelling", [{**rows[0], "policy/kl_per_answer": 1e-6}], torch.ones(2), None),
        ("shorter", [], torch.ones(2), ("other metrics", "step steps")),
        ("weights", rows, torch.tensor([1.0, 1.5]), ("weights", "policy/weights/a")),
    ):
        gaps = compared(run_folder(tmp_path / name, other, weight), one)
        if where is None:
            assert gaps.worst[0] <= LIMIT and (gaps.worst[0] == 0) == (name == "same")
        else:
            gap, found = gaps.largest[where[0]]
            assert gap > LIMIT and found == where[1]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_script_prints_a_table_writes_it_down_and_fails_where_a_cell_is_above_the_limit(
    tmp_path,
):
    script = Path(__file__).parents[2] / "benchmarks" / "parity.py"
    kept = ["--folder", str(tmp_path / "kept")]  # so that the second time nothing is run
    words = [
        sys.executable,
        str(script),
        "--ways",
        "fsdp2x2",
        "--cases",
        "sft",
        "--out",
        str(tmp_path),
        *kept,
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=1000, check=False, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("parity-*.md")
    assert "| fsdp2x2 |" in done.stdout and "| fsdp2x2 |" in written.read_text()
    prelude = (
        f"import sys; import benchmarks.parity as p; p.LIMIT = -1.0; sys.argv = {words[1:]!r}; "
        "sys.exit(p.main())"
    )
    above = subprocess.run(
        [sys.executable, "-c", prelude],
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
        env=ENVIRONMENT,
    )
    assert above.returncode == 1, above.stdout + above.stderr
