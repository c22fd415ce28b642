"""The engine of a process where others generate the batches."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RLConfig
from lightrft.workers.local import _own_engine


@pytest.mark.parametrize("compiles", [True, False, None])
@pytest.mark.parametrize("ahead", [{"rollout": {"staleness": 1}}, {}], ids=["ahead", "workers"])
def test_an_engine_that_generates_no_batches_is_not_made_to_compile_for_those_that_do(
    ahead: dict[str, Any], compiles: bool | None
) -> None:
    """With several ranks its weights are shards, and it would be refused."""
    tree = {"model": {"path": "model"}, "engine": {"kind": "vllm", "compile": compiles}, **ahead}
    own = _own_engine(build(RLConfig, tree), {} if ahead else {"engine": object()})
    assert own.kind == "native" and own.compile is (None if compiles else compiles)
