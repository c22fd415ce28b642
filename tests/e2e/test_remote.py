"""A whole run whose roles live in processes of their own: the numbers of a run in one, also when those processes are killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightrft.algorithms.requirements import Requirements
from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from lightrft.distributed.worker_api import Maker
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.roles import Roles
from lightrft.trainer import rl
from lightrft.utils.errors import ConfigError
from lightrft.workers.build_remote import check_workers
from lightrft.workers.engine_kinds import engine_worker
from lightrft.workers.engine_workers import EngineWorkerGroup
from lightrft.workers.local import local_roles
from lightrft.workers.model_workers import RemoteReference, frozen_model_worker
from lightrft.workers.reward_workers import RewardWorkerGroup, reward_scorer_worker
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy
from tests.e2e.several import PRESETS, beside, check_equal, rows_with_pictures
from tests.worker_helpers import ProcessWorker

LIMITS = FaultPolicy(restarts=3, call_timeout=600.0)
pytestmark = pytest.mark.slow


class Elsewhere:
    """Makes the roles of a run, as ``local_roles`` does, with all but the policy in workers."""

    def __init__(self) -> None:
        self.workers: dict[str, ProcessWorker] = {}

    def __call__(
        self,
        config: RLConfig,
        requirements: Requirements,
        tokenizer: Any,
        steps: int,
        processor: Any = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
    ) -> Roles:
        roles = local_roles(config, requirements, tokenizer, steps, processor, ranks)
        roles.scorer.close()
        cpu = config.strategy
        trained = frozenset(
            name for name, p in roles.actor.model.named_parameters() if p.requires_grad
        )
        engines = [
            self.worker(f"engine {i}", engine_worker, config.model, config.engine, cpu, 1)
            for i in range(2)
        ]
        roles.engine = EngineWorkerGroup(
            engines,
            config.engine,
            LIMITS,
            WeightSyncConfig("shared", 30_000, trained=trained),
            ranks,
        )
        roles.scorer = RewardWorkerGroup(
            [self.worker("scorer", reward_scorer_worker, config.reward)], LIMITS
        )
        if roles.reference is not None:
            model = config.model.model_copy(update={"lora": None})
            roles.reference = RemoteReference(
                [self.worker("reference", frozen_model_worker, model, cpu, 1)], LIMITS
            )
        return roles

    def worker(self, name: str, make: Any, *args: Any) -> ProcessWorker:
        self.workers[name] = ProcessWorker(name, partial(make, *args))
        return self.workers[name]


class Killer:
    """An observer that ends one worker after each step."""

    def __init__(self, roles: Elsewhere, *names: str) -> None:
        self.roles, self.names = roles, list(names)

    def begin(self, title: str, total: int, done: int) -> None:
        return

    def update(self, row: Mapping[str, Any]) -> None:
        if self.names:
            self.roles.workers[self.names.pop(0)].signal(signal.SIGKILL)

    def event(self, event: object) -> None:
        return


@pytest.fixture
def tree(uneven_tree: dict[str, Any]) -> dict[str, Any]:
    more = {
        "run": {"threads": 1, "progress": False},
        "strategy": {"device": "cpu"},
        "train": {"steps": 4},
        "checkpoint": {"every": 1},
    }
    return deep_merge(uneven_tree, more)


def train(tree: dict[str, Any], name: str, observer: Any = None, **over: Any) -> Path:
    config = build(RLConfig, deep_merge(tree, {"run": {"name": name}, **over}))
    rl.run_rl(config, observer)
    return Path(config.run.dir) / name


def restarts(path: Path) -> dict[str, float]:
    """How often workers of each role were started anew."""
    rows = read_rows(path / "metrics.jsonl")
    names = {key for row in rows for key in row if key.endswith("/restarts")}
    return {name.partition("/")[0]: sum(float(row.get(name, 0)) for row in rows) for name in names}


@pytest.mark.parametrize(
    ("preset", "killed"),
    [
        ("grpo", ["engine 1", "scorer"]),
        ("ppo", ["reference", "engine 0", "engine 1"]),
        ("lora", ["engine 0", "reference"]),
    ],
)
def test_roles_in_workers_give_the_numbers_of_one_process_whoever_is_killed(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, preset: str, killed: list[str]
) -> None:
    tree = deep_merge(tree, PRESETS[preset])
    one = train(tree, "one")
    made = Elsewhere()
    monkeypatch.setattr(rl, "local_roles", made)
    found = train(tree, "workers", Killer(made, *killed))
    assert sum(restarts(found).values()) == len(killed)
    check_equal(found, one)


class Office:
    """Where a run gets its workers from."""

    host = "127.0.0.1"

    def start_workers(self, kind: str, make: Maker) -> list[ProcessWorker]:
        return [ProcessWorker(f"{kind} 0", make)]


def test_a_run_with_a_moving_reference_goes_on_with_its_whole_teacher_in_a_worker_and_back(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = deep_merge(tree, {**beside(tmp_path / "teacher"), "eval": {"every": 1}})
    whole = train(tree, "whole")
    train(tree, "moved", train={"steps": 1})
    with monkeypatch.context() as patched:
        patched.setattr(rl, "current_allocator", Office)
        train(tree, "moved", train={"steps": 2}, launch={"kind": "ray", "ray": {"teachers": 1}})
    check_equal(train(tree, "moved"), whole)
    assert all(
        row["policy/divergence"] > 0 and row["prm/optimizer_steps"]
        for row in read_rows(whole / "metrics.jsonl")[1:]
    )


class TwoEach(Office):
    """Two workers of each kind."""

    workers: dict[str, ProcessWorker]

    def __init__(self) -> None:
        self.workers = {}

    def start_workers(self, kind: str, make: Maker) -> list[ProcessWorker]:
        self.workers |= {f"{kind} {i}": ProcessWorker(f"{kind} {i}", make) for i in range(2)}
        return [self.workers[f"{kind} {i}"] for i in range(2)]


def test_reward_models_and_judges_in_workers_give_the_numbers_of_one_process_also_when_killed(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = ModelConfig(path=tree["model"]["path"])
    tokenizer = load_tokenizer(base)
    RewardModel.load(base, RewardModelConfig(), seed=3).save(tokenizer, tmp_path / "rm")
    other = tiny_tokenizer(chars="0123456789+= ")
    stranger = tiny_model("llama", seed=4, hidden_size=32, vocab_size=len(other))
    RewardModel(stranger, ModelConfig(), RewardModelConfig(), seed=5).save(
        other, tmp_path / "other"
    )
    reward = {
        "models": [
            {"path": str(tmp_path / "rm"), "name": "own"},
            {"path": str(tmp_path / "other"), "name": "other", "weight": 0.5},
        ],
        "judges": [{"path": base.path, "form": "rating", "read": "probability", "scale": [0, 9]}],
        "gates": {"own": "other"},
        "gate_threshold": -100.0,
    }
    tree = deep_merge(tree, {**PRESETS["grpo"], "reward": reward, "train": {"steps": 2}})
    one = train(tree, "one")
    allocator = TwoEach()
    monkeypatch.setattr(rl, "current_allocator", lambda: allocator)
    found = train(
        tree,
        "workers",
        Killer(allocator, "reward_model 1"),  # type: ignore[arg-type]
        launch={"kind": "ray", "ray": {"reward_models": 2}},
    )
    check_equal(found, one)
    assert restarts(found) == {"scorer": 1}
    rows = read_rows(found / "metrics.jsonl")
    assert all(row["scorer/scored"] and row["scorer/judgements"] for row in rows if "loss" in row)


def test_workers_of_reward_models_without_a_model_are_refused(tree: dict[str, Any]) -> None:
    config = build(
        RLConfig, deep_merge(tree, {"launch": {"kind": "ray", "ray": {"reward_models": 1}}})
    )
    with pytest.raises(ConfigError, match=r"launch.ray.reward_models = 1 changes nothing"):
        check_workers(config, Requirements.of(config.algorithm))


def test_pictures_reach_roles_in_workers(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path))
    )
    sources = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    over = {
        "model": {"path": str(tmp_path / "reader")},
        "data": sources,
        "eval": {"data": sources},
        "train": {"steps": 2},
    }
    tree = deep_merge(tree, {**PRESETS["ppo"], **over})
    one = train(tree, "one")
    monkeypatch.setattr(rl, "local_roles", Elsewhere())
    check_equal(train(tree, "workers"), one)
