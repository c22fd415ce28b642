"""The commands that refusals and the documentation give to start a vLLM server."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lightrft.engines.served.vllm_server import ADAPTER_COMMAND, COMMAND
from tests.vllm_server import ADAPTERS, TRAINS

ROOT = Path(__file__).parents[4]
MODULE = ["python", "-m", "vllm.entrypoints.openai.api_server"]


@pytest.mark.parametrize(
    ("said", "options"), [(COMMAND, TRAINS), (ADAPTER_COMMAND, ADAPTERS[:2])], ids=["all", "lora"]
)
def test_a_refusal_starts_vllm_by_its_module_with_the_options_of_the_tested_servers(
    said: str, options: tuple[str, ...]
) -> None:
    words = shlex.split(said)
    assert words[1:6] == [*MODULE, "--model", "MODEL"]
    assert set(options) <= set(words)


def test_the_documentation_starts_vllm_by_the_module_that_every_package_of_it_has() -> None:
    shown = (ROOT / "docs/engines.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in shown.splitlines() if line.startswith("VLLM_")]
    assert len(commands) == 2
    for words in commands:
        assert words[1:5] == [*MODULE, "--model"]
