"""Models and whole runs on the device and on the CPU, bit for bit in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.models.critic import Critic
from lightrft.models.tiny import save_tiny_media
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from tests.e2e.conftest import data_folder, model_folder, rl_tree, teacher_folder  # noqa: F401
from tests.e2e.test_media import picture
from tests.model_helpers import gradients, hard_batch, small_actor, small_model

LAYOUTS = ("prefix_shared", "packed", "padded")
KL = {"where": "loss", "coef": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"train": {"max_tokens_per_micro_batch": 60}},
    "packed rows": {"model": {"layout": "packed"}},
    "padded rows": {"model": {"layout": "padded"}},
    "a critic, asleep with its optimizer while responses are generated": {
        "algorithm": {"preset": "ppo", "kl": {"where": "reward", "coef": 0.1}},
        "strategy": {"offload_during_generation": True},
    },
    "adapters that are their own reference": {
        "model": {"lora": {"rank": 4, "alpha": 8}},
        "algorithm": {"preset": "grpo", "kl": KL},
    },
    "a reference that moves": {"algorithm": {"preset": "grpo", "kl": {**KL, "refresh_every": 1}}},
    "a process reward model": {"algorithm": {"preset": "prime"}},
    "generation ahead of training": {"rollout": {"staleness": 1}},
    "optimizer state on the host, several micro-batches": {
        "strategy": {"cpu_offload": True, "offload_during_generation": True},
        "train": {"max_tokens_per_micro_batch": 60},
    },
    "activations offloaded, layers recomputed": {
        "strategy": {"offload_activations": True},
        "model": {"gradient_checkpointing": True},
    },
    "token masks, entropy and two updates": {
        "algorithm": {"preset": "kl_cov"},
        "train": {"ppo_epochs": 2, "num_mini_batches": 2},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral"])
def test_logprobs_and_gradients_of_each_layout(
    device: torch.device, family: str, layout: str
) -> None:
    """Gemma 2 bends its scores and logits and has windows; Mistral has windows."""
    # Transformers' own attention, by the kernel that it takes on a GPU and on a CPU.
    if layout == "padded":
        torch.manual_seed(0)
    here, there = small_actor(family, layout=layout), small_actor(family, layout=layout)
    there.load_state_dict(here.state_dict())
    there.to(device)
    expected, grads = gradients(here, hard_batch(), entropy=True)
    found, others = gradients(there, hard_batch(), entropy=True)
    assert torch.equal(found.cpu(), expected)
    assert grads.keys() == others.keys()
    assert [name for name, g in grads.items() if not torch.equal(others[name].cpu(), g)] == []


def test_values_of_a_critic(device: torch.device) -> None:
    here, there = Critic(small_model("qwen2")), Critic(small_model("qwen2"))
    there.load_state_dict(here.state_dict())
    expected, found = (
        here.values(hard_batch(), final=True),
        there.to(device).values(hard_batch(), final=True),
    )
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected))


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Metrics of each step but for seconds and bytes."""
    left_out = (
        "time/",
        "memory/",
        "throughput/",
        "perf/",
        "tokens_per_second",
        "generated_per_second",
    )
    return [
        {k: v for k, v in row.items() if not k.startswith(left_out) and "second" not in k}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def responses(folder: Path) -> list[Any]:
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(
        (line["prompt"]["id"], line["sample"], line["token_ids"], line["logprobs"])
        for line in lines
    )


def assert_same(there: Path, here: Path) -> None:
    assert responses(there) == responses(here)
    for found, expected in zip(numbers(there), numbers(here), strict=True):
        assert {k: (found[k], v) for k, v in expected.items() if found[k] != v and v == v} == {}
    found, expected = (
        load_file(folder / "model" / "model.safetensors") for folder in (there, here)
    )
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def varied(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with rewards that differ inside every group."""
    file = next(iter(tree["reward"]["terms"])).rpartition(":")[0]
    return deep_merge(tree, {"reward": {"terms": [f"{file}:varied"]}})


def run_on(tree: dict[str, Any], name: str, device: str, **more: Any) -> Path:
    if device == "cpu":
        # The CPU's memory is the host's.
        more = deep_merge({"strategy": {"cpu_offload": False}}, more)
    tree = deep_merge(
        tree, {"run": {"name": name}, "strategy": {"device": device}, "train": {"steps": 2}}
    )
    config = build(RLConfig, deep_merge(tree, more))
    run_rl(config)
    return Path(tree["run"]["dir"]) / name


@pytest.mark.parametrize("case", CASES)
def test_a_run(rl_tree: dict[str, Any], case: str) -> None:  # noqa: F811
    tree = deep_merge(varied(rl_tree), CASES[case])
    assert_same(run_on(tree, "there", "auto"), run_on(tree, "here", "cpu"))


@pytest.mark.parametrize("kind", ["sampled", "jsd"])
def test_a_run_with_a_teacher(rl_tree: dict[str, Any], teacher_folder: Path, kind: str) -> None:  # noqa: F811
    taught = {
        "algorithm": {"preset": "opd", "distill": {"kind": kind}},
        "teacher": {"path": str(teacher_folder)},
    }
    tree = deep_merge(rl_tree, {**taught, "reward": {"terms": []}})
    assert_same(run_on(tree, "there", "auto"), run_on(tree, "here", "cpu"))


def test_a_run_with_supervised_data_beside_the_rollouts(rl_tree: dict[str, Any]) -> None:  # noqa: F811
    tree = deep_merge(
        varied(rl_tree), {"ptx": {"coef": 0.5, "data": rl_tree["data"], "batch_size": 4}}
    )
    assert_same(run_on(tree, "there", "auto"), run_on(tree, "here", "cpu"))


def test_a_run_that_is_resumed_on_the_device(rl_tree: dict[str, Any]) -> None:  # noqa: F811
    tree = deep_merge(
        rl_tree,
        {
            "checkpoint": {"every": 1},
            "algorithm": {"preset": "ppo"},
            "optimizer": {"schedule": "constant"},
        },
    )
    run_on(tree, "there", "auto", train={"steps": 1})
    assert_same(run_on(tree, "there", "auto"), run_on(tree, "here", "cpu"))


def test_a_run_over_pictures(tmp_path: Path, rl_tree: dict[str, Any]) -> None:  # noqa: F811
    save_tiny_media("qwen2_5_vl", tmp_path / "model", hidden_size=32)
    names = [picture(tmp_path / f"p{i}.png", i, (12 + 8 * i, 20)) for i in range(3)]
    rows = [{"prompt": "which?", "images": [name], "label": "1"} for name in names] + [
        {"prompt": "1+1=", "label": "2"}
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"sources": [{"path": str(tmp_path / "train.jsonl")}]},
    }
    tree = deep_merge(rl_tree, over)
    assert_same(run_on(tree, "there", "auto"), run_on(tree, "here", "cpu"))


def test_supervised_training(rl_tree: dict[str, Any]) -> None:  # noqa: F811
    ends = []
    for name, kind in (("there", "auto"), ("here", "cpu")):
        tree = {key: rl_tree[key] for key in ("model", "data", "optimizer", "log")}
        more = {
            "run": {**rl_tree["run"], "name": name},
            "strategy": {"device": kind},
            "train": {"steps": 2},
            "batch_size": 5,
        }
        run_sft(build(SFTConfig, deep_merge(tree, more)))
        ends.append(Path(rl_tree["run"]["dir"]) / name)
    assert numbers(ends[0]) == numbers(ends[1])
    found, expected = (load_file(folder / "model" / "model.safetensors") for folder in ends)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
