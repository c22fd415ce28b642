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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import httpx
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.model import ModelConfig
from lightrft.config.strategy import EngineConfig, SamplingConfig
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.types import Prompt, Request, Rollout

NOT_RUN = 3
START_SECONDS = 400.0
PORT = 30017
HALF = 0.05
"""Mean difference of log-probs, in nats, that bfloat16 explains."""


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


def gap(model: Any, rollouts: list[Rollout]) -> float:
    """The mean difference of log-probs from those of ``model``, in nats."""
    gaps = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]]).to(model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1].float()
        chosen = torch.tensor(rollout.token_ids, device=model.device)[:, None]
        found = logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu()
        gaps += (found - torch.tensor(rollout.logprobs)).abs().tolist()
    return statistics.fmean(gaps)


def checked(engine: SGLangEngine, model: Any, tokens: int, count: int) -> dict[str, Any]:
    """What is wrong, by check (empty where nothing is), and what was measured."""
    ids = torch.randint(4, model.config.vocab_size, (4, 32)).tolist()
    prompts = [Prompt(str(k), row) for k, row in enumerate(ids)]
    requests = [
        Request(prompt, 100 * p + k, k) for p, prompt in enumerate(prompts) for k in range(count)
    ]
    sampling = SamplingConfig(max_new_tokens=tokens)
    wrong: dict[str, str] = {}
    engine.load_weights(model.named_parameters(), 0)
    first = {r.seed: r for r in engine.generate(requests, sampling)}
    began = time.perf_counter()
    again = {r.seed: r for r in engine.generate(requests, sampling)}
    seconds = time.perf_counter() - began
    numbers: dict[str, Any] = {"tokens per second": sum(map(len, again.values())) / seconds}
    if any(first[seed].token_ids != again[seed].token_ids for seed in first):
        wrong["seeds"] = "the same seeds gave other tokens"
    numbers["log-prob difference"] = gap(model, list(first.values())[:8])
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    began = time.perf_counter()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.load_weights(model.named_parameters(), 1)
    numbers["update seconds"] = time.perf_counter() - began
    new = list(engine.generate(requests[:8], sampling))
    numbers["log-prob difference after an update"] = gap(model, new)
    if {version for r in new for version in r.versions} != {1}:
        wrong["version"] = "tokens of the new weights do not have their version"
    engine.sleep(1)
    engine.wake()
    numbers["log-prob difference after sleep"] = gap(
        model, list(engine.generate(requests[:8], sampling))
    )
    for name, value in numbers.items():
        if name.startswith("log-prob") and not value < HALF:
            wrong[name] = f"{value:.3g} nats"
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])
    return {"wrong": wrong, **numbers}


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
