"""A step of GRPO on this machine: tokens a second, model FLOPs utilisation, the share of each phase, memory.

Goes through the same functions as ``lightrft rl``: answers are drawn, rewarded, asked about at the reference, and trained on. The model
is made on the spot, and no answer ends by itself, so that each run does the same work.

    python benchmarks/gpu/step.py [--size 0.5b | 1.5b | 7b] [--lora] [--compile] [--steps 3] [--smoke]

Utilisation is the FLOPs that a step asks for over what the device could do meanwhile; ``common.work_of`` has the formula.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import torch

from benchmarks.vs_trl import open_run
from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.diagnostics.memory.estimate import estimate_memory
from lightrft.diagnostics.memory.formulas import shown
from lightrft.diagnostics.memory.phases import Device, Lengths

PHASES = (
    "generate",
    "reward",
    "layout",
    "logprobs",
    "reference",
    "advantages",
    "update",
    "weights",
)


def tree(args: Any, folder: Path, prompts: Path) -> dict[str, Any]:
    """The config of the run."""
    return {
        "run": {"dir": str(folder / "runs"), "name": "run", "progress": False},
        "model": {
            "path": str(folder / args.size),
            "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
            "lora": {"rank": 16} if args.lora else None,
            "gradient_checkpointing": args.checkpointing,
        },
        "data": {"sources": [str(prompts)], "apply_chat_template": False},
        "rollout": {"prompts_per_step": args.prompts, "group_size": args.samples},
        "sampling": {"max_new_tokens": args.answer, "min_new_tokens": args.answer},
        "engine": {
            "compile": args.compile,
            "max_num_seqs": args.prompts * args.samples,
            "max_cache_tokens": 4 * args.samples * args.prompts * args.answer,
        },
        "reward": {"terms": [f"{folder / args.size / 'rewards.py'}:varied"]},
        "algorithm": {"preset": "grpo", "kl": {"where": "loss", "coef": 0.01}},
        "train": {"steps": args.steps + 1, "max_tokens_per_micro_batch": args.micro},
        "log": {"tensorboard": False, "rollouts_every": 0, "entropy": False},
    }


def measure(config: RLConfig, size: str, steps: int) -> dict[str, Any]:
    """``steps`` steps after one that warms up."""
    rows, kind = [], common.device().type
    model, head = common.dense(size)
    with open_run(config) as (session, run):
        for step in range(steps + 1):
            common.wait()
            began = time.perf_counter()
            run.step = step
            result = run.learn_next()
            common.wait()
            seconds = time.perf_counter() - began
            values, batch = session.record(step + 1, result.metrics), result.batch
            assert batch is not None
            prompts, answers, of = (
                batch.prompts.lengths.tolist(),
                batch.lengths.tolist(),
                batch.prompt_of.tolist(),
            )
            work = common.work_of(
                model, head, prompts, answers, of, frozen=config.model.lora is not None
            )
            spent = {name: values.get(f"time/{name}", 0.0) for name in PHASES}
            rows.append(
                {
                    "seconds": seconds,
                    "tokens": sum(answers),
                    "prompts": sum(prompts),
                    **spent,
                    "flops": vars(work),
                }
            )
        peak, reserved = (
            common.peak_memory(),
            torch.cuda.max_memory_reserved() if kind == "cuda" else 0,
        )
    return {"steps": rows[1:], "first": rows[0], "peak": peak, "reserved": reserved}


def lines_of(
    found: dict[str, Any], speed: common.Speed, said: float, parts: dict[str, float]
) -> tuple[list[str], dict[str, Any]]:
    """The table of phases, and its numbers."""
    middle = {
        k: statistics.median(s[k] for s in found["steps"])
        for k in ("seconds", "tokens", "prompts", *PHASES)
    }
    flops, all_of = found["steps"][0]["flops"], middle["seconds"]
    work = {"generate": flops["drawing"], "reference": flops["forward"], "update": flops["update"]}
    work |= {"logprobs": flops["forward"]} if middle["logprobs"] > 0.01 * all_of else {}
    known = sum(middle[name] for name in PHASES)
    rows = []
    for name, seconds in [
        *((n, middle[n]) for n in PHASES),
        ("other", max(0.0, all_of - known)),
        ("step", all_of),
    ]:
        does = sum(work.values()) if name == "step" else work.get(name)
        share = "" if does is None or not seconds else f"{does / seconds / speed.peak:.1%}"
        rows.append(
            [
                name,
                f"{seconds:.3f}",
                f"{seconds / all_of:.1%}",
                "" if does is None else f"{does / 1e12:.3g}",
                share,
            ]
        )
    whole = middle["tokens"] + middle["prompts"]
    numbers = {
        "step seconds": all_of,
        "answer tokens per second": middle["tokens"] / all_of,
        "tokens per second": whole / all_of,
        "utilisation": sum(work.values()) / all_of / speed.peak,
        "utilisation of the update": work["update"] / max(1e-9, middle["update"]) / speed.peak,
        "generation tokens per second": middle["tokens"] / max(1e-9, middle["generate"]),
    }
    lines = [f"* {name}: {value:,.4g}" for name, value in numbers.items()]
    lines += [f"* peak: {speed.source}"]
    if found["peak"]:
        ratio = f"{said / found['peak']:.2f}"
        lines.append(
            f"* memory: {shown(found['peak'])} of tensors at most, {shown(found['reserved'])} "
            f"reserved; `doctor` says {shown(said)} ({ratio} of measured): "
            + ", ".join(f"{shown(size)} {part}" for part, size in parts.items() if size)
        )
    lines += ["", *common.table(["phase", "s", "share", "TFLOP", "utilisation"], rows)]
    return lines, {**numbers, "phases": {row[0]: float(row[1]) for row in rows}}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument(
        "--lora",
        action="store_true",
        help="train adapters; always so above 1.5b, whose optimizer needs several GPUs",
    )
    parser.add_argument("--compile", action="store_true", help="decode with engine.compile")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--micro", type=int, default=16384, help="tokens of a micro-batch")
    args = parser.parse_args()
    if args.smoke:
        args.size, args.steps, args.prompts, args.samples, args.prompt, args.answer, args.micro = (
            "smoke",
            1,
            2,
            3,
            8,
            8,
            64,
        )
    args.lora = args.lora or args.size == "7b"
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name:
        folder = Path(name)
        common.make(args.size, folder / args.size)
        vocabulary = common.SIZES[args.size]["vocab_size"]
        prompts = common.write_prompts(
            folder, vocabulary, args.prompts * (args.steps + 1), args.prompt
        )
        config = build(RLConfig, tree(args, folder, prompts))
        speed = common.speed()
        device = Device(common.device().type, 0)
        needed = estimate_memory(
            config, Lengths(args.prompt, args.answer, args.prompts, args.samples), device
        )
        found = measure(config, args.size, args.steps)
    lines, numbers = lines_of(found, speed, needed.peak, {**needed.largest.parts})
    kind = "LoRA of rank 16 on all layers" if args.lora else "all weights"
    head = (
        f"Qwen2.5-{args.size} (random weights), {kind}, {config.model.dtype}; {args.prompts} "
        f"prompts of {args.prompt} tokens x "
    )
    head += f"{args.samples} answers of {args.answer}, reference in the loss, "
    head += f"micro-batches of {args.micro} tokens; {args.steps} steps, medians"
    head += "; decoding is compiled" if args.compile else ""
    more = {
        "work": head,
        "numbers": numbers,
        "found": found,
        "peak FLOP/s": vars(speed),
        "predicted bytes": needed.peak,
    }
    name = f"step-{args.size}" + "-lora" * args.lora + "-compiled" * args.compile
    common.write(
        args.out, name, args.machine, f"A step of GRPO, {args.size}", more, [head, "", *lines]
    )


if __name__ == "__main__":
    main()
