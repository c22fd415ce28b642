"""Does every preset learn? Held-out accuracy of each before and after reinforcement learning on the demo's task.

    python benchmarks/learning.py [--presets grpo ppo ...] [--seeds 0 1 2] [--steps N] [--jobs 1] [--report]

All presets go on from one and the same model: the demo's own, after its supervised warm-up (seed 0). ``RECIPE`` is what they share and
``OWN`` what a preset has of its own, with the reason; everything else is the preset's published row. A result is a line of
``learning-<machine>.jsonl``, written when its run ends, so that the table can be made in pieces: what is there is not run again
unless its settings have changed. ``--report`` only writes the page and the plot from the lines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lightrft.config.base import build, deep_merge, dotted, load_settings
from lightrft.config.demo import DemoConfig
from lightrft.config.presets import PRESETS
from lightrft.config.verbs import RLConfig

STEPS = 12
ENOUGH = 0.2
"""What an accuracy has to gain to count as learned."""

RECIPE: dict[str, Any] = {
    "rollout": {"prompts_per_step": 16, "group_size": 8},
    "train": {"steps": STEPS, "num_mini_batches": 2},
    "optimizer": {"lr": 3e-4},
    "eval": {"every": 3},
    "checkpoint": {"every": 0, "keep": 1},
    "log": {"tensorboard": False, "rollouts_every": 0},
}


@dataclass(frozen=True, slots=True)
class Own:
    """Settings of one preset, and why."""

    settings: dict[str, Any]
    why: str


CONTROL = "grpo, coin rewards"
"""Not a preset: what happens when there is nothing to learn."""

NAMES = [*PRESETS, CONTROL]

OWN: dict[str, Own] = {
    CONTROL: Own(
        {
            "algorithm": {"preset": "grpo"},
            "reward": {"terms": [f"{Path(__file__).resolve()}:coin"]},
        },
        "a control: rewards in training are coin tosses, held-out accuracy is measured as always",
    ),
    "vapo": Own(
        {"critic": {"warmup_steps": 3, "optimizer": {"lr": 1e-3}}},
        "the paper trains the critic alone for 50 steps first; here for 3 of the 12, so that it "
        "has to learn faster",
    ),
    "prime": Own(
        {"prm": {"optimizer": {"lr": 1e-4}}},
        "its reward model has 12 steps to learn from the start, as the policy has",
    ),
}

LIMITED: dict[str, Any] = {
    "reward": {"terms": ["math", {"function": "format", "name": "cost", "weight": 0}]},
}
OWN.update(
    {
        name: Own(
            LIMITED,
            "its cost is the built-in term format, which no answer meets: the limit is never passed",
        )
        for name in ("ppo_lag", "grpo_lag")
    }
)

ON_POLICY = ("reinforce", "rloo", "remax", "opo", "pass_at_k", "maxrl", "gpg", "raft", "rft")
OWN.update(
    {
        name: Own(
            {"train": {"num_mini_batches": 1}},
            "no ratio: published for answers of the policy itself, so one optimizer step a batch",
        )
        for name in ON_POLICY
    }
)

TAUGHT = ("opd",)
"""Presets that learn from a teacher, and from no reward: what ``grpo`` made of the same start."""

NOTES: dict[str, str] = {
    "vapo": "its critic learns fast here, and that can cost stability: of two trials of 24 steps "
    "while this tree was written, one rose to 0.985 and fell to 0.650 by the end, the other "
    "stayed at 1.000.",
    CONTROL: "with nothing to learn the accuracy moves too: the start prefers guessing to working by "
    "little, and chance moves that preference. A gain of a few tenths alone would prove "
    "little; that of every preset is far larger than any of these.",
}
"""What has to be said about a preset's result."""


def coin(rollout: Any) -> float:
    """0 or 1 by chance on problems that are trained on; the truth on those that are held out."""
    from lightrft.datasets.synthetic.arithmetic import is_heldout
    from lightrft.rewards.rules.math import math_reward

    problem = re.search(r"([0-9+*-]+)=\?", rollout.prompt.text)
    if problem is None or is_heldout(problem[1], 0.2):
        return math_reward(rollout)
    return float(hashlib.sha256(f"{problem[1]} {rollout.seed}".encode()).digest()[0] % 2)


