"""What a run needs: which models, on how many devices, in which phases."""

from __future__ import annotations

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
    update = {name: next(p for p in n.phases if p.name == "policy: update") for name, n in (("one", one), ("two", two))}
    assert update["two"].parts["gradients"] == update["one"].parts["gradients"] / 2
    assert update["two"].parts["blocks made whole"] > 0


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
