# ruff: noqa: E402 (the environment is set before torch is imported)
"""How busy generation and training are, one after the other and with generation ahead of training.

Runs the same small RL run with ``rollout.staleness`` 0 and with others, and prints seconds a step, the share of the time in which
answers were drawn, in which the policy was trained, and in which each waited for the other. Nothing is gained where the two compete
for the same cores: what overlap can bring is seen where both would leave some idle, such as on two devices or while rewards
are waited for (``--reward-seconds`` adds a reward that sleeps).

    python benchmarks/overlap.py [--staleness 0 1 2] [--steps 8] [--reward-seconds 0.0]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl

REWARD = """
import time

def slow(rollout, seconds=0.0):
    time.sleep(seconds)
    return rollout.text.count("1") / max(1, len(rollout.text))
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    return parser.parse_args()


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Model, data and reward on disk; the tree of the run."""
    tokenizer = tiny_tokenizer()
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
    }
    tiny_model("qwen2", seed=1, vocab_size=len(tokenizer), **sizes).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(64))
    )
    (folder / "reward.py").write_text(REWARD)
    return {
        "run": {"dir": str(folder)},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"sources": [{"path": str(folder / "train.jsonl")}]},
        "rollout": {"prompts_per_step": args.prompts, "group_size": args.samples},
        "sampling": {"max_new_tokens": args.tokens},
        "reward": {
            "terms": [
                {
                    "function": f"{folder / 'reward.py'}:slow",
                    "options": {"seconds": args.reward_seconds},
                }
            ]
        },
        "algorithm": {"preset": "grpo", "importance_sampling": ["tis"]},
        "train": {"steps": args.steps},
        "log": {"tensorboard": False, "rollouts_every": 0},
    }


def measured(rows: list[dict[str, Any]], staleness: int) -> dict[str, float]:
    """Seconds a step and shares of the wall clock, the first two steps left out: they warm up and fill the lead."""
    rows = rows[2:]
    total = lambda name: sum(row.get(f"time/{name}", 0.0) for row in rows)  # noqa: E731
    seconds = total("step")
    training = sum(
        total(name)
        for name in ("logprobs", "reference", "values", "advantages", "update", "layout", "weights")
    )
    drawing = (
        total("ahead/generate") + total("ahead/reward")
        if staleness
        else total("generate") + total("reward")
    )
    return {
        "seconds": seconds / len(rows),
        "drawing": drawing / seconds,
        "training": training / seconds,
        "training waits": (total("wait") if staleness else drawing) / seconds,
        "drawing waits": (total("ahead/idle") if staleness else training) / seconds,
    }


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} with "
        f"{torch.get_num_threads()} threads"
    )
    print(
        "| staleness | s/step | drawing | training | training waits | drawing waits "
        "|\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        tree = prepare(Path(name), args)
        for staleness in args.staleness:
            run = {**tree["run"], "name": f"staleness-{staleness}", "progress": False}
            config = build(
                RLConfig,
                {**tree, "run": run, "rollout": {**tree["rollout"], "staleness": staleness}},
            )
            run_rl(config)
            found = measured(read_rows(Path(name) / run["name"] / "metrics.jsonl"), staleness)
            shares = " | ".join(f"{share:.0%}" for key, share in found.items() if key != "seconds")
            print(f"| {staleness} | {found['seconds']:.2f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
