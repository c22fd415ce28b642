"""What ``lightrft doctor`` predicts against the peak memory of real runs on the CPU: ten configurations, each in a process of its own.

    python benchmarks/doctor.py [--only 0 3] [--as-is] [--out benchmarks/results]

Each run begins with everything imported, draws answers of full length and takes two steps of reinforcement learning, all of it through
``run_rl``: models are read from a folder, answers drawn, references and critics asked, weights updated, a checkpoint and the model saved.
The peak is that of the resident memory of its process (VmHWM) less that of the same run of a model of next to
nothing. The prediction is ``needs`` of the same config with the lengths of the
data, as the command computes it: all models, and the largest phase.

glibc keeps much of what is freed, in pieces of which the next step can use only some. Runs here give it back at once, by
``MALLOC_MMAP_THRESHOLD_``; with ``--as-is`` they do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT, ANSWER, GROUPS, SAMPLES, STEPS = 64, 128, 2, 4, 2
LETTERS = 4000
GIVEN_BACK = 262_144
"""Bytes from which on an array is given back to the system when it is freed."""
KL = {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}
NO_KL = {"preset": "grpo", "kl": {"where": "none", "coef": 0.0}}
SIZES = {
    "none": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    "16M": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    },
    "45M": {
        "hidden_size": 512,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
    },
    "130M": {
        "hidden_size": 896,
        "num_hidden_layers": 10,
        "num_attention_heads": 14,
        "intermediate_size": 3584,
    },
}
NOTHING = (
    "",
    "none",
    {"algorithm": NO_KL, "model": {"logits_mb": 1}, "train": {"max_tokens_per_micro_batch": 1}},
)
"""The same run of a model of next to nothing: what the program itself takes."""
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("float32", "45M", {"algorithm": NO_KL}),
    ("float32, reference", "45M", {"algorithm": KL}),
    ("float32, reference and critic (ppo)", "45M", {"algorithm": {"preset": "ppo"}}),
    (
        "float32, checkpointing",
        "45M",
        {"algorithm": NO_KL, "model": {"gradient_checkpointing": True}},
    ),
    ("LoRA, float32", "45M", {"algorithm": KL, "model": {"lora": {"rank": 16}}}),
    (
        "LoRA, bfloat16",
        "45M",
        {"algorithm": KL, "model": {"lora": {"rank": 16}, "dtype": "bfloat16"}},
    ),
    ("bfloat16, reference", "45M", {"algorithm": KL, "model": {"dtype": "bfloat16"}}),
    (
        "bfloat16, checkpointing",
        "45M",
        {"algorithm": NO_KL, "model": {"dtype": "bfloat16", "gradient_checkpointing": True}},
    ),
    (
        "float32, one micro-batch",
        "16M",
        {"algorithm": KL, "train": {"max_tokens_per_micro_batch": 8192}},
    ),
    (
        "float32, reference, checkpointing",
        "130M",
        {"algorithm": KL, "model": {"gradient_checkpointing": True}},
    ),
]


def tree(case: int | None, folder: Path) -> dict[str, Any]:
    """The config of a case over the model and data in ``folder``."""
    _, size, more = NOTHING if case is None else CASES[case]
    own = {"path": str(folder / size), "dtype": "float32", **more.get("model", {})}
    return {
        "run": {
            "dir": str(folder / "runs"),
            "name": f"case{case}",
            "progress": False,
            "threads": 1,
        },
        "data": {"sources": [str(folder / "rows.jsonl")], "apply_chat_template": False},
        "rollout": {"prompts_per_step": GROUPS, "group_size": SAMPLES},
        "sampling": {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER},
        "reward": {"terms": [{"function": f"{folder / 'reward.py'}:varied"}]},
        "log": {"tensorboard": False},
        "algorithm": more["algorithm"],
        "train": {"steps": STEPS, "max_tokens_per_micro_batch": 640, **more.get("train", {})},
        "model": own,
    }


def make(folder: Path) -> dict[str, Any]:
    """Models, tokenizer, rows and reward of all cases."""
    from lightrft.models.loading.save_model import save_model
    from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer("".join(chr(0x4E00 + i) for i in range(LETTERS)))
    for name, sizes in SIZES.items():
        save_model(
            tiny_model("qwen2", vocab_size=len(tokenizer), initializer_range=0.02, **sizes),
            tokenizer,
            folder / name,
        )
    rows = [json.dumps({"prompt": chr(0x4E00 + i) * PROMPT, "label": "1"}) for i in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def varied(rollout):\n    return sum(rollout.token_ids) % 7 / 7\n", encoding="utf-8"
    )
    return {}


def peak() -> int:
    """Bytes that this process has had resident at most."""
    line = next(
        x
        for x in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if x.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def run(case: int | None, folder: Path) -> dict[str, Any]:
    """In a process of its own: the run of ``case``, or of a model of next to nothing."""
    from lightrft.config.base import build
    from lightrft.config.verbs import RLConfig
    from lightrft.trainer.rl import run_rl

    began = time.perf_counter()
    run_rl(build(RLConfig, tree(case, folder)))
    return {"peak": peak(), "seconds": time.perf_counter() - began}


def predicted(case: int, folder: Path) -> dict[str, Any]:
    """What the doctor says of ``case``."""
    from lightrft.config.base import build
    from lightrft.config.verbs import RLConfig
    from lightrft.diagnostics.memory.estimate import estimate_memory
    from lightrft.diagnostics.memory.phases import Device, Lengths

    found = estimate_memory(
        build(RLConfig, tree(case, folder)),
        Lengths(PROMPT, ANSWER, GROUPS, SAMPLES),
        Device("cpu", 0),
    )
    return {
        "peak": found.peak,
        "phase": found.largest.name,
        "parameters": found.parameters["policy"][0],
    }


def forked(work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What ``work`` gives in a process that begins with all that this one has imported, and whose peak begins with what that takes."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(work(*given)))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__}{given} failed") from None
    finally:
        process.join()


def serve(folder: Path, cases: list[int]) -> None:
    """The child: everything is imported once, models are made, and then each case runs; a line of JSON for each."""
    import peft  # noqa: F401
    import torch

    import lightrft.diagnostics.memory.estimate
    import lightrft.trainer.rl  # noqa: F401

    torch.set_num_threads(1)
    forked(make, folder)
    print(json.dumps(forked(run, None, folder)), flush=True)
    for case in cases:
        print(
            json.dumps(
                {"said": forked(predicted, case, folder), "real": forked(run, case, folder)}
            ),
            flush=True,
        )


def child(folder: Path, cases: list[int], *, as_is: bool) -> Iterator[dict[str, Any]]:
    """The lines of ``serve``, in a process whose allocator gives back what is freed, unless it is to stay ``as_is``."""
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    back = (
        {} if as_is else {f"MALLOC_{name}_THRESHOLD_": str(GIVEN_BACK) for name in ("MMAP", "TRIM")}
    )
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **back,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "false",
    }
    words = [sys.executable, __file__, "--child", str(folder), *map(str, cases)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise SystemExit(f"a run failed with status {process.returncode}; see above")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--child", nargs="+")
    args = parser.parse_args()
    if args.child:
        serve(Path(args.child[0]), [int(case) for case in args.child[1:]])
        return
    heads = (
        "configuration",
        "parameters",
        "predicted MiB",
        "measured MiB",
        "predicted / measured",
        "largest phase",
        "s",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    print("\n".join(lines), flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        found = child(Path(name), args.only, as_is=args.as_is)
        base = next(found)["peak"]
        for case, each in zip(args.only, found, strict=True):
            said, real = each["said"], each["real"]["peak"] - base
            about = (
                f"| {CASES[case][0]} | {said['parameters'] / 1e6:.0f}M | "
                f"{said['peak'] / 2**20:.0f} | {real / 2**20:.0f} |"
            )
            lines.append(
                f"{about} {said['peak'] / real:.3f} | {said['phase']} | "
                f"{each['real']['seconds']:.0f} |"
            )
            print(lines[-1], flush=True)
    print(f"baseline {base / 2**20:.0f} MiB, {time.perf_counter() - began:.0f} s in all")
    if args.out:
        import torch
        import transformers

        about = (
            f"{platform.machine()}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}, one thread"
        )
        off = (
            f"the same run of a model of next to nothing takes {base / 2**20:.0f} MiB, which is "
            "taken off"
        )
        text = (
            "# What doctor predicts, and what runs take\n\n`python benchmarks/doctor.py` on "
            f"{about}; {off}.\n\n"
        )
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"doctor-{platform.machine()}-{os.cpu_count()}cores.md").write_text(
            text + "\n".join(lines) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
