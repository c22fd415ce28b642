"""Runs on the hub: what the hub's own client sends to a stand-in for its server, and the model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

import lightrft
from lightrft.cli.explain import explanation_of
from lightrft.config.base import to_yaml
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.explanation.explain import formula_rows
from lightrft.trainer.model_card import model_card
from lightrft.utils.errors import ConfigError, DataError
from tests.hub_server import StandIn, stand_in
from tests.unit.datasets.media_files import picture

ROWS = [{"prompt": f"{k}+{k}=", "response": str(2 * k), "label": str(2 * k)} for k in range(8)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from stand_in(monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``trained(settings...)``: a run of ``sft`` with an eval set."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, **over: Any) -> lightrft.Run:
        return lightrft.sft(
            model=(tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()),
            data=ROWS,
            eval={"data": ROWS, "sampling": {"max_new_tokens": 4}, "at_start": True},
            rewards=["math"],
            steps=2,
            batch_size=4,
            optimizer={"lr": 1e-3},
            run={"dir": str(folder), "name": name, "threads": 1, "progress": False},
            **over,
        )

    return run


def test_a_run_is_uploaded_in_one_commit_and_loads_from_what_was_sent(hub, trained, tmp_path):
    run = trained("whole")
    address = run.push_to_hub("me/it", private=True)
    assert address.endswith("/me/it") and "private" in str(hub.made[0])
    assert hub.messages == ["Model of step 2"]
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    sent = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    kept = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    assert all(sent[name].equal(kept[name]) for name in kept)


def test_a_model_that_reads_images_is_uploaded_with_its_processor(hub, tmp_path):
    save_tiny_media("llava", tmp_path / "eye")
    picture(tmp_path / "a.png", seed=1)
    rows = [{"prompt": "see?", "image": str(tmp_path / "a.png"), "response": "1"}] * 2
    options = {"dir": str(tmp_path), "threads": 1, "progress": False}
    run = lightrft.sft(
        model=str(tmp_path / "eye"), data=rows, steps=1, batch_size=2, run=options, lr=1e-3
    )
    run.push_to_hub("me/eye")
    sent = tmp_path / "sent"
    sent.mkdir()
    for name, content in hub.files.items():
        (sent / name).write_bytes(content)
    image = Image.open(tmp_path / "a.png")
    base, own = (
        AutoProcessor.from_pretrained(folder)(
            text=["<image>see?"], images=[image], return_tensors="pt"
        )
        for folder in (tmp_path / "eye", sent)
    )
    assert own["input_ids"].tolist() == base["input_ids"].tolist()
    assert own["pixel_values"].equal(base["pixel_values"])
    model = AutoModelForImageTextToText.from_pretrained(sent)
    assert model(**own).logits.isfinite().all()


def test_the_card_says_how_the_model_was_trained_and_what_was_measured(hub, trained):
    run = trained("card")
    run.push_to_hub("me/it")
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["tags"] == ["lightrft", "sft"] and "base_model" not in head
    assert "* steps: 2" in card and "optimizer.lr: 0.001" in card
    low, high = (run.metrics[f"eval/accuracy_{end}"].iloc[-1] for end in ("low", "high"))
    assert f"| {low:.4g} to {high:.4g} |" in card
    assert str(run.path.parent) not in card  # folders of this machine


def test_the_card_has_the_formulas_of_explain_the_data_the_code_and_the_hardware(hub, trained):
    run = trained("formulas")
    run.push_to_hub("me/it")
    card = hub.files["README.md"].decode()
    assert all(row in card for row in formula_rows(explanation_of([str(run.path / "config.yaml")])))
    found = run.summary["environment"]
    assert f"* hardware: 1 x {found['device']}" in card and f"LightRFT {found['lightrft']}" in card
    assert found.get("lightrft_commit", "") in card and found["processes"] == 1
    assert "* `data`: `rows`" in card and "* `eval.data`: `rows`" in card
    assert "datasets" not in ModelCard(card).data.to_dict()  # none of the hub


def test_the_card_names_data_sets_and_the_base_of_the_hub_in_its_fields(trained, tmp_path):
    run = trained("named")
    tree = run.config
    tree["model"]["path"] = "some/base"
    tree["data"]["sources"] = [
        {"path": "openai/gsm8k", "subset": "main", "limit": 9},
        {"path": str(tmp_path / "secret" / "own.jsonl")},
        {"path": f"{tmp_path}/rows.py:read"},
    ]
    (run.path / "config.yaml").write_text(yaml.safe_dump(tree))
    card = model_card(run.path, run.model, run.summary)
    data = ModelCard(card).data
    assert data.datasets == ["openai/gsm8k"] and data.base_model == "some/base"
    shown = (
        "[openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k) (subset main, split train)"
    )
    assert f"* `data`: {shown}, the first 9 rows; `own.jsonl`; `rows.py:read`" in card
    assert str(tmp_path) not in card


def test_the_card_of_a_round_names_the_base_and_the_prompts_of_all_rounds(tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    lightrft.iterate(
        model=(tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()),
        data=str(tmp_path / "tasks.jsonl"),
        rewards=[lambda rollout: len(rollout.text)],
        rounds=2,
        samples=2,
        select={"keep_truncated": True},
        sampling={"max_new_tokens": 4},
        sft={"batch_size": 2, "train": {"steps": 1}},
        run={"dir": str(tmp_path), "name": "pupil", "threads": 1, "progress": False},
    )
    folder = tmp_path / "pupil"
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["model"]["path"] = "some/base"
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    run = folder / "round_02" / "train"
    card = model_card(run, run / "model", {"verb": "sft", "steps": 1})
    assert ModelCard(card).data.base_model == "some/base"
    assert "\n# pupil, round 02\n" in card and "`some/base`, trained by `lightrft sft`" in card
    assert "* `data`: `tasks.jsonl`" in card and "rows.jsonl" not in card
    alone = tmp_path / "alone" / "round_01" / "train"  # of a user who names a folder so
    shutil.copytree(run, alone)
    assert "\n# train\n" in model_card(alone, alone / "model", {"verb": "sft", "steps": 1})


def test_the_card_shows_the_number_and_the_name_of_gpus(trained):
    run = trained("devices")
    found = {"device": "NVIDIA H200", "devices": 2, "processes": 16}
    card = model_card(run.path, run.model, {**run.summary, "environment": found})
    assert "* hardware: 2 x NVIDIA H200, processes: 16" in card


def test_the_card_shows_functions_of_the_objective_without_their_folders(tmp_path):
    own = tmp_path / "shapes.py"
    own.write_text("def own(rewards, rollouts, *, max_new_tokens):\n    return rewards\n")
    config = RLConfig.model_validate({"algorithm": {"shaping": [f"{own}:own"]}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    card = model_card(tmp_path, tmp_path / "model", {"verb": "rl", "steps": 1})
    assert "shaping: shapes.py:own" in card and str(tmp_path) not in card


def test_the_card_of_adapters_keeps_how_they_are_used(hub, trained):
    run = trained("adapters", **{"model.lora.rank": 2})
    kept = run.path / "kept"
    lightrft.export(path=str(run.path), adapters="keep", output=str(kept))
    shutil.rmtree(run.model)
    kept.rename(run.path / "model")  # as a run over a model in 4 bit ends
    run.push_to_hub("me/it")
    card = hub.files["README.md"].decode()
    assert "## Adapters" in card and "rank 2" in card and "AutoPeftModelForCausalLM" in card
    assert "adapter_model.safetensors" in hub.files and "* steps: 2" in card


def test_what_the_hub_refuses_is_an_error_that_says_what_to_do(hub, trained, monkeypatch):
    run = trained("refused")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(
        ConfigError, match=r"push_to_hub\('me/it'\): Invalid user token.*hf auth login"
    ):
        run.push_to_hub("me/it")
    with pytest.raises(ConfigError, match=r"push_to_hub\('a/b/c'\)"):
        run.push_to_hub("a/b/c")
    assert not hub.files


def test_a_run_that_has_not_finished_is_not_uploaded(hub, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("run: {name: none}\n")
    with pytest.raises(DataError, match="has not finished"):
        lightrft.Run(tmp_path).push_to_hub("me/it")
    assert not hub.made


def length(rollout: Any) -> float:
    return float(sum(map(ord, rollout.text)) % 5)


PAIRS = [
    {"prompt": f"{k}+{k}=", "chosen": str(2 * k), "rejected": str(2 * k + 1)} for k in range(8)
]
STEPWISE = [{"prompt": f"{k}+{k}=", "completions": ["so", "1"], "labels": [1, 0]} for k in range(8)]
PUSHED = {
    "sft": {"data": ROWS, "batch_size": 4},
    "rl": {"data": ROWS, "rewards": [length], "rollout": {"prompts_per_step": 2, "group_size": 2}},
    "dpo": {"data": PAIRS, "batch_size": 4},
    "rm": {"data": PAIRS, "batch_size": 4},
    "prm": {"data": STEPWISE, "batch_size": 4},
}


def run_of(verb: str, folder: Path, name: str, **over: Any) -> lightrft.Run:
    more = {"sampling": {"max_new_tokens": 4}} if verb == "rl" else {}
    tokenizer = tiny_tokenizer(special=["<sep>"])
    if verb == "prm":
        more = {"data.separator": "<sep>"}
    return getattr(lightrft, verb)(
        model=(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer),
        optimizer={"lr": 1e-3},
        run={"dir": str(folder), "name": name, "threads": 1, "progress": False},
        **{"steps": 5, **PUSHED[verb], **more, **over},
    )


def row_values(run: lightrft.Run) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second", "time", "memory", "hub/", "mfu", "device")
    return [
        {name: value for name, value in row.items() if not any(part in name for part in timed)}
        for row in run.metrics.to_dict("records")
    ]


@pytest.mark.parametrize("verb", PUSHED)
def test_models_are_pushed_while_a_run_goes_on_and_change_nothing_of_it(hub, tmp_path, verb):
    run = run_of(verb, tmp_path, "pushed", hub={"repo": "me/it", "push_every": 2, "private": True})
    assert hub.messages == [f"Model of step {step}" for step in (2, 4, 5)]
    assert len(hub.made) == 1 and "private" in str(hub.made[0])
    for file in run.model.rglob("*"):
        name = file.relative_to(run.model).as_posix()
        assert not file.is_file() or hub.files[name] == file.read_bytes(), name
    assert f"trained by `lightrft {verb}`" in hub.files["README.md"].decode()
    assert run.summary["hub"].endswith("/me/it") and not (run.path / "hub").exists()
    assert run.metrics["hub/failed"].dropna().eq(0).all()
    assert repr(row_values(run)) == repr(row_values(run_of(verb, tmp_path, "plain")))


def test_the_pushed_model_of_a_step_is_that_of_its_checkpoint(hub, tmp_path):
    hub.refused = {"Model of step 5"}
    run = run_of(
        "sft",
        tmp_path,
        "run",
        hub={"repo": "me/it", "push_every": 3},
        checkpoint={"every": 3, "keep": 9},
    )
    assert hub.messages == ["Model of step 3"] and run.summary["hub_failed"] == 1
    card = hub.files["README.md"].decode()
    assert "* steps: 3" in card and "optimizer.lr: 0.001" in card
    (tmp_path / "sent").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "sent" / name).write_bytes(content)
    lightrft.export(path=str(run.path), step=3, output=str(tmp_path / "third"))
    sent, third = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("sent", "third")
    )
    assert all(sent[name].equal(third[name]) for name in third)


def test_an_upload_that_fails_is_counted_and_the_run_goes_on(hub, tmp_path, caplog):
    hub.refused = {"Model of step 2"}
    run = run_of("sft", tmp_path, "run", hub={"repo": "me/it", "push_every": 2})
    assert hub.messages == ["Model of step 4", "Model of step 5"]
    assert run.metrics["hub/failed"].sum() == 1 and "hub_failed" not in run.summary
    (told,) = [line for line in caplog.messages if "a model was not pushed" in line]
    assert ".push_to_hub('me/it')" in told and "403" in told


@pytest.mark.parametrize("repo", ["me/it", "a/b/c"])
def test_a_hub_that_refuses_the_repository_ends_the_run_before_the_first_step(
    hub, tmp_path, monkeypatch, repo
):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=rf"hub.repo = '{repo}': .*hf auth login"):
        run_of("sft", tmp_path, "run", hub={"repo": repo})
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not hub.messages


def test_a_stopped_run_pushes_no_last_model_and_does_when_it_goes_on(hub, tmp_path):
    def stop(event: Any) -> None:
        if event.number == 3:
            event.stop()

    settings = {"repo": "me/it", "push_every": 2}
    run = run_of("sft", tmp_path, "run", hub=settings, on_step=stop)
    assert hub.messages == ["Model of step 2"] and "hub" not in run.summary
    assert not (run.path / "hub").exists()
    run.resume()
    assert hub.messages == [f"Model of step {step}" for step in (2, 4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "deepspeed"])
def test_two_processes_push_what_they_trained_together_once(hub, tmp_path, kind):
    settings = {"hub": {"repo": "me/it", "push_every": 2}, "launch.processes": 2}
    run = run_of("sft", tmp_path, "run", **settings, **{"strategy.kind": kind})
    assert hub.messages == [f"Model of step {step}" for step in (2, 4, 5)] and len(hub.made) == 1
    assert hub.files["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    assert not (run.path / "hub").exists()


def rounds_of(folder: Path, **over: Any) -> lightrft.Run:
    tokenizer = tiny_tokenizer()
    return lightrft.iterate(
        model=(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer),
        data=ROWS,
        rewards=[length],
        rounds=2,
        samples=2,
        sampling={"max_new_tokens": 4},
        run={"dir": str(folder), "name": "rounds", "threads": 1, "progress": False},
        **{"sft": {"batch_size": 4}, "select.keep_truncated": True, **over},
    )


def test_each_round_of_iterate_pushes_its_model_and_the_last_one_is_the_newest(hub, tmp_path):
    run = rounds_of(tmp_path, hub={"repo": "me/it"})
    assert len(hub.messages) == 2 and run.summary["hub"].endswith("/me/it")
    assert hub.files["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    run.push_to_hub("me/it")
    card = hub.files["README.md"].decode()
    assert "trained by `lightrft iterate`" in card and "* hardware: 1 x " in card
    assert "in each round, minimise  L" in card and str(tmp_path) not in card


def test_iterate_refuses_a_hub_of_its_training_and_asks_the_hub_before_it_generates(
    hub, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"sft.hub changes nothing.*set hub at the top"):
        rounds_of(tmp_path, sft={"batch_size": 4, "hub": {"repo": "me/it"}})
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=r"hub.repo = 'me/it': .*hf auth login"):
        rounds_of(tmp_path, hub={"repo": "me/it"})
    assert not (tmp_path / "rounds").exists()
