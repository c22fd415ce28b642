"""Runs of several processes: from the command line, and by the benchmark's runner of many in the same processes; and how they are
compared."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from benchmarks.parity import CASES, LIMIT, Tree, compared, rows_of_pictures
from lightrft.config.base import deep_merge
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests import warm

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

DEEPSPEED = [
    pytest.mark.slow,
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="the package deepspeed is not installed",
    ),
]

PRESETS: dict[str, Tree] = {name: CASES[name] for name in ("grpo", "ppo", "lora")}

BEYOND: dict[str, Tree] = {
    "copies": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.1, "refresh_every": 2}}},
    "averages": {
        "algorithm": {
            "preset": "grpo",
            "kl": {"coef": 0.1, "refresh_every": 1, "refresh_decay": 0.5},
        }
    },
    "distils": {"algorithm": {"preset": "opd", "distill": {"kind": "jsd"}}},
    "refills": {
        "rollout": {"staleness": 1, "max_rounds": 3},
        "algorithm": {"filters": ["zero_variance"], "importance_sampling": ["tis"]},
        "train": {"num_mini_batches": 2},
    },
    "further": {"rollout": {"staleness": 2}, "algorithm": {"old_logprobs": "rollout"}},
    "alone": {
        "rollout": {"staleness": 2, "max_rounds": 1},
        "algorithm": {"old_logprobs": "rollout"},
    },
    "adapters": {"rollout": {"staleness": 1}, "model": {"lora": {"rank": 4}}},
}
"""What reaches beyond a step: a reference that follows the policy, a teacher's whole vocabulary, answers drawn beside training."""


def rows_with_pictures(folder: Path) -> list[Tree]:
    """Most rows have none, so that some rank has none in its part."""
    return [
        *({"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)),
        *rows_of_pictures(folder),
    ]


def beside(teacher: Path) -> Tree:
    """Settings of a run of three steps with a reference that moves, a process reward model, and a teacher, made in a folder of its own,
    whose whole distributions are compared."""
    tokenizer = tiny_tokenizer()
    tiny_model(
        "llama", seed=9, hidden_size=24, intermediate_size=32, vocab_size=len(tokenizer) + 5
    ).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    kl = {"where": "loss", "coef": 0.1, "refresh_every": 1, "refresh_decay": 0.5}
    return {
        "algorithm": {
            "preset": "prime",
            "filters": [],
            "kl": kl,
            "distill": {"kind": "jsd", "coef": 0.1},
        },
        "teacher": {"path": str(teacher)},
        # Or rounding would grow.
        "prm": {
            "forward": "double",
            "optimizer": {"lr": 1e-3, "eps": 1e-4},
        },
        "train": {"steps": 3},
    }


def named(tree: Tree, folder: Path, name: str) -> Tree:
    """``tree`` for a run of that name in ``folder``."""
    run = {
        "run": {"dir": str(folder), "name": name, "threads": 1, "progress": False},
        "strategy": {"device": "cpu"},
    }
    return deep_merge(tree, run)


def config_file(tree: Tree, folder: Path, name: str) -> Path:
    """``tree`` as a file, for a run of that name."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(named(tree, folder, name)))
    return file


def train(tree: Tree, folder: Path, name: str, processes: int, *more: str) -> Path:
    """``lightrft rl`` with ``tree`` in as many processes; the run's folder."""
    file = config_file(tree, folder, name)
    words = ["-m", "lightrft", "rl", file, f"launch.processes={processes}", *more]
    done = warm.run(words, env=ENVIRONMENT, seats=processes if processes > 1 else 0)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def check_equal(found: Path, expected: Path) -> None:
    """The metrics of two runs, but for rounding, and their weights."""
    gap, where = compared(found, expected).worst
    assert gap <= LIMIT, where
