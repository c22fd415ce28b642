# ruff: noqa: E402 (the environment is set before torch is imported)
"""Tokens per second of the native engine against transformers (``generate`` and continuous batching), vLLM on CPUs, and a bare loop.

Skewed response lengths, 8 responses per prompt. Every side samples the same number of tokens for each response, from a
lognormal distribution. The bare loop calls the model's own forward for as many rows as the engine has, with its own cache and without
sampling; for it, all responses have one length on both sides. Rounds are interleaved; compare ratios only. vLLM is a side where the
package is installed (``make test-vllm`` makes such an environment), and is loaded after all others were measured.

    python benchmarks/generate.py [--prompt-tokens 256 2048] [--threads 1 2] [--rounds 3] [--sides generate continuous bare vllm]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from vs_trl import cpu_family, cpu_model

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request

Side = Callable[[], int]
SIDES = ("generate", "continuous", "bare", "vllm")
LONGEST_WAIT = 600
"""Seconds without a response after which continuous batching counts as hung."""


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
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--median", type=float, default=64)
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--family", default="qwen2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--compile", action="store_true", help="the native engine with engine.compile"
    )
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def sized_model(family: str, args: argparse.Namespace, positions: int) -> PreTrainedModel:
    """A model of ``family`` for ``positions`` tokens, in the sizes of the command line, without an end token."""
    return tiny_model(
        family,
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        intermediate_size=args.hidden * 11 // 4,
        eos_token_id=None,
        max_position_embeddings=positions,
    )


def conditions(family: str, args: argparse.Namespace) -> dict[str, str]:
    """What a result depends on besides its work: the load of the machine, versions and the model."""
    return {
        "load": f"{os.getloadavg()[1]:.1f} on average over the last five minutes, this benchmark "
        "included",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"python {platform.python_version()}",
        "model": f"{family}, {args.layers} layers of {args.hidden}, vocabulary {args.vocabulary}, "
        "float32",
    }


def build(
    args: argparse.Namespace, prompt_tokens: int
) -> tuple[PreTrainedModel, list[Prompt], torch.Tensor]:
    model = sized_model(args.family, args, prompt_tokens + args.longest)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(
        4, args.vocabulary, (args.prompts, prompt_tokens), generator=generator
    ).tolist()
    prompts = [Prompt(id=str(i), token_ids=row) for i, row in enumerate(rows)]
    draws = (
        torch.randn(args.prompts * args.answers, generator=generator)
        .mul(args.sigma)
        .exp()
        .mul(args.median)
    )
    return model, prompts, draws.round().long().clamp(1, args.longest)


def native(
    model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor, *, compiled: bool = False
) -> Side:
    """The native engine, with compiled decoding on request."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig(compile=compiled))
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


def continuous_batching(
    model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor
) -> Side:
    """transformers' continuous batching, each request with its own length."""
    answers = len(lengths) // len(prompts)
    settings = GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=int(lengths.max())
    )

    def run() -> int:
        manager = model.init_continuous_batching(generation_config=settings)
        manager.start()
        total = 0
        try:
            rows = [p for p in prompts for _ in range(answers)]
            for prompt, length in zip(rows, lengths.tolist(), strict=True):
                manager.add_request(prompt.token_ids, max_new_tokens=length)
            waiting = len(rows)
            while waiting:
                found = manager.get_result(timeout=LONGEST_WAIT)
                assert found is not None, "continuous batching gave no response"
                if found.is_finished():
                    total += len(found.generated_tokens)
                    waiting -= 1
        finally:
            manager.stop(block=True)
        return total

    return run


def bare_loop(model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor) -> Side:
    """The model's own forward for all rows at each step, with its cache. Prompts are computed once, nothing is sampled."""
    answers, longest = len(lengths) // len(prompts), int(lengths.max())

    @torch.no_grad()
    def run() -> int:
        ids = torch.tensor([p.token_ids for p in prompts])
        cache = DynamicCache(config=model.config)
        out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(answers)
        last = out.logits[:, -1].argmax(-1).repeat_interleave(answers)
        for _ in range(longest - 1):
            out = model(input_ids=last[:, None], past_key_values=cache)
            last = out.logits[:, -1].argmax(-1)
        return len(lengths) * longest

    return run


def vllm_side(model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor) -> Side:
    """vLLM in this process, with its own compilation and prefix cache."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    vllm = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        served = vllm.LLM(model=folder, skip_tokenizer_init=True, dtype="float32")
    answers = len(lengths) // len(prompts)
    asked = [{"prompt_token_ids": p.token_ids} for p in prompts for _ in range(answers)]
    settings = [
        vllm.SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
        for n in lengths.tolist()
    ]

    def run() -> int:
        served.reset_prefix_cache()
        found = served.generate(asked, settings, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return run


def speed(side: Side, threads: int) -> float:
    """Tokens per second."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    tokens = side()
    return tokens / (time.perf_counter() - start)


