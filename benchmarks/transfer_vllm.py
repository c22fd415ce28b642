# ruff: noqa: E402 (the repository is put on the path before its modules are imported)
"""Seconds and bytes of weight updates to vLLM: in the process and to its server, of whole weights and of an adapter.

Each row is a run of ``lightrft rl`` on a random model. Seconds are ``engine/update_seconds`` of its steps after the first, which
contain the check of every tensor that vLLM holds. Run it with the Python of an environment with vLLM (``make test-vllm`` makes
one in build/vllm):

    build/vllm/bin/python benchmarks/transfer_vllm.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrft.config.base import deep_merge
from tests.model_helpers import byte_pairs
from tests.vllm_server import ADAPTERS, TRAINS, vllm_server

LORA = {"model": {"lora": {"rank": 8}}}
REWARD = "def odd(rollout):\n    return float(sum(t % 2 for t in rollout.token_ids))\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def save_model(args: argparse.Namespace, folder: Path) -> int:
    """Save a random model with its tokenizer. Return the bytes of its weights."""
    tokenizer = byte_pairs(["the quick brown fox jumps"], 280)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 128,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def measured(tree: dict[str, Any], folder: Path, name: str) -> list[dict[str, Any]]:
    """Run ``lightrft rl``. Return the metrics of the steps after the first."""
    config = folder / f"{name}.yaml"
    # JSON is YAML
    config.write_text(json.dumps(deep_merge(tree, {"run": {"name": name}})), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "lightrft", "rl", str(config)]
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    text = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()][1:]


@contextmanager
def engines(folder: Path, name: str) -> Generator[dict[str, Any]]:
    """Yield the settings of the engine ``name``."""
    if name.startswith("process"):
        yield {"kind": "vllm", "max_cache_tokens": 4096}
        return
    options = [*TRAINS, *ADAPTERS, "--max-model-len", "256"]
    with vllm_server(folder / "model", *options) as server:
        more = {"weights_dir": str(folder / "adapters")} if name.endswith("adapter") else {}
        yield {"kind": "http", "url": server.url, "deadline": 600.0, **more}


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        size = save_model(args, folder / "model")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        prompts = [{"prompt": f"def f{k}(x):"} for k in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        tree: dict[str, Any] = {
            "model": {"path": str(folder / "model")},
            "data": {"sources": [str(folder / "rows.jsonl")]},
            "reward": {"terms": [f"{folder}/reward.py:odd"]},
            "rollout": {"prompts_per_step": 1, "group_size": 4},
            "sampling": {"max_new_tokens": 8},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": args.steps},
            "log": {"tensorboard": False},
            "run": {"dir": str(folder / "runs"), "progress": False},
        }
        for name in ("process", "process adapter", "server", "server adapter"):
            with engines(folder, name) as engine:
                over = {"engine": engine, **(LORA if name.endswith("adapter") else {})}
                found = measured(deep_merge(tree, over), folder, name.replace(" ", "-"))
            seconds = sorted(row["engine/update_seconds"] for row in found)
            rows.append((name, found[-1]["engine/update_bytes"], seconds))
            print(rows[-1], flush=True)
    report(args, size, rows)


def report(args: argparse.Namespace, size: int, rows: list[tuple[str, float, list[float]]]) -> None:
    package = next(
        f"{one.metadata['Name']} {one.version}"
        for one in importlib.metadata.distributions()
        if (one.metadata["Name"] or "").startswith("vllm")
    )
    lines = [
        "# Weight updates to vLLM",
        "",
        "`python benchmarks/transfer_vllm.py`",
        "",
        f"{args.machine}, {package}, torch {torch.__version__}; a model of {size / 1e6:.0f} MB in "
        "float32, one thread for each of vLLM and the trainer. Seconds are the median of "
        f"{args.steps - 1} updates of a run, lowest to highest, with the check of every tensor that "
        "vLLM then holds.",
        "",
        "| vLLM | sent | bytes, MB | seconds |",
        "|---|---|---|---|",
    ]
    for name, sent, seconds in rows:
        place, _, part = name.partition(" ")
        lines.append(
            f"| {'in the process' if place == 'process' else 'server'} | "
            f"{part or 'whole weights'} | {sent / 1e6:.1f} | {statistics.median(seconds):.2f} "
            f"({seconds[0]:.2f} to {seconds[-1]:.2f}) |"
        )
    file = args.out / f"transfer_vllm-{args.machine}.md"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
