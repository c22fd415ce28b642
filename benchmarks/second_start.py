# ruff: noqa: E402 (the path is set before lightrft is imported)
"""Processor time of the first and of later starts on a file of JSON lines, whose token ids are cached.

Each start is a process of its own that imports lightrft, opens the file as a run does, and reads 1,000 prompts. A later start maps
the cache into memory. The command fails where a later start takes more than ``--limit`` seconds of processor time.

    python benchmarks/second_start.py [--rows 1000000] [--starts 3] [--limit 10]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lightrft.models.tiny.text import tiny_tokenizer

START = """
import json, sys, time
from transformers import AutoTokenizer
from lightrft.config.data import DataConfig
from lightrft.datasets.prompt_dataset import PromptDataset

folder, read = sys.argv[1], 1000
tokenizer = AutoTokenizer.from_pretrained(folder)
config = DataConfig.model_validate({"sources": [f"{folder}/rows.jsonl"], "token_cache": f"{folder}/cache"})
began = time.process_time()
prompts = PromptDataset(config, tokenizer, seed=0)
tokens = sum(len(prompts[i * len(prompts) // read].token_ids) for i in range(read))
print(json.dumps({"data": time.process_time() - began, "rows": len(prompts), "tokens": tokens}))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Processor seconds of one start: of the whole process, and of its data alone."""

    process: float
    data: float
    rows: int
    tokens: int


def write_rows(file: Path, count: int) -> None:
    """Write ``count`` questions with their labels."""
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            row = {
                "prompt": f"Question {number}: what is {number} + {number % 977}?",
                "label": str(number + number % 977),
            }
            out.write(json.dumps(row) + "\n")


def used() -> float:
    """Return the processor seconds of all processes that were started here and have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def start(folder: Path) -> Start:
    """Open the rows of ``folder`` in a new process."""
    before = used()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Start(process=used() - before, **json.loads(done.stdout.splitlines()[-1]))


def table(starts: list[Start]) -> str:
    rows = [
        f"| {number} | {one.process:.1f} | {one.data:.1f} |" for number, one in enumerate(starts, 1)
    ]
    header = "| start | processor seconds of the process | of its data |\n|---|---|---|\n"
    return header + "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.starts < 2:
        parser.error("--starts must be at least 2: the first start makes the cache")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_tokenizer().save_pretrained(folder)
        write_rows(folder / "rows.jsonl", options.rows)
        starts = [start(folder) for _ in range(options.starts)]
        if not list((folder / "cache").glob("*.arrow")):
            parser.error(
                f"the tokens of {options.rows} rows were not kept: see data.token_cache_min_mb"
            )
    if len({(one.rows, one.tokens) for one in starts}) > 1:
        parser.error(f"the starts differ in their rows or tokens: {starts}")
    command = f"python benchmarks/second_start.py --rows {options.rows} --starts {options.starts}"
    load = f"load {os.getloadavg()[2]:.1f} over the last 15 minutes"
    text = f"# Starts on {options.rows} rows of JSON lines\n\n`{command}` on {options.machine}, {load}\n\n{table(starts)}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"second_start-{options.machine}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(max(one.process for one in starts[1:]) > options.limit)


if __name__ == "__main__":
    sys.exit(main())