def fastest_batch(
    model: PreTrainedModel, prompts: list[Prompt], lengths: torch.Tensor, threads: int
) -> tuple[str, Side]:
    """``generate`` with the batch size that was fastest in one try."""
    total, answers = len(lengths), len(lengths) // len(prompts)
    sides = {
        size: transformers_generate(model, prompts, lengths, size)
        for size in sorted({total, max(answers, total // 2), max(answers, total // 4)})
    }
    size = max(sides, key=lambda size: speed(sides[size], threads))
    return f"transformers generate, batches of {size}", sides[size]


@dataclass(frozen=True, slots=True)
class Measured:
    """One side against the native engine: tokens per second of both in each round."""

    prompt_tokens: int
    threads: int
    side: str
    rounds: list[tuple[float, float]]

    @property
    def ratios(self) -> list[float]:
        return sorted(ours / theirs for ours, theirs in self.rounds)

    def row(self) -> str:
        """Return a line of the table."""
        ours, theirs = (statistics.median(column) for column in zip(*self.rounds, strict=True))
        low, *_, high = [self.ratios[0], *self.ratios]
        return (
            f"| {self.prompt_tokens} | {self.threads} | {self.side} | {ours:,.0f} | {theirs:,.0f} "
            f"| {statistics.median(self.ratios):.2f} ({low:.2f}, {high:.2f}) |"
        )


def measure(args: argparse.Namespace, prompt_tokens: int, threads: int, kind: str) -> Measured:
    """Run the side ``kind`` and the native engine in turn."""
    model, prompts, lengths = build(args, prompt_tokens)
    if kind == "bare":
        lengths = torch.full_like(lengths, int(lengths.float().mean()))
    ours = native(model, prompts, lengths, compiled=args.compile)
    torch.set_num_threads(threads)
    if kind == "generate":
        name, theirs = fastest_batch(model, prompts, lengths, threads)
    else:
        name, made = {
            "continuous": ("transformers continuous batching", continuous_batching),
            "bare": ("bare loop, equal lengths", bare_loop),
            "vllm": ("vLLM", vllm_side),
        }[kind]
        theirs = made(model, prompts, lengths)
        theirs()
    ours()
    rounds = [(speed(ours, threads), speed(theirs, threads)) for _ in range(args.rounds)]
    return Measured(prompt_tokens, threads, name, rounds)


def main() -> None:
    args = arguments()
    kinds = list(args.sides)
    if "vllm" in kinds and importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: no side of it")
        kinds.remove("vllm")
    # vLLM changes the threads of its process, so it comes last
    kinds.sort(key=SIDES.index)
    print(TABLE)
    found: list[Measured] = []
    failed: list[str] = []
    for kind in kinds:
        for prompt_tokens in args.prompt_tokens:
            for threads in args.threads:
                try:
                    found.append(measure(args, prompt_tokens, threads, kind))
                except AssertionError as error:
                    # continuous batching hangs at times; the other sides must not be lost
                    failed.append(f"{kind}, {prompt_tokens} tokens, {threads} threads: {error}")
                    print(f"failed: {failed[-1]}", flush=True)
                    continue
                print(found[-1].row(), flush=True)
                report(args, found, failed)


TABLE = """| prompt tokens | threads | side | native, tokens/s | side, tokens/s | ratio: median (lowest, highest) |
|---|---|---|---|---|---|"""


def report(args: argparse.Namespace, found: list[Measured], failed: list[str]) -> None:
    """Write the table and what failed, and all rounds as JSON."""
    command = " ".join(["python", "benchmarks/generate.py", *sys.argv[1:]])
    _, _, lengths = build(args, args.prompt_tokens[0])
    about = {
        "machine": f"{cpu_model()} (family {cpu_family()}), {os.cpu_count()} cores, {platform.system()}",
        **conditions(args.family, args),
        "work": f"{args.prompts} prompts x {args.answers} responses; lengths lognormal, median "
        f"{args.median:g}, sigma {args.sigma:g}: mean {lengths.float().mean():.0f}, longest "
        f"{int(lengths.max())}",
    }
    rows = [dataclasses.asdict(one) for one in found]
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"generate-{args.machine}"
    result = {"command": command, **about, "measured": rows, "failed": failed}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    lines = [
        "# The native engine against others",
        "",
        f"`{command}`",
        "",
        *(f"* {key}: {text}" for key, text in about.items()),
        "",
        TABLE,
        *(one.row() for one in found),
        *(f"\nFailed: {text}" for text in failed),
    ]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
