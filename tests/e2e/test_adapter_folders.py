"""Every verb takes a folder of adapters as ``model.path``: base, tokenizer and adapters are those that peft reads."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    ExportConfig,
    KTOConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
)
from lightrft.observability.trackers import read_rows
from lightrft.trainer.distill.run import run_distill
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import run_export
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.http_client import server_client
from tests.e2e.command import assert_refused, command
from tests.e2e.several import train
from tests.model_helpers import save_random_adapters
from tests.serving_helpers import model_server
from tests.sglang_server import PACKAGE, sglang_server

Tree = dict[str, Any]
QV = ["q_proj", "v_proj"]
KINDS = {
    "lora": LoraConfig(r=2, target_modules=QV, task_type="CAUSAL_LM"),
    "dora": LoraConfig(r=2, target_modules=QV, task_type="CAUSAL_LM", use_dora=True),
    "head": LoraConfig(
        r=2, target_modules=QV, task_type="CAUSAL_LM", use_rslora=True, modules_to_save=["lm_head"]
    ),
}


def save_adapters(base: Path, settings: LoraConfig, folder: Path) -> Path:
    """Write adapters with random weights, as plain peft does."""
    save_random_adapters(AutoModelForCausalLM.from_pretrained(base), settings, folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a folder of adapters of one of ``KINDS``."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            made[kind] = save_adapters(model_folder, KINDS[kind], place)
        return made[kind]

    return folder


@pytest.fixture(scope="module")
def merged(
    adapters: Callable[[str], Path], model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the model folder that peft makes of adapters."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"merged_{kind}")
            shutil.copytree(model_folder, made[kind], dirs_exist_ok=True)
            whole = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(model_folder), adapters(kind)
            ).merge_and_unload()
            if "lm_head" in str(KINDS[kind].modules_to_save):
                whole.config.tie_word_embeddings = False
            whole.save_pretrained(made[kind])
        return made[kind]

    return folder


def metrics(config: Any) -> list[dict[str, Any]]:
    return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 12)[None]).logits


@pytest.mark.parametrize(
    ("verb", "kind"), [*(("generate", kind) for kind in KINDS), ("eval", "lora")]
)
def test_a_verb_that_samples_gives_the_responses_of_the_model_that_peft_merges(
    capsys, monkeypatch, tmp_path, adapters, merged, model_folder, data_folder, verb, kind
):
    monkeypatch.chdir(tmp_path)
    outputs = {}
    for name, model in {
        "kept": adapters(kind),
        "merged": merged(kind),
        "base": model_folder,
    }.items():
        rows = f"data.sources={data_folder / 'train.jsonl'}"
        words = [f"model={model}", "sampling.max_new_tokens=12", "sampling.temperature=0"]
        if verb == "generate":
            words += [rows, f"output={name}.jsonl"]
        else:
            words = [word.replace("sampling.", "eval.sampling.") for word in words]
            words += [f"eval.{rows}", "reward.terms=[math]", f"run.name={name}"]
        outcome = command(capsys, verb, *words)
        assert outcome.status == 0, outcome.err
        file = tmp_path / f"{name}.jsonl"
        if verb == "eval":
            [file] = (tmp_path / "runs" / name / "rollouts").glob("*.jsonl")
        read = [json.loads(line) for line in file.read_text().splitlines()]
        outputs[name] = [row.get("response", row.get("text")) for row in read]
    assert outputs["kept"] == outputs["merged"]
    assert outputs["kept"] != outputs["base"]


def test_a_chat_answers_by_adapters(capsys, monkeypatch, adapters):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n"))
    outcome = command(capsys, "chat", f"model={adapters('lora')}", "sampling.max_new_tokens=4")
    assert outcome.status == 0, outcome.err
    assert outcome.out.strip()


def preference_tree(tree: Tree, tmp_path: Path, *, is_paired: bool = True) -> Tree:
    file = tmp_path / "preferences.jsonl"
    rows = []
    for i in range(12):
        row: dict[str, Any] = {"prompt": f"{i}+{i}="}
        if is_paired:
            row |= {"chosen": str(2 * i), "rejected": str(2 * i + 1)}
        else:
            row |= {"completion": str(2 * i + i % 2), "label": i % 2 == 0}
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = {name: tree[name] for name in ("run", "model", "optimizer", "log")}
    return {**kept, "data": {"sources": [{"path": str(file)}]}, "batch_size": 4}


def run_of(verb: str, rl_tree: Tree, tmp_path: Path, **over: Any) -> Any:
    """Run a training verb for a step or two, and return its config."""
    tree = deep_merge(rl_tree, {"train": {"steps": 2}})
    given = {name: tree[name] for name in ("run", "model", "optimizer", "log", "data", "train")}
    kinds: dict[str, tuple[Any, Any, Tree]] = {
        "rl": (RLConfig, run_rl, tree),
        "sft": (SFTConfig, run_sft, {**given, "batch_size": 4}),
        "distill": (DistillVerbConfig, run_distill, {**given, "batch_size": 4}),
        "dpo": (DPOConfig, run_preference, preference_tree(tree, tmp_path)),
        "kto": (KTOConfig, run_preference, preference_tree(tree, tmp_path, is_paired=False)),
        "rm": (RMConfig, run_reward_model, preference_tree(tree, tmp_path)),
    }
    kind, run, start = kinds[verb]
    start = {**start, "train": tree["train"]}
    if verb == "distill":
        start["teacher"] = {"path": str(tree["model"]["path"])}
    config = build(kind, deep_merge(start, over))
    run(config)
    return config


@pytest.mark.parametrize(
    ("verb", "kind"),
    [*((verb, "lora") for verb in ("rl", "dpo", "kto", "distill")), *(("sft", k) for k in KINDS)],
)
def test_a_training_verb_continues_the_adapters(
    rl_tree, tmp_path, adapters, merged, model_folder, verb, kind
):
    model = {"path": str(adapters(kind))}
    over: Tree = {"model": model}
    if verb == "distill":
        over["teacher"] = {"path": str(model_folder)}
    if verb == "rl":
        over["reward"] = {"terms": [rl_tree["reward"]["terms"][0].replace(":ones", ":varied")]}
    still = run_of(
        verb,
        rl_tree,
        tmp_path,
        **deep_merge(over, {"optimizer": {"lr": 0.0}, "run": {"name": "a"}}),
    )
    moved = run_of(verb, rl_tree, tmp_path, **deep_merge(over, {"run": {"name": "b"}}))
    start, end = (Path(c.run.dir) / c.run.name / "model" for c in (still, moved))
    torch.testing.assert_close(logits(start), logits(merged(kind)), atol=1e-4, rtol=1e-4)
    before, after, base = weights(start), weights(end), weights(model_folder)
    changed = {name for name in after if not after[name].equal(before[name])}
    adapted = {name for name in before if name not in base or not before[name].equal(base[name])}
    assert changed and changed <= adapted
    assert any("q_proj.weight" in name for name in changed)


def test_the_reference_is_the_policy_with_its_adapters(rl_tree, tmp_path, adapters):
    model = {"path": str(adapters("lora"))}
    dpo = run_of("dpo", rl_tree, tmp_path, model=model, run={"name": "dpo"})
    assert metrics(dpo)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    kl = {"algorithm": {"preset": "grpo", "kl": {"coef": 0.1}}, "optimizer": {"lr": 0.0}}
    rl = run_of("rl", rl_tree, tmp_path, model=model, run={"name": "rl"}, **kl)
    rows = metrics(rl)
    names = [name for name in rows[0] if name.endswith("kl")]
    assert names and all(abs(row[name]) < 1e-6 for row in rows for name in names)


def test_a_reward_model_starts_from_adapters(rl_tree, tmp_path, adapters, merged):
    found = []
    for name, path in {"kept": adapters("lora"), "merged": merged("lora")}.items():
        config = run_of(
            "rm",
            rl_tree,
            tmp_path,
            model={"path": str(path)},
            run={"name": name},
            optimizer={"lr": 0.0},
        )
        found.append(metrics(config)[0]["loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_critic_and_a_teacher_take_adapters(rl_tree, tmp_path, adapters, model_folder):
    ppo = {"algorithm": {"preset": "ppo"}}
    rl = run_of("rl", rl_tree, tmp_path, model={"path": str(adapters("lora"))}, **ppo)
    assert len(metrics(rl)) >= 2
    teacher = {"teacher": {"path": str(adapters("dora"))}}
    distill = run_of("distill", rl_tree, tmp_path, run={"name": "taught"}, **teacher)
    assert metrics(distill)[0]["distill/divergence"] > 0


def test_a_resumed_run_of_adapters_ends_as_an_uninterrupted_one(rl_tree, tmp_path, adapters):
    model = {"path": str(adapters("dora"))}
    every = {"checkpoint": {"every": 1}, "model": model}
    whole = run_of("sft", rl_tree, tmp_path, run={"name": "whole"}, **every)
    run_of("sft", rl_tree, tmp_path, run={"name": "parts"}, train={"steps": 1}, **every)
    shutil.rmtree(tmp_path / "parts" / "model")
    run_of("sft", rl_tree, tmp_path, run={"name": "parts", "resume": "auto"}, **every)
    one, other = weights(tmp_path / whole.run.name / "model"), weights(tmp_path / "parts" / "model")
    assert all(one[name].equal(other[name]) for name in one)


@pytest.fixture
def kept(rl_tree, tmp_path, model_folder) -> Path:
    """The folder that ``export adapters=keep`` writes of a run over a copy of the base."""
    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    model = {"path": str(base), "lora": {"rank": 2}}
    run_of("sft", rl_tree, tmp_path, model=model, checkpoint={"every": 1})
    given = {"path": str(tmp_path / "run"), "adapters": "keep", "output": str(tmp_path / "kept")}
    folder, _ = run_export(build(ExportConfig, given))
    return folder


def generated(capsys: Any, model: Path, *words: str) -> Any:
    rows = model.parent / "prompts.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    given = [f"model.path={model}", f"data.sources={rows}", "sampling.max_new_tokens=4"]
    output = model.parent / "out.jsonl"
    output.unlink(missing_ok=True)
    return command(capsys, "generate", *given, f"output={output}", *words)


def test_a_kept_export_names_its_base_and_refuses_another_under_the_same_path(
    capsys, kept, tmp_path
):
    card = (kept / "README.md").read_text()
    assert "rank 2" in card and "More Information Needed" not in card
    assert generated(capsys, kept).status == 0
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    shutil.rmtree(tmp_path / "base")
    refused = generated(capsys, kept)
    assert_refused(
        refused, "adapter_config.json", "base_model_name_or_path", str(tmp_path / "base")
    )
    assert "model.base" in refused.err
    assert generated(capsys, kept, f"model.base={tmp_path / 'moved'}").status == 0
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1
    shutil.copytree(tmp_path / "moved", tmp_path / "base")
    other.save_pretrained(tmp_path / "base")
    assert_refused(generated(capsys, kept), "trained on other weights", "lightrft_base.json")
    taken = generated(capsys, kept, f"model.base={tmp_path / 'base'}")
    assert taken.status == 0 and "takes it anyway" in taken.err


def test_a_run_notices_that_the_base_of_its_adapters_has_changed(rl_tree, tmp_path, model_folder):
    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    model = {"path": str(save_adapters(base, KINDS["lora"], tmp_path / "adapters"))}
    run_of("sft", rl_tree, tmp_path, model=model, train={"steps": 1}, checkpoint={"every": 1})
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight += 1
    other.save_pretrained(base)
    with pytest.raises(ConfigError, match=r"inputs have changed.*model\.path"):
        run_of(
            "sft", rl_tree, tmp_path, model=model, run={"resume": "auto"}, checkpoint={"every": 1}
        )


def test_a_base_in_the_cache_of_the_hub_is_named_as_there(rl_tree, tmp_path, model_folder):
    place = tmp_path / "hub" / "models--org--tiny-model" / "snapshots" / "0123abcd"
    shutil.copytree(model_folder, place)
    model = {"path": str(place), "lora": {"rank": 2}}
    run_of("sft", rl_tree, tmp_path, model=model, checkpoint={"every": 1})
    given = {"path": str(tmp_path / "run"), "adapters": "keep", "output": str(tmp_path / "kept")}
    folder, _ = run_export(build(ExportConfig, given))
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == "org/tiny-model"
    assert fields["revision"] == "0123abcd"
    assert "base_model: org/tiny-model" in (folder / "README.md").read_text()
    for file in folder.iterdir():
        assert str(tmp_path) not in file.read_text(errors="ignore"), file


def test_settings_of_new_adapters_over_saved_ones_must_agree(rl_tree, tmp_path, adapters):
    model = {"path": str(adapters("lora")), "lora": {"rank": 4}}
    with pytest.raises(ModelError, match=r"model\.lora\.rank = 4.*leave model\.lora out"):
        run_of("sft", rl_tree, tmp_path, model=model)
    model["lora"] = {"rank": 2, "alpha": 8, "targets": ["v_proj"]}
    with pytest.raises(ModelError, match=r"q_proj.*model\.lora\.targets"):
        run_of("sft", rl_tree, tmp_path, model=model)


def test_a_base_without_adapters_in_the_path_is_refused(rl_tree, tmp_path, model_folder):
    model = {"path": str(model_folder), "base": str(model_folder)}
    with pytest.raises(ModelError, match=r"model\.base = .*holds no adapters"):
        run_of("sft", rl_tree, tmp_path, model=model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_gets_the_adapters_merged_and_gives_the_numbers_of_the_native_engine(
    rl_tree, tmp_path, adapters, model_folder, monkeypatch, kind
):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    monkeypatch.setenv("TEST_KEY_OF_SERVERS", "secret")
    (tmp_path / "keys").write_text("secret\n")
    varied = rl_tree["reward"]["terms"][0].replace(":ones", ":varied")
    over: Tree = {"model": {"path": str(adapters(kind))}, "reward": {"terms": [varied]}}
    native = run_of("rl", rl_tree, tmp_path, run={"name": "native"}, **over)
    for name, served in {"base": model_folder, "kept": adapters(kind)}.items():
        with model_server(served, weights_token_file=str(tmp_path / "keys")) as (url, _):
            engine = {"kind": "http", "url": url, "api_key_env": "TEST_KEY_OF_SERVERS"}
            found = run_of("rl", rl_tree, tmp_path, run={"name": name}, engine=engine, **over)
        for row, other in zip(metrics(found), metrics(native), strict=True):
            starts = "reward", "loss", "grad", "policy/entropy"
            names = [metric for metric in other if metric.startswith(starts)]
            assert len(names) >= 3
            for metric in names:
                assert row[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_of_sglang_gets_the_adapters_merged(
    rl_tree, tmp_path, adapters, merged, model_folder, monkeypatch, kind
):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    varied = rl_tree["reward"]["terms"][0].replace(":ones", ":varied")
    over: Tree = {"model": {"path": str(adapters(kind))}, "reward": {"terms": [varied]}}
    over |= {"optimizer": {"lr": 0.0}}
    with sglang_server(model_folder) as (url, server):
        engine = {"kind": "sglang", "url": url, "weights_dir": str(tmp_path / "sent")}
        found = run_of("rl", rl_tree, tmp_path, run={"name": "served"}, engine=engine, **over)
        held = {n: t.clone() for n, t in server.generator.engine.decoder.parameters()}
    expected = weights(merged(kind))
    for name, tensor in expected.items():
        torch.testing.assert_close(held[name], tensor, atol=1e-6, rtol=1e-5)
    assert not any("lora_" in name for name in held)
    assert max(row["policy/rollout_logprob_diff"] for row in metrics(found)) < 1e-5


def test_a_run_starts_sglang_with_the_base_and_sends_it_the_merged_adapters(
    rl_tree, tmp_path, adapters, monkeypatch
):
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    over = {"model": {"path": str(adapters("dora"))}}
    found = run_of("rl", rl_tree, tmp_path, engine={"kind": "sglang"}, **over)
    assert max(row["policy/rollout_logprob_diff"] for row in metrics(found)) < 1e-5


def test_generate_needs_a_server_of_sglang_that_serves_the_adapters_merged(
    capsys, tmp_path, adapters, merged, model_folder, data_folder, monkeypatch
):
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.02)
    monkeypatch.chdir(tmp_path)
    words = (f"model={adapters('dora')}", f"data.sources={data_folder / 'train.jsonl'}")
    words += ("sampling.max_new_tokens=12", "sampling.temperature=0")
    assert command(capsys, "generate", *words, "output=native.jsonl").status == 0
    for name, folder in {"merged": merged("dora"), "base": model_folder}.items():
        with sglang_server(folder) as (url, _):
            engine = ("engine.kind=sglang", f"engine.url={url}", f"output={name}.jsonl")
            outcome = command(capsys, "generate", *words, *engine)
        if name == "base":
            assert_refused(outcome, f"{url} serves other weights than model.path", "lightrft merge")
        else:
            assert outcome.status == 0, outcome.err
            served = (tmp_path / f"{name}.jsonl").read_text()
            assert served == (tmp_path / "native.jsonl").read_text()


def test_adapters_that_an_engine_cannot_be_sent_are_refused_with_the_setting(
    rl_tree, tmp_path, model_folder, monkeypatch
):
    monkeypatch.setenv("TEST_KEY_OF_SERVERS", "secret")
    (tmp_path / "keys").write_text("secret\n")
    ranks = LoraConfig(r=2, target_modules=QV, rank_pattern={"q_proj": 4}, task_type="CAUSAL_LM")
    kept = save_adapters(model_folder, ranks, tmp_path / "ranks")
    with model_server(model_folder, weights_token_file=str(tmp_path / "keys")) as (url, _):
        engine = {"kind": "http", "url": url, "api_key_env": "TEST_KEY_OF_SERVERS"}
        with pytest.raises(ModelError, match=r"rank_pattern = .*engine\.kind=native"):
            run_of("rl", rl_tree, tmp_path, engine=engine, model={"path": str(kept)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_continue_adapters_as_one_does(uneven_tree, tmp_path, adapters, kind):
    varied = uneven_tree["reward"]["terms"][0].replace(":ones", ":varied")
    model = {"path": str(adapters(kind)), "dtype": "float32"}
    kl = {"preset": "grpo", "kl": {"coef": 0.1}}
    over = {"model": model, "reward": {"terms": [varied]}, "algorithm": kl}
    one, two = (train(deep_merge(uneven_tree, over), tmp_path, f"{n}", n) for n in (1, 2))
    first, second = weights(one / "model"), weights(two / "model")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-5, rtol=1e-4)
