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

import numpy as np
import psutil
import pytest
import ray
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray.cluster_utils import Cluster
from transformers import AutoModelForImageTextToText

from lightrft.config import RLConfig, SFTConfig
from lightrft.models.tiny_media import save_tiny_media
from lightrft.trainer.launch.ray import Driver, run_on_ray
from lightrft.trainer.rl import run_rl
from lightrft.trainer.session import Nobody
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import DataError, RankError, ResourceError
from lightrft.utils.settings import build, deep_merge
from lightrft.utils.signals import StopFlag
from lightrft.utils.trackers import read_rows
from tests.e2e.test_ranks import PRESETS, check_equal, config_file, rows_with_pictures

pytestmark = pytest.mark.slow
RL = "lightrft.trainer.rl:run_rl"
BORNE = tuple(f"{role}/{what}" for role in ("engine", "ahead", "scorer", "reference") for what in ("restarts", "weights_resent"))
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


def test_killed_ranks_have_all_start_again_until_restarts_are_used_up_and_the_same_command_goes_on(nodes, tree, tmp_path, caplog):
    config = config_of(tree, tmp_path, "cluster", **deep_merge(TWO, {"launch": {"ray": {"restarts": 1}}}))
    with StopFlag() as stop:
        driver = Driver(RL, config, Nobody(), stop)
        second = Watcher(3, lambda: kill_rank(0)(driver))
        driver.observer = Watcher(2, lambda: [kill_rank(1)(driver), setattr(driver, "observer", second)])
        with pytest.raises(
            RankError, match=r"rank 0 on node \S+ \(\w+\) was lost: .*restarts = 1 times\. The same command goes on"
        ):
            driver.run()
    assert re.search(
        r"rank 1 on node \S+ \(\w+\) was lost: .*; all ranks start again from the last checkpoint \(1 of 1\)", caplog.text
    )
    assert run_on_ray(RL, config, Nobody())["finished"]
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


def ended(command: list[str], env: dict[str, str], metrics: Path, steps: int, number: int) -> tuple[int, str, str]:
    """Send ``command`` the signal ``number`` after so many steps; its exit status and what it said. All that it began ends too."""
    before = set(psutil.pids())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        until = time.monotonic() + 240
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        began = [p for p in psutil.process_iter(["name"]) if p.pid not in before and p.info["name"].startswith("ray")]
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert any("ray::Rank" in p.info["name"] for p in began)
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own, which follow a minute later
    left = psutil.wait_procs([p for p in began if not p.info["name"].startswith(agents)], timeout=60)[1]
    assert [p for p in left if p.is_running() and p.ppid() in {1, process.pid}] == []
    return process.returncode, out, err


def test_a_command_that_is_stopped_or_killed_leaves_nothing_behind_and_goes_on(nodes, tree, tmp_path):
    """With a cluster of its own, for which nothing is written into the user's home, and on one that is there."""
    tree = deep_merge(tree, {**PRESETS["lora"], "checkpoint": {"every": 0}, "train": {"steps": 7}})
    words = ["launch.kind=ray", "launch.processes=2", "launch.ray.cpus=0.5", "run.progress=true"]
    command = [sys.executable, "-m", "lightrft", "rl", str(config_file(tree, tmp_path, "cluster")), *words]
    (home := tmp_path / "home").mkdir()
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": str(home)}
    metrics = tmp_path / "cluster" / "metrics.jsonl"
    status, out, err = ended(command, alone, metrics, 1, signal.SIGTERM)
    assert status == 0 and "stopped; the same command goes on" in out and "rl 1/7" in err, err
    assert list(home.iterdir()) == []
    done = len(metrics.read_text().splitlines())
    attached = [*command, f"launch.ray.address={nodes.address}"]
    assert ended(attached, dict(os.environ), metrics, done + 1, signal.SIGKILL)[0] == -signal.SIGKILL
    run_on_ray(RL, config_of(tree, tmp_path, "cluster", **TWO), Nobody())
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def test_supervised_training_runs_there_too(nodes, tree, tmp_path):
    kept = {name: tree[name] for name in ("model", "data", "log")}
    kept |= {
        "strategy": {"device": "cpu"},
        "train": {"steps": 2, "micro_batch_tokens": 60},
        "batch_size": 5,
        "run": {"threads": 1},
    }
    for name, more in (("one", {}), ("cluster", TWO)):
        config = build(SFTConfig, deep_merge(kept, {"run": {"dir": str(tmp_path), "name": name}, **more}))
        if more:
            assert run_on_ray("lightrft.trainer.sft:run_sft", config, Nobody())["finished"]
        else:
            run_sft(config)
    check_equal(tmp_path / "cluster", tmp_path / "one")


def test_an_error_of_the_program_is_the_commands_and_nothing_is_tried_twice(nodes, tree, tmp_path, caplog):
    broken = deep_merge(tree, {"data": {"sources": [{"path": str(tmp_path / "nowhere.jsonl")}]}})
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        run_on_ray(RL, config_of(broken, tmp_path, "cluster", **TWO), Nobody())
    assert "start again" not in caplog.text


def test_room_that_the_cluster_has_not_is_an_error_that_says_what_is_there(nodes, tree, tmp_path):
    over = {"launch": {"kind": "ray", "processes": 2, "ray": {"cpus": 64, "address": nodes.address, "wait": 0.02}}}
    said = r"2 ranks and 0 workers ask for 128 CPU in 2 bundles \(PACK\), and the cluster has \d CPU .* launch\.ray\.wait = 0\.02 min"
    with pytest.raises(ResourceError, match=said):
        run_on_ray(RL, config_of(tree, tmp_path, "cluster", **over), Nobody())


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
    """While engines draw beside the training, whose answers are then a step old."""
    tree = deep_merge(tree, {**PRESETS["ppo"], "rollout": {"staleness": 1}})
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


def test_an_object_store_that_others_have_filled_changes_nothing(nodes, tree, tmp_path):
    held = [ray.put(np.full(20 * 2**20, i, np.uint8)) for i in range(4)]  # all that the store of a node holds
    over = staffed(engines=1, scorers=1, weights="message")
    run_on_ray(RL, config_of(tree, tmp_path, "cluster", **over), Nobody())
    assert [int(ray.get(ref)[-1]) for ref in held] == [0, 1, 2, 3]
    check_equal(tmp_path / "cluster", one(tree, tmp_path), ignore=BORNE)
