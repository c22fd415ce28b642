# ruff: noqa: E402 (the path is set before lightrft is imported)
"""Wall time of ``lightrft.rl`` against the command line, for the same tiny run, in one process.

Each round takes both, in alternating order, after one of each that is not counted. The time of a run includes
reading its settings, rows and model, and writing its model; the start of a process and imports are left out. The command line writes
``report.html`` too. Processor time is that of this process, and does not depend on others. The time of a step is the median of
the differences of ``seconds`` in the metrics. From Python, rows and the reward function are those of the program, which are
written to files in each run; the command line reads these files.

    python benchmarks/python_cost.py [--rounds 15] [--steps 20]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

import lightrft
from lightrft.cli.main import main as command_line
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(8) for b in range(8)]
SETTINGS = {
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "sampling": {"max_new_tokens": 8},
    "log": {"tensorboard": False},
    "run": {"overwrite": True, "progress": False, "threads": 1},
}


def digits(rollout):
    """Reward the share of digits in a response."""
    return sum(map(str.isdigit, rollout.text)) / max(1, len(rollout.text))


def timed(start, folder: Path) -> tuple[float, float, float]:
    """Return the seconds of a run, its processor seconds, and the median seconds of its steps."""
    began, used = time.perf_counter(), time.process_time()
    start()
    taken, used = time.perf_counter() - began, time.process_time() - used
    return taken, used, float(lightrft.Run(folder).metrics["seconds"].diff().iloc[1:].median())


def spread(ratios: list[float]) -> str:
    """Return the median of ratios, and their quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--machine", default=f"{platform.machine()}-{os.cpu_count()}cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model("llama"), tiny_tokenizer()
    found: dict[str, list[tuple[float, float, float]]] = {"Python": [], "command line": []}
    with tempfile.TemporaryDirectory() as name, redirect_stdout(StringIO()):
        given = {**SETTINGS, "steps": options.steps, "dir": name}

        def from_python() -> None:
            lightrft.rl(model=model, data=ROWS, rewards=[digits], name="python", **given)

        from_python()
        config = Path(name) / "python" / "config.yaml"
        copy = Path(name) / "config.yaml"
        copy.write_text(config.read_text(encoding="utf-8"), encoding="utf-8")

        def from_shell() -> None:
            assert command_line(["rl", str(copy), "run.name=shell"]) == 0

        from_shell()
        starts = {
            "Python": (from_python, Path(name) / "python"),
            "command line": (from_shell, Path(name) / "shell"),
        }
        for number in range(options.rounds):
            for kind in list(starts)[:: 1 if number % 2 else -1]:
                found[kind].append(timed(*starts[kind]))
    lines = [
        f"# `lightrft.rl` against `lightrft rl`, {options.steps} steps of a tiny model",
        "",
        f"`python benchmarks/python_cost.py --rounds {options.rounds} --steps {options.steps}` on {options.machine}, one thread, torch "
        f"{torch.__version__}, load {os.getloadavg()[2]:.1f} over the last 15 minutes. Medians of {options.rounds} paired rounds; the "
        "ratio is that of a round, with its quartiles.",
        "",
        "| time | Python, s | command line, s | Python / command line |",
        "|---|---|---|---|",
    ]
    for part, title in enumerate(("a run", "a run, processor", "a step")):
        own, other = ([one[part] for one in found[kind]] for kind in found)
        ratios = spread([a / b for a, b in zip(own, other)])
        lines.append(
            f"| {title} | {statistics.median(own):.4f} | {statistics.median(other):.4f} | {ratios} |"
        )
    text = "\n".join([*lines, ""])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"python_cost-{options.machine}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
