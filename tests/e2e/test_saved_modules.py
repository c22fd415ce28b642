"""Runs that train modules whole beside adapters, ``model.lora.modules_to_save``: exports, resumes, processes and engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoConfig

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import ExportConfig, RLConfig
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import run_export
from lightrft.utils.errors import ModelError
from lightrft.utils.http_client import server_client
from tests.e2e.several import train
from tests.e2e.test_adapter_folders import logits, metrics, run_of, weights
from tests.serving_helpers import model_server

Tree = dict[str, Any]
LORA: Tree = {"rank": 2, "targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "norm"]}


def base(folder: Path, *, is_tied: bool) -> Path:
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    tiny_model("qwen2", seed=1, tie_word_embeddings=is_tied, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("untied"), is_tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("tied"), is_tied=True)


def varied(tree: Tree) -> Tree:
    return {"reward": {"terms": [tree["reward"]["terms"][0].replace(":ones", ":varied")]}}


@pytest.mark.parametrize("verb", ["rl", "sft", "dpo", "kto", "distill", "rm"])
def test_every_training_verb_trains_them_and_writes_a_model_that_transformers_loads(
    rl_tree, tmp_path, tied, teacher_folder, verb
):
    names = ["norm"] if verb == "rm" else ["embed_tokens", "norm"]
    model = {"path": str(tied), "lora": {**LORA, "modules_to_save": names}}
    over: Tree = {"model": model, "run": {"name": verb}}
    if verb == "rl":
        over |= varied(rl_tree)
    if verb == "distill":
        over["teacher"] = {"path": str(teacher_folder)}
    config = run_of(verb, rl_tree, tmp_path, **over)
    folder = tmp_path / verb / "model"
    after, before = weights(folder), weights(tied)
    for name in ("norm.weight", "layers.1.input_layernorm.weight"):
        prefix = "" if f"model.{name}" not in after else "model."
        assert not after[f"{prefix}{name}"].equal(before[f"model.{name}"]), name
    if verb == "rm":
        return
    assert not after["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])
    # The head stays as it was, so that the two are no longer tied.
    assert after["lm_head.weight"].equal(before["model.embed_tokens.weight"])
    assert AutoConfig.from_pretrained(folder).tie_word_embeddings is False
    if verb == "rl":
        assert all(row["policy/rollout_logprob_diff"] < 1e-4 for row in metrics(config))


def test_adapters_are_exported_merged_and_continued_with_them(rl_tree, tmp_path):
    run_of("sft", rl_tree, tmp_path, model={"lora": LORA}, checkpoint={"every": 2})
    run = str(tmp_path / "run")
    kept, whole = tmp_path / "kept", tmp_path / "merged"
    run_export(build(ExportConfig, {"path": run, "adapters": "keep", "output": str(kept)}))
    run_export(build(ExportConfig, {"path": run, "output": str(whole)}))
    given = json.loads((kept / "adapter_config.json").read_text())
    assert sorted(given["modules_to_save"]) == ["lm_head", "norm"]
    wanted = logits(tmp_path / "run" / "model")
    model = AutoPeftModelForCausalLM.from_pretrained(str(kept)).eval()
    with torch.no_grad():
        found = model(input_ids=torch.arange(4, 12)[None]).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(whole), wanted, atol=1e-6, rtol=1e-6)
    still = {"run": {"name": "still"}, "optimizer": {"lr": 0.0}}
    run_of("sft", rl_tree, tmp_path, model={"path": str(kept), "lora": LORA}, **still)
    torch.testing.assert_close(logits(tmp_path / "still" / "model"), wanted, atol=1e-4, rtol=1e-4)
    other = {**LORA, "modules_to_save": ["norm"]}
    with pytest.raises(ModelError, match=r"modules_to_save = \['norm'\].*leave model\.lora out"):
        model = {"path": str(kept), "lora": other}
        run_of("sft", rl_tree, tmp_path, model=model, run={"name": "other"})


def test_a_resumed_run_ends_bit_for_bit_like_a_whole_one(rl_tree, tmp_path):
    over = {"model": {"lora": LORA}, "checkpoint": {"every": 1, "keep": 9}, "train": {"steps": 3}}
    tree = deep_merge(rl_tree, {**over, **varied(rl_tree)})
    run_rl(build(RLConfig, deep_merge(tree, {"run": {"name": "whole"}})))
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for later in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{later:06}")
    run_rl(build(RLConfig, deep_merge(tree, {"run": {"resume": "auto"}})))
    found, expected = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")
    )
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_server_samples_the_policy_with_its_whole_modules(rl_tree, tmp_path, untied, monkeypatch):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    monkeypatch.setenv("TEST_KEY_OF_SERVERS", "secret")
    (tmp_path / "keys").write_text("secret\n")
    names = ["lm_head", "norm", "embed_tokens"]
    over = {"model": {"path": str(untied), "lora": {**LORA, "modules_to_save": names}}}
    over |= varied(rl_tree)
    native = run_of("rl", rl_tree, tmp_path, run={"name": "native"}, **over)
    with model_server(untied, weights_token_file=str(tmp_path / "keys")) as (url, _):
        engine = {"kind": "http", "url": url, "api_key_env": "TEST_KEY_OF_SERVERS"}
        served = run_of("rl", rl_tree, tmp_path, run={"name": "served"}, engine=engine, **over)
    for row, other in zip(metrics(served), metrics(native), strict=True):
        assert row["policy/rollout_logprob_diff"] < 1e-3
        for metric in [name for name in other if name.startswith(("reward/", "policy/grad"))]:
            assert row[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-5), metric


def test_a_server_of_tied_embeddings_is_refused(rl_tree, tmp_path, tied, monkeypatch):
    monkeypatch.setenv("TEST_KEY_OF_SERVERS", "secret")
    (tmp_path / "keys").write_text("secret\n")
    with model_server(tied, weights_token_file=str(tmp_path / "keys")) as (url, _):
        engine = {"kind": "http", "url": url, "api_key_env": "TEST_KEY_OF_SERVERS"}
        with pytest.raises(ModelError, match=r"modules_to_save = \['lm_head'.*engine\.kind=native"):
            model = {"path": str(tied), "lora": LORA}
            run_of("rl", rl_tree, tmp_path, engine=engine, model=model)


@pytest.mark.slow
def test_processes_train_them_as_one_does(uneven_tree, tmp_path, tied):
    names = ["embed_tokens", "lm_head", "0.self_attn", "norm"]
    lora = {**LORA, "targets": "all-linear", "modules_to_save": names}
    kl = {"preset": "grpo", "kl": {"coef": 0.1}}
    model = {"path": str(tied), "lora": lora}
    over = {"model": model, "algorithm": kl, "train": {"steps": 2}, **varied(uneven_tree)}
    one, two = (train(deep_merge(uneven_tree, over), tmp_path, f"{n}", n) for n in (1, 2))
    first, second = weights(one / "model"), weights(two / "model")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens"]])
def test_processes_start_from_what_was_tied_before_a_run(rl_tree, tmp_path, tied, names):
    lora = {**LORA, "modules_to_save": names}
    run_of("sft", rl_tree, tmp_path, model={"path": str(tied), "lora": lora})
    start = tmp_path / "run" / "model"
    before = weights(start)
    assert not before["lm_head.weight"].equal(before["model.embed_tokens.weight"])
    still: Tree = {"model": {"path": str(start)}, "optimizer": {"lr": 0.0}, "train": {"steps": 1}}
    strategy = {"strategy": {"kind": "fsdp2"}}
    two = train(deep_merge(rl_tree, {**still, **strategy, **varied(rl_tree)}), tmp_path, "two", 2)
    after = weights(two / "model")
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)
