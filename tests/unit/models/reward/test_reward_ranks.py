"""Reward models on two processes: the scores, gradients and steps of one."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.process_group import (
    ModelParallelGroup,
    ProcessGroup,
    init_process_group,
)
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.fsdp2 import Fsdp2Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from tests import warm
from tests.model_helpers import gap, ragged_batch, weights
from tests.unit.distributed.test_process_group import free_port
from tests.unit.models.reward.scoring import POOLINGS, TWO, settings_of

pytestmark = pytest.mark.slow

FORMS: dict[str, dict[str, Any]] = {
    **{pooling: {"heads": TWO, "gate": True, "pooling": pooling} for pooling in POOLINGS},
    "ordinal of an inner layer": {"heads": [{"kind": "ordinal", "size": 3}], "layer": 1},
}


KINDS = ["fsdp2"]
if importlib.util.find_spec("deepspeed") is not None:
    KINDS += ["zero1", "zero3"]


def strategy_of(kind: str, ranks: ProcessGroup) -> SingleStrategy:
    if kind == "fsdp2":
        return Fsdp2Strategy(StrategyConfig(device="cpu"), ranks)
    stage = 1 if kind == "zero1" else 3
    return DeepSpeedStrategy(
        StrategyConfig(kind="deepspeed", zero_stage=stage, device="cpu"), ranks
    )


def some_batch() -> Batch:
    return ragged_batch([5, 7, 3], [4, 6, 2, 5, 3, 7, 1, 4], [0, 0, 0, 1, 1, 1, 2, 2])


def loss_of(reward: RewardModel, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """The share of ``rows`` in a loss of the whole batch."""
    shares = weights(len(batch), torch.float32)[rows]
    found = reward.score(batch.select(rows)).values()
    return sum((shares * (each.scores - 0.1 * each.outputs.sum(-1))).sum() for each in found)


def step(strategy: Any, config: ModelConfig, settings: RewardModelConfig) -> dict[str, Any]:
    """One optimizer step, of whose rows each rank has its share."""
    with strategy.loading() as device:
        reward = RewardModel.load(config, settings, device=device)
    state = strategy.prepare(reward, OptimizerConfig(lr=1e-2, eps=1e-3), 2)
    reward.train()
    ranks = strategy.data_parallel_group
    batch = some_batch()
    loss = loss_of(reward, batch, torch.arange(ranks.rank, len(batch), ranks.size))
    strategy.backward(state, loss, last=True)
    norm = strategy.step(state).grad_norm
    moved = dict(strategy.full_parameters(state))
    with torch.no_grad():
        scores = [each.scores for each in reward.eval().score(batch).values()]
    total = float(ranks.sum(loss.detach()))
    return {"loss": total, "norm": norm, "weights": moved, "scores": scores}


def split_rows(config: ModelConfig, settings: RewardModelConfig) -> dict[str, Any]:
    """Scores, and gradients summed over the two ranks, of which each has half of the tokens."""
    import torch.distributed as dist

    reward = RewardModel.load(config, settings).train()
    if dist.is_initialized():
        reward.model_parallel_group = ModelParallelGroup(dist.get_rank(), 2, dist.group.WORLD)
    batch = some_batch()
    loss_of(reward, batch, torch.arange(len(batch))).backward()
    grads = {}
    for name, parameter in reward.named_parameters():
        if parameter.grad is not None:
            grads[name] = parameter.grad.clone()
            if dist.is_initialized():
                dist.all_reduce(grads[name])
    with torch.no_grad():
        scores = [each.scores for each in reward.eval().score(batch).values()]
    return {"grads": grads, "scores": scores}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    port = Path(folder, "port").read_text(encoding="utf-8")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    config = ModelConfig(path=f"{folder}/model")
    with init_process_group(10.0) as ranks:
        found = {}
        for name, fields in FORMS.items():
            settings = settings_of(**fields)
            for kind in KINDS:
                found[name, kind] = step(strategy_of(kind, ranks), config, settings)
            found[name, "rows"] = split_rows(config, settings)
    torch.save(found, f"{folder}/found_{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    model = tiny_model("qwen2", num_key_value_heads=2, tie_word_embeddings=False)
    save_model(model, tiny_tokenizer(), path / "model")
    (path / "port").write_text(str(free_port()))
    warm.spawn(work, path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[Any, dict[str, Any]]]:
    return [torch.load(folder / f"found_{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_on_two_processes_is_that_of_one(form, kind, found, folder):
    config = ModelConfig(path=str(folder / "model"))
    single = SingleStrategy(StrategyConfig(device="cpu"))
    expected = step(single, config, settings_of(**FORMS[form]))
    start = RewardModel.load(config, settings_of(**FORMS[form]))
    for rank in found:
        each = rank[form, kind]
        assert each["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert each["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert_close(each["scores"], expected["scores"])
        assert list(each["weights"]) == list(expected["weights"])
        for name, weight in start.named_parameters():
            moved = expected["weights"][name] - weight.detach()
            assert (each["weights"][name] - expected["weights"][name]).abs().max() <= (
                0.02 * moved.abs().max()
            ), name


@pytest.mark.parametrize("form", FORMS)
def test_rows_split_over_two_processes_have_the_scores_and_gradients_of_one(form, found, folder):
    expected = split_rows(ModelConfig(path=str(folder / "model")), settings_of(**FORMS[form]))
    assert any("heads" in name for name in expected["grads"])
    for rank in found:
        assert_close(rank[form, "rows"]["scores"], expected["scores"])
        assert gap(rank[form, "rows"]["grads"], expected["grads"]) < 1e-4
