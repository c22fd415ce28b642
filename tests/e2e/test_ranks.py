"""What reaches beyond a step, with several processes: a reference that follows the policy, a teacher's whole vocabulary, answers drawn
beside training. Many runs share one group of processes, since most of a run's time is its start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.parity import Tree, run_all
from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.strategy.checkpoint import load_state
from lightrft.trainer.rl import run_rl
from tests import warm
from tests.e2e.several import BEYOND, ENVIRONMENT, check_equal, config_file, named

GROUP = Path(__file__).with_name("group.py")
pytestmark = pytest.mark.slow
Whole = Callable[[str], Path]


@pytest.fixture
def trees(uneven_tree: Tree, teacher_folder: Path) -> dict[str, Tree]:
    """Runs of four steps by name, every checkpoint kept, and one of one step."""
    long = deep_merge(uneven_tree, {"train": {"steps": 4}, "checkpoint": {"every": 1, "keep": 10}})
    trees = {name: deep_merge(long, cell) for name, cell in BEYOND.items()}
    trees["distils"]["teacher"] = {"path": str(teacher_folder)}
    trees["halves"] = deep_merge(
        uneven_tree, {"model": {"dtype": "bfloat16"}, "train": {"steps": 1}, "eval": {"every": 0}}
    )
    trees["undisturbed"] = deep_merge(
        trees["alone"], {"checkpoint": {"every": 0}, "eval": {"every": 0}}
    )
    return trees


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of one process are."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(trees: dict[str, Tree], runs: Path) -> Whole:
    """The folder of a run on one process that nothing happens to, by its name."""

    def find(name: str) -> Path:
        return runs / name if (runs / name).exists() else alone(trees[name], runs, name)

    return find


def alone(tree: Tree, folder: Path, name: str) -> Path:
    """A run of this process; its folder."""
    run_rl(build(RLConfig, named(tree, folder, name)))
    return folder / name


def in_group(plan: list[dict[str, Any]], folder: Path) -> None:
    """The runs of ``plan``, whose entries name their config by ``config``, in two processes, where something happens to them."""
    file = folder / "plan.json"
    file.write_text(json.dumps([{**entry, "config": str(entry["config"])} for entry in plan]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = warm.run([*torchrun, GROUP, file], env=ENVIRONMENT, seats=2, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr


def cut(run: Path, to: Path, step: int) -> None:
    """A copy of ``run`` that was killed after its checkpoint of ``step``."""
    shutil.copytree(run, to)
    for checkpoint in (to / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_what_reaches_beyond_a_step_has_the_numbers_of_one_process(
    trees, whole, tmp_path, subtests, processes
):
    configs = [named(trees[name], tmp_path, name) for name in (*BEYOND, "halves")]
    run_all(configs, tmp_path, processes, start=warm.run)
    for name in BEYOND:
        with subtests.test(name):
            check_equal(tmp_path / name, whole(name))
    with subtests.test("what is exported has the type of the model and not of its masters"):
        exported = tmp_path / "halves" / "model"
        kinds = {str(tensor.dtype) for tensor in load_file(exported / "model.safetensors").values()}
        assert (kinds, json.loads((exported / "config.json").read_text())["dtype"]) == (
            {"torch.bfloat16"},
            "bfloat16",
        )


def test_runs_with_a_moving_reference_or_batches_that_wait_go_on_with_another_number_of_processes(
    trees, whole, tmp_path
):
    names = ("averages", "further")
    for name in names:
        cut(whole(name), tmp_path / f"{name}-moved", 2)
    configs = [named(trees[name], tmp_path, f"{name}-moved") for name in names]
    run_all(configs, tmp_path, 3, start=warm.run)
    for name in names:
        check_equal(tmp_path / f"{name}-moved", whole(name))
        cut(tmp_path / f"{name}-moved", tmp_path / f"{name}-back", 3)
        check_equal(alone(trees[name], tmp_path, f"{name}-back"), whole(name))


@pytest.mark.parametrize("way", ["further", "alone"])
def test_one_rank_that_is_asked_to_stop_or_fails_while_it_draws_stops_all_and_the_run_goes_on(
    trees, whole, tmp_path, way
):
    tree = trees[way]
    names = ("stopped", "failed", "unscored", "unanswered")
    stopped, failed, unscored, unanswered = (
        {"config": config_file(tree, tmp_path, name)} for name in names
    )
    failing = [
        failed | {"fail": [1, 3, "ZeroDivisionError"]},
        failed,
        unscored | {"fail": [1, 3, "RewardError"]},
        unscored,
        unanswered | {"fail": [1, 3, "ResourceError"]},
        unanswered,
    ]
    in_group([stopped | {"stop": [1, 3]}, *failing], tmp_path)
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert not summary["finished"] and summary["steps"] < 4
    state = load_state(
        tmp_path / "stopped" / "checkpoints" / f"step_{summary['steps']:06d}" / "trainer"
    )
    assert min(state["drawn"]["weights"]) == 1
    check_equal(alone(tree, tmp_path, "stopped"), whole(way))
    assert (tmp_path / "failed.1.error").read_text() == "ZeroDivisionError: broken"
    assert (
        tmp_path / "failed.0.error"
    ).read_text() == "RankError: rank 1: ZeroDivisionError: broken"
    said = [(tmp_path / f"unscored.{rank}.error").read_text() for rank in range(2)]
    assert (
        said[0] == said[1]
        and "RewardError: broken; the same command then resumes from step 3" in said[0]
    )
    said = [(tmp_path / f"unanswered.{rank}.error").read_text() for rank in range(2)]
    assert [
        line.partition(": broken; the same command then resumes from step ")[0] for line in said
    ] == [
        "RankError: rank 1: ResourceError",
        "ResourceError",
    ]
    for name in names[1:]:
        check_equal(tmp_path / name, whole(way))


def test_a_rank_does_not_wait_for_the_tail_of_another_where_no_refill_can_come(
    trees, whole, tmp_path
):
    """Without checkpoints and held-out answers, which wait until nothing is being drawn."""
    in_group(
        [{"config": config_file(trees["undisturbed"], tmp_path, "late"), "slow": [1, 2]}], tmp_path
    )
    check_equal(tmp_path / "late", whole("undisturbed"))


@pytest.mark.parametrize("way", ["refills", "alone"])
def test_an_engine_that_stands_for_all_ranks_draws_ahead_for_them_and_others_go_on_without_it(
    trees, whole, tmp_path, way
):
    cut(whole(way), tmp_path / "moved", 2)
    in_group(
        [
            {"config": config_file(trees[way], tmp_path, name), "of_all": True}
            for name in ("anew", "moved")
        ],
        tmp_path,
    )
    for name in ("anew", "moved"):
        check_equal(tmp_path / name, whole(way))
    cut(tmp_path / "anew", tmp_path / "back", 3)
    check_equal(alone(trees[way], tmp_path, "back"), whole(way))