def demo() -> DemoConfig:
    """What ``lightrft demo`` runs."""
    with resources.as_file(resources.files("lightrft.cli") / "demo.yaml") as file:
        return load_settings(DemoConfig, [str(file)], ["run.progress=false"]).settings


def config_of(preset: str, seed: int, steps: int, start: Path, folder: Path) -> RLConfig:
    """The demo's reinforcement learning with the shared recipe and what ``preset`` has of its own."""
    tree = demo().rl.model_dump(mode="json", exclude={"algorithm"})
    over = deep_merge(RECIPE, OWN[preset].settings if preset in OWN else {})
    over = deep_merge({"algorithm": {"preset": preset}}, over) if preset in PRESETS else over
    here = {
        "run": {"dir": str(folder), "name": "run", "seed": seed, "progress": False, "threads": 1},
        "model": {"path": str(start)},
        "train": {"steps": steps},
    }
    if preset in TAUGHT:
        here["teacher"] = {"path": str(start.parents[1] / "teacher" / "model")}
    return build(RLConfig, deep_merge(deep_merge(tree, over), here))


def fingerprint(config: RLConfig) -> str:
    """A short hash of every setting that could change a number. A setting that is new, and at its default, does not."""
    tree = config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={"run", "model", "log", "checkpoint", "reward", "teacher"},
    )
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]


def make_start(folder: Path) -> Path:
    """The demo's model after its warm-up, made once."""
    model = folder / "sft" / "model"
    if not model.exists():
        from lightrft.trainer.demo import make_start as random_weights
        from lightrft.trainer.sft import run_sft

        config = demo()
        random_weights(config, folder / "start")
        run = config.sft.run.model_copy(
            update={"dir": str(folder), "name": "sft", "progress": False, "overwrite": True}
        )
        path = config.sft.model.model_copy(update={"path": str(folder / "start")})
        run_sft(config.sft.model_copy(update={"run": run, "model": path}))
    return model


def make_teacher(folder: Path, start: Path) -> Path:
    """What ``grpo`` makes of the start, with a seed of its own: the model that distillation learns from, made once."""
    model = folder / "teacher" / "model"
    if not model.exists():
        from lightrft.trainer.rl import run_rl

        config = config_of("grpo", 100, 2 * STEPS, start, folder)
        run_rl(
            config.model_copy(
                update={"run": config.run.model_copy(update={"name": "teacher", "overwrite": True})}
            )
        )
    return model


