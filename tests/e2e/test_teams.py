"""Several real processes on the same rows: the same numbers as one, and less held by each."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.model import LoRAConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.config.verbs import RLConfig
from lightrft.distributed.process_group import SINGLE_PROCESS, ModelParallelGroup
from lightrft.models.actor import Actor
from lightrft.models.lora import add_adapters
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.strategy.tensor_parallel import shard_layers
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.workers.local import strategy_of
from tests import warm
from tests.e2e.several import ENVIRONMENT, PRESETS, check_equal, config_file, rows_with_pictures
from tests.e2e.teams import MEDIA, PLANNED
from tests.model_helpers import float32_bound, small_actor, small_model

SEQUENCE, TENSOR, BOTH = (
    {"sequence_parallel": 2},
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "sequence_parallel": 2},
)
CELLS: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [
        *((name, SEQUENCE) for name in (*PRESETS, "pictures")),
        *(
            (name, TENSOR)
            for name in ("ppo", "pictures", "ppo taken up", "lora", "lora taken up", "lora left")
        ),
    ],
    4: [("grpo", SEQUENCE), ("lora", {"sequence_parallel": 4}), ("lora", TENSOR), ("ppo", BOTH)],
}
"""By the number of processes, the runs and how teams work in them. One process has begun what is taken up, and ends what is left.
Five groups are more than teams, and do not divide by two of them."""


def name_of(ranks: int, name: str, strategy: dict[str, int]) -> str:
    return "-".join([name, str(ranks), *(f"{key}{size}" for key, size in strategy.items())])


def trees_in(folder: Path, data: Path) -> dict[str, dict[str, Any]]:
    """RL runs of two steps on five groups of three answers, with models whose heads four ranks can share."""
    tokenizer = tiny_tokenizer()
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
    }
    tiny_model("qwen2", seed=1, **sizes).save_pretrained(folder / "four")
    tokenizer.save_pretrained(folder / "four")
    save_tiny_media("qwen2_5_vl", folder / "reader", hidden_size=32)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_with_pictures(folder))
    )
    tree = {
        "run": {"seed": 5},
        "model": {"path": str(folder / "four"), "dtype": "float32"},
        "data": {"sources": [{"path": str(data / "train.jsonl")}]},
        "rollout": {"prompts_per_step": 5, "group_size": 3},
        "sampling": {"max_new_tokens": 6},
        "reward": {"terms": [f"{data / 'rewards.py'}:ones"]},
        "train": {"max_tokens_per_micro_batch": 60, "steps": 2},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "log": {"tensorboard": False},
    }
    pictures = {
        "model": {"path": str(folder / "reader")},
        "data": {"sources": [{"path": str(folder / "rows.jsonl")}]},
    }
    return {
        name: deep_merge(tree, cell) for name, cell in {**PRESETS, "pictures": pictures}.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    """Models, configs of all runs, and those of one process finished."""
    folder = tmp_path_factory.mktemp("teams")
    for family in MEDIA:
        save_tiny_media(family, folder / family)
    trees = trees_in(folder, data_folder)
    for name, tree in trees.items():
        run_alone(tree, folder, name)
    for ranks, cells in CELLS.items():
        for name, strategy in cells:
            cell, (tree, _, how) = name_of(ranks, name, strategy), name.partition(" ")
            if how == "taken up":
                run_alone(trees[tree], folder, cell, steps=1)
            first = {"train": {"steps": 1}} if how == "left" else {}
            config_file(deep_merge(trees[tree], {"strategy": strategy, **first}), folder, cell)
    return folder


def run_alone(tree: dict[str, Any], folder: Path, name: str, steps: int = 2) -> None:
    tree = json.loads(config_file(tree, folder, name).read_text())
    run_rl(build(RLConfig, deep_merge(tree, {"train": {"steps": steps}})))


Found = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found_in(folder: Path) -> Found:
    """What the script beside this file finds in each of some processes; they are started once."""

    @cache
    def found(ranks: int) -> list[dict[str, Any]]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        files = [folder / f"{name_of(ranks, *cell)}.yaml" for cell in CELLS[ranks]]
        words = [*torchrun, Path(__file__).with_name("teams.py"), folder, *files]
        done = warm.run(words, env=ENVIRONMENT, seats=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.partition("FOUND")[2].splitlines()[0])

    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
class TestTeams:
    def test_ranks_that_share_the_tokens_of_a_row_give_the_log_probs_and_gradients_of_one(
        self, found_in, ranks
    ):
        for found in found_in(ranks):
            assert len(found["gaps"]) > 15
            single = float32_bound(small_model("qwen2"))
            limit = {name: single if "float32" in name else 1e-9 for name in found["gaps"]}
            assert {
                name: gaps for name, gaps in found["gaps"].items() if max(gaps) > limit[name]
            } == {}

    def test_ranks_that_share_the_layers_of_a_model_give_the_log_probs_and_gradients_of_one(
        self, found_in, ranks
    ):
        for found in found_in(ranks):
            assert tuple(found["tensor"]) == (*PLANNED, "adapters")
            assert {name: gaps for name, gaps in found["tensor"].items() if max(gaps) > 1e-9} == {}

    def test_what_a_rank_holds_for_the_backward_pass_falls_with_the_ranks_that_share_a_row(
        self, found_in, ranks
    ):
        for found in found_in(ranks):
            assert found["held"]["team"] < 1.1 * found["held"]["alone"] / ranks

    def test_runs_give_the_numbers_of_one_process(self, found_in, folder, ranks):
        steps = [run["steps"] for run in found_in(ranks)[0]["runs"]]
        assert steps == [1 if name.endswith("left") else 2 for name, _ in CELLS[ranks]]
        for name, strategy in CELLS[ranks]:
            cell, (tree, _, how) = name_of(ranks, name, strategy), name.partition(" ")
            if how == "left":
                run_alone(json.loads((folder / f"{tree}.yaml").read_text()), folder, cell)
            check_equal(folder / cell, folder / tree)

    def test_every_rank_of_a_team_says_that_it_is_still_drawing(self, found_in, ranks):
        for found in found_in(ranks):
            assert all(run["signs"] for run in found["runs"])

    def test_ranks_of_a_team_wait_for_one_another_as_long_as_all_ranks_do(self, found_in, ranks):
        assert [found["limit"] for found in found_in(ranks)] == [600.0] * ranks


def test_processes_that_teams_do_not_divide_are_refused():
    for ranks in (SINGLE_PROCESS, SimpleNamespace(rank=0, size=6)):
        with pytest.raises(
            ConfigError,
            match=rf"^4 processes work .* the {ranks.size} of this run; .*launch.processes to a multiple of 4",
        ):
            strategy_of(StrategyConfig(sequence_parallel=2, tensor_parallel=2, device="cpu"), ranks)


@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel"])
@pytest.mark.parametrize("kind", ["single", "deepspeed"])
def test_teams_are_refused_with_a_strategy_that_has_none(kind, name):
    with pytest.raises(
        ConfigError,
        match=rf"strategy.{name} = 2 needs strategy.kind auto or fsdp2, which is {kind}",
    ):
        StrategyConfig(**{"kind": kind, name: 2})


@pytest.mark.parametrize(
    ("ranks", "way"), [(3, "set it to 1 or 2$"), (8, "set it to 1 or 2 or 4$")]
)
def test_heads_that_a_team_does_not_divide_are_refused_with_what_would(ranks, way):
    actor = small_actor("qwen2")
    with pytest.raises(
        ModelError,
        match=rf"strategy.sequence_parallel = {ranks} does not divide the 4 heads .*{way}",
    ):
        actor.model_parallel_group = ModelParallelGroup(0, ranks)


def test_heads_are_shared_out_among_those_that_shared_layers_leave():
    actor = small_actor("qwen2", num_attention_heads=4, num_key_value_heads=2)
    actor.model_parallel_group = ModelParallelGroup(0, 4)
    with pytest.raises(
        ModelError,
        match=r"strategy.sequence_parallel = 4 .* the 2 heads .* strategy.tensor_parallel = 2 leaves .*1 of keys.*set it to 1 or 2$",
    ):
        actor.model_parallel_group = ModelParallelGroup(0, 4, tensor=2)
    actor.model_parallel_group = ModelParallelGroup(0, 2, tensor=2)


def test_rows_of_their_own_are_refused_in_a_team():
    actor = small_actor("qwen2", layout="padded")
    with pytest.raises(
        ModelError,
        match=r"strategy.sequence_parallel = 2 .*model.layout = padded.*set strategy.sequence_parallel=1",
    ):
        actor.model_parallel_group = ModelParallelGroup(0, 2)


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("qwen2", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (
            "phi3",
            {"num_key_value_heads": 4},
            "qkv_proj of .* is colwise_gather_output, which is not known here",
        ),
        (
            "qwen3_moe",
            {"num_key_value_heads": 4, "moe_intermediate_size": 34},
            "gate_up_proj of .*experts is .*whose width",
        ),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused_with_the_reason(family, options, why):
    with pytest.raises(
        ConfigError, match=rf"strategy.tensor_parallel = 4: .*{why}.*set strategy.tensor_parallel=1"
    ):
        shard_layers(small_actor(family, **options), SimpleNamespace(size=lambda: 4))


def test_adapters_with_weight_decomposition_are_refused_where_layers_are_shared_out():
    actor = Actor(add_adapters(small_actor("qwen2").base, LoRAConfig(rank=4, dora=True)))
    with pytest.raises(
        ConfigError,
        match=r"strategy.tensor_parallel = 2: model.lora.dora = true .*set model.lora.dora=false; or set strategy",
    ):
        shard_layers(actor, SimpleNamespace(size=lambda: 2))
