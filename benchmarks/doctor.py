"""What ``lightrft doctor`` predicts against the peak memory of real runs on the CPU: ten configurations, each in a process of its own.

    python benchmarks/doctor.py [--only 0 3] [--as-is] [--out benchmarks/results]

Each run draws answers of full length and takes two steps of reinforcement learning, all of it through ``run_rl``: models are read from a
folder, answers drawn, references and critics asked, weights updated, a checkpoint and the model saved. The peak is that of the resident
memory of its process (VmHWM) less the peak of a process that imports the same and loads nothing. The prediction is ``needs`` of the same
config with the lengths of the data, as the command computes it: all models, and the largest phase.

glibc keeps much of what is freed, in pieces of which the next step can use only some. Runs here give it back at once, by
``MALLOC_MMAP_THRESHOLD_``; with ``--as-is`` they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT, ANSWER, GROUPS, SAMPLES, STEPS = 64, 128, 2, 4, 2
LETTERS = 4000
GIVEN_BACK = 262_144
"""Bytes from which on an array is given back to the system when it is freed."""
KL = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
NO_KL = {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}}
SIZES = {
    "16M": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536},
    "45M": {"hidden_size": 512, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 2048},
    "130M": {"hidden_size": 896, "num_hidden_layers": 10, "num_attention_heads": 14, "intermediate_size": 3584},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("float32", "45M", {"algorithm": NO_KL}),
    ("float32, reference", "45M", {"algorithm": KL}),
    ("float32, reference and critic (ppo)", "45M", {"algorithm": {"preset": "ppo"}}),
    ("float32, checkpointing", "45M", {"algorithm": NO_KL, "model": {"gradient_checkpointing": True}}),
    ("LoRA, float32", "45M", {"algorithm": KL, "model": {"lora": {"rank": 16}}}),
    ("LoRA, bfloat16", "45M", {"algorithm": KL, "model": {"lora": {"rank": 16}, "dtype": "bfloat16"}}),
    ("bfloat16, reference", "45M", {"algorithm": KL, "model": {"dtype": "bfloat16"}}),
    ("bfloat16, checkpointing", "45M", {"algorithm": NO_KL, "model": {"dtype": "bfloat16", "gradient_checkpointing": True}}),
    ("float32, one micro-batch", "16M", {"algorithm": KL, "train": {"micro_batch_tokens": 8192}}),
    ("float32, reference, checkpointing", "130M", {"algorithm": KL, "model": {"gradient_checkpointing": True}}),
]


def tree(case: int, folder: Path) -> dict[str, Any]:
    """The config of a case over the model and data in ``folder``."""
    _, size, more = CASES[case]
    own = {"path": str(folder / size), "dtype": "float32", **more.get("model", {})}
    return {
        "run": {"dir": str(folder / "runs"), "name": f"case{case}", "progress": False, "threads": 1},
        "data": {"sources": [str(folder / "rows.jsonl")], "chat": False},
        "rollout": {"prompts": GROUPS, "samples": SAMPLES},
        "sampling": {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER},
        "reward": {"terms": [{"function": f"{folder / 'reward.py'}:varied"}]},
        "log": {"tensorboard": False},
        "algorithm": more["algorithm"],
        "train": {"steps": STEPS, "micro_batch_tokens": 640, **more.get("train", {})},
        "model": own,
    }


def make(folder: Path) -> None:
    """Models, tokenizer, rows and reward of all cases."""
    from lightrft.models.loading import save_model
    from lightrft.models.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer("".join(chr(0x4E00 + i) for i in range(LETTERS)))
    for name, sizes in SIZES.items():
        save_model(tiny_model("qwen2", vocab_size=len(tokenizer), initializer_range=0.02, **sizes), tokenizer, folder / name)
    rows = [json.dumps({"prompt": chr(0x4E00 + i) * PROMPT, "label": "1"}) for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "reward.py").write_text("def varied(rollout):\n    return sum(rollout.token_ids) % 7 / 7\n", encoding="utf-8")


def peak() -> int:
    """Bytes that this process has had resident at most."""
    line = next(x for x in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run(case: int | None, folder: Path) -> dict[str, Any]:
    """In this process: the run of ``case``, or nothing but the imports."""
    import peft  # noqa: F401

    from lightrft.config import RLConfig
    from lightrft.models.loading import load_tokenizer
    from lightrft.models.settings import ModelConfig
    from lightrft.trainer.rl import run_rl
    from lightrft.utils.settings import build

    if case is None:
        load_tokenizer(ModelConfig(path=str(folder / "16M")))
        return {"peak": peak()}
    run_rl(build(RLConfig, tree(case, folder)))
    return {"peak": peak()}


def predicted(case: int, folder: Path) -> dict[str, Any]:
    """In this process: what the doctor says of ``case``."""
    from lightrft.config import RLConfig
    from lightrft.trainer.needs import Device, Lengths, needs
    from lightrft.utils.settings import build

    found = needs(build(RLConfig, tree(case, folder)), Lengths(PROMPT, ANSWER, GROUPS, SAMPLES), Device("cpu", 0))
    return {"peak": found.peak, "phase": found.largest.name, "parameters": found.parameters["policy"][0]}


def apart(what: str, case: int | None, folder: Path, *, as_is: bool = False) -> dict[str, Any]:
    """``run`` or ``predicted`` in a process of its own."""
    words = [sys.executable, __file__, "--child", what, str(folder), *([] if case is None else [str(case)])]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    back = {} if as_is else {f"MALLOC_{name}_THRESHOLD_": str(GIVEN_BACK) for name in ("MMAP", "TRIM")}
    env = {"OMP_NUM_THREADS": "1", **os.environ, **back, "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"case {case}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--child", nargs="+")
    args = parser.parse_args()
    if args.child:
        what, folder, *case = args.child
        does = run if what == "run" else predicted
        print(json.dumps(does(int(case[0]) if case else None, Path(folder))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        base = apart("run", None, folder, as_is=args.as_is)["peak"]
        lines = [
            "| configuration | parameters | predicted MiB | measured MiB | predicted / measured | largest phase |",
            "|---|---|---|---|---|---|",
        ]
        print("\n".join(lines), flush=True)
        for case in range(len(CASES)) if args.only is None else args.only:
            said, real = apart("predict", case, folder), apart("run", case, folder, as_is=args.as_is)["peak"] - base
            about = f"| {CASES[case][0]} | {said['parameters'] / 1e6:.0f}M | {said['peak'] / 2**20:.0f} | {real / 2**20:.0f} |"
            row = f"{about} {said['peak'] / real:.3f} | {said['phase']} |"
            print(row, flush=True)
            lines.append(row)
    print(f"baseline {base / 2**20:.0f} MiB")
    if args.out:
        import torch
        import transformers

        about = f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}, one thread"
        off = f"a process that only imports takes {base / 2**20:.0f} MiB, which is taken off"
        text = f"# What doctor predicts, and what runs take\n\n`python benchmarks/doctor.py` on {about}; {off}.\n\n"
        (args.out / f"doctor-{platform.machine()}-{os.cpu_count()}cores.md").write_text(
            text + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