def train(job: tuple[str, int, int, Path]) -> dict[str, Any]:
    """One run, and what the table needs of it; a run that fails says why."""
    import torch

    from lightrft.trainer.rl import run_rl

    preset, seed, steps, start = job
    torch.set_num_threads(1)
    began, cpu = time.perf_counter(), time.process_time()
    found: dict[str, Any] = {"preset": preset, "seed": seed}
    folder = Path(tempfile.mkdtemp(prefix="learning-"))
    try:
        config = config_of(preset, seed, steps, start, folder)
        found |= {"settings": fingerprint(config)}
        run_rl(config)
        rows = [
            json.loads(line)
            for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        curve = [
            (row["step"], row["eval/accuracy"])
            for row in rows
            if row.get("eval/accuracy") is not None
        ]
        found |= {
            "before": curve[0][1],
            "after": curve[-1][1],
            "curve": curve,
            "steps": curve[-1][0],
        }
        found |= {name: mean_of(rows, key) for name, key in LOGGED.items()}
        found["reward"] = [round(row["reward/mean"], 4) for row in rows if "reward/mean" in row]
    except Exception as error:
        found |= {"error": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found | {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}


LOGGED = {"clipped": "policy/clip_fraction", "optimizer_steps": "policy/optimizer_steps"}


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def lines_of(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The last result of each preset and seed."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["preset"], row["seed"]): row for row in map(json.loads, lines)}


def left(args: argparse.Namespace, start: Path, file: Path) -> Iterator[tuple[str, int, int, Path]]:
    """The runs that have no result with these settings yet, seed by seed."""
    there = lines_of(file)
    for seed in args.seeds:
        for preset in args.presets:
            try:
                wanted = fingerprint(config_of(preset, seed, args.steps, start, Path("unused")))
            except Exception as error:
                print(f"{preset}: {error}", file=sys.stderr)
                continue
            row = there.get((preset, seed), {})
            if row.get("settings") != wanted or "error" in row:
                yield preset, seed, args.steps, start


def run_all(jobs: Sequence[tuple[str, int, int, Path]], processes: int, file: Path) -> None:
    """Run ``jobs`` and append each result as it comes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=12) as pool:
        for found in pool.imap_unordered(train, jobs):
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            print(line_of(found), flush=True)


def line_of(found: Mapping[str, Any]) -> str:
    head = f"{found['preset']:<20} seed {found['seed']}"
    if "error" in found:
        return f"{head}: {found['error']}"
    return (
        f"{head}: {found['before']:.3f} -> {found['after']:.3f} in {found['steps']} steps, "
        f"{found['seconds']:.0f} s"
    )


# ---------------------------------------------------------------- the page and the plot


@dataclass(frozen=True, slots=True)
class Learned:
    """All seeds of one preset."""

    preset: str
    runs: list[dict[str, Any]]

    def mean(self, key: str) -> float:
        return statistics.mean(run[key] or 0.0 for run in self.runs)

    @property
    def after(self) -> list[float]:
        return [run["after"] for run in self.runs]

    @property
    def gain(self) -> float:
        """Of the worst seed."""
        return min(run["after"] - run["before"] for run in self.runs)


def learned(rows: Iterable[Mapping[str, Any]]) -> list[Learned]:
    """Presets in their own order, those that ended without an error."""
    by_preset: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: r["seed"]):
        if "error" not in row:
            by_preset.setdefault(row["preset"], []).append(dict(row))
    return [Learned(name, by_preset[name]) for name in NAMES if name in by_preset]


def page(found: Sequence[Learned], args: argparse.Namespace) -> str:
    """The result as markdown."""
    count = sum(len(preset.runs) for preset in found)
    good = [preset for preset in found if preset.gain >= ENOUGH and preset.preset != CONTROL]
    parts = [
        "# Every preset on the demo's task",
        f"`python benchmarks/learning.py` on {args.machine}, one thread a run, the machine busy "
        f"with other work: {count} runs.",
        ABOUT,
        f"{len(good)} of {sum(p.preset != CONTROL for p in found)} presets gain at least "
        f"{ENOUGH} from every seed.",
        f"![Held-out accuracy before and after](learning-{args.machine}.svg)",
        "\n".join(table(found)),
    ]
    missing = [name for name in PRESETS if name not in {preset.preset for preset in found}]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    notes = [
        f"* `{preset.preset}`: {NOTES[preset.preset]}" for preset in found if preset.preset in NOTES
    ]
    if notes:
        parts += ["## What stands out", "\n".join(notes)]
    parts += ["## Settings", "\n".join(settings_table(found))]
    return "\n\n".join(parts) + "\n"


ABOUT = """\
All go on from the same model, the demo's after its supervised warm-up, which mostly guesses and knows how to work a problem out. A step is
16 problems x 8 answers, in two optimizer steps, so that ratios leave 1 and clipping acts. Accuracy is that of greedy answers to 200
problems that were never trained on. *Lowest gain* is that of the worst seed; *clipped* the share of tokens whose ratio the loss clipped or
capped, over all optimizer steps (what a token mask leaves out is not in it); *seconds* a whole run with its evaluations, by the
clock of a busy machine, and *CPU* the seconds that it computed, the mean over seeds."""


def table(found: Sequence[Learned]) -> Iterator[str]:
    seeds = sorted({run["seed"] for preset in found for run in preset.runs})
    named = " | ".join(f"seed {seed}" for seed in seeds)
    yield (
        f"| preset | before | {named} | mean after | lowest gain | steps | seconds | CPU | "
        "clipped |"
    )
    yield "|---|---|" + "---|" * (len(seeds) + 6)
    for preset in found:
        by_seed = {run["seed"]: f"{run['after']:.3f}" for run in preset.runs}
        after = " | ".join(by_seed.get(seed, "") for seed in seeds)
        gain = f"{preset.gain:.3f}" if preset.gain >= ENOUGH else f"**{preset.gain:.3f}**"
        yield (
            f"| {preset.preset} | {preset.mean('before'):.3f} | {after} | "
            f"{statistics.mean(preset.after):.3f} | {gain} | {preset.mean('steps'):.0f} | "
            f"{preset.mean('seconds'):.0f} | {preset.mean('cpu'):.0f} | "
            f"{preset.mean('clipped'):.1%} |"
        )


def settings_table(found: Sequence[Learned]) -> Iterator[str]:
    shared = ", ".join(
        f"`{key}={value}`"
        for key, value in dotted(RECIPE)
        if not key.startswith(("log.", "checkpoint."))
    )
    yield f"All: {shared}; the rest as in `lightrft demo`; `algorithm` is the preset's row."
    yield ""
    yield "| preset | of its own | why |"
    yield "|---|---|---|"
    for preset in found:
        if preset.preset in OWN:
            own = OWN[preset.preset]
            settings = ", ".join(f"`{k}={v}`" for k, v in dotted(own.settings)).replace(
                f"{Path(__file__).resolve().parents[1]}/", ""
            )
            yield f"| {preset.preset} | {settings} | {own.why} |"


STYLE = """\
text{font:12px system-ui,sans-serif;fill:#33312d}.m{fill:#605c55}.g{stroke:#e3e0d8}.b{fill:#66727f}.a{fill:#1f5fd0}
.r{stroke:#1f5fd0;stroke-width:2;stroke-opacity:.35}rect{fill:#fff}
@media(prefers-color-scheme:dark){text{fill:#ecebe7}.m{fill:#a8a59e}.g{stroke:#2d3035}.b{fill:#98a5b3}.a{fill:#82b1ff}
.r{stroke:#82b1ff}rect{fill:#191b1e}}"""


def plot(found: Sequence[Learned]) -> str:
    """A row per preset: the start as a grey dot, each seed's end as a blue one."""
    left, width, row, top = 150, 420, 20, 30
    height = top + row * len(found) + 26
    parts = [f'<rect width="{left + width + 20}" height="{height}"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + share * width
        parts.append(f'<line class="g" x1="{x}" x2="{x}" y1="{top - 8}" y2="{height - 22}"/>')
        parts.append(
            f'<text class="m" x="{x}" y="{height - 8}" text-anchor="middle">{share:.0%}</text>'
        )
    parts.append(
        f'<text class="m" x="{left}" y="14">held-out accuracy: grey before, blue after, a dot '
        "per seed</text>"
    )
    for i, preset in enumerate(found):
        y, before = top + row * i + 8, left + preset.mean("before") * width
        ends = [left + after * width for after in preset.after]
        parts.append(
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(preset.preset)}</text>'
        )
        parts.append(f'<line class="r" x1="{before:.1f}" x2="{max(ends):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="b" cx="{before:.1f}" cy="{y}" r="3.5"/>')
        parts += [
            f'<circle class="a" cx="{x:.1f}" cy="{y}" r="3.5" fill-opacity=".7"/>' for x in ends
        ]
    size = (
        f'viewBox="0 0 {left + width + 20} {height}" width="{left + width + 20}" height="{height}"'
    )
    label = "Held-out accuracy of every preset before and after reinforcement learning"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


def write_report(args: argparse.Namespace, file: Path) -> None:
    found = learned(lines_of(file).values())
    if found:
        text = page(found, args)
        file.with_suffix(".md").write_text(text, encoding="utf-8")
        file.with_suffix(".svg").write_text(plot(found), encoding="utf-8")
        print("\n".join(table(found)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--start",
        type=Path,
        default=Path("runs/learning"),
        help="folder of the model that all go on from",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument(
        "--report",
        action="store_true",
        help="only write page and plot from the lines that are there",
    )
    args = parser.parse_args()
    file = args.out / f"learning-{args.machine}.jsonl"
    if not args.report:
        start = make_start(args.start.resolve())
        make_teacher(args.start.resolve(), start)
        run_all(list(left(args, start, file)), args.jobs, file)
    write_report(args, file)


if __name__ == "__main__":
    main()
