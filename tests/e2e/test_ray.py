"""Runs on real Ray clusters: the numbers of one process, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.distributed.ray_launcher import RayLauncher, run_on_ray
from lightrft.models.tiny import save_tiny_media
from lightrft.observability.observer import NullObserver
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import DataError, RankError, ResourceError
from lightrft.utils.stop_signal import StopFlag
from lightrft.workers import build_remote
from lightrft.workers.weight_sync import WeightSync, WeightSyncConfig
from tests import warm
from tests.e2e.several import PRESETS, beside, check_equal, config_file, rows_with_pictures

pytestmark = pytest.mark.slow
RL = "lightrft.trainer.rl:run_rl"
TWO = {"launch": {"kind": "ray", "processes": 2, "ray": {"cpus": 1}}}
PATIENCE = 60.0
"""Seconds that ranks wait for one another where one of them is stopped."""

Act = Callable[[RayLauncher], None]
Whom = Callable[[RayLauncher], Sequence[int]]
"""Processes, by their numbers."""


def forks() -> dict[str, Any]:
    """A runtime environment of Ray whose workers have torch imported when they begin."""
    return {"py_executable": warm.as_client()}


@pytest.fixture(scope="module")
def nodes() -> Generator[Cluster]:
    """A cluster whose first node has room for two ranks, and this process on it."""
    path = str(Path(__file__).parents[2])
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": path,
    }
    # A machine that others fill too has Ray kill workers.
    own |= {"RAY_memory_monitor_refresh_ms": "0"}
    # Two that no test uses.
    own |= {"RAY_prestart_worker_first_driver": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        _enable_token_auth()  # the mode is read when ray is imported, and anew here
        head = {
            "num_cpus": 2,
            "object_store_memory": 80 * 2**20,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        # In new interpreters each worker would need 5 s of a processor to import torch.
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=forks())
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def to_come(config: RLConfig, step: int) -> Path:
    """A file that is there until what is to happen after ``step`` has happened."""
    return Path(config.run.dir) / f"to-come-after-{step}"


class Watcher(NullObserver):
    """Does what is to happen once a step is done, the first time that it is."""

    def __init__(self, driver: RayLauncher, acts: Mapping[int, Act]) -> None:
        self.driver, self.left = driver, dict(acts)
        for step in acts:
            to_come(driver.config, step).touch()

    def update(self, row: Mapping[str, Any]) -> None:
        if act := self.left.pop(row["step"], None):
            act(self.driver)
            to_come(self.driver.config, row["step"]).unlink()


@dataclass(frozen=True, slots=True)
class Paced:
    """An observer in the first rank that has it wait for what is to happen after a step: else the run could be over before that."""

    config: RLConfig
    observer: Any

    def begin(self, title: str, total: int, done: int) -> None:
        self.observer.begin(title, total, done)

    def update(self, row: Mapping[str, Any]) -> None:
        self.observer.update(row)
        until = time.monotonic() + 300
        while to_come(self.config, row["step"]).exists():
            assert time.monotonic() < until, f"nothing has happened after step {row['step']}"
            time.sleep(0.01)

    def event(self, event: object) -> None:
        self.observer.event(event)


def paced(config: RLConfig, observer: Any) -> dict[str, Any]:
    """A program of ranks: reinforcement learning that waits for what is to happen."""
    return run_rl(config, Paced(config, observer))


def config_of(tree: dict[str, Any], folder: Path, name: str, **over: Any) -> RLConfig:
    run = {"run": {"dir": str(folder), "name": name, "threads": 1}, "strategy": {"device": "cpu"}}
    return build(RLConfig, deep_merge(deep_merge(tree, run), over))


def one(tree: dict[str, Any], folder: Path) -> Path:
    """The run of one process."""
    run_rl(config_of(tree, folder, "one"))
    return folder / "one"


def driven(config: RLConfig, acts: Mapping[int, Act]) -> dict[str, Any]:
    """A run on the cluster to which all of ``acts`` happen, by the step that each comes after."""
    with StopFlag() as stop:
        driver = RayLauncher("tests.e2e.test_ray:paced", config, NullObserver(), stop)
        driver.observer = Watcher(driver, acts)
        try:
            return driver.run()
        finally:
            assert not driver.observer.left


def rank(number: int) -> Whom:
    return lambda driver: [driver.places[number].pid]


def workers(*names: str) -> Whom:
    def found(driver: RayLauncher) -> list[int]:
        there = ray.get(driver.roster.processes.remote())
        return [there[name] for name in names]

    return found


def killed(whom: Whom) -> Act:
    return lambda driver: signalled(signal.SIGKILL, whom(driver))


def stopped(whom: Whom, seconds: float | None = None) -> Act:
    """For ever, or for some time."""

    def act(driver: RayLauncher) -> None:
        pids = whom(driver)
        signalled(signal.SIGSTOP, pids)
        if seconds is not None:
            threading.Timer(seconds, signalled, (signal.SIGCONT, pids)).start()

    return act


def signalled(number: int, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.fixture
def tree(uneven_tree: dict[str, Any]) -> dict[str, Any]:
    return deep_merge(
        uneven_tree,
        {
            "train": {"steps": 4},
            "checkpoint": {"every": 1},
            "eval": {"data": {"sources": []}, "every": 0},
        },
    )


@pytest.mark.thorough
def test_paused_and_killed_ranks_have_all_start_again_until_restarts_are_used_up_and_the_same_command_goes_on(
    nodes, tree, tmp_path, caplog
):
    """Not for a pause that is shorter than the limit."""
    over = {"launch": {"ray": {"restarts": 1}}, "strategy": {"timeout_minutes": PATIENCE / 60}}
    config = config_of(tree, tmp_path, "cluster", **deep_merge(TWO, over))
    acts = {1: stopped(rank(1), seconds=3), 2: killed(rank(0)), 3: stopped(rank(1))}
    with pytest.raises(RankError) as caught:
        driven(config, acts)
    said = r"rank 0 on node \S+ \(\w+\) was lost: .*; all ranks start again from the last checkpoint \(1 of 1\)"
    assert re.search(said, caplog.text)
    said = r"rank 1 .*no heartbeat.*; the ranks were restarted launch\.ray\.restarts = 1 times\. The same command resumes"
    assert re.search(said, str(caught.value)), caught.value
    assert run_on_ray(RL, config, NullObserver())["finished"]
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


@pytest.mark.thorough
def test_a_killed_node_has_all_start_again_elsewhere_and_the_numbers_are_those_of_one_process(
    nodes, tree, tmp_path, caplog
):
    tree = deep_merge(tree, PRESETS["ppo"])
    away = [nodes.add_node(num_cpus=1) for _ in range(2)]
    spread = deep_merge(TWO, {"launch": {"ray": {"placement": "STRICT_SPREAD"}}})

    def lose_node(driver: RayLauncher) -> None:
        used = [place.node for place in reversed(driver.places)]
        assert len(set(used)) == 2
        lost = next(node for one in used for node in away if node.node_id == one)
        nodes.remove_node(lost, allow_graceful=False)

    summary = driven(config_of(tree, tmp_path, "cluster", **spread), {2: lose_node})
    assert summary["restarts"] == 1 and "start again" in caplog.text
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def ended(
    command: list[str], env: dict[str, str], metrics: Path, steps: int, number: int
) -> tuple[int, str, str]:
    """Send ``command`` the signal ``number`` after so many steps; its exit status and what it said. All that it began ends too."""
    before = set(psutil.pids())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        # new interpreters of a new cluster, on a machine that other tests fill
        until = time.monotonic() + 900
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= steps):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        began = [
            p
            for p in psutil.process_iter(["name"])
            if p.pid not in before and p.info["name"].startswith("ray")
        ]
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
    assert any("ray::Rank" in p.info["name"] for p in began)
    # Ray's own, which follow a minute later.
    agents = (
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
    )
    own = [p for p in began if not p.info["name"].startswith(agents)]
    until = time.monotonic() + 300
    while left := [p for p in own if belongs_to(p, {1, process.pid})]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    return process.returncode, out, err


def belongs_to(process: psutil.Process, parents: set[int]) -> bool:
    """Return whether ``process`` runs, and one of ``parents`` is its parent.

    A worker of a cluster that goes on has that cluster's raylet for its parent.
    """
    try:
        return process.is_running() and process.ppid() in parents
    except psutil.NoSuchProcess:
        return False


@pytest.mark.thorough
def test_a_command_that_is_stopped_or_killed_leaves_nothing_behind_and_goes_on(
    nodes, tree, tmp_path
):
    """With a cluster of its own, for which nothing is written into the user's home, and on one that is there.

    The workers of its own cluster are new interpreters, as in real use.
    """
    tree = deep_merge(
        tree, {**PRESETS["lora"], "checkpoint": {"every": 0}, "train": {"steps": 200}}
    )
    words = ["launch.kind=ray", "launch.processes=2", "launch.ray.cpus=0.5", "run.progress=true"]
    command = [
        sys.executable,
        "-m",
        "lightrft",
        "rl",
        str(config_file(tree, tmp_path, "cluster")),
        *words,
    ]
    (home := tmp_path / "home").mkdir()
    alone = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(home)
    }
    metrics = tmp_path / "cluster" / "metrics.jsonl"
    status, out, err = ended(command, alone, metrics, 1, signal.SIGTERM)
    assert status == 143 and "stopped; the same command resumes" in out and "rl 1/200" in err, err
    assert list(home.iterdir()) == []
    done = len(metrics.read_text().splitlines())
    attached = [*command, f"launch.ray.address={nodes.address}"]
    assert (
        ended(attached, dict(os.environ), metrics, done + 1, signal.SIGKILL)[0] == -signal.SIGKILL
    )
    tree["train"]["steps"] = len(metrics.read_text().splitlines()) + 1
    run_on_ray(RL, config_of(tree, tmp_path, "cluster", **TWO), NullObserver())
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def trained_twice(config: SFTConfig, observer: Any) -> dict[str, Any]:
    """A program of ranks: supervised training, and then on data that is not there."""
    run_sft(config, observer)
    nowhere = {"sources": [{"path": str(Path(config.run.dir) / "nowhere.jsonl")}]}
    return run_sft(
        build(
            SFTConfig, deep_merge(config.model_dump(), {"data": nowhere, "run": {"name": "broken"}})
        ),
        observer,
    )


def test_supervised_training_runs_there_too_and_an_error_of_the_program_is_the_commands_and_nothing_is_tried_twice(
    nodes, tree, tmp_path, caplog
):
    kept = {name: tree[name] for name in ("model", "data", "log")}
    kept |= {
        "strategy": {"device": "cpu"},
        "train": {"steps": 2, "max_tokens_per_micro_batch": 60},
        "batch_size": 5,
        "run": {"threads": 1, "dir": str(tmp_path)},
    }
    run_sft(build(SFTConfig, deep_merge(kept, {"run": {"name": "one"}})))
    config = build(SFTConfig, deep_merge(kept, {"run": {"name": "cluster"}, **TWO}))
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        run_on_ray("tests.e2e.test_ray:trained_twice", config, NullObserver())
    assert "start again" not in caplog.text
    check_equal(tmp_path / "cluster", tmp_path / "one")


def test_room_that_the_cluster_has_not_is_an_error_that_says_what_is_there(nodes, tree, tmp_path):
    over = {
        "launch": {
            "kind": "ray",
            "processes": 2,
            "ray": {"cpus": 64, "address": nodes.address, "placement_timeout_minutes": 0.02},
        }
    }
    said = (
        r"2 ranks and 0 workers ask for 128 CPU in 2 bundles \(PACK\), and the cluster has \d CPU "
        r".* launch\.ray\.placement_timeout_minutes = 0\.02 min"
    )
    with pytest.raises(ResourceError, match=said):
        run_on_ray(RL, config_of(tree, tmp_path, "cluster", **over), NullObserver())


def roles_in_workers(**worker_counts: Any) -> dict[str, Any]:
    return {
        "launch": {
            "kind": "ray",
            "processes": 2,
            "ray": {"cpus": 0.2, "worker_cpus": 0.2, **worker_counts},
        }
    }


def test_workers_that_are_killed_or_fall_silent_are_started_anew_and_the_numbers_are_those_of_one_process(
    nodes, tree, tmp_path
):
    """Of every role that keeps no state. A pause that is shorter than the limit changes nothing."""
    algorithm = {"preset": "grpo", "kl": {"coef": 0.01}, "distill": {"kind": "sampled"}}
    tree = deep_merge(tree, {"algorithm": algorithm, "teacher": {"path": tree["model"]["path"]}})
    worker_counts = {"engine": 1, "scorer": 1, "reference": 1, "teacher": 1}
    # Loads within it on a busy machine too.
    over = roles_in_workers(
        **{f"{role}s": count for role, count in worker_counts.items()},
        call_timeout_minutes=1.0,
        restarts=9,
    )
    all_of = workers(*(f"{role} 0" for role in worker_counts))
    acts = {1: stopped(all_of, seconds=3), 2: killed(all_of), 3: stopped(workers("engine 0"))}
    assert "restarts" not in driven(config_of(tree, tmp_path, "cluster", **over), acts)
    rows = read_rows(tmp_path / "cluster" / "metrics.jsonl")
    starts = {role: [int(row[f"{role}/restarts"]) for row in rows] for role in worker_counts}
    assert all(counts[1] == 0 and sum(counts[2:]) >= 1 for counts in starts.values()), starts
    assert sum(starts["engine"]) >= 2, starts
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def died(config: RLConfig) -> Path:
    """A file with the time at which a process was killed."""
    return Path(config.run.dir) / "died"


def with_a_sender_that_dies(config: RLConfig, observer: Any) -> dict[str, Any]:
    """A program of ranks: in the third update of the weights, the second sender is killed while it sends, once. Buckets are small, so
    that both ranks send."""
    own, mark = WeightSync._own, to_come(config, 3)

    def dying(self: WeightSync, stream: Any, sender: int, *more: Any) -> Iterator[Any]:
        for weight in own(self, stream, sender, *more):
            if sender == 1 and self._kept.update == 2 and mark.exists():
                mark.unlink()
                died(config).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            yield weight

    def small(way: Any, bucket: int, *more: Any, **options: Any) -> WeightSyncConfig:
        return WeightSyncConfig(way, 4096, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightSync, "_own", dying)
        patch.setattr(build_remote, "WeightSyncConfig", small)
        return run_rl(config, observer)


def test_a_sender_of_weights_that_is_killed_in_an_update_has_all_start_again_and_loses_nothing(
    nodes, tree, tmp_path, caplog
):
    """Each rank has all weights, so that rank 0 waits for the engines alone, and these for the rank that is gone."""
    over = {"strategy": {"hsdp_shard_size": 1}}
    config = config_of(tree, tmp_path, "cluster", **deep_merge(roles_in_workers(engines=2), over))
    mark = to_come(config, 3)
    mark.touch()
    summary = run_on_ray("tests.e2e.test_ray:with_a_sender_that_dies", config, NullObserver())
    assert summary["restarts"] == 1 and not mark.exists()
    (told,) = [record for record in caplog.records if "rank 1 on node" in record.getMessage()]
    assert (
        told.created - float(died(config).read_text()) < 300
    )  # ten minutes where they wait for it
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def store_stats() -> Any:
    """What the object store of this node says of itself."""
    here = next(
        node for node in ray.nodes() if node["NodeID"] == ray.get_runtime_context().get_node_id()
    )
    return node_stats(
        here["NodeManagerAddress"], here["NodeManagerPort"], include_memory_info=False
    ).store_stats


def filled_store() -> list[np.ndarray]:
    """Views of objects, which Ray can therefore not move to the disk, until what comes next has to lie there from the start."""
    held: list[np.ndarray] = []
    for size in (2**20, 2**14):
        before = store_stats().object_store_bytes_fallback
        while store_stats().object_store_bytes_fallback == before:
            held.append(ray.get(ray.put(np.zeros(size, np.uint8))))
            assert len(held) < 500
    return held


def test_pictures_and_adapters_reach_engines_of_their_own_also_where_others_have_filled_the_object_store(
    nodes, tree, tmp_path
):
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path))
    )
    sources = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    over = {
        "model": {"path": str(tmp_path / "reader"), "lora": {"rank": 4}},
        "data": sources,
        "train": {"steps": 2},
    }
    tree = deep_merge(tree, over)
    held = filled_store()
    before = store_stats()
    run_on_ray(
        RL,
        config_of(tree, tmp_path, "cluster", **roles_in_workers(engines=1, weights="shared")),
        NullObserver(),
    )
    assert (
        store_stats().cumulative_created_objects > before.cumulative_created_objects
        and len(held) > 70
    )
    check_equal(tmp_path / "cluster", one(tree, tmp_path))


def test_an_engine_of_its_own_decodes_with_a_draft_model_and_changes_no_number(
    nodes, tree, tmp_path
):
    speculative = {"kind": "draft", "tokens": 3, "path": tree["model"]["path"]}
    engine = {"engine": {"speculative": speculative}, "train": {"steps": 2}}
    tree = deep_merge(tree, engine)
    run_on_ray(
        RL, config_of(tree, tmp_path, "cluster", **roles_in_workers(engines=1)), NullObserver()
    )
    check_equal(tmp_path / "cluster", one(tree, tmp_path))
    first = read_rows(tmp_path / "cluster" / "metrics.jsonl")[0]
    # the draft model is the policy before its first update
    assert first["rollout/drafted_tokens"] > 0
    assert first["rollout/draft_acceptance"] == 1


@pytest.mark.thorough
def test_a_teacher_and_an_engine_that_are_killed_while_batches_are_generated_ahead_change_no_number(
    nodes, tree, tmp_path
):
    """Two ranks train on responses that are a step old, with a reference that moves and all of the teacher's distribution."""
    tree = deep_merge(tree, beside(tmp_path / "teacher"))
    tree = deep_merge(tree, {"rollout": {"staleness": 1}, "train": {"steps": 4}})
    over = roles_in_workers(engines=2, teachers=1, weights="message")
    acts = {1: killed(workers("teacher 0")), 2: killed(workers("engine 0"))}
    assert "restarts" not in driven(config_of(tree, tmp_path, "cluster", **over), acts)
    rows = read_rows(tmp_path / "cluster" / "metrics.jsonl")
    assert sum(row["teacher/restarts"] for row in rows)
    assert sum(row["async_engine/restarts"] for row in rows)
    check_equal(tmp_path / "cluster", one(tree, tmp_path))
