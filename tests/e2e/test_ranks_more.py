"""What reaches beyond a step, with several processes: a reference that follows the policy, a teacher's whole vocabulary, answers drawn
beside training. Many runs share one group of processes, since most of a run's time is its start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightrft.config import RLConfig
from lightrft.models.tiny import tiny_model, tiny_tokenizer
from lightrft.strategy.checkpoint import load_state
from lightrft.trainer.rl import run_rl
from lightrft.utils.settings import deep_merge, load_settings
from tests.e2e.test_ranks import DEEPSPEED, check_equal, config_file

ROOT = Path(__file__).parents[2]
GROUP = Path(__file__).with_name("group.py")

FOLLOWS: dict[str, dict[str, Any]] = {
    "copies": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.1, "refresh_every": 2}}},
    "averages": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.1, "refresh_every": 1, "refresh_decay": 0.5}}},
}
DISTILS: dict[str, dict[str, Any]] = {
    "distils": {"algorithm": {"preset": "opd", "distill": {"kind": "jsd"}}},
}
DRAWS: dict[str, dict[str, Any]] = {
    "refills": {
        "rollout": {"staleness": 1, "max_rounds": 3},
        "algorithm": {"filters": ["zero_variance"], "corrections": ["tis"]},
        "train": {"mini_batches": 2},
    },
    "further": {"rollout": {"staleness": 2}, "algorithm": {"proximal": "behavior"}},
    "alone": {"rollout": {"staleness": 2, "max_rounds": 1}, "algorithm": {"proximal": "behavior"}},
    "adapters": {"rollout": {"staleness": 1}, "model": {"lora": {"rank": 4}}},
}


@pytest.fixture
def tree(rl_tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Five groups of three, which do not divide by two or three ranks, in micro-batches of a few rows; held-out answers too; a
    teacher; every checkpoint kept."""
    tokenizer = tiny_tokenizer()
    teacher = tiny_model("qwen2", seed=7, hidden_size=48, intermediate_size=64, vocab_size=len(tokenizer))
    teacher.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    more = {
        "rollout": {"prompts": 5, "samples": 3},
        "train": {"micro_batch_tokens": 60, "steps": 5},
        "eval": {"data": {"sources": rl_tree["data"]["sources"]}, "every": 2, "sampling": {"max_new_tokens": 4}},
        "checkpoint": {"every": 1, "keep": 10},
        "optimizer": {"lr": 1e-3},
    }
    return deep_merge(rl_tree, more)


