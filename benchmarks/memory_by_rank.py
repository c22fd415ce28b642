"""Memory of each rank against the number of ranks, while a model is read and while it is trained, beside what arithmetic says.

    python benchmarks/memory_by_rank.py                         # fsdp2, and ZeRO-3 where deepspeed is installed, on 2 and 4 ranks
    python benchmarks/memory_by_rank.py --ranks 2 --hidden 256  # smaller
    python benchmarks/memory_by_rank.py --reading               # no step is taken; the rest of the page stays as it was

Real processes on this machine's CPUs. A rank first does all of it with a tiny model, so that code and caches of the libraries are there,
and then reads its part of a model of random weights, takes two optimizer steps of two micro-batches each on a short batch, and says by how
much its memory grew: at most, and after the last step, when gradients are gone. Then it reads the same model once more, as one that is not
trained. What the ranks hold together while they read is sampled by the process that started them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
READING = "## While it is read"
PAUSE = 0.001
"""Seconds between two samples."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the float32 weights of a model, of what lies outside of its blocks, and of one block."""

    all: int
    outside: int
    block: int


def status(which: str, pid: int | str = "self") -> int:
    """A line of a process's memory in bytes: ``VmRSS``, its peak ``VmHWM``, or ``RssAnon``, without what only mirrors a file."""
    line = next(
        x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith(which)
    )
    return int(line.split()[1]) * 1024


def settle() -> None:
    """Give back what is freed, and forget the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def work(kind: str, folder: Path, steps: int) -> dict[str, Any]:
    """One rank's run: bytes beyond what it had after the tiny model, and when it was reading."""
    import torch

    from lightrft.config.model import ModelConfig
    from lightrft.config.strategy import OptimizerConfig, StrategyConfig
    from lightrft.distributed.process_group import init_process_group
    from lightrft.models.actor import Actor
    from lightrft.strategy.base import TrainState
    from lightrft.types import Batch, Segments
    from lightrft.workers.local import strategy_of

    torch.set_num_threads(1)
    rows = [[5 + (7 * i + j) % 90 for j in range(8)] for i in range(4)]
    batch = Batch(Segments.of(rows[:2]), Segments.of(rows[2:]), torch.tensor([0, 1]))
    with init_process_group(5.0) as ranks:
        settings: dict[str, Any] = {"kind": kind, "device": "cpu"}
        strategy = strategy_of(
            StrategyConfig(**settings, **({"zero_stage": 3} if kind == "deepspeed" else {})), ranks
        )

        class Timed(Actor):
            """It knows when its weights were there: shards are read when they are placed, and the optimizer comes after."""

            there = 0.0

            def read_weights(self, *held: Any) -> None:
                super().read_weights(*held)
                self.there = time.monotonic()

        def read(model: str) -> Any:
            with strategy.loading() as device:
                return Timed.load(
                    ModelConfig(path=str(folder / model), dtype="float32"), device=device
                )

        def prepared(actor: Any) -> TrainState:
            return strategy.prepare(actor, OptimizerConfig(lr=1e-4), 4)

        def train(state: TrainState) -> None:
            for _ in range(steps):
                state.model.train()
                for last in (False, True):
                    strategy.backward(state, -state.model.score(batch).logprobs.sum(), last=last)
                strategy.step(state)

        def frozen(model: str) -> Any:
            actor = read(model).requires_grad_(False)
            strategy.place(actor)
            return actor

        kept: list[Any] = [prepared(read("tiny")), frozen("tiny")]
        train(kept[0])
        settle()
        ranks.gather(0)
        found: dict[str, Any] = {"empty": status("RssAnon")}
        empty, began = status("VmRSS"), time.monotonic()
        actor = read("large")
        made = time.monotonic()
        kept.append(prepared(actor))
        found["reading"] = [began, actor.there or made]
        train(kept[-1])
        found["peak"] = status("VmHWM") - empty
        settle()
        found |= {"held": status("VmRSS") - empty, "before": status("RssAnon")}
        ranks.gather(0)
        began = time.monotonic()
        kept.append(frozen("large"))
        found["reading_frozen"] = [began, time.monotonic()]
        ranks.gather(0)
        return found


