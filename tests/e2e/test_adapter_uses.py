"""Folders of adapters as a process reward model's start, a judge, a teacher of itself, the start of rounds, and with more tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import IterateConfig, PRMVerbConfig, RLConfig
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.trainer.pipelines.iterate import run_iterate
from lightrft.trainer.process_model.run import run_process_model
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError, ModelError
from tests.e2e.command import assert_refused, command
from tests.e2e.test_adapter_folders import QV, logits, metrics, run_of, weights
from tests.model_helpers import save_random_adapters
from tests.serving_helpers import judge_server, model_server


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters, and the model that peft merges them to."""
    place = tmp_path_factory.mktemp("adapters")
    settings = LoraConfig(r=2, target_modules=QV, task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    adapted = save_random_adapters(base, settings, place / "kept")
    adapted.merge_and_unload().save_pretrained(place / "merged")
    for name in ("kept", "merged"):
        tiny_tokenizer().save_pretrained(place / name)
    return {name: place / name for name in ("kept", "merged")}


def test_a_process_reward_model_starts_from_adapters(rl_tree, tmp_path, folders):
    file = tmp_path / "steps.jsonl"
    rows = [
        {"prompt": f"{i}+1=", "completions": ["1", "2"], "labels": [True, i % 2 == 0]}
        for i in range(8)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: dict[str, list[float]] = {}
    for name, path in folders.items():
        for rate in (0.0, 1e-2):
            tree = {
                "run": {**rl_tree["run"], "name": f"{name}-{rate}"},
                "model": {"path": str(path), "dtype": "float32"},
                "data": {"sources": [{"path": str(file)}]},
                "optimizer": {"lr": rate},
                "train": {"steps": 2},
                "batch_size": 8,
            }
            config = build(PRMVerbConfig, tree)
            run_process_model(config)
            found[f"{name}-{rate}"] = [row["loss"] for row in metrics(config)]
    assert found["kept-0.0"] == pytest.approx(found["merged-0.0"], abs=1e-5)
    assert found["kept-0.01"][1] < found["kept-0.01"][0]
    start, end = (weights(tmp_path / f"kept-{rate}" / "model") for rate in (0.0, 1e-2))
    changed = {name for name in start if not start[name].equal(end[name])}
    assert any("q_proj" in name for name in changed)
    assert not any("up_proj" in name or "embed_tokens" in name for name in changed)


def test_a_judge_may_be_adapters(rl_tree, tmp_path, folders, model_folder):
    found = {}
    for name, path in {**folders, "base": model_folder}.items():
        judge = {"path": str(path), "form": "rating", "read": "probability", "scale": [1, 3]}
        over = {
            "run": {"name": name},
            "reward": {"judges": [judge], "terms": []},
            "optimizer": {"lr": 0.0},
            "train": {"steps": 1},
        }
        config = build(RLConfig, deep_merge(rl_tree, over))
        run_rl(config)
        found[name] = metrics(config)[0]["reward/mean"]
    assert found["kept"] == pytest.approx(found["merged"], abs=1e-5)
    assert abs(found["kept"] - found["base"]) > 1e-4


def test_a_policy_with_adapters_is_its_own_teacher(rl_tree, tmp_path, folders):
    """The teacher is the start of training with its adapters, and sees more than the student."""
    shown = {"teacher_template": "Think. {prompt}"}
    found = {}
    for name, path in folders.items():
        over = {"run": {"name": name}, "model": {"path": str(path)}, "teacher": {"path": ""}}
        config = run_of("distill", rl_tree, tmp_path, distill=shown, optimizer={"lr": 0.0}, **over)
        found[name] = [row["distill/divergence"] for row in metrics(config)]
    assert found["kept"] == pytest.approx(found["merged"], abs=1e-5)
    assert found["kept"][0] > 1e-4


def test_a_teacher_of_adapters_is_the_model_that_peft_merges(rl_tree, tmp_path, folders):
    own, found = {"path": str(folders["kept"])}, []
    still = {"optimizer": {"lr": 0.0}}
    same = run_of("distill", rl_tree, tmp_path, run={"name": "a"}, model=own, teacher=own, **still)
    assert all(abs(row["distill/divergence"]) < 1e-6 for row in metrics(same))
    for name, path in folders.items():
        given = {"run": {"name": name}, "teacher": {"path": str(path)}}
        config = run_of("distill", rl_tree, tmp_path, **given, **still)
        found.append([row["distill/divergence"] for row in metrics(config)])
    assert found[0] == pytest.approx(found[1], abs=1e-5) and found[0][0] > 1e-3
    # The teacher stays, while the student moves away from it.
    more = {"distill": {"nll_coef": 1.0}, "run": {"name": "moved"}}
    moved = metrics(run_of("distill", rl_tree, tmp_path, model=own, teacher=own, **more))
    assert abs(moved[0]["distill/divergence"]) < 1e-6 < moved[1]["distill/divergence"]


@pytest.mark.parametrize("over", [{"rounds": 1}, {"rounds": 2, "train_from": "start"}])
def test_rounds_that_start_from_adapters_train_them(rl_tree, tmp_path, folders, over):
    found = {}
    for name, path in folders.items():
        tree = {
            "run": {**rl_tree["run"], "name": name},
            "model": {"path": str(path), "dtype": "float32"},
            "data": rl_tree["data"],
            "samples": 2,
            "sampling": {"max_new_tokens": 6},
            "reward": {"terms": [rl_tree["reward"]["terms"][0].replace(":ones", ":varied")]},
            "select": {"keep_truncated": True},
            "sft": {
                "batch_size": 2,
                "optimizer": {"lr": 0.0 if name == "merged" else 1e-2},
                "train": {"steps": 2},
            },
            "log": {"tensorboard": False},
            **over,
        }
        run_iterate(build(IterateConfig, tree))
        rows = (tmp_path / name / "round_01" / "rows.jsonl").read_text()
        found[name] = rows
    assert found["kept"] == found["merged"]
    last = tmp_path / "kept" / f"round_{over['rounds']:02}"
    end, start = weights(next(last.rglob("model.safetensors")).parent), weights(folders["merged"])
    changed = {name for name in start if not torch.allclose(start[name], end[name], atol=1e-6)}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)


def test_rounds_that_would_merge_adapters_in_between_are_refused(rl_tree, folders):
    tree = {"run": rl_tree["run"], "model": {"path": str(folders["kept"])}, "data": rl_tree["data"]}
    terms = {"reward": rl_tree["reward"], "rounds": 2}
    with pytest.raises(ConfigError, match=r"holds adapters.*lightrft merge.*train_from=start"):
        run_iterate(build(IterateConfig, {**tree, **terms}))


@pytest.mark.parametrize("whole", [["embed_tokens", "lm_head"], None])
def test_adapters_that_enlarged_the_vocabulary_need_a_base_that_has_it(
    rl_tree, tmp_path, model_folder, whole
):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    tokens = base.config.vocab_size
    base.resize_token_embeddings(tokens + 8)
    tokenizer = tiny_tokenizer(special=tuple(f"<new{i}>" for i in range(8)))
    tokenizer.save_pretrained(tmp_path / "wide_base")
    base.save_pretrained(tmp_path / "wide_base")
    base.config._name_or_path = str(model_folder)
    settings = LoraConfig(r=2, target_modules=QV, modules_to_save=whole, task_type="CAUSAL_LM")
    adapted = save_random_adapters(base, settings, tmp_path / "wide")
    model = {"path": str(tmp_path / "wide")}
    still = {"optimizer": {"lr": 0.0}}
    named = rf"model\.path = .*wide.* {tokens + 8} tokens .* {tokens}; .*model\.base"
    with pytest.raises(ModelError, match=named):
        run_of("sft", rl_tree, tmp_path, model=model, **still)
    tokenizer.save_pretrained(tmp_path / "wide")
    with pytest.raises(
        ModelError, match=rf"tokenizer .* {tokens + 8} tokens.*lightrft merge.*model\.base"
    ):
        run_of("sft", rl_tree, tmp_path, model=model, **still)
    model["base"] = str(tmp_path / "wide_base")
    run_of("sft", rl_tree, tmp_path, model=model, run={"name": "named"}, **still)
    with torch.no_grad():
        expected = adapted(input_ids=torch.arange(4, 12)[None]).logits
    found = logits(tmp_path / "named" / "model")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    if whole is None:
        # Its embeddings take the place of those of the base, which processes would read in parts.
        with pytest.raises(ModelError, match=r"change the base \(the tensor .*launch\.processes=1"):
            Actor.load(ModelConfig(**model), device="meta")


@pytest.mark.parametrize("opened", [model_server, judge_server], ids=["serve", "serve-rm"])
def test_a_served_folder_of_adapters_answers_as_the_model_that_peft_merges(
    opened, folders, model_folder
):
    found = {}
    asked = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 6}
    for name, path in {**folders, "base": model_folder}.items():
        with opened(path) as (url, _):
            body = {**asked, "temperature": 0, "return_token_ids": True}
            [choice] = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
            found[name] = choice["token_ids"], choice["sampled_logprobs"]
    assert found["kept"][0] == found["merged"][0] != found["base"][0]
    assert found["kept"][1] == pytest.approx(found["merged"][1], abs=1e-5)


