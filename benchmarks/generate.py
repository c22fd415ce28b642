# ruff: noqa: E402 (the environment is set before torch is imported)
"""Tokens per second of the native engine against transformers' ``generate``: skewed answer lengths, 8 answers per prompt.

Both sides sample the same number of tokens for each answer, drawn from a lognormal distribution. Rounds are interleaved, each
side with the thread count (and, for transformers, the batch size) that a first round found best; compare ratios only.

    python benchmarks/generate.py [--prompts 8] [--rounds 3] [--machine NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

for _variable, _value in (
    ("OMP_WAIT_POLICY", "PASSIVE"),
    ("GOMP_SPINCOUNT", "0"),
    ("HF_HUB_OFFLINE", "1"),
):
    os.environ.setdefault(_variable, _value)  # two spinning threads make small models far slower
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request

Side = Callable[[], int]


class PerRowLength(StoppingCriteria):
    """Ends each row at its own length, as an end token would."""

    def __init__(self, prompt_tokens: int, lengths: torch.Tensor) -> None:
        self._ends = prompt_tokens + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--median", type=float, default=64)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["native", "transformers"])
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[PreTrainedModel, list[Prompt], torch.Tensor]:
    model = tiny_model(
        args.family,
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        intermediate_size=args.hidden * 11 // 4,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(
        4, args.vocabulary, (args.prompts, args.prompt_tokens), generator=generator
    ).tolist()
    prompts = [Prompt(id=str(i), token_ids=row) for i, row in enumerate(rows)]
    draws = (
        torch.randn(args.prompts * args.answers, generator=generator)
        .mul(args.sigma)
        .exp()
        .mul(args.median)
    )
    return model, prompts, draws.round().long().clamp(1, args.longest)


def native(model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor) -> Side:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    answers = len(lengths) // len(prompts)
    requests = [
        Request(prompt, seed=i, sample=i % answers, max_new_tokens=int(length))
        for i, (prompt, length) in enumerate(
            zip((p for p in prompts for _ in range(answers)), lengths)
        )
    ]
    return lambda: sum(len(rollout) for rollout in engine.generate(requests, SamplingConfig()))


def transformers_generate(
    model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor, batch: int
) -> Side:
    """Left-padded batches of ``batch`` answers (equal prompts need no padding), sdpa, dynamic cache."""
    answers = len(lengths) // len(prompts)
    per_call = max(1, batch // answers)

    def run() -> int:
        total = 0
        for start in range(0, len(prompts), per_call):
            ids = torch.tensor(
                [p.token_ids for p in prompts[start : start + per_call]], device=model.device
            )
            wanted = lengths[start * answers : (start + len(ids)) * answers].to(model.device)
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                temperature=1.0,
                num_return_sequences=answers,
                max_new_tokens=int(lengths.max()),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([PerRowLength(ids.shape[1], wanted)]),
            )
            assert out.shape == (len(wanted), ids.shape[1] + int(wanted.max()))
            total += int(wanted.sum())
        return total

    return run


def speed(side: Side, threads: int) -> float:
    """Tokens per second."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    tokens = side()
    return tokens / (time.perf_counter() - start)


def best(sides: dict[str, Side]) -> tuple[str, Side, int]:
    """The fastest of ``sides`` and its thread count, each tried once after a warm-up."""
    next(iter(sides.values()))()
    tried = {
        (name, threads): speed(side, threads)
        for name, side in sides.items()
        for threads in (1, os.cpu_count() or 1)
    }
    name, threads = max(tried, key=lambda key: tried[key])
    for key, value in tried.items():
        print(f"  {key[0]}, {key[1]} threads: {value:,.0f} tokens/s")
    return name, sides[name], threads


def main() -> None:
    args = arguments()
    model, prompts, lengths = build(args)
    total = len(lengths)
    print(
        f"{total} answers, {int(lengths.sum())} tokens, mean {lengths.float().mean():.0f}, "
        f"longest {int(lengths.max())}"
    )
    ours, theirs = {"native": native(model, prompts, lengths)}, {}
    for batch in sorted(
        {total, max(args.answers, total // 2), max(args.answers, total // 4)}, reverse=True
    ):
        theirs[f"transformers, batches of {batch}"] = transformers_generate(
            model, prompts, lengths, batch
        )
    if args.only:
        best(ours if args.only == "native" else theirs)
        return
    chosen = [best(ours), best(theirs)]
    rounds = []
    for _ in range(args.rounds):
        speeds = [speed(side, threads) for _, side, threads in chosen]
        rounds.append(
            {"native": speeds[0], "transformers": speeds[1], "ratio": speeds[0] / speeds[1]}
        )
        print("  round: " + ", ".join(f"{k} {v:,.2f}" for k, v in rounds[-1].items()))
    report(args, str(model.config._attn_implementation), lengths, chosen, rounds)


def report(
    args: argparse.Namespace,
    attention: str,
    lengths: torch.Tensor,
    chosen: list[tuple[str, Side, int]],
    rounds: list[dict[str, float]],
) -> None:
    ratios = sorted(r["ratio"] for r in rounds)
    command = " ".join(["python", "benchmarks/generate.py", *sys.argv[1:]])
    result = {
        "command": command,
        "machine": f"{args.machine}, {platform.system()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[1]:.1f} on average over the last five minutes, this benchmark "
        "included",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "model": f"{args.family}, {args.layers} layers of {args.hidden}, vocabulary "
        f"{args.vocabulary}, float32 (transformers: {attention})",
        "work": f"{args.prompts} prompts of {args.prompt_tokens} tokens x {args.answers} answers; "
        f"answer lengths lognormal, median {args.median:g}, sigma {args.sigma:g}: mean "
        f"{lengths.float().mean():.0f}, longest {int(lengths.max())}",
        "sides": {name: f"{threads} threads" for name, _, threads in chosen},
        "rounds": rounds,
        "ratio": {"lowest": ratios[0], "median": statistics.median(ratios), "highest": ratios[-1]},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"generate-{args.machine}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [
        "# Native engine against transformers' generate",
        "",
        f"`{command}`",
        "",
        *(
            f"* {key}: {result[key]}"
            for key in ("machine", "load", "versions", "model", "work", "sides")
        ),
        "",
        "| round | native, tokens/s | transformers, tokens/s | ratio |",
        "|---|---|---|---|",
        *(
            f"| {i} | {r['native']:,.0f} | {r['transformers']:,.0f} | {r['ratio']:.2f} |"
            for i, r in enumerate(rounds, 1)
        ),
        "",
        f"Ratio: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}.",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[-1:]))


if __name__ == "__main__":
    main()
