"""All measurements on a GPU in one command: the parts of ``PARTS`` in the order of their worth, within a time limit.

    python benchmarks/gpu/run_all.py [--minutes 9] [--only step-0.5b-512 sft] [--again] [--list] [--out FOLDER] [--smoke]

A part that the committed result of this machine has, of the same version and arguments, is not measured again
unless ``--only`` names it or ``--again`` is given. A side that lacks memory is tried again with half the
micro-batch. Results go to ``--out``, else to the folder that the environment calls ``OUT``, else to
``benchmarks/results``; they are written after each side. Packages that are missing, or too old, are installed from
``--wheels``, without a network, into a folder that is removed at the end; what still lacks a package is left out.
The exit status is 1 where something failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_RUN = 3
"""Status of a script that lacks something."""
TRIALS = 3
"""Most tries of a side that lacks memory."""
MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory")
MODELS = 48 * 2**30
"""Bytes that the models of all parts and a copy of the largest one take at most."""
NEEDS = {"trl": ("trl", "datasets"), "vllm": ("vllm",)}
"""Packages that a side needs, by its name."""


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        about: A description.
        seconds: Limit of all sides.
        sides: The script and its arguments, by side. Each is a process.
        version: To be raised when a script measures something else. Other arguments are seen.
        equal: Numbers that must be the same for all sides.
    """

    about: str
    seconds: int
    sides: Mapping[str, str]
    version: int = 1
    equal: tuple[str, ...] = ()


def against_trl(kind: str, work: str, ours: int, theirs: int) -> dict[str, str]:
    """Return both sides of a comparison, each with the tokens of its fastest micro-batch."""
    return {
        "lightrft": f"measure.py {kind} {work} --micro {ours}",
        "trl": f"measure.py trl-{kind} {work} --micro {theirs}",
    }


def alone(words: str) -> dict[str, str]:
    return {"lightrft": words}


SMALL = "measure.py grpo --size 0.5b --prompts 8 --samples 8 --steps 2 --micro 24576"
SKEWED = "measure.py decoding --size 0.5b --prompts 16 --samples 16 --prompt 256 --answer 768"
PARTS: dict[str, Part] = {
    "step-0.5b-512": Part(
        "a step of GRPO at 0.5B with prompts of 512 tokens, and a profile of the update",
        110,
        against_trl("grpo", "--size 0.5b --prompt 512 --profile", 24576, 24576),
    ),
    "step-0.5b-32": Part(
        "a step of GRPO at 0.5B with prompts of 32 tokens",
        80,
        against_trl("grpo", "--size 0.5b --prompt 32 --answer 64 --steps 4", 16384, 16384),
    ),
    "step-1.5b": Part(
        "a step of GRPO at 1.5B, all weights, and a profile of the update",
        120,
        against_trl("grpo", "--size 1.5b --prompt 512 --profile", 8192, 16384),
    ),
    "step-3b": Part(
        "a step of GRPO at 3B, all weights, with gradient checkpointing",
        80,
        alone(
            "measure.py grpo --size 3b --micro 8192 --steps 1 --set model.gradient_checkpointing=true"
        ),
    ),
    "step-7b": Part(
        "a step of GRPO at 7B, adapters, with gradient checkpointing",
        110,
        alone(
            "measure.py grpo --size 7b --lora --micro 8192 --steps 1 "
            "--set model.gradient_checkpointing=true"
        ),
    ),
    "skewed": Part(
        "decoding at 0.5B with skewed lengths; vLLM with its graphs and its compilation",
        180,
        {
            side: f"{SKEWED} --engine {engine}"
            for side, engine in (
                ("native", "native"),
                ("transformers", "transformers"),
                ("vllm", "vllm"),
            )
        },
    ),
    "sft": Part(
        "a step of SFT at 0.5B",
        80,
        against_trl("sft", "--prompts 32 --prompt 512 --answer 512 --steps 3", 32768, 16384),
    ),
    "dpo": Part(
        "a step of DPO at 0.5B",
        90,
        against_trl("dpo", "--prompts 16 --prompt 512 --answer 512 --steps 3", 24576, 16384),
    ),
    "pictures": Part(
        "a step of GRPO with a picture in each prompt: the tower of Qwen2.5-VL-3B on a 0.5B",
        70,
        alone(f"{SMALL} --prompt 128 --pictures 1"),
    ),
    "deterministic": Part(
        "a step of GRPO by deterministic operations: twice the same weights",
        80,
        dict.fromkeys(("first", "again"), f"{SMALL} --deterministic"),
        equal=("weights",),
    ),
    "offloading": Part(
        "a step of GRPO with state and activations in the host's memory",
        90,
        {
            "during generation": f"{SMALL} --set strategy.offload_during_generation=true",
            "activations": f"{SMALL} --set strategy.offload_activations=true",
        },
    ),
    "rl-vllm": Part(
        "steps of GRPO with vLLM in the process, asleep during the update",
        150,
        {"vllm": f"{SMALL} --set engine.kind=vllm"},
    ),
    "layouts": Part("layouts against one another", 90, alone("layouts.py")),
    "compiled": Part("CUDA graphs against decoding without them", 120, alone("compiled.py")),
    "decoding": Part("the parts of a decoding step", 90, alone("decoding.py")),
    "ranks": Part("two processes against one", 150, alone("ranks.py")),
    "vllm": Part("vLLM in the process, checked", 400, alone("vllm_in_process.py")),
    "sglang": Part("SGLang, checked", 500, alone("served_sglang.py")),
}


