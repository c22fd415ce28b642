"""Runs on real Ray clusters: the numbers of one process, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray.cluster_utils import Cluster
from transformers import AutoModelForImageTextToText

from lightrft.config import RLConfig
from lightrft.models.tiny_media import save_tiny_media
from lightrft.trainer.launch.ray import Driver, run_on_ray
from lightrft.trainer.rl import run_rl
from lightrft.trainer.session import Nobody
from lightrft.utils.settings import build, deep_merge
from lightrft.utils.signals import StopFlag
from lightrft.utils.trackers import read_rows
from tests.e2e.test_ranks import PRESETS, check_equal, config_file, rows_with_pictures

pytestmark = pytest.mark.slow
RL = "lightrft.trainer.rl:run_rl"
BORNE = ("engine/", "scorer/", "reference/", "critic/")
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


def test_a_command_that_is_stopped_or_killed_leaves_nothing_behind_and_goes_on(nodes, tree, tmp_path):
    """It has a cluster of its own, writes nothing into the user's home, and shows the progress of its ranks."""
    tree = deep_merge(tree, {**PRESETS["lora"], "checkpoint": {"every": 0}, "train": {"steps": 7}})
    words = ["launch.kind=ray", "launch.processes=2", "launch.ray.cpus=0.5", "run.progress=true"]
    command = [sys.executable, "-m", "lightrft", "rl", str(config_file(tree, tmp_path, "cluster")), *words]
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    metrics = tmp_path / "cluster" / "metrics.jsonl"

    def begin(number: int, steps: int) -> tuple[int, str, str, list[psutil.Process]]:
        """Send the signal ``number`` after so many steps: exit status, what was said, and the processes that there were."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
            until = time.monotonic() + 240
            while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
        psutil.wait_procs(children, timeout=60)
        return process.returncode, out, err, [child for child in children if child.is_running()]

    status, out, err, left = begin(signal.SIGTERM, 1)
    assert (status, left) == (0, []) and "stopped; the same command goes on" in out and "rl 1/7" in err, err
    done = len(metrics.read_text().splitlines())
    status, _, _, left = begin(signal.SIGKILL, done + 1)
    assert (status, left) == (-signal.SIGKILL, [])
    assert list(home.iterdir()) == []
    run_on_ray(RL, config_of(tree, tmp_path, "cluster", **TWO), Nobody())
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def kill_workers(*names: str) -> Callable[[Driver], None]:
    def kill(driver: Driver) -> None:
        there = ray.get(driver.roster.processes.remote())
        for name in names:
            os.kill(there[name], signal.SIGKILL)

    return kill


def staffed(**staff: Any) -> dict[str, Any]:
    return {"launch": {"kind": "ray", "processes": 2, "ray": {"cpus": 0.2, "worker_cpus": 0.2, **staff}}}


def test_workers_that_are_killed_are_started_anew_and_the_numbers_are_those_of_one_process(nodes, tree, tmp_path):
    tree = deep_merge(tree, {"algorithm": {"preset": "grpo", "kl": {"coef": 0.01}}})
    config = config_of(tree, tmp_path, "cluster", **staffed(engines=1, scorers=1, references=1))
    summary = driven(config, 2, kill_workers("engine 0", "scorer 0", "reference 0"))
    assert "restarts" not in summary
    counted = Counter()
    for row in read_rows(tmp_path / "cluster" / "metrics.jsonl"):
        counted.update({key: int(value) for key, value in row.items() if key.endswith("/restarts")})
    assert counted["engine/restarts"] == 1 and counted["scorer/restarts"] and counted["reference/restarts"]
    check_equal(tmp_path / "cluster", one(tree, tmp_path), ignore=BORNE)


def test_a_critic_that_is_killed_has_all_start_again_and_the_numbers_are_those_of_one_process(nodes, tree, tmp_path):
    tree = deep_merge(tree, PRESETS["ppo"])
    lone = deep_merge(staffed(engines=2, critic=True, weights="message"), {"launch": {"processes": 1}})
    config = config_of(tree, tmp_path, "cluster", **lone)
    assert driven(config, 2, kill_workers("critic 0"))["restarts"] == 1
    check_equal(tmp_path / "cluster", one(tree, tmp_path), ignore=BORNE)


def test_pictures_and_adapters_reach_engines_of_their_own(nodes, tree, tmp_path):
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path)))
    sources = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    over = {"model": {"path": str(tmp_path / "reader"), "lora": {"rank": 4}}, "data": sources, "train": {"steps": 2}}
    tree = deep_merge(tree, over)
    run_on_ray(RL, config_of(tree, tmp_path, "cluster", **staffed(engines=1, weights="shared")), Nobody())
    check_equal(tmp_path / "cluster", one(tree, tmp_path), AutoModelForImageTextToText, ignore=BORNE)
