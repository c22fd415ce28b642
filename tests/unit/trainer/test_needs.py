"""What a run needs: which models, on how many devices, in which phases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightrft.config import RLConfig, SFTConfig
from lightrft.models.tiny import tiny_config
from lightrft.trainer.needs import Device, Lengths, Needs, needs
from lightrft.utils.settings import build

LENGTHS = Lengths(16, 32, 4, 4)
SIZES = {"vocab_size": 300, "num_attention_heads": 2}


def found(folder: Path, family: str = "qwen2", processes: int = 1, **tree: Any) -> Needs:
    config = tiny_config(family, **SIZES)
    config.dtype = "float32"
    config.save_pretrained(folder / family)
    model = {"path": str(folder / family), **tree.pop("model", {})}
    given = {"model": model, "train": {"micro_batch_tokens": 200}, **tree}
    return needs(build(RLConfig, given), LENGTHS, Device("cuda", 0, processes))


def test_only_the_models_that_the_algorithm_needs_are_counted(tmp_path: Path) -> None:
    plain = {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}}
    assert list(found(tmp_path, algorithm=plain).models) == ["policy"]
    assert list(found(tmp_path, algorithm={"preset": "ppo"}).models) == ["policy", "reference", "critic"]
    with_kl = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
    assert list(found(tmp_path, algorithm=with_kl, model={"lora": {}}).models) == ["policy"]


def test_all_phases_of_a_step_are_there(tmp_path: Path) -> None:
    names = [phase.name for phase in found(tmp_path, algorithm={"preset": "ppo"}).phases]
    assert {"drawing answers", "policy: layout check", "policy: update", "reference: forward", "critic: update"} <= set(names)


def test_shards_halve_what_is_held_and_each_rank_reads_a_model_whole(tmp_path: Path) -> None:
    one, two = found(tmp_path), found(tmp_path, processes=2)
    assert two.models["policy"].total == one.models["policy"].total / 2
    assert "loading, one model whole" in [phase.name for phase in two.phases]
    assert update_of(two)["blocks made whole"] > 0


def update_of(needed: Needs) -> Mapping[str, float]:
    return next(p for p in needed.phases if p.name == "policy: update").parts


def test_gradients_are_shared_out_where_one_micro_batch_makes_a_step_and_whole_where_several_add_up(tmp_path: Path) -> None:
    large = {"train": {"micro_batch_tokens": 10_000}}
    assert update_of(found(tmp_path, processes=2, **large))["gradients"] == update_of(found(tmp_path, **large))["gradients"] / 2
    assert update_of(found(tmp_path, processes=2))["gradients"] == update_of(found(tmp_path))["gradients"]


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 2), (3, 2, 2)])
def test_each_stage_of_zero_shares_out_what_it_says_and_of_frozen_models_the_third_alone(
    tmp_path: Path, stage: int, weights: int, gradients: int
) -> None:
    zero = {"kind": "deepspeed", "stage": stage, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}}
    algorithm = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
    one, two = found(tmp_path, algorithm=algorithm), found(tmp_path, processes=2, strategy=zero, algorithm=algorithm)
    alone, shared = one.models["policy"], two.models["policy"]
    assert (alone.weights / shared.weights, alone.moments / shared.moments) == (weights, 2)
    assert shared.masters == (alone.weights / 2 if stage < 3 else 0)
    assert two.models["reference"].weights == one.models["reference"].weights / (2 if stage == 3 else 1)
    assert update_of(two)["gradients"] == update_of(one)["gradients"] / gradients + 4 * 1000
    assert ("blocks made whole" in update_of(two)) is (stage == 3)


def test_optimizer_state_that_is_offloaded_is_not_on_the_device(tmp_path: Path) -> None:
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    held = found(tmp_path, processes=2, strategy={"kind": "deepspeed", "deepspeed": offload}).models["policy"]
    assert (held.masters, held.moments) == (0, 0)
    assert held.weights > 0


def test_drawing_ahead_holds_copies_of_the_weights_and_goes_on_beside_every_phase(tmp_path: Path) -> None:
    plain, ahead = found(tmp_path), found(tmp_path, rollout={"staleness": 1})
    assert ahead.models["sampling copies"].weights == 2 * plain.models["policy"].weights
    assert all("drawing meanwhile" in phase.parts for phase in ahead.phases[1:])


def test_a_mixture_of_experts_is_computed_and_what_cannot_be_traced_is_said(tmp_path: Path) -> None:
    needed = found(tmp_path, "qwen3_moe")
    assert next(p for p in needed.phases if p.name == "policy: update").parts["activations"] > 0
    assert all("cannot be traced" in problem for problem in needed.problems)


@pytest.mark.parametrize("evaluates", [False, True])
def test_supervised_runs_draw_only_to_evaluate(tmp_path: Path, evaluates: bool) -> None:
    tiny_config("qwen2", **SIZES).save_pretrained(tmp_path)
    data = {"eval": {"data": {"sources": ["held.jsonl"]}}} if evaluates else {}
    config = build(SFTConfig, {"model": {"path": str(tmp_path)}, **data})
    names = [phase.name for phase in needs(config, Lengths(1, 63, 4, 1), Device("cpu", 0)).phases]
    assert ("drawing answers" in names) is evaluates


def test_ranks_that_share_a_row_hold_a_part_of_its_activations_and_of_each_layer(tmp_path: Path) -> None:
    two = found(tmp_path, processes=2)
    rows, layers = (found(tmp_path, processes=2, strategy={name: 2}) for name in ("sequence", "tensor"))
    assert rows.models == layers.models == two.models
    alone = update_of(found(tmp_path))
    assert update_of(rows)["activations"] == alone["activations"] / 2
    assert update_of(layers)["gradients"] == alone["gradients"] / 2
    assert update_of(layers)["blocks made whole"] == update_of(two)["blocks made whole"] / 2
    whole = next(p for p in layers.phases if p.name == "drawing answers").parts["policy made whole"]
    assert whole == 0


def test_a_team_draws_and_trains_the_rows_that_its_ranks_would_have_had(tmp_path: Path) -> None:
    cache = [
        next(p for p in found(tmp_path, processes=4, strategy=s).phases if p.name == "drawing answers").parts["cache"]
        for s in ({}, {"sequence": 2}, {"tensor": 2})
    ]
    assert cache[0] == cache[1] == cache[2]
