"""Runs that sample from FP8 weights in vLLM: each FP8 value is that of the trainer's weights, or the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.vllm.faults import FAULTS, Fault, break_updates
from tests.e2e.vllm.runs import lines
from tests.model_helpers import vllm_model


@pytest.fixture
def fp8(tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    vllm_model(tmp_path / "model", spread=0.1)
    over = {
        "engine": {"quantization": "fp8_per_channel"},
        "model": {"dtype": "bfloat16"},
        "algorithm": {"importance_sampling": ["tis"]},
        # an update below the steps of FP8 changes nothing that could be lost
        "optimizer": {"lr": 1e-4},
    }
    return deep_merge(tree, over)


@pytest.mark.parametrize(
    "over", [{}, {"rollout": {"staleness": 1}}, {"model": {"lora": {"rank": 4}}}]
)
def test_a_run_samples_from_fp8_values_of_the_weights_that_it_trains(
    over: dict[str, Any], fp8: dict[str, Any], tmp_path: Path
) -> None:
    run_rl(build(RLConfig, deep_merge(fp8, over)))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    # bfloat16 alone stays below 0.03 here
    assert 0.03 < max(line["policy/rollout_logprob_diff"] for line in steps) < 0.4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_update_of_fp8_weights_that_goes_wrong_names_what_was_lost(
    fault: Fault,
    fp8: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_updates(fault, monkeypatch)
    with pytest.raises(ModelError, match=r"vLLM does not hold the .* of model\.|lm_head"):
        run_rl(build(RLConfig, fp8))
    assert len(lines(tmp_path)) <= 1


def test_quantization_that_cannot_work_is_refused_at_the_start(fp8: dict[str, Any]) -> None:
    for over, said in (
        ({"algorithm": {"importance_sampling": []}}, r"importance_sampling=\[tis\]"),
        ({"model": {"dtype": "float32"}}, r"model\.dtype=bfloat16"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_rl(build(RLConfig, deep_merge(fp8, over)))
    with pytest.raises(ConfigError, match=r"engine\.quantization.*set engine\.kind=vllm"):
        build(RLConfig, deep_merge(fp8, {"engine": {"kind": "native"}}))
