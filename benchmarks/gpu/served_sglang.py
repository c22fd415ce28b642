"""The real SGLang as ``engine.kind = sglang``: the same tokens and log-probs as transformers, new weights, memory, and tokens a second.

    pip install sglang
    python benchmarks/gpu/served_sglang.py [--size 0.5b] [--rounds 2] [--url http://host:30000 --model FOLDER] [--smoke]

It starts ``sglang.launch_server`` on a model made on the spot. With ``--url`` it asks a server that serves ``--model`` and was started
with ``--enable-deterministic-inference --enable-memory-saver``. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import engine_checks
import httpx
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.types import Request, Rollout

NOT_RUN = 3
START_SECONDS = 400.0
PORT = 30017


@contextmanager
def started(folder: Path, log: Path) -> Iterator[str]:
    """Start SGLang on the model of ``folder``, and yield its address."""
    words = ["--model-path", str(folder), "--port", str(PORT), "--dtype", "bfloat16"]
    words += ["--enable-deterministic-inference", "--enable-memory-saver"]
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    # not this folder, whose files would be imported in the place of packages
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{PORT}"
    try:
        until = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"SGLang did not start:\n{log.read_text()[-4000:]}")
            time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    """Whether the server at ``url`` is healthy."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def checked(engine: SGLangEngine, model: Any, tokens: int, count: int) -> dict[str, Any]:
    """What is wrong, by check (empty where nothing is), and what was measured."""
    found = engine_checks.Found()
    asked = engine_checks.requests(model.config.vocab_size, 4, 32, count)
    sampling = SamplingConfig(max_new_tokens=tokens)

    def draw(requests: list[Request]) -> list[Rollout]:
        return list(engine.generate(requests, sampling))

    engine.load_weights(model.named_parameters(), 0)
    first = draw(asked)
    began = time.perf_counter()
    again = draw(asked)
    found.add("tokens per second", sum(map(len, again)) / (time.perf_counter() - began))
    found.same_tokens(first, again)
    found.compare("at the start", model, first[:8])
    engine_checks.change(model)
    began = time.perf_counter()
    engine.load_weights(model.named_parameters(), 1)
    found.add("update seconds", time.perf_counter() - began)
    new = draw(asked[:8])
    found.compare("after an update", model, new)
    found.versions(new, 1)
    engine.sleep(1)
    engine.wake()
    found.compare("after sleep", model, draw(asked[:8]))
    return {"wrong": found.wrong, **found.numbers}


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument("--url", help="a running SGLang")
    parser.add_argument("--model", type=Path, help="the folder that it serves")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    args = parser.parse_args()
    if args.url is None and not (importlib.util.find_spec("sglang") and torch.cuda.is_available()):
        print("not run: needs a GPU and sglang (pip install sglang)")
        return NOT_RUN
    if args.smoke:
        args.tokens, args.answers = 8, 2
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name:
        folder = args.model or common.make(args.size, Path(name) / "model", torch.bfloat16)
        with started(folder, Path(name) / "log") if args.url is None else at(args.url) as url:
            tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
            # broadcasts its weights: SGLang needs no folder of them
            config = EngineConfig(kind="sglang", url=url)
            engine = SGLangEngine.connect(config, tokenizer, [])
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            # NCCL needs another GPU than that of the server; weights of a CPU go by Gloo
            device = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
            tree = checked(engine, model.to(device).eval(), args.tokens, args.answers)
            tree["weights by"] = "nccl" if device != "cpu" else "gloo"
            engine.close()
    rows = [[name, str(value)] for name, value in tree.items()]
    lines = [f"{args.size}, {args.tokens} tokens", "", *common.table(["", ""], rows)]
    common.write(args.out, "sglang", args.machine, "Sampling with SGLang", tree, lines)
    return 1 if tree["wrong"] else 0


@contextmanager
def at(url: str) -> Iterator[str]:
    """Yield ``url``, whose server runs already."""
    yield url


if __name__ == "__main__":
    raise SystemExit(main())
