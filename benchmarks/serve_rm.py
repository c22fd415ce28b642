"""Ask a reward server from many clients at once, and write times, statuses and memory.

``python benchmarks/serve_rm.py --minutes 5 --clients 64 --output benchmarks/results/NAME.md``

A tiny reward model is served by ``lightrft serve-rm`` in a process of its own. Each client sends one request after the other, of all
kinds. Some are repeated with their request id, some are too large, truncated or malformed: these must be refused, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import httpx

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

REFUSALS = (400, 413, 429)
BODY_MB = 1


@dataclass
class Seen:
    """What the clients have seen."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    scores: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)


def save_model(folder: Path) -> None:
    """Save a tiny reward model with two heads."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=64, vocab_size=len(tokenizer))
    heads = RewardModelConfig(heads=[{"name": "good"}, {"name": "short"}])  # type: ignore[arg-type]
    RewardModel(model, ModelConfig(), heads, seed=3).save(tokenizer, folder)


def request_of(number: random.Random) -> tuple[str, dict[str, object] | bytes, int]:
    """Return path, body and number of scores of a random request; 0 scores are refused."""
    kind = number.choices(
        ["rewards", "get_reward", "score", "classify", "pooling", "large", "cut", "wrong"],
        [6, 4, 4, 2, 2, 0.1, 0.3, 0.3],
    )[0]
    count = number.randint(1, 8)
    texts = ["".join(number.choices("0123456789+=", k=number.randint(4, 64))) for _ in range(count)]
    if kind == "rewards":
        rows = [[number.randint(5, 60) for _ in range(number.randint(2, 48))] for _ in range(count)]
        prompt = [number.randint(5, 60) for _ in range(number.randint(2, 64))]
        body = {"prompts": {"input_ids": [prompt]}, "responses": {"input_ids": rows}}
        return "/v1/rewards", {**body, "prompt_of": [0] * count}, count
    if kind == "large":
        return "/pooling", b" " * ((BODY_MB << 20) + 1), 0
    if kind == "cut":
        return "/pooling", b'{"input": ["abc"', 0
    if kind == "wrong":
        return "/pooling", {"input": [[10**9]]}, 0
    bodies: dict[str, dict[str, object]] = {
        "get_reward": {"query": texts, "prompts": [text[:2] for text in texts]},
        "score": {"text_1": "1+1=", "text_2": texts},
        "classify": {"input": texts},
        "pooling": {"input": texts},
    }
    return f"/{kind}", bodies[kind], count


async def client(url: str, seed: int, until: float, seen: Seen) -> None:
    """Send requests until a time."""
    number = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=60) as session:
        while time.monotonic() < until:
            path, body, count = request_of(number)
            headers = {"X-Request-Id": f"{seed}-{number.random()}"}
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            for _ in range(2 if number.random() < 0.05 else 1):
                start = time.monotonic()
                try:
                    answer = await session.post(path, headers=headers, **given)
                except httpx.TransportError as error:
                    seen.errors[type(error).__name__] += 1
                    continue
                seen.seconds.append(time.monotonic() - start)
                seen.statuses[f"{path} {answer.status_code}"] += 1
                expected = (200, 429) if count else REFUSALS
                if answer.status_code not in expected:
                    seen.errors[f"{path} {answer.status_code} {answer.text[:80]}"] += 1
                if answer.status_code == 200:
                    seen.scores += count
                elif answer.status_code == 429:
                    await asyncio.sleep(float(answer.headers["retry-after"]))


async def watch(url: str, until: float, seen: Seen) -> None:
    """Read the memory of the server until a time."""
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=60) as session:
        while time.monotonic() < until:
            answer = await session.get("/metrics")
            if found := re.search(r"lightrft_resident_bytes (\d\S*)", answer.text):
                seen.memory.append((time.monotonic() - start, float(found[1]) / 2**20))
            await asyncio.sleep(2)


async def load(url: str, clients: int, minutes: float) -> Seen:
    """Return what ``clients`` see in some minutes."""
    seen, until = Seen(), time.monotonic() + 60 * minutes
    jobs = [client(url, seed, until, seen) for seed in range(clients)]
    await asyncio.gather(watch(url, until, seen), *jobs)
    return seen


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of ``values`` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def page(seen: Seen, clients: int, minutes: float, command: str) -> str:
    """Return the result as a page."""
    fifth = max(1, len(seen.memory) // 5)
    early = [size for _, size in seen.memory[fifth : 2 * fifth]]
    late = [size for _, size in seen.memory[-fifth:]]
    times = [f"{percentile(seen.seconds, share) * 1000:.0f}" for share in (0.5, 0.9, 0.99, 1.0)]
    rows = "\n".join(f"| `{name}` | {count} |" for name, count in sorted(seen.statuses.items()))
    errors = "; ".join(f"{name}: {count}" for name, count in seen.errors.items()) or "none"
    sizes = f"{mean(early):.1f} MiB in the second fifth, {mean(late):.1f} MiB in the last"
    return f"""# A reward server under load

`{command}`

{clients} clients for {minutes:g} minutes, on {os.cpu_count()} cores ({platform.machine()}), which the clients share with the server. The
model is a tiny Qwen2 with two heads. Some requests are malformed, truncated or too large, and must be refused.

| | |
|---|---|
| requests | {len(seen.seconds)} ({len(seen.seconds) / 60 / minutes:.0f} a second) |
| scores | {seen.scores} |
| errors other than refusals | {errors} |
| time in ms: median, p90, p99, longest | {", ".join(times)} |
| memory of the server, mean | {sizes} |
| memory of the server, median and largest | {median(s for _, s in seen.memory):.1f} and {max(s for _, s in seen.memory):.1f} MiB |

| path and status | answers |
|---|---|
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        words = ["-m", "lightrft", "serve-rm", folder, "http.port=0", f"http.max_body_mb={BODY_MB}"]
        server = subprocess.Popen(
            [sys.executable, *words, "device=cpu", "threads=1"], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]
            seen = asyncio.run(load(url, given.clients, given.minutes))
        finally:
            server.terminate()
            status = server.wait(60)
    text = page(seen, given.clients, given.minutes, "python " + " ".join(sys.argv))
    print(text)
    if given.output is not None:
        given.output.write_text(text, encoding="utf-8")
    return 1 if seen.errors or status else 0


if __name__ == "__main__":
    sys.exit(main())
