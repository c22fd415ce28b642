# ruff: noqa: E402 (the environment is set before torch is imported)
"""Computed prompt tokens and seconds of conversations, with and without kept keys and values.

Each turn's prompt is the one before, its response, and a new question. All conversations begin with the same system prompt. They take
their turns together. Both sides use the same seeds. Rounds are interleaved; compare ratios only.

    python benchmarks/turns.py [--conversations 4] [--turns 8] [--threads 1] [--rounds 3]
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
from transformers import PreTrainedModel

from benchmarks.generate import conditions, sized_model
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.types import Prompt, Request


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=256)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def converse(
    args: argparse.Namespace, model: PreTrainedModel, *, keeps: bool
) -> tuple[list[float], int, int]:
    """Return the seconds of each turn, the prompt tokens, and how many of them were reused."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    if keeps and not engine.keep_prefixes():
        raise RuntimeError("the model reuses nothing")
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(4, args.vocabulary, (count,), generator=generator).tolist()

    sampling = SamplingConfig(max_new_tokens=args.answer_tokens)
    system = words(args.system_tokens)
    texts = [[*system, *words(args.question_tokens)] for _ in range(args.conversations)]
    seconds, asked, reused = [], 0, 0
    for turn in range(args.turns):
        requests = [Request(Prompt(str(k), ids), 1000 * turn + k) for k, ids in enumerate(texts)]
        start = time.perf_counter()
        found = sorted(engine.generate(requests, sampling), key=lambda one: one.seed)
        seconds.append(time.perf_counter() - start)
        asked += sum(map(len, texts))
        reused += sum(one.reused_tokens for one in found)
        texts = [
            [*ids, *one.token_ids, *words(args.question_tokens)] for ids, one in zip(texts, found)
        ]
    return seconds, asked, reused


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    turn = args.question_tokens + args.answer_tokens
    model = sized_model("qwen2", args, args.system_tokens + args.turns * turn)
    for keeps in (False, True):
        converse(args, model, keeps=keeps)  # warms up
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}
    counts: dict[bool, tuple[int, int]] = {}
    for _ in range(args.rounds):
        for keeps in (False, True):
            seconds, asked, reused = converse(args, model, keeps=keeps)
            rounds[keeps].append(seconds)
            counts[keeps] = asked, reused
    report(args, rounds, counts)


def report(
    args: argparse.Namespace,
    rounds: dict[bool, list[list[float]]],
    counts: dict[bool, tuple[int, int]],
) -> None:
    command = f"python benchmarks/turns.py {' '.join(sys.argv[1:])}".strip()
    about = {
        "machine": f"{args.machine}, {args.threads} threads",
        **conditions("qwen2", args),
        "work": f"{args.conversations} conversations of {args.turns} turns; system prompt "
        f"{args.system_tokens}, question {args.question_tokens}, response {args.answer_tokens} "
        "tokens",
    }
    rows = []
    for keeps, found in rounds.items():
        asked, reused = counts[keeps]
        totals = [sum(one) for one in found]
        rows.append(
            {
                "keeps_prefixes": keeps,
                "prompt_tokens": asked,
                "computed_prompt_tokens": asked - reused,
                "seconds": totals,
                "last_turn_seconds": [one[-1] for one in found],
            }
        )
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"turns-{args.machine}"
    result = {"command": command, **about, "measured": rows}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [
        *("# Conversations with and without kept keys and values", "", f"`{command}`", ""),
        *(f"* {key}: {text}" for key, text in about.items()),
        "",
        "Seconds are medians of the rounds.",
        "",
        "| kept | prompt tokens | computed | seconds of all turns | of the last turn |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        whole, last = (statistics.median(row[k]) for k in ("seconds", "last_turn_seconds"))
        kept = "yes" if row["keeps_prefixes"] else "no"
        lines.append(
            f"| {kept} | {row['prompt_tokens']} | {row['computed_prompt_tokens']} | {whole:.2f} | "
            f"{last:.2f} |"
        )
    text = "\n".join(lines) + "\n"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
