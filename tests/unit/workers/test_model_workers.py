"""Models in processes of their own give the numbers of models of this one, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrft.config.algorithm import KLConfig
from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import ALONE
from lightrft.learner.controllers import Controls
from lightrft.learner.distillation import targets
from lightrft.learner.forward_passes import logprobs_by_parts
from lightrft.learner.policy_update import update
from lightrft.learner.process_reward import with_process_rewards
from lightrft.learner.reference_update import Follower, load_refreshed, refresh, refreshed_state
from lightrft.models.actor import Actor
from lightrft.models.divergence import token_divergence
from lightrft.models.tiny.text import tiny_model
from lightrft.observability.metrics import Metrics
from lightrft.roles import Frozen, Roles, Trained
from lightrft.strategy.single import SingleStrategy, shapes_of
from lightrft.trainer.rl_step import with_advantages, with_reference, with_values
from lightrft.types import Batch
from lightrft.utils.errors import CheckpointError, WorkerError
from lightrft.workers.build_remote import Apart
from lightrft.workers.local import local_critic, local_frozen, local_process
from lightrft.workers.model_workers import RemoteFollower, RemoteModel, RemoteTeacher, follower_host, model_host
from lightrft.workers.trainable_workers import RemoteCritic, RemoteProcess, critic_host, process_host
from lightrft.workers.weight_sync import Hand
from lightrft.workers.worker_group import Limits
from tests.unit.rollout.test_collect import Threads, of_all_ranks
from tests.unit.trainer.test_rl_step import batch_of, roles_of
from tests.worker_helpers import ProcessWorker

CPU = StrategyConfig(device="cpu")
LIMITS = Limits(restarts=2, silence=60.0)
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=8).save_pretrained(path)
    return path


def config_of(folder: Path, **over: Any) -> RLConfig:
    tree = {
        "model": {"path": str(folder)},
        "algorithm": {"preset": "vapo", "value": {"clip": 0.1}},
        "sampling": {"max_new_tokens": 8},
        "train": {"mini_batches": 2, "micro_batch_tokens": 24},
        "critic": {"optimizer": {"lr": 1e-2, "warmup": 3}},
    }
    return build(RLConfig, deep_merge(tree, over))


@pytest.fixture
def critic(folder: Path) -> Iterator[ProcessWorker]:
    worker = ProcessWorker("critic", partial(critic_host, config_of(folder), CPU, STEPS, 1))
    yield worker
    worker.close()


def roles_with(config: RLConfig, critic: Trained | RemoteCritic) -> Roles:
    roles = roles_of(config)
    roles.critic = critic
    return roles


def local(config: RLConfig) -> Trained:
    found = local_critic(config, SingleStrategy(CPU), STEPS)
    assert found is not None
    return found


def step(roles: Roles, config: RLConfig, number: int) -> tuple[Batch, dict[str, float]]:
    controls, batch = Controls.of(config.algorithm), batch_of(seed=number)
    batch = batch.replace(old_logprobs=batch.behavior_logprobs)
    batch = with_advantages(with_values(batch, roles, config, controls), config, controls)
    return batch, update(roles, batch, config, controls, number).compute()


def test_log_probs_are_bit_for_bit_those_of_a_model_of_this_process_also_when_a_worker_dies(folder: Path) -> None:
    config = config_of(folder)
    model, roles = ModelConfig(path=str(folder)), roles_of(config)
    workers = [ProcessWorker(f"reference {i}", partial(model_host, model, CPU, 1)) for i in range(2)]
    remote = RemoteModel(workers, LIMITS)
    batch = batch_of(groups=12)
    expected = logprobs_by_parts(Frozen(local_frozen(model, SingleStrategy(CPU))), batch, roles, config)
    try:
        assert torch.equal(logprobs_by_parts(remote, batch, roles, config), expected)
        workers[0].signal(signal.SIGKILL)
        assert torch.equal(logprobs_by_parts(remote, batch, roles, config), expected)
        assert remote.take_counts() == {"restarts": 1}
        empty = batch.select(torch.zeros(0, dtype=torch.long))
        assert remote.score(empty, temperature=1.0).logprobs.shape == (0,)
    finally:
        remote.close()


@pytest.mark.parametrize(("decay", "dtype"), [(0.0, "float32"), (0.75, "bfloat16")])
def test_a_reference_in_workers_follows_the_policy_bit_for_bit_on_every_rank_and_one_that_dies_catches_up(
    folder: Path, decay: float, dtype: Any
) -> None:
    """Copies, and averages of half-precision weights, which go on from what was saved of them."""
    config, model = config_of(folder), ModelConfig(path=str(folder), dtype=dtype)
    kl = KLConfig(where="loss", coef=0.1, refresh_every=1, refresh_decay=decay)
    strategy = SingleStrategy(CPU)
    policies = [Actor(tiny_model("qwen2", seed=seed, dtype=getattr(torch, dtype))) for seed in (5, 6, 7)]
    workers = [ProcessWorker(f"reference {i}", partial(follower_host, model, CPU, 1)) for i in range(2)]
    batch = batch_of(groups=6)

    def own() -> Follower:
        return Follower.of(local_frozen(model, strategy), shapes_of(policies[0]), strategy, kl)

    def told(
        roles: Roles, reference: Any, ranks: Any, saved: dict[str, Any] | None, moves: range
    ) -> tuple[list[Any], dict[str, Any]]:
        roles.reference, roles.strategy.ranks = reference, ranks
        load_refreshed(roles, saved or {})
        found = [logprobs_by_parts(reference, batch, roles, config)]
        for i in moves:
            roles.policy.state = strategy.prepare(policies[i], config.optimizer, 1)
            refresh(roles, kl, i + 1)
            if ranks.rank == 0 and not isinstance(reference, Follower):
                workers[i % 2].signal(signal.SIGKILL)
            found.append(logprobs_by_parts(reference, batch, roles, config))
        return found, {k: {n: t.clone() for n, t in v.items()} for k, v in refreshed_state(roles).items()}

    def remote(saved: dict[str, Any] | None, moves: range) -> list[tuple[list[Any], dict[str, Any]]]:
        made = [
            roles_of(config),
            roles_of(config),
        ]  # not in threads: transformers has a dtype for the whole process while it loads
        ours, hand = own(), Hand("shared", 30_000)

        def one(ranks: Threads) -> tuple[list[Any], dict[str, Any]]:
            first = ranks.rank == 0
            reference = RemoteFollower(workers if first else (), LIMITS, hand, ours if first else None, ranks)
            found = told(made[ranks.rank], reference, ranks, saved, moves)
            if first:
                reference.crew.settle()
                assert reference.take_counts()["restarts"] >= 1
            return found

        return of_all_ranks(one, 2, minutes=5)

    try:
        expected, saved = told(roles_of(config), own(), ALONE, None, range(2))
        (first, state), (second, nothing) = remote(None, range(2))
        assert len({tuple(found.tolist()) for found in expected}) == 3
        assert all(map(torch.equal, first, expected)) and all(map(torch.equal, second, expected)) and nothing == {}
        assert all(torch.equal(saved["reference"][n], t) for n, t in state["reference"].items())
        expected, _ = told(roles_of(config), own(), ALONE, saved, range(2, 3))
        for found, _ in remote(state, range(2, 3)):
            assert all(map(torch.equal, found, expected))
    finally:
        for worker in workers:
            worker.close()


@pytest.mark.parametrize(("kind", "preset"), [("critic", "vapo"), ("process", "prime")])
def test_a_model_that_learns_in_a_worker_keeps_activations_where_the_strategy_says(folder: Path, kind: str, preset: str) -> None:
    tree = {"device": "cpu", "offload_activations": True}
    config = config_of(folder, algorithm={"preset": preset}, strategy=tree, run={"threads": torch.get_num_threads()})
    made: list[Any] = []
    apart = Apart(config, ALONE, lambda _, make: made.append(make()) or [SimpleNamespace()], "here")  # type: ignore[arg-type]
    getattr(apart, kind)(SingleStrategy(CPU), STEPS)
    (host,) = made
    assert host.strategy.config == StrategyConfig(**tree)
    assert host.trained.model._forward_pre_hooks


@pytest.mark.parametrize("padded", [0, 5])
def test_whole_distributions_of_a_teacher_in_a_worker_are_bit_for_bit_those_of_one_of_this_process(
    tmp_path: Path, padded: int
) -> None:
    """Whatever the width of its head, with answers or without, and when the worker dies."""
    width = tiny_model("qwen2").config.vocab_size + padded
    tiny_model("gemma2", seed=9, hidden_size=24, vocab_size=width).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    config = config_of(tmp_path, algorithm={"preset": "opd", "distill": {"kind": "jsd", "beta": 0.3}})
    worker = ProcessWorker("teacher", partial(model_host, model, CPU, 1))
    remote = RemoteTeacher([worker], LIMITS, torch.device("cpu"))
    roles, batch = roles_of(config), batch_of()
    states = torch.randn(batch.tokens, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = torch.nn.Linear(16, width - padded)

    def of(teacher: Any) -> tuple[torch.Tensor, ...]:
        roles.teacher = teacher
        target = targets(roles, config)(batch)
        assert target is not None
        found = token_divergence(states, head, target, chunk_mb=0.01)
        return found, *torch.autograd.grad(found.sum(), [states, head.weight])

    try:
        expected = of(Frozen(local_frozen(model, SingleStrategy(CPU))))
        assert all(map(torch.equal, of(remote), expected)) and expected[0].abs().min() > 0
        worker.signal(signal.SIGKILL)
        assert all(map(torch.equal, of(remote), expected))
        assert remote.take_counts() == {"restarts": 1}
        nobody = batch.select(torch.zeros(0, dtype=torch.long))
        empty = remote.target(nobody, "jsd")
        assert empty.states.shape == (0, 24)
        assert token_divergence(states[:0], head, empty).shape == (0,)
    finally:
        remote.close()


@pytest.mark.parametrize("forward", ["single", "double"])
def test_a_process_reward_model_in_a_worker_learns_bit_for_bit_what_one_of_this_process_does(
    folder: Path, tmp_path: Path, forward: str
) -> None:
    config = config_of(
        folder, algorithm={"preset": "prime"}, process={"forward": forward, "threshold": 0.0, "optimizer": {"lr": 1e-2}}
    )
    worker = ProcessWorker("process", partial(process_host, config, CPU, STEPS, 1))
    here, there = roles_of(config), roles_of(config)
    here.process, there.process = local_process(config, here.strategy, STEPS), RemoteProcess(worker, LIMITS)
    assert here.process is not None
    try:
        assert list(here.process.shapes.items()) == list(there.process.shapes.items())
        for number in range(3):
            batch = with_reference(batch_of(seed=number), here, config)
            metrics, found = Metrics(), Metrics()
            expected = with_process_rewards(batch, here, config, metrics).process_rewards
            assert torch.equal(with_process_rewards(batch, there, config, found).process_rewards, expected)  # type: ignore[arg-type]
            assert metrics.compute() == found.compute() and "process/accuracy" in found.compute()
        for roles, name in ((here, "here"), (there, "there")):
            roles.process.save(roles.strategy, tmp_path / name)  # type: ignore[union-attr]
        for file in ("state.safetensors", "state.json"):
            assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()
        worker.restart()
        there.process.load(there.strategy, tmp_path / "here")
        batch = with_reference(batch_of(seed=4), here, config)
        one, two = (with_process_rewards(batch, roles, config, Metrics()).process_rewards for roles in (here, there))
        assert torch.equal(one, two)  # type: ignore[arg-type]
        worker.signal(signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"process was lost .* since the last checkpoint"):
            with_process_rewards(batch, there, config, Metrics())
    finally:
        there.process.close()


def test_a_critic_in_a_worker_learns_bit_for_bit_what_one_of_this_process_does(
    folder: Path, critic: ProcessWorker, tmp_path: Path
) -> None:
    config = config_of(folder)
    here, there = (roles_with(config, c) for c in (local(config), RemoteCritic(critic, LIMITS)))
    assert here.critic is not None and there.critic is not None
    assert list(here.critic.shapes.items()) == list(there.critic.shapes.items())
    for number in range(3):
        (batch, metrics), (same, found) = (step(roles, config, number) for roles in (here, there))
        assert batch.values is not None and batch.final_values is not None and same.values is not None
        assert torch.equal(batch.values, same.values) and torch.equal(batch.final_values, same.final_values)  # type: ignore[arg-type]
        assert metrics == found and metrics["critic/optimizer_steps"] == 2
    for roles, name in ((here, "here"), (there, "there")):
        roles.critic.save(roles.strategy, tmp_path / name)  # type: ignore[union-attr]
    for file in ("state.safetensors", "state.json"):
        assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()
    for name, parameter in here.actor.named_parameters():
        assert torch.equal(parameter, dict(there.actor.named_parameters())[name])


def test_each_placement_takes_up_what_the_other_saved(folder: Path, critic: ProcessWorker, tmp_path: Path) -> None:
    config = config_of(folder)
    one, remote = roles_with(config, local(config)), RemoteCritic(critic, LIMITS)
    step(one, config, 0)
    assert one.critic is not None
    one.critic.save(one.strategy, tmp_path / "one")
    remote.load(one.strategy, tmp_path / "one")
    two = roles_with(config, remote)
    two.actor.load_state_dict(one.actor.state_dict())
    two.policy.state.optimizer.load_state_dict(one.policy.state.optimizer.state_dict())
    (batch, metrics), (same, found) = step(one, config, 1), step(two, config, 1)
    assert torch.equal(batch.values, same.values)  # type: ignore[arg-type]
    assert {k: v for k, v in metrics.items() if "critic" in k} == {k: v for k, v in found.items() if "critic" in k}
    remote.save(two.strategy, tmp_path / "two")
    again = local(config)
    again.load(one.strategy, tmp_path / "two")
    for name, parameter in one.critic.model.named_parameters():  # type: ignore[union-attr]
        assert torch.equal(parameter, dict(again.model.named_parameters())[name])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        remote.load(two.strategy, tmp_path / "bad")


def test_the_loss_of_a_critic_ends_the_run_and_says_how_to_go_on(folder: Path, critic: ProcessWorker) -> None:
    remote = RemoteCritic(critic, LIMITS)
    remote.values(batch_of())
    critic.signal(signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"critic was lost .* since the last checkpoint"):
        remote.values(batch_of())
