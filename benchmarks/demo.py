"""A demo from several seeds: held-out accuracy before and after reinforcement learning, seconds, and seconds of processor time.

``python benchmarks/demo.py --seeds 10``, ``python benchmarks/demo.py vision --seeds 3``. A demo that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

DEMOS = ("arithmetic", "vision", "audio")
HEADER = (
    "| seed | held-out after warm-up | held-out after RL | seconds | of processor "
    "|\n|---|---|---|---|---|\n"
)


def run(which: str, folder: Path, seed: int) -> dict[str, float]:
    """The summary of the demo with ``seed``, and the processor's time of all its processes."""
    name = f"demo{seed}" if which == "arithmetic" else f"{which}{seed}"
    found = folder / name / "processor.json"
    if not found.exists():
        command = [
            sys.executable,
            "-m",
            "lightrft",
            "demo",
            which,
            f"run.dir={folder}",
            f"run.name={name}",
            f"run.seed={seed}",
        ]
        before = used()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found.write_text(json.dumps({"processor": used() - before}), encoding="utf-8")
    summary = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
    return {**summary, **json.loads(found.read_text(encoding="utf-8"))}


def used() -> float:
    """Seconds of processor time of all processes that were started here and have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def row(seed: int, found: dict[str, float]) -> str:
    accuracy = f"{found['heldout_before']:.3f} | {found['heldout_after']:.3f}"
    return f"| {seed} | {accuracy} | {found['seconds']:.0f} | {found['processor']:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", nargs="?", choices=DEMOS, default=DEMOS[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--dir", type=Path, default=Path("runs/demos"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    which = "" if options.demo == DEMOS[0] else options.demo
    table = HEADER + "".join(
        row(seed, run(options.demo, options.dir, seed)) + "\n" for seed in range(options.seeds)
    )
    machine = f"{os.uname().machine}-{os.cpu_count()}cores"
    command = " ".join(
        ["python benchmarks/demo.py", *([which] if which else []), f"--seeds {options.seeds}"]
    )
    title = f"The demo{f' of {which}' if which else ''} from {options.seeds} seeds"
    text = (
        f"# {title}\n\n`{command}` on {machine}, load {os.getloadavg()[2]:.1f} over the last 15 "
        f"minutes\n\n{table}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"demo{f'_{which}' if which else ''}-{machine}.md").write_text(
        text, encoding="utf-8"
    )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