def with_cell(tree: dict[str, Any], cell: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``tree`` of a cell, with the teacher that it may need."""
    teacher = {"teacher": {"path": str(folder / "teacher")}} if "distill" in cell.get("algorithm", {}) else {}
    return deep_merge(tree, {**cell, **teacher})


def alone(tree: dict[str, Any], folder: Path, name: str) -> Path:
    """A run of this process; its folder."""
    run_rl(load_settings(RLConfig, [config_file(tree, folder, name)]).settings)
    return folder / name


def in_group(processes: int, plan: list[dict[str, Any]], folder: Path) -> None:
    """The runs of ``plan``, whose entries name their config by ``config``, in one group of processes."""
    file = folder / "plan.json"
    file.write_text(json.dumps([{**entry, "config": str(entry["config"])} for entry in plan]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, str(GROUP), str(file)], env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_cells(cells: Mapping[str, Mapping[str, Any]], tree: dict[str, Any], processes: int, folder: Path) -> None:
    """Each of ``cells`` gives in as many processes what it gives in one."""
    trees = {name: with_cell(tree, cell, folder) for name, cell in cells.items()}
    in_group(processes, [{"config": config_file(t, folder, f"{name}-{processes}")} for name, t in trees.items()], folder)
    for name, t in trees.items():
        one = alone({**t, "strategy": {}}, folder, f"{name}-alone")
        check_equal(folder / f"{name}-{processes}", one)


def cut(run: Path, name: str, step: int) -> None:
    """A copy of ``run`` called ``name`` that was killed after its checkpoint of ``step``."""
    shutil.copytree(run, run.with_name(name))
    for checkpoint in (run.with_name(name) / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_what_reaches_beyond_a_step_has_the_numbers_of_one_process(tree, tmp_path, processes):
    check_cells({**FOLLOWS, **DISTILS, **DRAWS}, tree, processes, tmp_path)


@pytest.mark.slow
def test_runs_with_a_moving_reference_or_batches_that_wait_go_on_with_another_number_of_processes(tree, tmp_path):
    names = {"averages": FOLLOWS["averages"], "further": DRAWS["further"]}
    for name, cell in names.items():
        cut(alone(with_cell(tree, cell, tmp_path), tmp_path, name), f"{name}-moved", 2)
    plan = [{"config": config_file(with_cell(tree, cell, tmp_path), tmp_path, f"{name}-moved")} for name, cell in names.items()]
    in_group(3, plan, tmp_path)
    for name in names:
        check_equal(tmp_path / f"{name}-moved", tmp_path / name)
        cut(tmp_path / f"{name}-moved", f"{name}-back", 3)
        check_equal(alone(with_cell(tree, names[name], tmp_path), tmp_path, f"{name}-back"), tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["further", "alone"])
def test_one_rank_that_is_asked_to_stop_or_fails_while_it_draws_stops_all_and_the_run_goes_on(tree, tmp_path, way):
    tree = with_cell(tree, DRAWS[way], tmp_path)
    whole = alone(tree, tmp_path, "whole")
    stopped, failed, unscored = ({"config": config_file(tree, tmp_path, name)} for name in ("stopped", "failed", "unscored"))
    failing = [failed | {"fail": [1, 3, "ZeroDivisionError"]}, failed, unscored | {"fail": [1, 3, "RewardError"]}, unscored]
    in_group(2, [stopped | {"stop": [1, 3]}, *failing], tmp_path)
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert not summary["finished"] and summary["steps"] < 4
    state = load_state(tmp_path / "stopped" / "checkpoints" / f"step_{summary['steps']:06d}" / "trainer")
    assert min(state["drawn"]["weights"]) == 1
    check_equal(alone(tree, tmp_path, "stopped"), whole)
    assert (tmp_path / "failed.1.error").read_text() == "ZeroDivisionError: broken"
    assert (tmp_path / "failed.0.error").read_text() == "RankError: rank 1: ZeroDivisionError: broken"
    said = [(tmp_path / f"unscored.{rank}.error").read_text() for rank in range(2)]
    assert said[0] == said[1] and "RewardError: broken; the same command then goes on from step 3" in said[0]
    for name in ("failed", "unscored"):
        check_equal(tmp_path / name, whole)


@pytest.mark.slow
def test_a_rank_does_not_wait_for_the_tail_of_another_where_no_refill_can_come(tree, tmp_path):
    undisturbed = {"checkpoint": {"every": 0}, "eval": {"every": 0}}  # those wait until nothing is being drawn
    tree = deep_merge(with_cell(tree, DRAWS["alone"], tmp_path), undisturbed)
    in_group(2, [{"config": config_file(tree, tmp_path, "late"), "slow": [1, 2]}], tmp_path)
    check_equal(tmp_path / "late", alone(tree, tmp_path, "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["refills", "alone"])
def test_an_engine_that_stands_for_all_ranks_draws_ahead_for_them_and_others_go_on_without_it(tree, tmp_path, way):
    tree = with_cell(tree, DRAWS[way], tmp_path)
    whole = alone(tree, tmp_path, "whole")
    cut(whole, "moved", 2)
    in_group(2, [{"config": config_file(tree, tmp_path, name), "of_all": True} for name in ("anew", "moved")], tmp_path)
    for name in ("anew", "moved"):
        check_equal(tmp_path / name, whole)
    cut(tmp_path / "anew", "back", 3)
    check_equal(alone(tree, tmp_path, "back"), whole)


class TestZero:
    """The same by DeepSpeed, in each of its stages."""

    pytestmark = DEEPSPEED

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_what_reaches_beyond_a_step_has_the_numbers_of_one_process(self, tree, tmp_path, stage):
        tree = deep_merge(tree, {"strategy": {"kind": "deepspeed", "stage": stage}})
        check_cells({"averages": FOLLOWS["averages"], **DISTILS, "refills": DRAWS["refills"]}, tree, 2, tmp_path)