def measure(kind: str, count: int, folder: Path, steps: int) -> list[dict[str, float]]:
    """What each of ``count`` ranks says; in the first, what all hold together at most while they read."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    # Memory that is freed goes back at once, so that what is resident is what is used.
    shared |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [
        sys.executable,
        __file__,
        "--work",
        kind,
        "--folder",
        str(folder),
        "--steps",
        str(steps),
    ]
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(count)
    ]
    samples: list[tuple[float, int]] = []
    while all(process.poll() is None for process in started):
        with suppress(OSError, StopIteration):  # one has ended
            samples.append(
                (time.monotonic(), sum([status("RssAnon", process.pid) for process in started]))
            )
        time.sleep(PAUSE)
    said = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(
            f"{kind} on {count} ranks failed: {[process.returncode for process in started]}"
        )
    found = [json.loads(each.partition("FOUND")[2].splitlines()[0]) for each in said]
    for name, base in (("reading", "empty"), ("reading_frozen", "before")):
        spans = [rank.pop(name) for rank in found]
        start, end = min(span[0] for span in spans), max(span[1] for span in spans)
        found[0][name] = max(bytes_ for at, bytes_ in samples if start <= at <= end) - sum(
            rank[base] for rank in found
        )
    return found


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> Sizes:
    """A folder with a model of random float32 weights."""
    from lightrft.models.tiny.text import tiny_model
    from lightrft.strategy.sharding import outermost_blocks

    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    model = tiny_model("qwen2", num_attention_heads=8, tie_word_embeddings=True, **sizes)
    model.save_pretrained(folder, max_shard_size="50MB")

    def size(module: Any) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    blocks = [size(block) for block in outermost_blocks(model)]
    return Sizes(size(model), size(model) - sum(blocks), max(blocks))


def predicted(kind: str, count: int, sizes: Sizes) -> tuple[float, float, float]:
    """Bytes on each of ``count`` ranks: what lies there in shards between steps, the gradients' shards that a step adds, and what is
    whole for a moment of the backward pass. Shards are of weights and two moments; ZeRO-3 keeps room for gradients, and the bucket that
    they are collected in.

    Whole: what lies outside of blocks and its gradient, so far as the head has made it (of one rank, all that gradients are: once more
    that of a weight which is head and embedding). Blocks: with FSDP2 the one at hand, its gradients, the next one on its way, and the
    gradients of the last one, as they were sent. With ZeRO-3 the one at hand, and of its gradients what is sent and gloo's copy of that.
    """
    shard, outside, block = sizes.all / count, sizes.outside, sizes.block
    if kind == "single":
        return 3 * shard, shard, outside
    if kind == "fsdp2":
        return 3 * shard, shard, 2 * outside + 4 * block
    return 4 * shard + block, 0.0, 2 * outside + 3 * block


def training(found: dict[str, dict[int, list[dict[str, float]]]], sizes: Sizes) -> str:
    lines = [
        "# Memory by rank",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, `python benchmarks/memory_by_rank.py`. A "
        f"model of {sizes.all / MIB:.1f} MiB of float32 weights ({sizes.outside / MIB:.1f} "
        f"outside of blocks, each block {sizes.block / MIB:.1f}). MiB beyond what each process "
        "has taken for a tiny model.",
        "",
        "## While it trains",
        "",
        "The fullest rank. Computed, from left to right: shards that lie there between steps, "
        "gradients that a step adds to them, and what is whole for a moment (`predicted` in the "
        "script says what); their sum is the peak to expect. Measured, over two optimizer steps: "
        "the peak, by how much it differs from that, what lies there after a step, and the peak "
        "as a share of that of one process.",
        "",
        "| strategy | ranks | shards | gradients | whole | peak, computed | peak, measured | "
        "differs | after a step | of one process |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    alone = max(rank["peak"] for rank in found["single"][1])
    for kind, by_count in found.items():
        for count, ranks in by_count.items():
            parts = predicted(kind, count, sizes)
            peak, held = (max(rank[key] for rank in ranks) for key in ("peak", "held"))
            row = [f"{x / MIB:.0f}" for x in (*parts, sum(parts), peak)]
            row += [f"{peak / sum(parts) - 1:+.1%}", f"{held / MIB:.0f}", f"{peak / alone:.2f}"]
            lines.append(f"| {kind} | {count} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n\n"


def reading(found: dict[str, dict[int, list[dict[str, float]]]], sizes: Sizes) -> str:
    lines = [
        READING,
        "",
        "All ranks together, at most, without what only mirrors the file; and as copies of the "
        "whole model, for one that is trained (before its optimizer is made) and one that is not.",
        "",
        "| strategy | ranks | trained | in copies | not trained | in copies |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind, by_count in found.items():
        for count, ranks in by_count.items():
            both = [ranks[0][key] for key in ("reading", "reading_frozen")]
            lines.append(
                f"| {kind} | {count} | "
                f"{' | '.join(f'{x / MIB:.0f} | {x / sizes.all:.2f}' for x in both)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--reading", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--steps", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print("FOUND" + json.dumps(work(options.work, options.folder, options.steps)), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "tiny", 32, 2, 8000)
        sizes = make_model(folder / "large", options.hidden, options.layers, 8000)
        steps = 0 if options.reading else options.steps
        found = {"single": {1: measure("single", 1, folder, steps)}}
        for kind in ("fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])):
            found[{"deepspeed": "ZeRO-3"}.get(kind, kind)] = {
                n: measure(kind, n, folder, steps) for n in options.ranks
            }
    page = RESULTS / f"memory_by_rank-{platform.machine()}-{os.cpu_count()}cores.md"
    before = page.read_text().partition(READING)[0] if options.reading else training(found, sizes)
    text = before + reading(found, sizes)
    print(text)
    if not options.no_write:
        page.write_text(text)


if __name__ == "__main__":
    main()
