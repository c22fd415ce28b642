"""Tiny real models and data on disk, and configs over them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from tests import warm
from tests.reward_trials import try_each_reward_once

REWARD = '''
def ones(rollout):
    """The share of the answer's characters that are 1."""
    return rollout.text.count("1") / max(1, len(rollout.text))


def varied(rollout):
    """As different for answers as for right and wrong ones."""
    return sum(rollout.token_ids) % 7 / 7


def seeded(rollout):
    return float(rollout.seed % 3)


def sometimes_hangs(rollout):
    import signal

    if rollout.seed % 11 == 0:
        # As if the deadline, which is far, were over soon.
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 30
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            pass
    return varied(rollout)


def wrong_sign(rollout):
    return -ones(rollout)


def sometimes_fails(rollout):
    if rollout.seed % 5 == 0:
        raise ValueError("no score today")
    return float(rollout.seed % 3 == 0)
'''


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 of a character vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model(
        "qwen2", seed=1, hidden_size=32, intermediate_size=64, vocab_size=len(tokenizer)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


RANDOM: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "opt": {"dropout": 0.2, "attention_dropout": 0.1, "layerdrop": 0.3},
    "mixtral": {"router_jitter_noise": 0.3},
    "phimoe": {"input_jitter_noise": 0.3, "router_jitter_noise": 0.3},
}
"""Families with a random forward, and the fields of their config that make it random."""


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model with a random forward."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tokenizer = tiny_tokenizer()
            model = family_model(family, seed=1, vocab_size=len(tokenizer), **RANDOM[family])
            model.save_pretrained(made[family])
            tokenizer.save_pretrained(made[family])
        return made[family]

    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts with answers, and a file of reward functions."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i), "label": str(2 * i)} for i in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "rewards.py").write_text(REWARD)
    return folder


@pytest.fixture(autouse=True)
def _rewards_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    try_each_reward_once(monkeypatch)


MakeConfig = Callable[..., RLConfig]


@pytest.fixture
def rl_tree(model_folder: Path, data_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The smallest RL run: 4 steps of 3 prompts x 4 answers, over an epoch's end."""
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "rollout": {"prompts_per_step": 3, "group_size": 4},
        "sampling": {"max_new_tokens": 6},
        "reward": {"terms": [f"{data_folder / 'rewards.py'}:ones"]},
        "algorithm": {"preset": "grpo"},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def rl_config(rl_tree: dict[str, Any]) -> MakeConfig:
    def make(**over: Any) -> RLConfig:
        return build(RLConfig, deep_merge(rl_tree, over))

    return make


@pytest.fixture
def uneven_tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Three steps of five groups of three, which do not divide by two or three ranks, in micro-batches of a few rows; held-out answers
    too. Adam makes a gradient that is nothing but rounding as large as any other unless eps is above it."""
    more = {
        "rollout": {"prompts_per_step": 5, "group_size": 3},
        "train": {"max_tokens_per_micro_batch": 60, "steps": 3},
        "eval": {
            "data": {"sources": rl_tree["data"]["sources"]},
            "every": 2,
            "sampling": {"max_new_tokens": 4},
        },
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
    }
    return deep_merge(rl_tree, more)


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model of the same vocabulary."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_tokenizer()
    tiny_model(
        "qwen2", seed=7, hidden_size=48, intermediate_size=64, vocab_size=len(tokenizer)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def started() -> Iterator[list[warm.Process]]:
    """Processes that are killed after the test."""
    processes: list[warm.Process] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.close()