@dataclass
class Results:
    """Results of all parts, those of the committed file among them.

    Attributes:
        stem: The files without their suffix.
        about: The machine.
        parts: By part, its version, how it ended, and the results of its sides.
        logs: The last lines of sides that failed.
    """

    stem: Path
    about: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return [name for name, part in self.parts.items() if "FAILED" in part["ended"]]

    def write(self) -> None:
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        tree = {"machine": self.about, "parts": self.parts}
        self.stem.with_suffix(".json").write_text(
            json.dumps(tree, indent=1) + "\n", encoding="utf-8"
        )
        lines = [
            "# Measurements on a GPU",
            "",
            "`python benchmarks/gpu/run_all.py`",
            "",
            "Machine: " + ", ".join(f"{key} {value}" for key, value in self.about.items()),
        ]
        for name, part in self.parts.items():
            lines += ["", *page(name, part)]
        for name, log in self.logs.items():
            lines += ["", f"## The end of {name}", "", "```text", log, "```"]
        self.stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def page(name: str, part: dict[str, Any]) -> list[str]:
    """Return the lines of a part: how it ended, its numbers side by side, and its profiles."""
    sides: dict[str, Any] = part["sides"]
    lines = [f"## {name}", "", f"{part['about']}: {part['ended']}.", ""]
    for side, found in sides.items():
        work = f"; {found['work']}" if "work" in found else ""
        lines += [f"* {side}: {found['ended']}{work}"]
    measured = {side: found["numbers"] for side, found in sides.items() if "numbers" in found}
    names = dict.fromkeys(number for found in measured.values() for number in found)
    compared = list(measured) == ["lightrft", "trl"]
    rows = []
    for number in names:
        values = [found.get(number, "") for found in measured.values()]
        row = [number, *map(shown, values)]
        if compared:
            both = all(isinstance(value, int | float) and value for value in values)
            row.append(f"{values[1] / values[0]:.2f}" if both else "")
        rows.append(row)
    if rows:
        heads = ["", *measured, *(["trl / lightrft"] if compared else [])]
        lines += ["", *table(heads, rows)]
    for side, found in sides.items():
        if "profile" in found:
            profile = found["profile"]
            lines += ["", f"Operations of the update, {side}:", ""]
            lines += table(profile["heads"], profile["rows"])
        lines += ["", *found.get("text", [])]
    return lines


def shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


