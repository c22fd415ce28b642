"""Whole runs that sample with vLLM: the numbers are the trainer's, and wrong weights end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lightrft.config.base import build, deep_merge
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import ChatConfig, RLConfig
from lightrft.engines.vllm import VLLMEngine
from lightrft.engines.vllm_parts.options import CPU_STEP_TOKENS
from lightrft.trainer.inference import Chat
from lightrft.trainer.rl import run_rl
from lightrft.types import Prompt, Request
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.vllm.faults import FAULTS, Fault, break_updates
from tests.e2e.vllm.runs import lines
from tests.model_helpers import vllm_model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_run_trains_on_the_log_probs_that_vllm_sampled_from(
    tied: bool, tree: dict[str, Any], tmp_path: Path
) -> None:
    if tied:
        # the output layer is the embeddings
        vllm_model(tmp_path / "model", tied=True)
    run_rl(build(RLConfig, tree))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5
    first, *later = [line["engine/update_bytes"] for line in steps]
    # vLLM gets the start weights once, and those after each step
    assert first == 2 * later[0] > 0 and len(set(later)) == 1
    assert all(line["engine/update_seconds"] > 0 for line in steps)


def test_a_killed_and_resumed_run_samples_from_the_weights_of_its_checkpoint(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    kept = deep_merge(tree, {"checkpoint": {"every": 1}})
    run_rl(build(RLConfig, deep_merge(kept, {"train": {"steps": 2}})))
    run_rl(build(RLConfig, deep_merge(kept, {"train": {"steps": 4}, "run": {"resume": "auto"}})))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5


# At the usual learning rate, log-probs change by less than bfloat16 rounds.
SMALL = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-6}}


@pytest.mark.parametrize("over", [{}, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_weight_update_that_goes_wrong_stops_the_run_at_its_first_batch(
    fault: Fault,
    over: dict[str, Any],
    tree: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if over:
        vllm_model(tmp_path / "model", spread=0.02)
    break_updates(fault, monkeypatch)
    with pytest.raises(ModelError, match="Cause: "):
        run_rl(build(RLConfig, deep_merge(tree, over)))
    assert len(lines(tmp_path)) <= 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_trains_and_says_what_log_probs_alone_compare(
    kind: str, tree: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_model(tmp_path / "model", kind=kind)
    run_rl(build(RLConfig, tree))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5
    assert steps[-1]["policy/grad_norm"] > 0
    assert sum("cannot be compared after an update" in one for one in caplog.messages) == 1
    blind = {"engine": {"check_logprobs": False}, "run": {"name": "blind"}}
    with pytest.raises(ConfigError, match=r"experts.*set engine\.check_logprobs=true"):
        run_rl(build(RLConfig, deep_merge(tree, blind)))


@pytest.mark.parametrize(
    ("over", "named"),
    [
        ({"sampling": {"temperature": 0.001}}, r"temperature = 0\.001"),
        ({"sampling": {"min_p": 0.1, "top_p": 0.9}}, r"min_p = 0\.1 with sampling\.top_p = 0\.9"),
    ],
    ids=["temperature", "min_p"],
)
def test_settings_that_vllm_cannot_keep_are_refused_with_the_way_out(
    over: dict[str, Any], named: str, tree: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=named) as found:
        run_rl(build(RLConfig, deep_merge(tree, over)))
    assert "engine.kind=native" in str(found.value)


def test_heads_that_vllm_cannot_compute_on_a_cpu_are_refused_at_the_start(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    vllm_model(tmp_path / "model", heads=4)
    with pytest.raises(ConfigError, match=r"have 16 channels, and on a CPU vLLM takes 32, 64"):
        run_rl(build(RLConfig, tree))


def test_chat_answers_by_vllm(tree: dict[str, Any]) -> None:
    config = {
        "model": tree["model"],
        "engine": tree["engine"],
        "sampling": {"max_new_tokens": 4, "temperature": 0.0},
    }
    found = Chat(build(ChatConfig, config)).say("one + two")
    config["engine"] = {"kind": "native"}
    expected = Chat(build(ChatConfig, config)).say("one + two")
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_prompts_of_more_tokens_than_a_step_takes_are_sampled_by_their_seeds(
    tmp_path: Path,
) -> None:
    vllm_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    length = 200
    asked = [
        Request(Prompt(str(k), [4 + (k + j) % 50 for j in range(length)]), seed=k)
        for k in range(2 * CPU_STEP_TOKENS // length)
    ]
    sampling = SamplingConfig(max_new_tokens=3)
    found = []
    for rows in (256, 16):  # all at once are more than a step takes, and 16 are less
        engine = VLLMEngine(
            ModelConfig(path=str(tmp_path)),
            tokenizer,
            EngineConfig(kind="vllm", max_num_seqs=rows),
            [tokenizer.eos_token_id],
            torch.float32,
        )
        found.append({r.seed: r.token_ids for r in engine.generate(asked, sampling)})
        engine.close()
    assert found[0] == found[1] and len(found[0]) == len(asked)


def test_a_path_in_the_home_folder_is_loaded(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run_rl(build(RLConfig, deep_merge(tree, {"model": {"path": "~/model"}, "train": {"steps": 1}})))
    assert [line["step"] for line in lines(tmp_path)] == [1]
