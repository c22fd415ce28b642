"""The real SGLang as ``engine.kind = sglang``: the same tokens and log-probs as transformers, new weights, memory, and tokens a second.

    pip install sglang
    python benchmarks/gpu/served_sglang.py [--size 0.5b] [--rounds 2] [--url http://host:30000 --model FOLDER] [--smoke]

It starts SGLang as a run without ``engine.url`` does, on a model made on the spot and on the GPU of the trainer's model: weights go by
memory that both share, memory is released in sleep, and the server is killed once. With ``--url`` it asks a server that serves ``--model``
and was started with ``--enable-deterministic-inference --enable-memory-saver``, and broadcasts its weights. The exit status is 1 where a
check fails.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # first: it says where the rest lies
import engine_checks
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.distributed.guarded.guardian import descendants
from lightrft.engines.served.sglang_process import CHILD
from lightrft.engines.sglang import SGLangEngine
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.types import Request, Rollout
from lightrft.utils.errors import ModelError
from lightrft.workers.local_served import own_server_options

NOT_RUN = 3


def checked(engine: SGLangEngine, model: Any, tokens: int, count: int, own: bool) -> dict[str, Any]:
    """What is wrong, by check (empty where nothing is), and what was measured. ``own``: this process started the server."""
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
    try:
        engine.load_weights(model.named_parameters(), 1)
    except ModelError as error:
        # nothing after it would tell more
        found.fail("update", str(error))
        return {"wrong": found.wrong, **found.numbers}
    found.add("update seconds", time.perf_counter() - began)
    new = draw(asked[:8])
    found.compare("after an update", model, new)
    found.versions(new, 1)
    engine.sleep(1)
    engine.wake()
    found.compare("after sleep", model, draw(asked[:8]))
    if own:
        check_own(found, engine, model, lambda: draw(asked[:8]))
    return {"wrong": found.wrong, **found.numbers}


def check_own(
    found: engine_checks.Found, engine: SGLangEngine, model: Any, draw: Callable[[], list[Rollout]]
) -> None:
    """Check what only the server of the run does: free the GPU, take weights asleep, and come back after a kill."""
    for version, level in enumerate((1, 2), 2):
        before = free_bytes()
        engine.sleep(level)
        found.add(f"GiB freed in sleep {level}", (free_bytes() - before) / 2**30)
        engine_checks.change(model)
        engine.load_weights(model.named_parameters(), version)
        engine.wake()
        rollouts = draw()
        found.compare(f"after an update in sleep {level}", model, rollouts)
        found.versions(rollouts, version)
    first = draw()
    guardian = next(p for p in descendants(os.getpid()) if CHILD in words_of(p))
    for pid in list(descendants(guardian))[:1]:
        os.kill(pid, signal.SIGKILL)
    began = time.perf_counter()
    found.same_tokens(first, draw())
    found.add("seconds of a restart", time.perf_counter() - began)
    restarts = engine.take_counts().get("restarts", 0)
    if restarts != 1:
        found.fail("restart", f"the server was started again {restarts} times")


def free_bytes() -> int:
    """Return the free memory of the GPU, or 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def words_of(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--size", choices=list(common.SIZES), default="0.5b")
    parser.add_argument("--url", help="a running SGLang")
    parser.add_argument("--model", type=Path, help="the folder that it serves")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    args = parser.parse_args()
    usable = torch.cuda.is_available() or args.smoke
    if args.url is None and not (importlib.util.find_spec("sglang") and usable):
        print("not run: needs a GPU and sglang (pip install sglang)")
        return NOT_RUN
    if args.smoke:
        args.tokens, args.answers = 8, 2
    with tempfile.TemporaryDirectory(dir=common.scratch(args.size)) as name:
        folder = args.model or common.make(args.size, Path(name) / "model", torch.bfloat16)
        settings = ModelConfig(path=str(folder))
        tokenizer = load_tokenizer(settings)
        config = EngineConfig(kind="sglang", url=args.url)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        several = torch.cuda.device_count() > 1
        # NCCL needs another GPU than that of the server; weights of a CPU go by Gloo
        device = torch.device("cuda", 1) if several else torch.device("cpu")
        if args.url is None:
            # handles of memory need the same GPU
            device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
            options = own_server_options(settings, config, device)
            engine = SGLangEngine.start(config, tokenizer, [], options)
        else:
            engine = SGLangEngine.connect(config, tokenizer, [])
        try:
            own = args.url is None
            tree = checked(engine, model.to(device).eval(), args.tokens, args.answers, own)
        finally:
            engine.close()
        way = "nccl" if device.type == "cuda" else "gloo"
        tree["weights by"] = f"memory of {device}" if args.url is None else way
    rows = [[name, str(value)] for name, value in tree.items()]
    lines = [f"{args.size}, {args.tokens} tokens", "", *common.table(["", ""], rows)]
    common.write(args.out, "sglang", args.machine, "Sampling with SGLang", tree, lines)
    return 1 if tree["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
