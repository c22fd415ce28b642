"""Models in processes of their own give the numbers of models of this one, bit for bit."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.learner.distillation.targets import distillation_targets
from lightrft.learner.forward_passes import compute_logprobs
from lightrft.models.divergence.token_divergence import token_divergence
from lightrft.models.tiny.text import tiny_model
from lightrft.roles import FrozenModel
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.workers.frozen_models import local_frozen
from lightrft.workers.model_workers import RemoteReference, RemoteTeacher, frozen_model_worker
from lightrft.workers.worker_group import FaultPolicy
from tests.unit.trainer.test_rl_step import batch_of, roles_of
from tests.worker_helpers import ProcessWorker

CPU = StrategyConfig(device="cpu")
LIMITS = FaultPolicy(restarts=2, call_timeout=600.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=8).save_pretrained(path)
    return path


def config_of(folder: Path, **over: Any) -> RLConfig:
    tree = {
        "model": {"path": str(folder)},
        "sampling": {"max_new_tokens": 8},
        "train": {"num_mini_batches": 2, "max_tokens_per_micro_batch": 24},
    }
    return build(RLConfig, deep_merge(tree, over))


@pytest.mark.slow
def test_log_probs_are_bit_for_bit_those_of_a_model_of_this_process_also_when_a_worker_dies(
    folder: Path,
) -> None:
    config = config_of(folder)
    model, roles = ModelConfig(path=str(folder)), roles_of(config)
    workers = [
        ProcessWorker(f"reference {i}", partial(frozen_model_worker, model, CPU, 1))
        for i in range(2)
    ]
    remote = RemoteReference(workers, LIMITS)
    batch = batch_of(groups=12)
    expected = compute_logprobs(
        FrozenModel(local_frozen(model, SingleStrategy(CPU))),
        batch,
        roles,
        config.train.micro_batch_tokens,
        config.sampling.temperature,
    )
    try:
        assert torch.equal(
            compute_logprobs(
                remote,
                batch,
                roles,
                config.train.micro_batch_tokens,
                config.sampling.temperature,
            ),
            expected,
        )
        workers[0].signal(signal.SIGKILL)
        assert torch.equal(
            compute_logprobs(
                remote,
                batch,
                roles,
                config.train.micro_batch_tokens,
                config.sampling.temperature,
            ),
            expected,
        )
        assert remote.take_counts() == {"restarts": 1}
        empty = batch.select(torch.zeros(0, dtype=torch.long))
        assert remote.score(empty, temperature=1.0).logprobs.shape == (0,)
    finally:
        remote.close()


class OneThread:
    """A worker that runs its calls one after another. The first waits for a second one."""

    name = "reference 0"

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._second = threading.Event()
        self._pending = 0
        self.most_pending = 0

    def call(self, method: str, *args: Any) -> Future[Any]:
        with self._lock:
            self._pending += 1
            self.most_pending = max(self.most_pending, self._pending)
            if self._pending > 1:
                self._second.set()
        return self._thread.submit(self._answer, args[0])

    def _answer(self, batch: Batch) -> torch.Tensor:
        self._second.wait(300)
        with self._lock:
            self._pending -= 1
        return torch.zeros(batch.tokens)

    def restart(self) -> None:
        raise AssertionError("no call is lost")

    def close(self) -> None:
        self._thread.shutdown()


def test_a_worker_has_its_next_micro_batch_before_it_has_returned_the_last() -> None:
    config = build(RLConfig, {})
    worker = OneThread()
    remote = RemoteReference([worker], LIMITS)
    try:
        batch = batch_of(groups=12)
        compute_logprobs(remote, batch, roles_of(config), 24, 1.0)
    finally:
        remote.close()
    assert worker.most_pending == 2


@pytest.mark.parametrize("padded", [0, 5])
def test_whole_distributions_of_a_teacher_in_a_worker_are_bit_for_bit_those_of_one_of_this_process(
    tmp_path: Path, padded: int
) -> None:
    """Whatever the width of its head, with answers or without, and when the worker dies."""
    width = tiny_model("qwen2").config.vocab_size + padded
    tiny_model("gemma2", seed=9, hidden_size=24, vocab_size=width).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    config = config_of(
        tmp_path, algorithm={"preset": "opd", "distill": {"kind": "jsd", "beta": 0.3}}
    )
    worker = ProcessWorker("teacher", partial(frozen_model_worker, model, CPU, 1))
    remote = RemoteTeacher([worker], LIMITS, torch.device("cpu"))
    roles, batch = roles_of(config), batch_of()
    states = torch.randn(
        batch.tokens, 16, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    head = torch.nn.Linear(16, width - padded)

    def of(teacher: Any) -> tuple[torch.Tensor, ...]:
        roles.teacher = teacher
        target = distillation_targets(roles, config.algorithm.distill, config.sampling.temperature)(
            batch
        )
        assert target is not None
        found = token_divergence(states, head, target, chunk_mb=0.01)
        return found, *torch.autograd.grad(found.sum(), [states, head.weight])

    try:
        expected = of(FrozenModel(local_frozen(model, SingleStrategy(CPU))))
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
