"""Runs with the load-balancing loss of experts: its value on the batch of a step, and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import EvaluateConfig, RLConfig, RMConfig, SFTConfig
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.rollout.serialization import load_batch
from lightrft.trainer.inference import run_eval
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ConfigError, ModelError
from tests.unit.learner.test_router_loss import padded_rows

METRIC = "policy/router_aux_loss"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    family_model("qwen3_moe", num_experts=8).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def over(folder: Path, **model: Any) -> dict[str, Any]:
    return {"model": {"path": str(folder), "router_aux_loss_coef": 0.1, **model}}


def values(folder: Path, metric: str = METRIC) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[metric] for line in lines]


def test_a_run_adds_the_loss_of_all_responses_of_a_step_however_they_are_split(
    rl_tree: dict[str, Any], mixture: Path, tmp_path: Path
) -> None:
    more = {
        **over(mixture),
        "train": {"steps": 1},
        # All rewards are equal, so that no response has an advantage.
        "reward": {"terms": [{"function": "length", "options": {"limit": 99, "buffer": 1}}]},
        "log": {"batches_every": 1},
    }
    tree = deep_merge(rl_tree, more)
    run_rl(build(RLConfig, tree))
    (saved,) = (tmp_path / "run").rglob("step_*.pt")
    ids, mask = padded_rows(load_batch(saved.with_suffix("")))
    model = AutoModelForCausalLM.from_pretrained(mixture)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, output_router_logits=True).aux_loss
    (found,) = values(tmp_path / "run")
    assert found == pytest.approx(float(expected), rel=1e-5)
    assert values(tmp_path / "run", "policy/frac_rows_with_loss") == [1.0]
    (norm,) = values(tmp_path / "run", "policy/grad_norm")
    assert norm > 1e-4
    split = {"run": {"name": "split"}, "train": {"max_tokens_per_micro_batch": 20}}
    run_rl(build(RLConfig, deep_merge(tree, split)))
    assert values(tmp_path / "split") == pytest.approx([found], rel=1e-6)
    assert values(tmp_path / "split", "policy/grad_norm") == pytest.approx([norm], rel=1e-4)


def test_training_on_the_loss_alone_balances_the_experts_and_the_run_can_be_evaluated(
    rl_tree: dict[str, Any], mixture: Path, data_folder: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "run": rl_tree["run"],
        "data": {"sources": [{"path": str(tmp_path / "rows.jsonl")}]},
        "model": over(mixture)["model"] | {"router_aux_loss_coef": 1000.0, "dtype": "float32"},
        "optimizer": {"lr": 1e-2},
        "batch_size": 8,
        "train": {"steps": 6},
        "log": {"tensorboard": False},
    }
    run_sft(build(SFTConfig, tree))
    found = values(tmp_path / "run")
    assert found[0] > found[-1]
    scored = {
        "reward": rl_tree["reward"],
        "eval": {"data": rl_tree["data"], "sampling": {"max_new_tokens": 4}},
    }
    model = {"model": {"path": str(tmp_path / "run")}, "run": {"dir": str(tmp_path), "name": "e"}}
    run_eval(build(EvaluateConfig, {**scored, **model}))


def test_a_model_without_routers_and_a_verb_without_the_loss_refuse_it_by_name(
    rl_tree: dict[str, Any], model_folder: Path
) -> None:
    with pytest.raises(ModelError, match=r"model\.router_aux_loss_coef = 0\.1 .*'qwen2'"):
        run_rl(build(RLConfig, deep_merge(rl_tree, over(model_folder))))
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss_coef"):
        build(RMConfig, over(model_folder))
