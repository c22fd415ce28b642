"""vLLM's own server in a process that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lightrft.engines.vllm_parts.weight_receiver import BACKEND
from tests.serving_helpers import free_port, wait_for

TRAINS = ("--enable-scale-out", "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}')
ADAPTERS = ("--enable-lora", "--max-lora-rank", "8")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # else several processes need a NUMA node each
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}


class VLLMServer:
    """A server of the model in ``folder``, with further ``words`` of its command line."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--model", str(folder), "--port", str(self.port), "--dtype", "float32"]
        options += ["--max-num-seqs", "8", "--enforce-eager"]
        options += ["--logprobs-mode", "processed_logprobs", *words]
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
        self._log = folder / "server.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        wait_for(self.url, 300)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(300)


@contextmanager
def vllm_server(folder: Path, *words: str) -> Generator[VLLMServer]:
    """Run vLLM's own server in a process."""
    server = VLLMServer(folder, *words)
    try:
        server.wait()
        yield server
    finally:
        server.kill()
