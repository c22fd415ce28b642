"""Every script of this folder, one after another, within a time limit; all results in two files that have the machine in their names.

    python benchmarks/gpu/run_all.py [--minutes 8] [--only layouts step-0.5b] [--out FOLDER] [--smoke]

Results go to ``--out``, else to the folder that the environment calls ``OUT``, else to ``benchmarks/results``; they are written again after
each script. A script that no longer fits into the time, or that needs what is not installed, is said to be not run. The exit status
is 1 where one failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import common

HERE = Path(__file__).resolve().parent
JOBS: dict[str, tuple[list[str], int]] = {
    "layouts": (["layouts.py"], 90),
    "compiled": (["compiled.py"], 120),
    "decoding": (["decoding.py"], 90),
    "step-0.5b": (["step.py", "--size", "0.5b"], 120),
    "step-0.5b-compiled": (["step.py", "--size", "0.5b", "--compile"], 120),
    "generate-0.5b": (["generate.py", "--size", "0.5b"], 100),
    "vs_trl": (["vs_trl.py", "--rounds", "1", "--cases", "0.5b-32", "0.5b"], 600),
    "ranks": (["ranks.py"], 150),
    "vllm": (["vllm_in_process.py"], 400),
    "sglang": (["served_sglang.py"], 500),
    "step-7b": (["step.py", "--size", "7b", "--steps", "2", "--micro", "8192"], 200),
    "step-1.5b": (["step.py", "--size", "1.5b", "--steps", "2"], 150),
}
"""Scripts with their arguments, most telling first, and the seconds that each may take at most."""
AGAIN = ("sglang", "vllm", "step-0.5b-compiled", "step-7b", "step-1.5b")
"""Left out of a smoke run: the same script once more, and what needs a GPU."""
NOT_RUN = 3
LEAST = 20
"""Seconds below which nothing is begun."""


@dataclass
class Results:
    """What scripts have come to so far. ``tail``: the last lines of one that failed."""

    out: Path
    name: str
    ended: dict[str, str] = field(default_factory=dict)
    tails: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    trees: dict[str, object] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return [name for name, said in self.ended.items() if said.startswith("FAILED")]

    def add(self, job: str, said: str, log: str, folder: Path) -> None:
        """Take in what ``job`` has written into ``folder``."""
        self.ended[job] = said
        if job in self.failed:
            self.tails[job] = log[-4000:]
        self.texts += [
            file.read_text(encoding="utf-8").strip() for file in sorted(folder.glob("*.md"))
        ]
        self.trees[job] = [
            json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))
        ] or said
        self.write()

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        head = [
            "# All scripts of benchmarks/gpu",
            "",
            *(f"* {job}: {said}" for job, said in self.ended.items()),
        ]
        tails = [f"## The end of {job}\n\n```text\n{tail}\n```" for job, tail in self.tails.items()]
        stem = self.out / f"gpu-{self.name}"
        stem.with_suffix(".md").write_text(
            "\n\n".join(["\n".join(head), *self.texts, *tails]) + "\n", encoding="utf-8"
        )
        stem.with_suffix(".json").write_text(
            json.dumps({"ended": self.ended, "results": self.trees}, indent=1) + "\n",
            encoding="utf-8",
        )


def run(words: list[str], limit: float, log: Path) -> str:
    """How it ended. What it has started ends with it."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"FAILED: not done after {limit:.0f} s"
    seconds = time.monotonic() - began
    if status == NOT_RUN:
        return log.read_text(encoding="utf-8").strip().splitlines()[-1]
    return (
        f"done in {seconds:.0f} s"
        if status == 0
        else f"FAILED with status {status} after {seconds:.0f} s"
    )


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    args = parser.parse_args()
    began, results = time.monotonic(), Results(args.out, common.machine_name(args.machine))
    for job in args.only:
        words, limit = JOBS[job]
        if args.smoke and job in AGAIN:
            continue
        left = 60 * args.minutes - (time.monotonic() - began)
        with tempfile.TemporaryDirectory() as name:
            folder, log = Path(name), Path(name) / "log"
            more = ["--out", name, "--machine", results.name, *(["--smoke"] if args.smoke else [])]
            said = (
                f"not run: {left:.0f} s are left"
                if left < LEAST
                else run([*words, *more], min(limit, left), log)
            )
            text = log.read_text(encoding="utf-8") if log.is_file() else ""
            results.add(job, said, text, folder)
        print(
            f"{job}: {said}",
            *([text[-2000:]] if job in results.failed else []),
            sep="\n",
            flush=True,
        )
    print((args.out / f"gpu-{results.name}.md").read_text(encoding="utf-8"))
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