@dataclass
class Runner:
    """Runs the sides of parts as processes.

    Attributes:
        results: Where results go.
        environment: Environment of the processes.
        modules: Packages that are installed, of those that some side needs.
        smoke: The work is tiny.
        end: Time at which the run must be over.
    """

    results: Results
    environment: dict[str, str]
    modules: Sequence[str]
    smoke: bool
    end: float

    def part(self, name: str, part: Part) -> None:
        """Measure the sides of a part. Results are written after each."""
        left = self.end - time.monotonic()
        about: dict[str, Any] = {
            "about": part.about,
            "version": part.version,
            "words": dict(part.sides),
            "ended": f"not run, since {left:.0f} s are left",
            "sides": {},
        }
        if left >= part.seconds / 2 or self.smoke:
            self.results.parts[name] = about
            # A smoke run says nothing of speed, and compiles for the CPU.
            ends = time.monotonic() + (left if self.smoke else min(part.seconds, left))
            for side, words in part.sides.items():
                missing = [m for m in NEEDS.get(side, ()) if m not in self.modules]
                found: dict[str, Any] = {
                    "ended": f"left out, since {', '.join(missing)} is missing"
                }
                if not missing:
                    log = self.side(words, found, ends)
                    if "FAILED" in found["ended"]:
                        self.results.logs[f"{name}, {side}"] = log[-4000:]
                about["sides"][side] = found
                about["ended"] = outcome(part, about["sides"])
                self.results.write()
                print(f"{name}, {side}: {found['ended']}", flush=True)
        else:
            # A committed result stays, although it is of an older version.
            self.results.parts.setdefault(name, about)
            print(f"{name}: {about['ended']}", flush=True)

    def side(self, words: str, found: dict[str, Any], ends: float) -> str:
        """Measure a side into ``found``. Return what it printed."""
        tries = []
        while True:
            with tempfile.TemporaryDirectory() as folder:
                ended, log = self.process(words, Path(folder), ends)
                found["ended"] = "; ".join([*tries, ended])
                read(Path(folder), found)
            smaller = half_the_micro_batch(words)
            if "FAILED" not in ended or not MEMORY.search(log) or smaller is None:
                return log
            if len(tries) == TRIALS - 1 or ends - time.monotonic() < 20:
                return log
            tries.append(
                f"micro-batch {micro_batch(words)} lacks memory, so {micro_batch(smaller)}"
            )
            words = smaller

    def process(self, words: str, out: Path, ends: float) -> tuple[str, str]:
        """Run a script. Return how it ended, and what it printed. What it started ends with it."""
        script, *arguments = words.split()
        more = ["--out", str(out), *(["--smoke"] if self.smoke else [])]
        if script != "measure.py":
            more += ["--machine", self.results.stem.name]
        words = [str(HERE / script), *arguments, *more]
        log, began = out / "log", time.monotonic()
        limit = max(1.0, ends - began)
        if self.smoke:
            status = wait_for_fork(words, log, limit)
        else:
            status = wait_for_process([sys.executable, *words], self.environment, log, limit)
        text = log.read_text(encoding="utf-8", errors="replace")
        seconds = time.monotonic() - began
        if status is None:
            return f"FAILED: not done after {limit:.0f} s", text
        if status == NOT_RUN:
            return (text.strip().splitlines() or ["not run"])[-1], text
        return f"done in {seconds:.0f} s" if status == 0 else f"FAILED with status {status}", text


def wait_for_process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
) -> int | None:
    """Run ``command``. Return its exit status, or None if it was killed after ``limit`` seconds."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


FORKS = multiprocessing.get_context("forkserver")
"""Tiny work takes less time than its imports, which these processes share."""


def wait_for_fork(words: Sequence[str], log: Path, limit: float) -> int | None:
    """Do as ``wait_for_process`` for a Python script, in a process that has its imports."""
    process = FORKS.Process(target=run_script, args=(words, log))
    process.start()
    process.join(limit)
    if process.exitcode is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def run_script(words: Sequence[str], log: Path) -> None:
    """Run a script as ``python words...`` does, in a session of its own."""
    os.setsid()
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = list(words)
    sys.path.insert(0, str(HERE))
    runpy.run_path(words[0], run_name="__main__")


def outcome(part: Part, sides: Mapping[str, Any]) -> str:
    """Return how a part ended, whose ``sides`` have ended so far."""
    for number in part.equal:
        values = {found.get("numbers", {}).get(number) for found in sides.values()}
        if len(values) > 1:
            return f"FAILED: {number} of the sides differ"
    bad = [side for side, found in sides.items() if "FAILED" in found["ended"]]
    if bad:
        return f"FAILED: {', '.join(bad)}"
    absent = [side for side in part.sides if "done" not in sides.get(side, {}).get("ended", "")]
    return f"without {', '.join(absent)}" if absent else "done"


def read(folder: Path, found: dict[str, Any]) -> None:
    """Add what a script wrote into ``folder``: numbers, or a page of its own."""
    for file in folder.glob("*.json"):
        tree = json.loads(file.read_text(encoding="utf-8"))
        found |= tree if file.name == "measured.json" else {"result": tree}
    pages = [file.read_text(encoding="utf-8").strip() for file in folder.glob("*.md")]
    if pages:
        # Below the heading of the part.
        found["text"] = [re.sub(r"^#", "###", one) for one in pages]


def micro_batch(words: str) -> str:
    found = re.search(r"--micro (\d+)", words)
    return found[1] if found else ""


def half_the_micro_batch(words: str) -> str | None:
    """Return ``words`` with half the micro-batch, or None without one."""
    tokens = micro_batch(words)
    if not tokens or int(tokens) < 2:
        return None
    return words.replace(f"--micro {tokens}", f"--micro {int(tokens) // 2}")


def install(wheels: Path, site: Path) -> str:
    """Install the packages of ``wheels`` that are missing into ``site``. Return what came of it."""
    absent = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(wheel)]
    if not absent:
        return f"wheels: none are needed of {wheels}"
    options = ["--no-index", "--no-deps", "--quiet", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "install", "--no-compile"]
    uv = ["uv", "pip", "install", "--python", sys.executable]
    # An environment that uv has made has no pip. uv refuses --no-compile where the environment asks
    # it to compile.
    tool = pip if find_spec("pip") else uv
    command = [*tool, *options, *map(str, absent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = ", ".join(wheel.name.split("-")[0] for wheel in absent)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return f"wheels: {names} cannot be installed: {said[-1] if said else done.returncode}"
    return f"wheels: installed {names}"


def is_installed(wheel: Path) -> bool:
    """Return True if the package of ``wheel`` is installed, and not older than it."""
    name, needed = wheel.name.split("-")[:2]
    try:
        return release(version(name.replace("_", "-"))) >= release(needed)
    except PackageNotFoundError:
        return False


def release(text: str) -> list[int]:
    """Return the numbers of a version, without what follows them."""
    return [int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part]


ABOUT = """
import importlib.util, json, sys
import common
from lightrft.trainer import rl
modules = [m for m in sys.argv[2:] if importlib.util.find_spec(m)]
print("ABOUT " + json.dumps([common.machine_name(sys.argv[1]), common.machine(), modules]))
"""


def about_machine(name: str, environment: dict[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the name of the machine, its description, and the installed packages of ``NEEDS``.

    This process itself never opens the device, whose memory a context would take.

    Raises:
        SystemExit: lightrft cannot be imported.
    """
    modules = sorted({module for needed in NEEDS.values() for module in needed})
    command = [sys.executable, "-c", ABOUT, name, *modules]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=HERE
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ABOUT ")]
    if done.returncode or not found:
        raise SystemExit(
            f"all parts are left out: lightrft cannot be imported\n{done.stderr[-2000:]}\nSee "
            "benchmarks/gpu/README.md for the wheels that a machine without a network needs."
        )
    return tuple(json.loads(found[-1].removeprefix("ABOUT ")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--again", action="store_true", help="measure what is committed, too")
    parser.add_argument("--list", action="store_true", help="list the parts, and measure nothing")
    parser.add_argument("--smoke", action="store_true", help="tiny work: does everything run?")
    parser.add_argument("--machine", default="", help="name in the result files")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS))
    parser.add_argument("--wheels", type=Path, default=HERE / "wheels")
    return parser.parse_args()


