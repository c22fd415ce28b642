"""Options of vLLM by the settings of a run, without vLLM."""

from __future__ import annotations

import pytest
import torch

from lightrft.config.engine import EngineConfig
from lightrft.engines.vllm_parts.options import CUDA_GRAPHS, graph_options
from lightrft.utils.errors import ConfigError


@pytest.mark.parametrize(("compiled", "graphs"), [(None, True), (True, True), (False, False)])
def test_vllm_decodes_by_cuda_graphs_on_a_gpu_unless_they_are_turned_off(
    compiled: bool | None, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = graph_options(EngineConfig(kind="vllm", compile=compiled))
    assert found["enforce_eager"] is not graphs
    assert found.get("compilation_config") == (CUDA_GRAPHS if graphs else None)


def test_vllm_compiles_nothing_on_a_cpu_and_refuses_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert graph_options(EngineConfig(kind="vllm")) == {"enforce_eager": True}
    with pytest.raises(ConfigError, match=r"engine\.compile = true .* needs a GPU"):
        graph_options(EngineConfig(kind="vllm", compile=True))
