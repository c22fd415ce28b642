"""Media under sharded weights: ranks of which some have fewer prompts, or no media, take the step of one process."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import is_torchvision_available

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import OptimizerConfig, StrategyConfig
from lightrft.distributed.collectives import EqualCalls
from lightrft.distributed.process_group import SINGLE_PROCESS, init_process_group
from lightrft.models.actor import Actor
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, TORCHVISION_FAMILIES, own
from lightrft.strategy.deepspeed import DeepSpeedStrategy
from lightrft.strategy.fsdp2 import Fsdp2Strategy
from lightrft.strategy.single import SingleStrategy
from lightrft.types import Batch
from lightrft.utils.errors import ModelError
from tests import warm
from tests.media_helpers import mixed_batch, mixed_prompts, rig, rig_in
from tests.model_helpers import weights

EXPERTS = ("ernie4_5_vl_moe",)
"""Families that are refused, since some of their experts read media alone."""
FAMILIES = [name for name in ALL_MEDIA_FAMILIES if name in own.FAMILIES and name not in EXPERTS]
STRATEGIES = {
    "fsdp2": {},
    "deepspeed": {"kind": "deepspeed", "zero_stage": 3},
}


def shares(batch: Batch) -> list[list[Tensor]]:
    """The rows of three micro-batches of two ranks: with media and without, and of text on both."""
    plain = (batch.prompt_of == 0).nonzero()[:, 0]
    rich = (batch.prompt_of != 0).nonzero()[:, 0]
    return [[rich[:1], rich[1:], plain[:1]], [plain[:0], plain[1:2], plain[2:]]]


def train(strategy: Any, path: Path, batch: Batch, parts: list[Tensor]) -> dict[str, Any]:
    """Two steps on the micro-batches ``parts``. The rows are scored before, by sharded and by whole weights."""
    torch.manual_seed(3)
    with strategy.loading() as device:
        actor = Actor.load(ModelConfig(path=str(path)), device=device)
    state = strategy.prepare(actor, OptimizerConfig(lr=1e-2, eps=1e-3), 4)
    start = {name: whole.detach().clone() for name, whole in strategy.full_parameters(state)}
    factors = weights(batch.tokens, torch.float32)
    found: dict[str, Any] = {"norms": []}
    with torch.no_grad():
        found["scores"] = [actor.score(batch.select(index)).logprobs for index in parts]
        with strategy.gathered(actor):
            # Ranks make unequal numbers of calls here.
            rows = [index for index in parts if len(index)]
            found["gathered"] = [actor.score(batch.select(index)).logprobs for index in rows]
    actor.train()
    for _ in range(2):
        for index in parts:
            mine = torch.isin(batch.row_of, index)
            loss = (actor.score(batch.select(index)).logprobs * factors[mine]).sum()
            strategy.backward(state, loss, last=index is parts[-1])
        found["norms"].append(strategy.step(state).grad_norm)
    found["moved"] = {
        name: whole.detach() - start[name] for name, whole in strategy.full_parameters(state)
    }
    return found


def work(rank: int, folder: str) -> None:
    """Train each family on this rank's rows."""
    torch.set_num_threads(1)
    kind, port, *families = Path(folder, "task").read_text().split()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    config = StrategyConfig(device="cpu", **STRATEGIES[kind])
    found: dict[str, Any] = {}
    with init_process_group(5.0) as ranks:
        strategy = {"fsdp2": Fsdp2Strategy, "deepspeed": DeepSpeedStrategy}[kind](config, ranks)
        for family in families:
            path = Path(folder, family)
            batch = mixed_batch(mixed_prompts(rig_in(path)))
            found[family] = train(strategy, path, batch, shares(batch)[rank])
        torch.save(found, f"{folder}/found_{rank}.pt")
        # Rank 0 has the store.
        ranks.gather(None)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """By strategy, what both ranks find for the families that were selected."""
    asked: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and "found" in vars(item)["fixturenames"]:
            params = vars(item)["callspec"].params
            is_there = params["family"] not in TORCHVISION_FAMILIES or is_torchvision_available()
            if is_there and not (absent and params["kind"] == "deepspeed"):
                asked.setdefault(params["kind"], []).append(params["family"])
    made = {}
    for kind, families in asked.items():
        folder = tmp_path_factory.mktemp(kind)
        for family in families:
            rig(family, folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (folder / "task").write_text(" ".join([kind, str(free.getsockname()[1]), *families]))
        warm.spawn(work, folder)
        ranks = [torch.load(folder / f"found_{r}.pt", weights_only=True) for r in (0, 1)]
        made[kind] = folder, ranks
    return made


absent = importlib.util.find_spec("deepspeed") is None
WITH_DEEPSPEED = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(absent, reason="the package deepspeed is not installed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("deepspeed", marks=WITH_DEEPSPEED)])
def test_ranks_with_unequal_media_take_the_step_of_one_process(kind, family, found):
    folder, ranks = found[kind]
    batch = mixed_batch(mixed_prompts(rig_in(folder / family)))
    parts = shares(batch)
    alone = SingleStrategy(StrategyConfig(device="cpu"))
    expected = train(alone, folder / family, batch, [part for each in parts for part in each])
    whole = torch.cat(expected["scores"])
    for by in ("scores", "gathered"):
        mine = torch.cat([row for rank in ranks for row in rank[family][by]])
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-5)
    for rank in ranks:
        assert rank[family]["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        moved = rank[family]["moved"]
        gap = sum(float((moved[n] - m).square().sum()) for n, m in expected["moved"].items())
        size = sum(float(m.square().sum()) for m in expected["moved"].values())
        assert gap < 1e-8 * size


def test_each_rank_makes_the_calls_that_it_lacks_on_blanks_of_another():
    class Ranks:
        """The answer of a rank with two calls on pictures and one on text."""

        def gather(self, value):
            return [value, {"image": (2, "picture"), "": (1, "text")}]

    equal = EqualCalls(Ranks())
    assert equal.missing({"": (3, "words")}) == {"": [], "image": ["picture"] * 2}
    equal.ranks = SINGLE_PROCESS
    # A pass with gradient reaches every kind of call that was seen.
    assert equal.missing({"": (1, "words")}) == {"": [], "image": ["picture"]}
    with torch.no_grad():
        assert equal.missing({"": (1, "words")}) == {"": []}
    assert EqualCalls().missing({"": (1, "words")}) == {}


@pytest.mark.parametrize("family", ["mllama", "llava"])
def test_weights_that_another_program_shards_are_refused_where_media_decide_about_calls(
    family, tmp_path
):
    r = rig(family, tmp_path)
    r.actor.run_towers = True
    batch = mixed_batch(mixed_prompts(r))
    parameter = next(r.actor.parameters())
    parameter.ds_id = 0
    r.actor.score(batch)  # its weights are whole now
    parameter.data = torch.empty(0)
    with pytest.raises(ModelError, match=rf"'{family}': its weights are sharded, but by none of"):
        r.actor.score(batch)


def test_experts_of_media_are_refused_with_sharded_weights(tmp_path):
    r = rig("ernie4_5_vl_moe", tmp_path)
    r.actor.run_towers = True
    r.actor.equal_calls.ranks = SINGLE_PROCESS
    for parameter in r.actor.parameters():
        parameter.ds_id = 0
    batch = mixed_batch(mixed_prompts(r))
    name = next(name for name, _ in r.actor.named_parameters() if ".vision_moe." in name)
    r.actor.get_parameter(name).data = torch.empty(0)
    with pytest.raises(ModelError, match="experts of media are trained with sharded weights"):
        r.actor.score(batch)