def is_measured(name: str, committed: Mapping[str, Any], modules: Sequence[str]) -> bool:
    """Return True if ``committed`` has the part with all sides that can be measured here."""
    found, part = committed.get(name), PARTS[name]
    if found is None or "FAILED" in found["ended"]:
        return False
    if (found["version"], found["words"]) != (part.version, dict(part.sides)):
        return False
    possible = [s for s in part.sides if all(m in modules for m in NEEDS.get(s, ()))]
    return all("done" in found["sides"].get(side, {}).get("ended", "") for side in possible)


def main() -> int:
    args = arguments()
    end = time.monotonic() + 60 * (args.minutes if not args.smoke else 60)
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > MODELS
    with (
        tempfile.TemporaryDirectory() as site,
        tempfile.TemporaryDirectory(dir=memory if has_room else None) as models,
    ):
        print(install(args.wheels, Path(site)), flush=True)
        paths = [site, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            # One copy of each model for all parts.
            "GPU_MODELS": models,
        }
        if args.smoke:
            os.environ |= environment
            sys.path.insert(0, str(ROOT))
            FORKS.set_forkserver_preload(["lightrft.cli.verbs", "lightrft.trainer.rl", "peft"])
        name, about, modules = about_machine(args.machine, environment)
        file = RESULTS / f"gpu-{name}.json"
        committed: dict[str, Any] = {}
        if file.is_file() and not args.smoke:
            committed = json.loads(file.read_text(encoding="utf-8")).get("parts", {})
        measured = [part for part in PARTS if is_measured(part, committed, modules)]
        if args.list:
            print(*(line(part, measured, modules) for part in PARTS), sep="\n")
            return 0
        stem = args.out / (f"smoke-{name}" if args.smoke else f"gpu-{name}")
        results = Results(stem, about, dict(committed))
        runner = Runner(results, environment, modules, args.smoke, end)
        for part in args.only or PARTS:
            if part in measured and not (args.only or args.again):
                print(f"{part}: is in {file.name} already", flush=True)
                continue
            runner.part(part, PARTS[part])
    results.write()
    print(f"{results.stem}.md")
    return 1 if results.failed else 0


def line(name: str, measured: Sequence[str], modules: Sequence[str]) -> str:
    """Return the line of a part for ``--list``."""
    part = PARTS[name]
    absent = [s for s in part.sides if any(m not in modules for m in NEEDS.get(s, ()))]
    state = "measured" if name in measured else "to be measured"
    without = f"; without {', '.join(absent)}" if absent else ""
    return f"{name:15} {part.seconds:4} s  version {part.version}, {state}{without}: {part.about}"


if __name__ == "__main__":
    raise SystemExit(main())
