"""The demo from several seeds: held-out accuracy before and after reinforcement learning, and seconds.

``python benchmarks/demo.py --seeds 10``. A demo that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HEADER = "| seed | held-out after warm-up | held-out after RL | seconds |\n|---|---|---|---|\n"


def run(folder: Path, seed: int) -> dict[str, float]:
    """The summary of the demo with ``seed``."""
    command = [sys.executable, "-m", "lightrft", "demo", f"run.dir={folder}", f"run.name=demo{seed}", f"run.seed={seed}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / f"demo{seed}" / "summary.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--dir", type=Path, default=Path("runs/demos"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    found = {seed: run(options.dir, seed) for seed in range(options.seeds)}
    rows = [f"| {s} | {d['heldout_before']:.3f} | {d['heldout_after']:.3f} | {d['seconds']:.0f} |" for s, d in found.items()]
    table = HEADER + "\n".join(rows) + "\n"
    machine = f"{os.uname().machine}-{os.cpu_count()}cores"
    text = f"# The demo from {options.seeds} seeds\n\n`python benchmarks/demo.py --seeds {options.seeds}` on {machine}\n\n{table}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"demo-{machine}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
