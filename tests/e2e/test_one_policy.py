"""At a learning rate of 0, old policy, reference and sampler are the policy: each ratio is 1 and each KL is 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lightrft.config.base import deep_merge
from lightrft.config.presets import PRESETS
from lightrft.models.tiny import save_tiny_media
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from tests.e2e.conftest import RANDOM
from tests.e2e.test_media import sound

EXACT = 2e-5
"""Difference of log-probs in nats that rounding in float32 makes between the engine and the trainer."""


def first_step(config: Any, folder: Path) -> dict[str, Any]:
    run_rl(config)
    return read_rows(folder / "run" / "metrics.jsonl")[0]


def audio_rows(folder: Path) -> Path:
    """Write three prompts with a sound each. Return their file."""
    names = [sound(folder / f"{k}.wav", k, 4000) for k in range(3)]
    rows = [{"prompt": "who?", "audio": name, "label": "1"} for name in names]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def assert_one_policy(row: dict[str, Any]) -> None:
    """Assert that no metric of ``row`` tells the policy from its old self, its sampler or its reference."""
    ones = [name for name in row if name.endswith(("/ratio", "/correction"))]
    nulls = ("policy/kl", "policy/old_kl", "policy/rollout_logprob_diff", "policy/teacher_kl")
    for name in ones:
        assert math.isclose(row[name], 1.0, abs_tol=EXACT), (name, row[name])
    for name in nulls:
        assert abs(row.get(name, 0.0)) <= EXACT, (name, row[name])
    assert row.get("policy/clip_fraction", 0.0) == 0.0


def still(**over: Any) -> dict[str, Any]:
    """Settings of a run of one step, of two optimizer steps that move nothing."""
    tree = {
        "optimizer": {"lr": 0.0},
        "train": {"steps": 1, "num_mini_batches": 2},
        "algorithm": {"kl": {"where": "loss", "coef": 0.1}},
    }
    return deep_merge(tree, over)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_a_random_forward_is_no_other_policy(
    rl_config, random_folder, data_folder, tmp_path, family, dropout
):
    model = {"path": str(random_folder(family)), "dropout": dropout}
    terms = [f"{data_folder / 'rewards.py'}:varied"]
    row = first_step(rl_config(**still(model=model, reward={"terms": terms})), tmp_path)
    assert_one_policy(row)
    assert row["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    ("family", "model"),
    [
        *((name, {"dropout": True}) for name in (*RANDOM, "qwen2_audio")),
        ("gpt2", {"lora": {"rank": 2, "dropout": 0.3}}),
    ],
)
def test_a_run_with_a_random_forward_resumes_bit_for_bit(
    rl_config, random_folder, data_folder, tmp_path, family, model
):
    base = tmp_path / "tower" if family == "qwen2_audio" else random_folder(family)
    rows = data_folder / "train.jsonl"
    if family == "qwen2_audio":
        save_tiny_media(family, base)
        settings = json.loads((base / "config.json").read_text())
        settings["audio_config"]["encoder_layerdrop"] = 0.5
        (base / "config.json").write_text(json.dumps(settings))
        rows = audio_rows(tmp_path)

    def config(name: str, steps: int, **over: Any) -> Any:
        tree = {
            "run": {"name": name},
            "model": {"path": str(base), **model, **over},
            "data": {"sources": [{"path": str(rows)}]},
            "reward": {"terms": [f"{data_folder / 'rewards.py'}:varied"]},
            "train": {"steps": steps, "num_mini_batches": 2},
            "optimizer": {"schedule": "constant"},
            "algorithm": {"kl": {"where": "loss", "coef": 0.1}},
        }
        return rl_config(**tree)

    run_rl(config("whole", 3))
    run_rl(config("parts", 1))
    torch.rand(7)  # another process has used its generators in another way
    run_rl(config("parts", 3))
    run_rl(config("still", 3, dropout=False, **({"lora": {"rank": 2}} if "lora" in model else {})))
    whole, parts, still = (
        load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "parts", "still")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not all(torch.equal(whole[name], still[name]) for name in whole)


SAMPLING: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1, "temperature": 1.3},
    {"min_new_tokens": 4},
    {"repetition_penalty": 1.5, "temperature": 0.7},
    {"first_token_temperature": 4.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
]
"""Sampling settings with filters."""
CORRECTIONS = {"importance_sampling": ["tis"]}
COMMON = ("grpo", "topr", "ppo", "cispo")
"""Presets that ``make test`` tries."""


def needed_by(preset: str, reward: str, folder: Path) -> dict[str, Any]:
    """Return settings that ``preset`` needs, and a correction where it may have one."""
    algorithm: dict[str, Any] = {"preset": preset}
    row = PRESETS[preset]
    tree: dict[str, Any] = {"reward": {"terms": [reward]}, "algorithm": algorithm}
    if "lagrangian" in row:
        algorithm["lagrangian"] = {"costs": ["seeded"]}
        cost = reward.replace("varied", "seeded")
        tree["reward"]["terms"].append({"function": cost, "weight": 0.0})
    if row.get("distill"):
        tree["teacher"] = {"path": str(folder)}
    if preset in ("ppo", "grpo", "dapo", "reinforce"):
        algorithm |= CORRECTIONS
    return tree


@pytest.mark.parametrize(
    ("number", "preset"),
    [
        pytest.param(n, preset, marks=() if preset in COMMON else pytest.mark.slow, id=preset)
        for n, preset in enumerate(PRESETS)
    ],
)
def test_a_filter_of_sampling_is_part_of_the_policy_of_every_preset(
    rl_config, model_folder, data_folder, tmp_path, preset, number
):
    reward = f"{data_folder / 'rewards.py'}:varied"
    tree = needed_by(preset, reward, model_folder)
    tree |= {
        "optimizer": {"lr": 0.0},
        "train": {"steps": 1, "num_mini_batches": 2},
        "sampling": {"max_new_tokens": 8, **SAMPLING[number % len(SAMPLING)]},
    }
    row = first_step(rl_config(**tree), tmp_path)
    assert_one_policy(row)
    assert "policy/rollout_logprob_diff" in row or row["policy/frac_rows_with_loss"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "preset"), enumerate(PRESETS))
def test_a_random_forward_under_a_filter_is_one_policy_of_every_preset(
    rl_config, random_folder, data_folder, tmp_path, preset, number
):
    """Each preset meets a family, and each family all sampling settings."""
    row, family = divmod(number, len(RANDOM))
    folder = random_folder(list(RANDOM)[family])
    tree = needed_by(preset, f"{data_folder / 'rewards.py'}:varied", folder)
    tree |= {
        "model": {"path": str(folder), "dropout": True},
        "optimizer": {"lr": 0.0},
        "train": {"steps": 1, "num_mini_batches": 2},
        "sampling": {"max_new_tokens": 8, **SAMPLING[row % len(SAMPLING)]},
    }
    assert_one_policy(first_step(rl_config(**tree), tmp_path))


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8, "temperature": 0.7}])
def test_what_the_model_reads_as_media_is_no_token_of_the_policy(
    rl_config, data_folder, tmp_path, sampling
):
    folder = tmp_path / "omni"
    save_tiny_media("qwen2_5_omni_thinker", folder)
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    media = [vocabulary[f"<|{name}|>"] for name in ("audio_bos", "vision_bos", "IMAGE", "AUDIO")]
    weights = load_file(folder / "model.safetensors")
    # In about half of the places, one of these tokens is by far the likeliest.
    weights["lm_head.weight"][media] *= 30
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    over = {
        "model": {"path": str(folder)},
        "data": {"sources": [{"path": str(audio_rows(tmp_path))}]},
        "reward": {"terms": [f"{data_folder / 'rewards.py'}:varied"]},
        "sampling": {"max_new_tokens": 8, **sampling},
    }
    row = first_step(rl_config(**still(**over)), tmp_path)
    assert_one_policy(row)
    assert row["policy/grad_norm"] > 0
    [file] = (tmp_path / "run" / "rollouts").glob("*.jsonl*")
    lines = file.read_text().splitlines()
    sampled = [token for line in lines for token in json.loads(line)["token_ids"]]
    assert sampled and not set(media) & set(sampled)
