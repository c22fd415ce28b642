# ruff: noqa: E402 (the environment is set before torch is imported)
"""How fast weights reach engines in other processes, by each way, and that every bit arrives.

Random tensors of the sizes of a model (embedding, and in each layer two large matrices and two vectors) go to ``--workers`` processes that
keep them, in buckets of ``--bucket-mb``; the fastest of ``--rounds`` counts. Each worker then says what it holds. With ``--device cuda``,
``shared`` is CUDA IPC on one device, and ``broadcast`` (NCCL) needs a device for each worker.

The ways ``http``, ``sglang`` and ``sglang-folder`` send a model of about that size, of which every number has changed, to a server in
another process: ``lightrft serve``, and the server of the tests that speaks SGLang's protocol. Their seconds are those of a whole update,
with the checksums that find what has changed, and for ``http`` with those that prove what has arrived.

With ``--senders``, two ranks that have a shard of every weight each send updates by ``broadcast``, of which so many send
(``benchmarks/transfer_ranks.py``).

    python benchmarks/transfer.py [--mb 512] [--bucket-mb 16 64 256] [--workers 1 2] [--ways message shared broadcast http ...] [--smoke]
                                  [--senders 1 2] [--out benchmarks/results/transfer-MACHINE.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightrft.utils.cpu import set_thread_policy

set_thread_policy()

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.engines.fingerprint import checksum
from lightrft.engines.http import HTTPEngine
from lightrft.engines.sending import sglang_weights
from lightrft.engines.sending.tensor_slices import fill
from lightrft.engines.served.served_engine import ServedEngine
from lightrft.engines.sglang import SGLangEngine
from lightrft.engines.weight_transport import WeightBuffer, build_transport, open_meeting
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests.serving_helpers import free_port, wait_for
from tests.worker_helpers import ProcessWorker

SECONDS = 300.0
WAYS = ("message", "shared", "broadcast")
SERVED = ("http", "sglang", "sglang-folder")
KEY = "TRANSFER_KEY"


class Shelf:
    """What an engine does with weights, and nothing else."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}
        self.inbox = WeightBuffer(self.load)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.held |= {name: tensor.to(self.device) for name, tensor in weights}

    def weights(self, method: str, *args: object) -> object:
        return getattr(self.inbox, method)(*args)

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
    place = open_meeting("127.0.0.1", 1, len(workers), SECONDS)
    carrier = build_transport(way, workers, bucket, torch.device(device), SECONDS, place)  # type: ignore[arg-type]
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        carrier.begin_turn(0)
        for slot, layout in fill(weights.items(), carrier.slots):
            carrier.send(slot, layout)
        carrier.end_turn()
        carrier.flush()
        seconds.append(time.perf_counter() - began)
    carrier.close()
    expected = {name: checksum(tensor) for name, tensor in weights.items()}
    for worker in workers:
        assert worker.call("sums").result(SECONDS) == expected, (
            f"{way}: {worker.name} holds other weights"
        )
    return min(seconds)


def saved_model(folder: Path, megabytes: float) -> dict[str, Tensor]:
    """Save a model of about ``megabytes`` in float32, and return its weights."""
    tokenizer = tiny_tokenizer()
    width = 1024 if megabytes > 64 else 128
    layers = max(1, round(megabytes * 2**20 / 4 / (16 * width**2)))
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    model = tiny_model("qwen2", seed=1, vocab_size=len(tokenizer), **sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@contextmanager
def served_engine(way: str, folder: Path, bucket: float) -> Iterator[ServedEngine]:
    """Start a server of the model in ``folder`` in a process, and yield an engine that sends it weights."""
    port, tokenizer = free_port(), tiny_tokenizer()
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), KEY: "secret"}
    os.environ[KEY] = "secret"
    (folder / "keys").write_text("secret\n")
    words = ["-m", "tests.sglang_server", str(folder), str(port)]
    if way == "http":
        settings = [f"http.port={port}", f"http.max_body_mb={bucket}", "model.dtype=float32"]
        settings += [f"weights_token_file={folder / 'keys'}", "device=cpu"]
        words = ["-m", "lightrft", "serve", str(folder), *settings]
    config: dict[str, Any] = {"kind": "http" if way == "http" else "sglang", "url": url}
    config |= {"api_key_env": KEY} if way == "http" else {}
    config |= {"weights_dir": str(folder / "sent")} if way == "sglang-folder" else {}
    sglang_weights.BUCKET = int(bucket * 2**20)
    with subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(url)
            kind = HTTPEngine if way == "http" else SGLangEngine
            engine = kind.connect(EngineConfig(**config), tokenizer, [tokenizer.eos_token_id])
            engine.require_updates()
            yield engine
            engine.close()
        finally:
            process.kill()


def measure_served(
    way: str, folder: Path, weights: dict[str, Tensor], bucket: float, rounds: int
) -> tuple[float, float]:
    """Seconds of the fastest round, and the bytes that it sent. The engine of ``http`` compares what has arrived."""
    costs: list[tuple[float, float]] = []
    with served_engine(way, folder, bucket) as engine:
        for version in range(1, rounds + 1):
            new = {name: tensor * (1 + version / 8) for name, tensor in weights.items()}
            engine.load_weights(new.items(), version)
            counts = engine.take_counts()
            costs.append((counts["update_seconds"], counts["update_bytes"]))
    return min(costs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=512)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[16, 64, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=[*WAYS, *SERVED])
    parser.add_argument("--senders", type=int, nargs="+", default=[])
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
        f"{args.device}; {size / 2**20:.0f} MiB of weights. Workers and the server of `http` then held every bit. `sglang` is a server "
        "that speaks SGLang's protocol (tests/sglang_server.py), and `sglang-folder` sends it files.\n"
    )
    say("| transport | workers | bucket, MiB | bytes sent, MB | seconds | GB/s to each |")
    say("|---|---|---|---|---|---|")
    for count in args.workers:
        workers = [ProcessWorker(f"shelf {i}", partial(Shelf, args.device)) for i in range(count)]
        for way in [way for way in args.ways if way in WAYS]:
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
    with TemporaryDirectory() as folder:
        served = [way for way in args.ways if way in SERVED]
        model = saved_model(Path(folder), args.mb) if served else {}
        for way in served:
            for bucket in args.bucket_mb if way != "sglang-folder" else [0]:
                seconds, sent = measure_served(way, Path(folder), model, bucket, args.rounds)
                shown = f"{bucket:g}" if bucket else "-"
                say(
                    f"| {way} | 1 | {shown} | {sent / 1e6:.0f} | {seconds:.3f} | "
                    f"{sent / seconds / 1e9:.2f} |"
                )
    if args.senders:
        from benchmarks.transfer_ranks import measure_ranks

        say(
            "\nTwo ranks. CPU seconds, the memory at most in an update, with the shards, and the copies that are kept: of each rank.\n"
        )
        say("| senders | workers | bucket, MiB | seconds | CPU seconds | MB at most | MB kept |")
        say("|---|---|---|---|---|---|---|")
        for count in args.workers:
            for bucket in args.bucket_mb:
                for senders in args.senders:
                    found = measure_ranks(args.mb, int(bucket * 2**20), count, senders, args.rounds)
                    shown = [
                        ", ".join(f"{x:.{n}f}" for x in xs)
                        for n, xs in zip((2, 2, 0, 0), zip(*found))
                    ]
                    say(f"| {senders} | {count} | {bucket:g} | {' | '.join(shown)} |")
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
