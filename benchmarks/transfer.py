# ruff: noqa: E402 (the environment is set before torch is imported)
"""How fast weights reach engines in other processes, by each way, and that every bit arrives.

Random tensors of the sizes of a model (embedding, and in each layer two large matrices and two vectors) go to ``--workers`` processes that
keep them, in buckets of ``--bucket-mb``; the fastest of ``--rounds`` counts. Each worker then says what it holds. With ``--device cuda``,
``shared`` is CUDA IPC on one device, and ``broadcast`` (NCCL) needs a device for each worker.

    python benchmarks/transfer.py [--mb 512] [--bucket-mb 16 64 256] [--workers 1 2] [--ways message shared broadcast] [--smoke]
                                  [--out benchmarks/results/transfer-MACHINE.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

for _variable, _value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0")):
    os.environ.setdefault(_variable, _value)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from lightrft.engines.fingerprint import checksum
from lightrft.engines.weight_transport import WeightBuffer, build_transport, fill
from tests.worker_helpers import ProcessWorker

SECONDS = 300.0


class Shelf:
    """What an engine does with weights, and nothing else."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}
        self.inbox = WeightBuffer(self.load)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.held |= {name: tensor.to(self.device) for name, tensor in weights}

    def weights(self, method: str, *args: object) -> None:
        getattr(self.inbox, method)(*args)

    def sums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.held.items()}


def model_like(megabytes: float, device: str) -> dict[str, Tensor]:
    """``megabytes`` of bfloat16: an eighth of it the embedding, the rest in twelve layers."""
    entries = int(megabytes * 2**20 / 2)
    width = max(8, int((entries / 8 / 32) ** 0.5) // 8 * 8)
    sizes = {"embedding": (entries // 8 // width, width)}
    for layer in range(12):
        rows = entries * 7 // 8 // 12 // 2 // width
        sizes |= {f"{layer}.{part}": (rows, width) for part in ("attention", "mlp")} | {
            f"{layer}.norm{i}": (width,) for i in (1, 2)
        }
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).bfloat16().to(device)
        for name, size in sizes.items()
    }


def measure(
    way: str,
    workers: list[ProcessWorker],
    weights: dict[str, Tensor],
    bucket: int,
    rounds: int,
    device: str,
) -> float:
    """Seconds of the fastest round. Raises ``AssertionError`` when a worker does not hold what was sent."""
    carrier = build_transport(way, workers, bucket, torch.device(device), SECONDS)  # type: ignore[arg-type]
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for slot, layout in fill(weights.items(), carrier.slots):
            carrier.send(slot, layout)
        carrier.flush()
        seconds.append(time.perf_counter() - began)
    carrier.close()
    expected = {name: checksum(tensor) for name, tensor in weights.items()}
    for worker in workers:
        assert worker.call("sums").result(SECONDS) == expected, (
            f"{way}: {worker.name} holds other weights"
        )
    return min(seconds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=512)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[16, 64, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=["message", "shared", "broadcast"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="a few megabytes, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    if args.smoke:
        args.mb, args.bucket_mb, args.workers, args.rounds = 4, [1], [2], 1
    return args


def main() -> None:
    args = arguments()
    weights = model_like(args.mb, args.device)
    size = sum(t.numel() * t.element_size() for t in weights.values())
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    say("# Weights to engines in other processes\n")
    say(f"`{' '.join(['python', 'benchmarks/transfer.py', *sys.argv[1:]])}`\n")
    say(
        f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}, "
        f"{args.device}; {size / 2**20:.0f} MiB of weights. Every worker then held every bit.\n"
    )
    say("| transport | workers | bucket, MiB | bytes sent, MB | seconds | GB/s to each |")
    say("|---|---|---|---|---|---|")
    for count in args.workers:
        workers = [ProcessWorker(f"shelf {i}", partial(Shelf, args.device)) for i in range(count)]
        for way in args.ways:
            for bucket in args.bucket_mb:
                seconds = measure(
                    way, workers, weights, int(bucket * 2**20), args.rounds, args.device
                )
                # memory that is shared is written once for all workers
                sent = size if way == "shared" else size * count
                say(
                    f"| {way} | {count} | {bucket:g} | {sent / 1e6:.0f} | {seconds:.3f} | "
                    f"{size / seconds / 1e9:.2f} |"
                )
        for worker in workers:
            worker.close()
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
