"""Peak memory of each rank against the number of ranks: weights, gradients and optimizer state of FSDP2 and ZeRO-3.

    python benchmarks/memory_by_rank.py                         # fsdp2, and ZeRO-3 where deepspeed is installed, on 1, 2 and 4 ranks
    python benchmarks/memory_by_rank.py --ranks 2 --hidden 256  # smaller

Real processes on this machine's CPUs. A rank reads its part of a model of random weights, takes two optimizer steps of two micro-batches
each on a short batch, and says by how much its resident set grew beyond that of a process that has imported everything and nothing else:
at most while reading, at most over all, and after the last step, when gradients are gone. What is held by then is weights and two moments,
12 bytes a weight; gradients are another 4 at the peak.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


def resident(which: str) -> int:
    """``VmRSS`` or ``VmHWM``, the peak, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(which))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def work(kind: str, folder: Path) -> dict[str, int]:
    """One rank's run; bytes beyond an empty process."""
    import torch

    from lightrft.models.actor import Actor
    from lightrft.models.settings import ModelConfig
    from lightrft.strategy.settings import OptimizerConfig, StrategyConfig
    from lightrft.trainer.launch.local import strategy_of
    from lightrft.types import Batch, Segments
    from lightrft.utils.ranks import joined

    torch.set_num_threads(1)
    torch.ones(8, requires_grad=True).sum().backward()
    with joined(5.0) as ranks:
        settings: dict[str, Any] = {"kind": kind, "device": "cpu"}
        strategy = strategy_of(StrategyConfig(**settings, **({"stage": 3} if kind == "deepspeed" else {})), ranks)
        ranks.gather(0)
        gc.collect()
        forget_peak()
        empty = resident("VmRSS")
        with strategy.loading() as device:
            actor = Actor.load(ModelConfig(path=str(folder), dtype="float32"), device=device)
        state = strategy.prepare(actor, OptimizerConfig(lr=1e-4), 4)
        loading = resident("VmHWM") - empty
        rows = [[5 + (7 * i + j) % 90 for j in range(8)] for i in range(4)]
        batch = Batch(Segments.of(rows[:2]), Segments.of(rows[2:]), torch.tensor([0, 1]))
        for _ in range(2):
            actor.train()
            for last in (False, True):
                strategy.backward(state, -actor.score(batch).logprobs.sum(), last=last)
            strategy.step(state)
        gc.collect()
        return {"loading": loading, "peak": resident("VmHWM") - empty, "held": resident("VmRSS") - empty}


def measure(kind: str, count: int, folder: Path) -> list[dict[str, int]]:
    """What each of ``count`` ranks says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    # Memory that is freed goes back at once, so that what is resident is what is used.
    shared |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, __file__, "--work", kind, "--folder", str(folder)]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
        )
        for r in range(count)
    ]
    found = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{kind} on {count} ranks failed: {[process.returncode for process in started]}")
    return [json.loads(said.partition("FOUND")[2].splitlines()[0]) for said in found]


def make_model(folder: Path, hidden: int, layers: int) -> int:
    """A folder with a model of random float32 weights; their bytes."""
    from lightrft.models.tiny import tiny_model

    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 8000}
    model = tiny_model("qwen2", num_attention_heads=8, tie_word_embeddings=True, **sizes)
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def table(found: dict[str, dict[int, list[dict[str, int]]]], weights: int) -> str:
    lines = [
        "# Memory by rank",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, `python benchmarks/memory_by_rank.py`. A model of {weights / MIB:.0f} MiB of"
        " float32 weights. MiB of the fullest rank, beyond a process that has imported everything: at most while weights are read,"
        " at most over two optimizer steps, and after them. Last: that peak as a share of one rank's, which would be 1 / ranks if"
        " nothing were whole.",
        "",
        "| strategy | ranks | reading | peak | after a step | all ranks, after a step | peak, of one rank's |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    alone = max(rank["peak"] for rank in found["single"][1])
    for kind, by_count in found.items():
        for count, ranks in by_count.items():
            top = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            together = sum(rank["held"] for rank in ranks) / MIB
            row = [f"{top[key] / MIB:.0f}" for key in ("loading", "peak", "held")]
            lines.append(f"| {kind} | {count} | {' | '.join(row)} | {together:.0f} | {top['peak'] / alone:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print("FOUND" + json.dumps(work(options.work, options.folder)), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        weights = make_model(Path(name), options.hidden, options.layers)
        found = {"single": {1: measure("single", 1, Path(name))}}
        for kind in ("fsdp2", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])):
            found[{"deepspeed": "ZeRO-3"}.get(kind, kind)] = {n: measure(kind, n, Path(name)) for n in options.ranks}
    text = table(found, weights)
    print(text)
    if not options.no_write:
        (RESULTS / f"memory_by_rank-{platform.machine()}-{os.cpu_count()}cores.md").write_text(text)


if __name__ == "__main__":
    main()
