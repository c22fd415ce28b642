"""Tokens a second of the native engine against transformers' ``generate`` on this machine, with skewed lengths of answers.

The native engine runs with and without ``engine.compile`` (CUDA graphs).
As ``benchmarks/generate.py``, whose two sides these are: both draw the same number of tokens for each answer, from a log-normal law.
transformers draws all answers in one left-padded batch.

    python benchmarks/gpu/generate.py [--size 0.5b | 1.5b | 7b] [--rounds 2] [--smoke]

The floor is what reading takes: weights once for each token of the longest answer, over the bandwidth that a copy reaches here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common  # first: it says where the rest lies
import torch
from transformers import AutoModelForCausalLM

from benchmarks.generate import native, transformers_generate
from lightrft.types import Prompt


def lengths_of(count: int, median: float, sigma: float, longest: int) -> torch.Tensor:
    """Tokens of each answer."""
    draws = (
        torch.randn(count, generator=torch.Generator().manual_seed(0)).mul(sigma).exp().mul(median)
    )
    return draws.round().long().clamp(1, longest)


def bandwidth() -> float:
    """Bytes a second that a copy within the device moves, read and written."""
    source = torch.empty(
        (2**30 if torch.cuda.is_available() else 2**24), dtype=torch.uint8, device=common.device()
    )
    target, best = torch.empty_like(source), float("inf")
    for _ in range(6):
        common.wait()
        began = time.perf_counter()
        target.copy_(source)
        common.wait()
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best


def seconds(side: Callable[[], int]) -> float:
    """Of one call."""
    common.wait()
    began = time.perf_counter()
    side()
    common.wait()
    return time.perf_counter() - began


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--median", type=float, default=128)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if args.smoke:
        (
            args.size,
            args.prompts,
            args.answers,
            args.prompt,
            args.median,
            args.longest,
            args.rounds,
        ) = "smoke", 2, 4, 8, 8, 16, 1
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name:
        folder = common.make(args.size, Path(name), dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(common.device()).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    rows = common.SIZES[args.size]["vocab_size"]
    ids = torch.randint(
        4, rows, (args.prompts, args.prompt), generator=torch.Generator().manual_seed(0)
    ).tolist()
    prompts = [Prompt(id=str(i), token_ids=row) for i, row in enumerate(ids)]
    total = args.prompts * args.answers
    lengths = lengths_of(total, args.median, args.sigma, args.longest)
    tokens = int(lengths.sum())
    sides = {"native": native(model, prompts, lengths)}
    if torch.cuda.is_available():
        sides["native, compiled"] = native(model, prompts, lengths, compiled=True)
    sides["transformers"] = transformers_generate(model, prompts, lengths, total)
    for name, side in sides.items():
        assert side() == tokens  # warms up
        print(f"{name}: warm", flush=True)
    took = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            took[name].append(seconds(side))
    speeds = {name: tokens / statistics.median(values) for name, values in took.items()}
    floor = common.parameters(args.size) * dtype.itemsize / bandwidth() * int(lengths.max())
    about = f"Qwen2.5-{args.size} (random weights), {str(dtype)[6:]}; "
    about += f"{args.prompts} prompts of {args.prompt} tokens x {args.answers} answers, "
    about += (
        f"{tokens:,} tokens, mean {tokens / total:.0f}, longest {int(lengths.max())}; "
        f"{args.rounds} rounds, medians"
    )
    lines = [
        about,
        "",
        *common.table(
            ["", "tokens/s", "s"],
            [[k, f"{v:,.0f}", f"{tokens / v:.2f}"] for k, v in speeds.items()],
        ),
        "",
    ]
    ratio = speeds["native"] / speeds["transformers"]
    gain = speeds.get("native, compiled", 0.0) / speeds["native"]
    lines += [f"Native over transformers: {ratio:.2f}."]
    lines += [f"Compiled over not compiled: {gain:.2f}."] if gain else []
    lines += [
        f"Reading the weights once a token of the longest answer would take {floor:.2f} s: "
        f"{tokens / floor:,.0f} tokens/s."
    ]
    tree = {
        "work": about,
        "tokens per second": speeds,
        "seconds": took,
        "ratio": ratio,
        "compiled ratio": gain,
        "floor seconds": floor,
    }
    common.write(
        args.out,
        f"generate-{args.size}",
        args.machine,
        "Drawing answers, against transformers' generate",
        tree,
        lines,
    )


if __name__ == "__main__":
    main()
