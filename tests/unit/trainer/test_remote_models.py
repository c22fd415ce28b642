"""Models in processes of their own give the numbers of models of this one, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config import RLConfig
from lightrft.models.settings import ModelConfig
from lightrft.models.tiny import tiny_model
from lightrft.strategy.settings import StrategyConfig
from lightrft.strategy.single import SingleStrategy
from lightrft.trainer.controls import Controls
from lightrft.trainer.launch.local import local_critic, local_frozen
from lightrft.trainer.launch.remote import Limits
from lightrft.trainer.launch.remote_models import RemoteCritic, RemoteModel, critic_host, model_host
from lightrft.trainer.ppo import with_advantages, with_values
from lightrft.trainer.roles import Frozen, Roles, Trained
from lightrft.trainer.scoring import logprobs_by_parts
from lightrft.trainer.update import update
from lightrft.types import Batch
from lightrft.utils.errors import CheckpointError, WorkerError
from lightrft.utils.settings import build, deep_merge
from tests.unit.trainer.test_ppo import batch_of, roles_of
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
