"""Engines that cannot generate as the config asks are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.trainer.checks.check_config import check_engine
from lightrft.utils.errors import ConfigError
from tests.architecture.tree import ROOT

SERVER = {"kind": "http", "url": "http://127.0.0.1:1"}
OWN = f"{ROOT}/examples/custom_engine.py:KIND"
FOUR_BITS = {"load_in_4bit": True, "lora": {"rank": 2}}
RAY = {"kind": "ray", "processes": 2, "ray": {"engines": 1}}


def config(tree: dict[str, Any]) -> RLConfig:
    return build(RLConfig, deep_merge({"model": {"path": "model"}}, tree))


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"engine": {"compile": True}, "launch": {"processes": 2}},
            r"engine\.compile = true: .*set launch\.ray\.engines",
        ),
        (
            {"engine": SERVER, "launch": RAY},
            r"launch\.ray\.engines = 1: engine\.kind = http .*leave out launch\.ray\.engines",
        ),
        (
            {"engine": {"kind": OWN}, "rollout": {"staleness": 1}},
            r"rollout\.staleness = 1: engine\.kind = .*between steps alone; leave out",
        ),
        (
            {"engine": {"kind": "vllm"}, "strategy": {"tensor_parallel": 2}},
            r"strategy\.tensor_parallel = 2",
        ),
        (
            {"engine": {"kind": "vllm"}, "launch": RAY, "model": FOUR_BITS},
            r"launch\.ray\.engines = 1: workers of .*load_in_4bit.*set engine\.kind=native",
        ),
    ],
)
def test_an_engine_that_cannot_generate_as_asked_is_refused_with_the_way_out(
    tree: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_engine(config(tree))


@pytest.mark.parametrize(
    "tree",
    [
        # engines with weights of their own compile
        {"engine": {"compile": True}, "launch": RAY},
        {
            "engine": {"compile": True},
            "launch": {"processes": 2},
            "rollout": {"staleness": 1},
        },
        # vLLM in the process of the policy gets its weights one by one
        {"engine": {"kind": "vllm"}, "model": FOUR_BITS},
        # a worker loads the whole model
        {"engine": {"kind": "vllm"}, "launch": RAY, "strategy": {"tensor_parallel": 2}},
    ],
)
def test_an_engine_that_others_replace_or_that_runs_elsewhere_is_accepted(
    tree: dict[str, Any],
) -> None:
    check_engine(config(tree))
