"""Two processes against one: the same run of GRPO, step by step the same numbers and in the end the same weights?

With two GPUs or more the ranks speak through nccl; with fewer, two processes on the CPU do, through gloo.

    python benchmarks/gpu/ranks.py [--processes 2] [--steps 3] [--smoke]

In float32, metrics may differ by 1e-5 relative to one process, weights by 1e-5 relative to their norm. The exit status is 1 where more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import torch
from safetensors.torch import load_file

from lightrft.observability.trackers import read_rows

CLOCK = ("time", "seconds", "tokens_per_second", "policy/rollout_logprob_diff")
"""What depends on the clock, or measures rounding itself."""
RELATIVE, LEAST = 1e-5, 2e-7
KINDS = {
    "grpo": {"algorithm": {"preset": "grpo", "kl": {"where": "loss", "coef": 0.01}}},
    "ppo": {"algorithm": {"preset": "ppo", "kl": {"coef": 0.01}}},
    "LoRA": {
        "algorithm": {"preset": "grpo", "kl": {"where": "loss", "coef": 0.01}},
        "model": {"lora": {"rank": 4}},
    },
}


def tree(folder: Path, kind: str, device: str, steps: int) -> dict[str, Any]:
    """Five groups of three, which two ranks cannot share evenly."""
    more = KINDS[kind]
    return {
        "model": {"path": str(folder / "model"), "dtype": "float32", **more.get("model", {})},
        "data": {"sources": [str(folder / "prompts.jsonl")], "apply_chat_template": False},
        "rollout": {"prompts_per_step": 5, "group_size": 3},
        "sampling": {"max_new_tokens": 16},
        "reward": {"terms": [f"{folder / 'model' / 'rewards.py'}:varied"]},
        "algorithm": more["algorithm"],
        "train": {"steps": steps, "max_tokens_per_micro_batch": 120},
        "optimizer": {"lr": 1e-3},
        "log": {"tensorboard": False},
        "strategy": {"device": device},
    }


def run(folder: Path, kind: str, device: str, steps: int, processes: int) -> Path:
    """A run of the command; its folder. Raises ``SystemExit`` with what it said, where it fails."""
    name = f"{kind}-{processes}"
    given = {"run": {"dir": str(folder / "runs"), "name": name, "progress": False, "threads": 1}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(tree(folder, kind, device, steps) | given), encoding="utf-8")
    paths = os.pathsep.join([str(common.ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lightrft", "rl", str(file), f"launch.processes={processes}"]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return folder / "runs" / name


def gaps(found: Path, truth: Path) -> dict[str, float]:
    """The largest relative gap of any metric in any step, of the gradient norms among them, and of the weights."""
    rows, wanted = (read_rows(path / "metrics.jsonl") for path in (found, truth))
    assert [r["step"] for r in rows] == [r["step"] for r in wanted]
    worst = {"metrics": 0.0, "gradient norm": 0.0}
    for row, want in zip(rows, wanted):
        assert row.keys() == want.keys(), row.keys() ^ want.keys()
        for key, value in want.items():
            if not isinstance(value, float | int) or key.startswith(CLOCK):
                continue
            gap = max(0.0, abs(row[key] - value) - LEAST) / max(abs(value), LEAST)
            for of in ("metrics", *(["gradient norm"] if key.endswith("grad_norm") else [])):
                worst[of] = max(worst[of], gap)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (found, truth))
    total = torch.stack([t.double().norm() for t in theirs.values()]).norm()
    return {
        **worst,
        "weights": float(
            torch.stack([(ours[k].double() - t.double()).norm() for k, t in theirs.items()]).norm()
            / total
        ),
    }


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    kinds = list(KINDS)
    if args.smoke:
        kinds, args.steps = ["grpo"], 1
    nccl = torch.cuda.device_count() >= args.processes
    device, backend = ("cuda", "nccl") if nccl else ("cpu", "gloo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common.make("smoke", folder / "model", torch.float32)
        common.write_prompts(folder, common.SIZES["smoke"]["vocab_size"], 20, 12)
        found = {}
        for kind in kinds:
            one, many = (run(folder, kind, device, args.steps, n) for n in (1, args.processes))
            found[kind] = gaps(many, one)
    bad = [
        f"{kind}: {of}"
        for kind, each in found.items()
        for of, gap in each.items()
        if gap > RELATIVE
    ]
    lines = [
        f"{args.processes} processes through {backend} against one, {args.steps} steps each, "
        "float32; largest relative gaps."
    ]
    lines += [
        "",
        *common.table(
            ["", *next(iter(found.values()))],
            [[k, *(f"{g:.1e}" for g in v.values())] for k, v in found.items()],
        ),
    ]
    lines += ["", f"Off by more than {RELATIVE:g}: {', '.join(bad) or 'nothing'}."]
    common.write(
        args.out,
        "ranks",
        args.machine,
        "Several processes against one",
        {"backend": backend, "gaps": found},
        lines,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
