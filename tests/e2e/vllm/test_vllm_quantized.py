"""Runs that sample from 8-bit weights in vLLM: each value is that of the trainer's weights, or the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.engines.vllm_parts.row_formats import ROW_FORMATS
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.vllm.faults import FAULTS, Fault, break_updates
from tests.e2e.vllm.runs import lines, train
from tests.model_helpers import small_model, vllm_model


@pytest.fixture(params=ROW_FORMATS)
def quantized(request: Any, tree: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    vllm_model(tmp_path / "model", spread=0.1)
    over = {
        "engine": {"quantization": request.param},
        "model": {"dtype": "bfloat16"},
        "algorithm": {"importance_sampling": ["tis"]},
        # an update below the steps of FP8 changes nothing that could be lost
        "optimizer": {"lr": 1e-4},
    }
    return deep_merge(tree, over)


def overflows(quantized: dict[str, Any]) -> bool:
    """Return ``True`` if vLLM's kernel of this format is not exact on this processor."""
    is_int8 = quantized["engine"]["quantization"] == "int8_per_channel"
    return is_int8 and "vnni" not in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    "over",
    [{}, {"rollout": {"staleness": 1}}, {"model": {"lora": {"rank": 4}}}],
    ids=["whole", "staleness", "lora"],
)
def test_a_run_samples_from_8_bit_values_of_the_weights_that_it_trains(
    over: dict[str, Any], quantized: dict[str, Any], tmp_path: Path
) -> None:
    config = build(RLConfig, deep_merge(quantized, over))
    if overflows(quantized):
        with pytest.raises(ModelError, match=r"INT8 kernel of vLLM overflows on this processor"):
            run_rl(config)
        return
    run_rl(config)
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    differences = [line["policy/rollout_logprob_diff"] for line in steps]
    # bfloat16 alone gives 0.005 in the first step
    assert differences[0] > 0.01
    assert max(differences) < 0.4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_update_of_8_bit_weights_that_goes_wrong_names_what_was_lost(
    fault: Fault,
    quantized: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_updates(fault, monkeypatch)
    said = r"vLLM does not hold the .* of model\.|lm_head"
    if overflows(quantized):
        said += "|overflows on this processor"
    with pytest.raises(ModelError, match=said):
        run_rl(build(RLConfig, quantized))
    assert len(lines(tmp_path)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("quantized", ["int8_per_channel"], indirect=True)
def test_replicas_sample_from_8_bit_values_of_sharded_weights_during_training(
    quantized: dict[str, Any], tmp_path: Path
) -> None:
    if overflows(quantized):
        pytest.skip("vLLM's INT8 kernel is not exact here, which another test sees refused")
    given = deep_merge(quantized, {"rollout": {"staleness": 1}})
    steps = train(given, tmp_path / "two", "launch.processes=2")
    assert max(line["staleness/max"] for line in steps) == 1
    # float32 values of the weights would not differ
    assert steps[0]["policy/rollout_logprob_diff"] > 0.01


def test_quantization_that_cannot_work_is_refused_at_the_start(
    quantized: dict[str, Any], picture_tree: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "experts")
    small_model("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "experts")
    for over, said in (
        ({"algorithm": {"importance_sampling": []}}, r"importance_sampling=\[tis\]"),
        ({"model": {"dtype": "float32"}}, r"model\.dtype=bfloat16"),
        ({"model": {"path": str(tmp_path / "experts")}}, r"leave out engine\.quantization"),
        (picture_tree, r"a model that reads media.*leave out engine\.quantization"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_rl(build(RLConfig, deep_merge(quantized, over)))
    with pytest.raises(ConfigError, match=r"engine\.quantization.*set engine\.kind=vllm"):
        build(RLConfig, deep_merge(quantized, {"engine": {"kind": "native"}}))
