"""The end of a run on a vLLM server that has stopped to answer."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from lightrft.config.model import LoRAConfig
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.sending.vllm_weights import AdapterToVLLM
from lightrft.utils.errors import ConfigError
from lightrft.utils.http_client.server_client import ServerClient, Unanswered


def test_the_end_of_a_run_does_not_wait_a_second_deadline_to_drop_its_adapter(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        client = ServerClient(url, 0.1, 4, dict)
        refusal = lambda cause: ConfigError(f"{cause}")  # noqa: E731
        sending = AdapterToVLLM(client, str(tmp_path), LoRAConfig(), refusal, UpdateCost())
        sending._versions.append("run-1")
        with pytest.raises(Unanswered, match=r"did not answer within deadline = 0\.1 s"):
            client.ask("GET", "/v1/models")
        client.deadline = 400.0
        start = time.monotonic()
        sending.close()
        assert time.monotonic() - start < 300
