"""Milliseconds for a token of all rows, with and without CUDA graphs, and the host's share of each part of a step.

    python benchmarks/gpu/decoding.py [--size 0.5b] [--tokens 128] [--smoke]

Responses have equal lengths: 32 rows after prompts of 32 tokens, and 256 rows after prompts of 512. The last of three calls counts; it
suppresses end tokens. ``_step`` is the model, ``_draw`` sampling, ``to_host`` the wait for the device.
"""

from __future__ import annotations

import time

import common  # first: it says where the rest lies
import engine_checks
import torch

from benchmarks.vs_trl import Stopwatch
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines import native
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_tokenizer

PARTS = ("_step", "_draw", "_admit", "_accept", "_take")
SAMPLES = 8


def seconds(engine: native.NativeEngine, rows: int, prompt: int, tokens: int, least: int) -> float:
    """Return the time of one call."""
    vocabulary = engine.decoder.model.config.vocab_size  # ty: ignore[unresolved-attribute]
    requests = engine_checks.requests(vocabulary, rows // SAMPLES, prompt, SAMPLES)
    sampling = SamplingConfig(max_new_tokens=tokens, min_new_tokens=least)
    common.wait()
    began = time.perf_counter()
    found = sum(len(rollout) for rollout in engine.generate(requests, sampling))
    common.wait()
    assert found == rows * tokens
    return time.perf_counter() - began


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    shapes = ((32, 32), (256, 512))
    if args.smoke:
        args.size, args.tokens, shapes = "smoke", 8, ((16, 16),)
    # compiling for a CPU takes half a minute for each shape
    choices = (False, True) if torch.cuda.is_available() else (False,)
    watch = Stopwatch()
    for part in PARTS:
        watch.wrap(native.GenerationBatch, part, part)
    watch.wrap(native, "to_host", "to_host")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model, tokenizer = common.random_model(args.size, dtype).eval(), tiny_tokenizer()
    tokenizer.eos_token = None
    table, tree = [], []
    for rows, prompt in shapes:
        for compiled in choices:
            config = EngineConfig(compile=compiled, max_num_seqs=256, max_cache_tokens=400_000)
            engine = native.NativeEngine(KVDecoder(model), tokenizer, config)
            for least in (0, 0, args.tokens):
                watch.take()
                took = seconds(engine, rows, prompt, args.tokens, least)
            parts = {
                name: round(1000 * value / args.tokens, 2) for name, value in watch.take().items()
            }
            ms, speed = 1000 * took / args.tokens, rows * args.tokens / took
            counts = engine.compiled
            graphs = 0 if counts is None else counts.graphs
            tree.append(
                {"rows": rows, "prompt": prompt, "compiled": compiled, "ms": ms, "parts": parts}
            )
            table.append(
                [
                    str(rows),
                    str(prompt),
                    "yes" if compiled else "no",
                    f"{ms:.1f}",
                    f"{speed:,.0f}",
                    str(graphs),
                    ", ".join(f"{k} {v}" for k, v in parts.items()),
                ]
            )
            print(*table[-1], sep=" | ", flush=True)
    heads = ["rows", "prompt", "compiled", "ms per token", "tokens/s", "graphs", "host, ms"]
    lines = [f"Qwen2.5-{args.size} (random weights), {args.tokens} tokens for each response", ""]
    common.write(
        args.out,
        "decoding",
        args.machine,
        "A decoding step",
        {"rows": tree},
        [*lines, *common.table(heads, table)],
    )


if __name__ == "__main__":
    main()
