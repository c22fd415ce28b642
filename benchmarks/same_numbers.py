"""Record the numbers of many short runs, to compare two versions of the code with each other.

    python benchmarks/same_numbers.py record before.json      # with the one version installed
    python benchmarks/same_numbers.py record after.json       # with the other
    python benchmarks/same_numbers.py compare before.json after.json

The runs cover every preset, the layouts, bfloat16, adapters, asynchronous and partial generation, supervised fine-tuning and
greedy evaluation. For each, the record holds all metrics but times and memory, a digest of the trained weights, and the
names, types and shapes of everything in the last checkpoint. ``compare`` prints what differs, and exits with 1 where
something does.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightrft.cli.main import main

CHARACTERS = "0123456789+-*/=()<>.,:?! \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VARYING = ("time/", "memory/", "seconds", "tokens_per_second", "_per_second", "host/", "device/")
"""Parts of the names of metrics that depend on the machine."""
LIMITED = ("ppo_lag", "grpo_lag")
"""Presets that need a cost, which the common arguments lack."""
REWARD = '''
def digits(rollout):
    """The share of digits among the characters of the response, and a little that differs for each."""
    return sum(c.isdigit() for c in rollout.text) / max(1, len(rollout.text)) + sum(rollout.token_ids) % 7 / 70
'''


def make_model(folder: Path, seed: int, hidden: int) -> None:
    """Save a Qwen2 model of two layers over single characters."""
    import torch

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each run, and its arguments beside the common ones."""
    try:
        from lightrft.config.presets import PRESETS
    except ImportError:
        from lightrft.presets import PRESETS  # the layout before the packages were split
    for preset in sorted(PRESETS):
        if preset not in LIMITED:
            yield f"preset {preset}", ["rl", f"algorithm={preset}"]
    for layout in ("prefix_shared", "packed", "padded"):
        yield (
            f"layout {layout}",
            [
                "rl",
                "algorithm=ppo",
                f"model.layout={layout}",
                "train.max_tokens_per_micro_batch=60",
            ],
        )
    yield "bfloat16", ["rl", "algorithm=gspo", "model.dtype=bfloat16"]
    yield "adapters", ["rl", "algorithm=grpo", "model.lora.rank=4", "algorithm.kl.coef=0.1"]
    yield "ahead", ["rl", "algorithm=grpo", "rollout.staleness=1", "train.steps=4"]
    yield (
        "partial",
        [
            "rl",
            "algorithm=dapo",
            "rollout.partial=true",
            "rollout.max_tokens_per_step=3",
            "algorithm.filters=[]",
        ],
    )
    yield "mini-batches", ["rl", "algorithm=ppo", "train.ppo_epochs=2", "train.num_mini_batches=2"]
    yield (
        "greedy evaluation",
        [
            "rl",
            "algorithm=grpo",
            "eval.data.sources={data}",
            "eval.every=1",
            "eval.sampling.max_new_tokens=6",
        ],
    )
    yield "sft", ["sft", "batch_size=4"]


def arguments_of(words: list[str], name: str, folder: Path) -> list[str]:
    """Return the full arguments of a run in ``folder``."""
    verb, *own = words
    common = [
        f"model.path={folder / 'model'}",
        f"data.sources={folder / 'rows.jsonl'}",
        f"run.dir={folder / 'runs'}",
        f"run.name={name.replace(' ', '-')}",
        "run.seed=5",
        "run.progress=false",
        "optimizer.lr=1e-3",
        "log.tensorboard=false",
        "checkpoint.every_minutes=0",
        "checkpoint.every=1",
    ]
    if verb == "rl":
        common += [
            f"reward.terms={folder / 'rewards.py'}:digits",
            "rollout.prompts_per_step=3",
            "rollout.group_size=4",
            "sampling.max_new_tokens=6",
            "train.steps=3",
        ]
        if "algorithm=opd" in own:
            common.append(f"teacher.path={folder / 'teacher'}")
    else:
        common += ["train.epochs=1"]
    return [verb, *common, *(word.format(data=folder / "rows.jsonl") for word in own)]


def record_of(run: Path, status: int, said: str) -> dict[str, Any]:
    """Return the numbers of a finished run."""
    if status:
        return {
            "status": status,
            "error": said.strip().splitlines()[-1][:200] if said.strip() else "",
        }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {k: v for k, v in row.items() if not any(part in k for part in VARYING)} for row in rows
    ]
    weights = hashlib.sha256()
    for file in sorted((run / "model").glob("*.safetensors")):
        weights.update(file.read_bytes())
    last = sorted(p for p in (run / "checkpoints").iterdir() if p.is_dir())[-1]
    held: dict[str, Any] = {}
    for file in sorted(last.rglob("*")):
        name = str(file.relative_to(last))
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                slices = {key: tensors.get_slice(key) for key in list(tensors.keys())}
            held[name] = {
                key: f"{one.get_dtype()} {one.get_shape()}" for key, one in slices.items()
            }
        elif file.is_file():
            held[name] = "file"
    return {"status": status, "metrics": kept, "weights": weights.hexdigest(), "checkpoint": held}


def record(out: Path, only: str) -> None:
    """Run every case whose name contains ``only``, and write the numbers to ``out``."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", 1, 32)
        make_model(folder / "teacher", 7, 48)
        rows = [
            {"prompt": f"{i}+{i}=", "response": str(2 * i), "label": str(2 * i)} for i in range(10)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "rewards.py").write_text(REWARD)
        for name, words in cases():
            if only not in name:
                continue
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                status = main(arguments_of(words, name, folder))
            found[name] = record_of(
                folder / "runs" / name.replace(" ", "-"),
                status,
                said.getvalue().replace(scratch, ""),
            )
            print(f"{name}: {'ok' if status == 0 else found[name]['error']}", flush=True)
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield each place where two records differ. Numbers are compared bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b:
                yield f"{where}/{key}: only in the {'second' if key not in a else 'first'}"
            else:
                yield from differences(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{where}[{i}]")
    elif a != b and not (a != a and b != b):  # NaN equals NaN here
        yield f"{where}: {a!r} is now {b!r}"


def command() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="", help="part of the names of the cases to run")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    args = parser.parse_args()
    if args.verb == "record":
        record(args.out, args.only)
        return 0
    first, second = (json.loads(path.read_text()) for path in (args.first, args.second))
    found = list(differences(first, second))
    failed = [name for name, row in second.items() if row["status"]]
    print(
        "\n".join(found)
        or f"{len(second)} runs, of which {len(failed)} are refused by both: nothing differs"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(command())
