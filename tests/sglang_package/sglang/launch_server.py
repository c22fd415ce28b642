"""Options of SGLang 0.5.23, read as strictly, and a server of its protocol.

Variables of the environment make it fail: ``FAKE_SGLANG_LATE`` makes it wait as many seconds before it answers, and
``FAKE_SGLANG_TALE`` makes it end at once, with these words.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

VALUES = {
    "model-path": str,
    "tokenizer-path": str,
    "revision": str,
    "dtype": str,
    "device": str,
    "tp-size": int,
    "base-gpu-id": int,
    "max-total-tokens": int,
    "max-running-requests": int,
    "context-length": int,
    "random-seed": int,
    "mem-fraction-static": float,
    "log-level": str,
    "host": str,
    "port": int,
    "api-key": str,
}
FLAGS = (
    "trust-remote-code",
    "enable-deterministic-inference",
    "enable-memory-saver",
    "enable-weights-cpu-backup",
    "disable-cuda-graph",
)
BACKENDS = ("triton", "fa3", "flashinfer", "torch_native")


def options() -> argparse.ArgumentParser:
    """Return a parser of the options that runs may set."""
    parser = argparse.ArgumentParser(prog="launch_server.py", allow_abbrev=False)
    for name, kind in VALUES.items():
        parser.add_argument(f"--{name}", type=kind, required=name == "model-path")
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--attention-backend", choices=BACKENDS)
    return parser


def scheduler(key: bytes) -> None:
    """Stand in for SGLang's process of a GPU, which opens the handles of tensors."""
    assert multiprocessing.current_process().authkey == key, "another key than that of the parent"
    time.sleep(3600)


def main() -> None:
    """Serve until killed."""
    given = options().parse_args(sys.argv[1:])
    if tale := os.environ.get("FAKE_SGLANG_TALE"):
        sys.exit(f"{tale} {given.api_key}")
    time.sleep(float(os.environ.get("FAKE_SGLANG_LATE", "0")))
    context = multiprocessing.get_context("spawn")
    key = bytes(multiprocessing.current_process().authkey)
    context.Process(target=scheduler, args=(key,)).start()

    # after the other process has started, which imports this module too
    from lightrft.config.generation.serving import HTTPConfig
    from lightrft.serving.http_server import HTTPServer
    from lightrft.serving.server_metrics import ServerMetrics
    from tests.sglang_server import SGLangServer

    about = {
        "dtype": given.dtype,
        "enable_memory_saver": given.enable_memory_saver,
        "max_total_num_tokens": given.max_total_tokens,
    }
    made = SGLangServer(Path(given.model_path), given.enable_deterministic_inference, **about)
    made.end = lambda: os._exit(1)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"{given.api_key}\n")
        keys.flush()
        config = HTTPConfig(host=given.host, port=given.port, token_file=keys.name)
        server = HTTPServer(made.endpoints(), config, ServerMetrics())
        server.bind()
        server.run()


if __name__ == "__main__":
    main()
