# ruff: noqa: E402 (the environment is set before torch is imported)
"""Tokens per CPU second of speculative against plain decoding in the native engine: repetitive text and random text, few rows and many.

The weights are random, but for the output layer: it prefers one token after each, and these run in circles of 5 to 20 tokens. So
text at temperature 1 repeats itself, and text at temperature 20 does not. The draft model has fewer and narrower layers, and the
same circles. Both sides must sample the same tokens by the same seeds, and the report counts them. Rounds are interleaved, and
times are of this process's CPU.

    python benchmarks/speculative.py [--rounds 5] [--machine NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
import transformers
from transformers import PreTrainedModel

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request, Rollout

LIKING = 14.0
"""Logit of the next token of a circle."""
TEMPERATURES = {"repetitive": 1.0, "random": 20.0}
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"kind": "ngram", "tokens": 6},
    "draft": {"kind": "draft", "tokens": 4, "path": "small"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def circles(vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """The token after each token, so that they run in circles of 5 to 20 tokens."""
    after, order = (
        torch.empty(vocabulary, dtype=torch.long),
        torch.randperm(vocabulary, generator=generator),
    )
    while len(order):
        part = order[: int(torch.randint(5, 21, (), generator=generator))]
        after[part] = part.roll(-1)
        order = order[len(part) :]
    return after


def model_of(args: argparse.Namespace, hidden: int, layers: int) -> PreTrainedModel:
    """A model that continues each token with the next of its circle, with probability 0.9 or so."""
    model = tiny_model(
        "qwen2",
        vocab_size=args.vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        intermediate_size=hidden * 11 // 4,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # the layers are computed, and change little
            parameter.data.mul_(0.01)
    after = circles(args.vocabulary, torch.Generator().manual_seed(1))
    with torch.no_grad():
        inputs = model.get_input_embeddings().weight.normal_(
            generator=torch.Generator().manual_seed(2)
        )
        model.get_output_embeddings().weight[after] = inputs * (LIKING / hidden)
    return model.eval()


def engines(args: argparse.Namespace) -> dict[str, NativeEngine]:
    policy = model_of(args, args.hidden, args.layers)
    small = model_of(args, args.hidden // 2, 1)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return {
        name: NativeEngine(
            KVDecoder(policy),
            tokenizer,
            EngineConfig.model_validate({"speculative": settings}),
            draft=KVDecoder(small) if name == "draft" else None,
        )
        for name, settings in KINDS.items()
    }


def requests(args: argparse.Namespace, rows: int) -> list[Request]:
    ids = torch.randint(4, args.vocabulary, (rows, 64), generator=torch.Generator().manual_seed(7))
    return [Request(Prompt(str(k), row), k) for k, row in enumerate(ids.tolist())]


def measure(
    engine: NativeEngine, wanted: list[Request], sampling: SamplingConfig
) -> tuple[float, list[Rollout]]:
    start = time.process_time()
    found = list(engine.generate(wanted, sampling))
    seconds = time.process_time() - start
    return sum(map(len, found)) / seconds, sorted(found, key=lambda r: r.seed)


def case(
    args: argparse.Namespace, sides: dict[str, NativeEngine], text: str, rows: int
) -> dict[str, Any]:
    """Measure one kind of text with a number of rows."""
    wanted = requests(args, rows)
    sampling = SamplingConfig(max_new_tokens=args.tokens, temperature=TEMPERATURES[text])
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    acceptance: dict[str, float] = {}
    equal: dict[str, float] = {}
    for k in range(args.rounds + 1):
        responses: dict[str, list[Rollout]] = {}
        for name, engine in sides.items():
            speed, responses[name] = measure(engine, wanted, sampling)
            # the first round warms up
            if k:
                speeds[name].append(speed)
        for name, found in responses.items():
            pairs = zip(found, responses["plain"], strict=True)
            equal[name] = sum(a.token_ids == b.token_ids for a, b in pairs) / len(found)
            drafted = sum(r.drafted for r in found)
            acceptance[name] = sum(r.accepted for r in found) / drafted if drafted else 0.0
    result: dict[str, Any] = {
        "text": text,
        "rows": rows,
        "plain": statistics.median(speeds["plain"]),
    }
    for name in [name for name in sides if name != "plain"]:
        ratios = sorted(a / b for a, b in zip(speeds[name], speeds["plain"], strict=True))
        result[name] = {
            "ratio": {
                "lowest": ratios[0],
                "median": statistics.median(ratios),
                "highest": ratios[-1],
            },
            "acceptance": acceptance[name],
            "equal_responses": equal[name],
        }
    print(json.dumps(result))
    return result


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    sides = engines(args)
    cases = [case(args, sides, text, rows) for text in TEMPERATURES for rows in args.rows]
    report(args, cases)


def report(args: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    command = " ".join(["python", "benchmarks/speculative.py", *sys.argv[1:]])
    result = {
        "command": command,
        "machine": f"{args.machine}, {platform.system()}, {args.threads} threads of {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[1]:.1f} on average over the last five minutes, this benchmark included",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "model": f"qwen2, {args.layers} layers of {args.hidden}, vocabulary {args.vocabulary}, float32; "
        f"draft model: 1 layer of {args.hidden // 2}",
        "work": f"a response of {args.tokens} tokens to each of n prompts of 64 tokens; "
        f"{args.rounds} rounds",
        "cases": cases,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"speculative-{args.machine}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [
        "# Speculative decoding against plain decoding",
        "",
        f"`{command}`",
        "",
        *(f"* {key}: {result[key]}" for key in ("machine", "load", "versions", "model", "work")),
        "",
        "A ratio above 1 is faster than plain decoding: the median of the rounds, and lowest to highest.",
        "",
        "| text | rows | plain, tokens/CPU s | kind | ratio | accepted | equal responses |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in cases:
        for kind in ("ngram", "draft"):
            one = found[kind]
            ratio = one["ratio"]
            lines.append(
                f"| {found['text']} | {found['rows']} | {found['plain']:,.0f} | {kind} | "
                f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f}) | "
                f"{one['acceptance']:.0%} | {one['equal_responses']:.0%} |"
            )
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
