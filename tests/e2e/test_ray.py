"""Runs on real Ray clusters: the numbers of one process, whoever is killed on the way."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray.cluster_utils import Cluster

from lightrft.config import RLConfig
from lightrft.trainer.launch.ray import Driver, run_on_ray
from lightrft.trainer.rl import run_rl
from lightrft.trainer.session import Nobody
from lightrft.utils.settings import build, deep_merge
from lightrft.utils.signals import StopFlag
from tests.e2e.test_ranks import PRESETS, check_equal

pytestmark = pytest.mark.slow
RL = "lightrft.trainer.rl:run_rl"
TWO = {"launch": {"kind": "ray", "processes": 2, "ray": {"cpus": 1}}}


@pytest.fixture(scope="module")
def nodes() -> Generator[Cluster]:
    """A cluster whose first node has room for two ranks, and this process on it."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        _enable_token_auth()  # the mode is read when ray is imported, and anew here
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 * 2**20})
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class Watcher(Nobody):
    """Calls ``act`` once ``step`` is done, the first time."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act, self.acted = step, act, False

    def update(self, row: Mapping[str, Any]) -> None:
        if row["step"] == self.step and not self.acted:
            self.acted = True
            self.act()


def config_of(tree: dict[str, Any], folder: Path, name: str, **over: Any) -> RLConfig:
    run = {"run": {"dir": str(folder), "name": name, "threads": 1}, "strategy": {"device": "cpu"}}
    return build(RLConfig, deep_merge(deep_merge(tree, run), over))


def one(tree: dict[str, Any], folder: Path) -> Path:
    """The run of one process."""
    run_rl(config_of(tree, folder, "one"))
    return folder / "one"


def driven(config: RLConfig, step: int, act: Callable[[Driver], Any]) -> dict[str, Any]:
    """A run on the cluster, with ``act`` once ``step`` is done."""
    with StopFlag() as stop:
        driver = Driver(RL, config, Nobody(), stop)
        driver.observer = Watcher(step, lambda: act(driver))
        summary = driver.run()
    assert driver.observer.acted
    return summary


def kill_rank(number: int) -> Callable[[Driver], None]:
    return lambda driver: os.kill(driver.places[number].pid, signal.SIGKILL)


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Five groups of three, which do not divide by two ranks, in micro-batches of a few rows."""
    more = {
        "rollout": {"prompts": 5, "samples": 3},
        "train": {"micro_batch_tokens": 60, "steps": 4},
        "checkpoint": {"every": 1},
        "optimizer": {"lr": 1e-3},
    }
    return deep_merge(rl_tree, more)


def test_a_killed_rank_has_all_start_again_and_the_numbers_are_those_of_one_process(nodes, tree, tmp_path, caplog):
    summary = driven(config_of(tree, tmp_path, "cluster", **TWO), 2, kill_rank(1))
    assert summary["restarts"] == 1 and summary["finished"]
    assert re.search(
        r"rank 1 on node \S+ \(\w+\) was lost: .*; all ranks start again from the last checkpoint \(1 of 3\)", caplog.text
    )
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def test_a_killed_node_has_all_start_again_elsewhere_and_the_numbers_are_those_of_one_process(nodes, tree, tmp_path, caplog):
    tree = deep_merge(tree, PRESETS["ppo"])
    away = nodes.add_node(num_cpus=1)
    spread = deep_merge(TWO, {"launch": {"ray": {"placement": "STRICT_SPREAD", "wait": 1}}})

    def lose_node(driver: Driver) -> None:
        assert len({place.node for place in driver.places}) == 2
        nodes.add_node(num_cpus=1)
        nodes.remove_node(away, allow_graceful=False)

    summary = driven(config_of(tree, tmp_path, "cluster", **spread), 2, lose_node)
    assert summary["restarts"] == 1 and "start again" in caplog.text
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def test_a_run_that_is_told_to_stop_saves_and_the_same_command_goes_on(nodes, tree, tmp_path):
    tree = deep_merge(tree, {**PRESETS["lora"], "checkpoint": {"every": 0}})
    config = config_of(tree, tmp_path, "cluster", **TWO)
    summary = driven(config, 2, lambda driver: os.kill(os.getpid(), signal.SIGTERM))
    assert not summary["finished"] and 2 <= summary["steps"] < 4
    assert run_on_ray(RL, config, Nobody())["finished"]
    check_equal(tmp_path / "cluster", one(tree, tmp_path))
