# ruff: noqa: E402 (the environment is set before torch is imported)
"""Tokens per CPU second of constrained against plain decoding, in the native engine and in transformers ``generate``.

The constraints are of llguidance on both sides. transformers has none of its own, so its side is ``generate`` with a
``LogitsProcessor`` that asks llguidance for the mask of each row, as its users write it. The weights are random, and every
constraint leaves room for more tokens than are asked for, so both sides sample the same number. Rounds are interleaved, and
times are of this process's CPU.

    python benchmarks/constrained.py [--rounds 5] [--machine NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import llguidance
import llguidance.hf
import llguidance.torch
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_model
from lightrft.types import Prompt, Request

FORMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "regex": {"regex": "[a-z ]{4000}"},
    "json_schema": {
        "json_schema": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["name", "count"],
            },
            "minItems": 1000,
        }
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of ``size`` tokens, learned from the modules of Python."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    backend.train_from_iterator((file.read_text("utf-8", "replace") for file in files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


class Masks(LogitsProcessor):
    """Masks the logits of each row by its own matcher of llguidance."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, grammar: str, rows: int) -> None:
        self._matchers = [llguidance.LLMatcher(tokenizer, grammar) for _ in range(rows)]
        self._mask = llguidance.torch.allocate_token_bitmask(rows, tokenizer.vocab_size)
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, matcher in enumerate(self._matchers):
            if self._begun:
                matcher.consume_token(int(input_ids[row, -1]))
            llguidance.torch.fill_next_token_bitmask(matcher, self._mask, row)
        self._begun = True
        llguidance.torch.apply_token_bitmask_inplace(scores, self._mask.to(scores.device))
        return scores


def grammar_of(form: dict[str, Any]) -> str:
    if "regex" in form:
        return llguidance.LLMatcher.grammar_from_regex(form["regex"])
    return llguidance.LLMatcher.grammar_from_json_schema(form["json_schema"])


def native(engine: NativeEngine, prompts: list[list[int]], args: Any, form: Any) -> int:
    """Generate with the native engine. Return the number of tokens."""
    sampling = SamplingConfig.model_validate({"max_new_tokens": args.tokens, "constraint": form})
    wanted = [Request(Prompt(str(k), ids), k) for k, ids in enumerate(prompts)]
    return sum(map(len, engine.generate(wanted, sampling)))


def peer(model: PreTrainedModel, guide: Any, prompts: list[list[int]], args: Any, form: Any) -> int:
    """Generate with transformers. Return the number of tokens."""
    given = torch.tensor(prompts)
    masks = [] if form is None else [Masks(guide, grammar_of(form), len(prompts))]
    with torch.inference_mode():
        found: Any = model.generate(  # type: ignore[operator]
            given,
            attention_mask=torch.ones_like(given),
            do_sample=True,
            top_k=0,
            max_new_tokens=args.tokens,
            min_new_tokens=args.tokens,
            logits_processor=masks,
        )
    return found[:, given.shape[1] :].numel()


def case(args: Any, sides: dict[str, Callable[..., int]], form: str, rows: int) -> dict[str, Any]:
    """Measure one form with a number of rows."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(300, args.vocabulary, (rows, 64), generator=generator).tolist()
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    # the first round warms up
    for k in range(args.rounds + 1):
        for name, generate in sides.items():
            start = time.process_time()
            tokens = generate(prompts, args, FORMS[form])
            if tokens != rows * args.tokens:
                raise SystemExit(f"{name} generated {tokens} tokens of {rows * args.tokens}")
            if k:
                speeds[name].append(tokens / (time.process_time() - start))
    ratios = sorted(a / b for a, b in zip(speeds["native"], speeds["transformers"], strict=True))
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    spread = {"lowest": ratios[0], "median": statistics.median(ratios), "highest": ratios[-1]}
    result = {"form": form, "rows": rows, **medians, "ratio": spread}
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    tokenizer = tokenizer_of(args.vocabulary)
    args.vocabulary = len(tokenizer)
    model = tiny_model(
        "qwen2",
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        intermediate_size=args.hidden * 11 // 4,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    ).eval()
    # both sides then take as many tokens as they are asked for
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig())
    guide = llguidance.hf.from_tokenizer(tokenizer)
    sides: dict[str, Callable[..., int]] = {
        "native": lambda *given: native(engine, *given),
        "transformers": lambda *given: peer(model, guide, *given),
    }
    cases = [case(args, sides, form, rows) for form in FORMS for rows in args.rows]
    report(args, cases)


def report(args: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    plain = {one["rows"]: one["native"] for one in cases if one["form"] == "none"}
    lines = [
        "# Constrained decoding",
        "",
        f"`{' '.join(['python', 'benchmarks/constrained.py', *sys.argv[1:]])}`",
        "",
        f"* machine: {args.machine}, {args.threads} threads of {os.cpu_count()} cores",
        f"* versions: torch {torch.__version__}, transformers {transformers.__version__}, "
        f"llguidance {llguidance.__version__}",
        f"* model: qwen2, {args.layers} layers of {args.hidden}, vocabulary {args.vocabulary}, float32",
        f"* work: a response of {args.tokens} tokens to each of n prompts of 64 tokens; "
        f"{args.rounds} rounds",
        "",
        "Tokens per CPU second. The ratio is that of the native engine to `generate` with a "
        "`LogitsProcessor` over llguidance: the median of the rounds, and lowest to highest.",
        "",
        "| constraint | rows | native | of its plain speed | transformers | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for one in cases:
        ratio = one["ratio"]
        lines.append(
            f"| {one['form']} | {one['rows']} | {one['native']:,.0f} | "
            f"{one['native'] / plain[one['rows']]:.2f} | {one['transformers']:,.0f} | "
            f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f}) |"
        )
    file = args.out / f"constrained-{args.machine}.md"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
