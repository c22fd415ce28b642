"""Tokens that the cache of the native engine holds against those in use, and attention over rectangles against pages.

python benchmarks/cache_layout.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.decoding.kv_decoder import KVDecoder, PlanDecodeSession
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Prompt, Request

LONGEST, VOCABULARY = 512, 4096
# prompts, responses of each, shortest and longest prompt, median and sigma of lengths, rows
WORK = {
    "8 x 8, prompts of 256, 64 rows": (8, 8, 256, 256, 64, 0.9, 64),
    "8 x 8, prompts of 256, 16 rows": (8, 8, 256, 256, 64, 0.9, 16),
    "16 x 4, prompts of 32 to 1024, 32 rows": (16, 4, 32, 1024, 64, 0.9, 32),
    "32 x 1, prompts of 32 to 256, very skewed, 16 rows": (32, 1, 32, 256, 32, 1.4, 16),
}


class Counting(PlanDecodeSession):
    """Counts tokens after each step."""

    log: list[tuple[int, int]]

    def step(self, tokens: Tensor) -> Tensor:
        logits = super().step(tokens)
        self.log.append((self.held, int(self._prompt_lengths.sum() + self._lengths.sum())))
        return logits


class CountingDecoder(KVDecoder):
    def session(self) -> Counting:
        session = Counting(self.model)
        self.log = session.log = []
        return session


def tokens_of(work: tuple[int, int, int, int, int, float, int]) -> np.ndarray:
    """Return ``[steps, 2]``, the tokens held and in use."""
    prompts, answers, low, high, median, sigma, rows = work
    generator = torch.Generator().manual_seed(0)
    model = tiny_model(
        "qwen2",
        vocab_size=VOCABULARY,
        eos_token_id=None,
        max_position_embeddings=high + LONGEST,
    )
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    draws = torch.randn(prompts * answers, generator=generator).mul(sigma).exp().mul(median)
    limits = draws.round().long().clamp(1, LONGEST).tolist()
    sizes = torch.randint(low, high + 1, (prompts,), generator=generator).tolist()
    asked = [
        Prompt(str(i), torch.randint(4, VOCABULARY, (n,), generator=generator).tolist())
        for i, n in enumerate(sizes)
    ]
    requests = [
        Request(asked[i // answers], i, i % answers, max_new_tokens=limit)
        for i, limit in enumerate(limits)
    ]
    decoder = CountingDecoder(model)
    engine = NativeEngine(decoder, tokenizer, EngineConfig(max_num_seqs=rows))
    list(engine.generate(requests, SamplingConfig(max_new_tokens=LONGEST)))
    return np.array(decoder.log)


def microseconds(call: Callable[[], Tensor]) -> float:
    call()
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20):
            call()
        found.append((time.perf_counter() - start) / 20)
    return min(found) * 1e6


def attention(longest: int, own: int, rows: int = 16, heads: int = 4, width: int = 32) -> str:
    """Compare a step over a rectangle with one that gathers pages of 16 tokens by a table."""
    size = 16
    key, value = torch.randn(2, rows, heads, longest, width).unbind()
    pages = torch.randn(2, rows * longest // size, heads, size, width)
    table = torch.randperm(rows * longest // size).view(rows, -1)[:, : own // size]
    query = torch.randn(rows * heads, 2, width)

    def over(keys: Tensor, values: Tensor) -> Tensor:
        weights = torch.softmax(query @ keys.flatten(0, 1).transpose(1, 2), -1)
        return weights @ values.flatten(0, 1)

    def gathered() -> Tensor:
        parts = [x[table].transpose(1, 2).reshape(rows, heads, own, width) for x in pages]
        return over(parts[0], parts[1])

    rectangle, paged = microseconds(lambda: over(key, value)), microseconds(gathered)
    return f"| {longest} | {own} | {rectangle:.0f} | {paged:.0f} |"


def main() -> None:
    torch.set_num_threads(1)
    print("| work | peak held | peak in use | mean held | mean in use |\n|---|---|---|---|---|")
    for name, work in WORK.items():
        log = tokens_of(work)
        held, used = log.max(0)
        mean_held, mean_used = log.mean(0)
        print(f"| {name} | {held} | {used} | {mean_held:.0f} | {mean_used:.0f} |", flush=True)
    print("\n| columns | tokens per row | rectangle, us | pages, us |\n|---|---|---|---|")
    for longest, own in ((512, 288), (512, 512), (1024, 576)):
        print(attention(longest, own), flush=True)


if __name__ == "__main__":
    main()
