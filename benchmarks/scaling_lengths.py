"""Answer lengths to simulate with: measured ones, and a log-normal law for those that nobody here has measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
FILE = HERE / "scaling_lengths.json"
SOLUTIONS = HERE.parent / "data" / "gsm8k" / "train.jsonl"


def counted() -> dict[str, int]:
    """How many worked solutions of GSM8K's training set have which length: characters over 4, rounded up, as tokens."""
    rows = (json.loads(line) for line in SOLUTIONS.read_text(encoding="utf-8").splitlines())
    found = Counter(math.ceil(len(row["answer"]) / 4) for row in rows)
    return {str(length): found[length] for length in sorted(found)}


def measured() -> np.ndarray:
    """Lengths of ``FILE``, each as often as it was found."""
    table = json.loads(FILE.read_text(encoding="utf-8"))["count of each length"]
    return np.repeat([int(length) for length in table], list(table.values()))


def fitted(lengths: np.ndarray) -> tuple[float, float]:
    """Median and sigma of the log-normal law that is likeliest."""
    logs = np.log(lengths)
    return float(np.exp(logs.mean())), float(logs.std())


def drawn_measured(rng: np.random.Generator, prompts: int, samples: int) -> np.ndarray:
    """``[prompts, samples]``, with replacement."""
    return rng.choice(measured(), size=(prompts, samples))


def drawn_lognormal(
    rng: np.random.Generator,
    prompts: int,
    samples: int,
    median: float,
    sigma: float,
    cap: int,
    alike: float = 0.5,
) -> np.ndarray:
    """``[prompts, samples]``. ``alike``: the share of the variance of log lengths that is between prompts."""
    noise = math.sqrt(alike) * rng.standard_normal((prompts, 1)) + math.sqrt(
        1 - alike
    ) * rng.standard_normal((prompts, samples))
    return np.clip(np.rint(median * np.exp(sigma * noise)), 1, cap).astype(np.int64)


def write() -> None:
    """Make ``FILE`` again."""
    made = (
        "python benchmarks/scaling.py --lengths: ceil(characters / 4) of `answer` in "
        "data/gsm8k/train.jsonl"
    )
    FILE.write_text(
        json.dumps({"made by": made, "count of each length": counted()}, indent=0) + "\n",
        encoding="utf-8",
    )