def test_doctor_counts_the_memory_that_training_the_adapters_of_a_folder_takes(
    capsys, data_folder, folders
):
    policy = {}
    rows = f"data.sources={data_folder / 'train.jsonl'}"
    for name, path in folders.items():
        outcome = command(capsys, "doctor", f"model={path}", rows, "reward.terms=[math]")
        assert outcome.status == 0, outcome
        [policy[name]] = re.findall(r"ok +policy +.* trained: .* \+ (\d+) KiB moments", outcome.out)
    assert 0 < int(policy["kept"]) < int(policy["merged"]) / 10


@pytest.mark.parametrize("start", ["a language model", "a classifier"])
def test_adapters_of_a_classifier_are_refused_until_they_are_merged(
    capsys, tmp_path, model_folder, start
):
    base = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    if start == "a classifier":
        base.save_pretrained(tmp_path / "base")
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    folder, whole = tmp_path / "kept", tmp_path / "whole"
    save_random_adapters(base, LoraConfig(r=2, target_modules=QV, task_type="SEQ_CLS"), folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    rows = [f"data.sources={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path}"]
    for verb in ("eval-rm", "serve-rm", "serve"):
        words = rows if verb == "eval-rm" else ["http.port=0", "device=cpu"]
        refused = command(capsys, verb, folder, *words)
        assert_refused(refused, "model.path = '", "lightrft merge")
        assert re.search("a classifier|it is a Qwen2ForSequenceClassification", refused.err)
    assert command(capsys, "merge", folder, f"output={whole}").status == 0
    outcome = command(capsys, "eval-rm", whole, *rows)
    assert outcome.status == 0 and "eval/pair_accuracy" in outcome.out, outcome
    refused = command(capsys, "serve", whole, "http.port=0", "device=cpu")
    assert_refused(refused, f"model.path = '{whole}'", "give it to eval-rm or serve-rm")


def test_a_reward_model_that_is_kept_as_adapters_is_served_and_evaluated(
    capsys, monkeypatch, rl_tree, tmp_path
):
    can_merge = "lightrft.trainer.reward_model.base.can_merge"
    rows = f"data.sources={tmp_path / 'preferences.jsonl'}"
    found: dict[str, list[float]] = {}
    for name in ("merged", "kept"):
        monkeypatch.setattr(can_merge, lambda model, name=name: name == "merged")
        lora = {"path": rl_tree["model"]["path"], "lora": {"rank": 2}}
        run_of("rm", rl_tree, tmp_path, model=lora, run={"name": name})
        folder = tmp_path / name / "model"
        assert (folder / "adapter_config.json").is_file() == (name == "kept")
        words = [rows, f"run.dir={tmp_path}", f"run.name=eval-{name}", "run.progress=false"]
        outcome = command(capsys, "eval-rm", folder, *words)
        assert outcome.status == 0, outcome
        with judge_server(folder) as (url, _):
            answer = httpx.post(f"{url}/score", json={"text_1": "1+1=", "text_2": "2"}).json()
        [served] = answer["data"]
        found[name] = [json.loads(outcome.out)["eval/score/mean"], served["score"]]
    assert found["kept"] == pytest.approx(found["merged"], abs=1e-5) != [0.0, 0.0]
