"""An evaluation is of the model that the config names: a server that has other weights is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.base import build
from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import EvaluateConfig
from lightrft.engines.http import HTTPEngine
from lightrft.engines.served.start_checks import open_client
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.rollout.eval_results.summary import EvalSummary
from lightrft.serving.http_server import Endpoint
from lightrft.serving.problems import HTTPCall
from lightrft.trainer.inference import run_eval
from lightrft.utils.errors import ConfigError
from lightrft.workers.local_served import check_served_weights
from tests.serving_helpers import answering, model_server

KEY = "TEST_KEY_OF_SERVERS"


def saved(folder: Path, **more: Any) -> Path:
    tokenizer = tiny_tokenizer()
    settings = {"seed": 1, "hidden_size": 32, "vocab_size": len(tokenizer), **more}
    tiny_model("qwen2", **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KEY, "secret")
    (tmp_path / "keys").write_text("secret\n")
    return tmp_path / "keys"


def evaluated(folder: Path, url: str, dtype: str = "float32", **engine: Any) -> EvalSummary:
    rows = folder.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "2+2=", "label": "4"}\n')
    sampling = {"max_new_tokens": 5}
    tree = {
        "model": {"path": str(folder), "dtype": dtype},
        "reward": {"terms": ["math"]},
        "eval": {"data": {"sources": [str(rows)]}, "sampling": sampling},
        "engine": {"kind": "http", "url": url, **engine},
        "run": {"dir": str(folder.parent), "name": "run", "overwrite": True},
    }
    return run_eval(build(EvaluateConfig, tree))


def test_an_evaluation_on_a_server_of_another_model_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    # so near that its log-probs are those of the model up to rounding
    other = saved(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight[0, 0] += 1e-4
    model.save_pretrained(other)
    with model_server(other) as (url, _):
        with pytest.raises(
            ConfigError, match=r"serves other weights than model\.path.*engine\.check_logprobs=fal"
        ):
            evaluated(folder, url)
        assert evaluated(other, url).metrics["eval/failed"] == 0
        # whatever the server has
        assert evaluated(folder, url, check_logprobs=False).metrics["eval/failed"] == 0


def test_a_server_that_holds_other_types_is_compared_by_log_probs_and_that_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with model_server(folder) as (url, _):
        evaluated(folder, url, "bfloat16")
    assert "in other types or by other names" in caplog.text


def test_a_server_that_a_run_has_updated_is_evaluated_if_it_shows_that_its_weights_are_those(
    folder: Path, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = saved(tmp_path / "other", seed=2)
    weights = dict(AutoModelForCausalLM.from_pretrained(other).named_parameters())
    with model_server(folder, weights_token_file=str(keys)) as (url, _):
        config = EngineConfig(kind="http", url=url, api_key_env=KEY)
        tokenizer = tiny_tokenizer()
        engine = HTTPEngine.connect(config, tokenizer, [tokenizer.eos_token_id])
        engine.require_updates()
        engine.load_weights(weights.items(), 1)
        assert evaluated(other, url, api_key_env=KEY).metrics["eval/failed"] == 0
        for model, key in ((folder, KEY), (folder, None), (other, None)):
            with pytest.raises(ConfigError, match=r"update:.* of a run that updated it.*restart"):
                evaluated(model, url, api_key_env=key)
        caplog.clear()
        evaluated(folder, url, check_logprobs=False)
        assert "of a run that updated it, and they are evaluated" in caplog.text


@pytest.mark.parametrize("version", ["default", "lightrft-12-v3", None])
def test_a_vllm_server_that_a_run_has_updated_is_refused(
    version: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def told(call: HTTPCall) -> object:
        return {"weight_version": version}

    # only a server that takes new weights has this address
    routes = [Endpoint(("/weight_info" if version else "/other",), told, "GET")]
    actor = Actor.load(ModelConfig(path=str(folder)))
    with answering(*routes) as (url, _):
        config = EngineConfig(kind="http", url=url)
        engine = HTTPEngine(open_client(config), tiny_tokenizer(), config, [1])
        engine.is_vllm = True
        is_updated = version not in ("default", None)
        check_served_weights(engine, actor, compares=False)
        assert ("they are evaluated" in caplog.text) == is_updated
        if is_updated:
            with pytest.raises(ConfigError, match=r"the weights lightrft-12-v3 of a run that upda"):
                check_served_weights(engine, actor, compares=True)
        else:
            check_served_weights(engine, actor, compares=True)
