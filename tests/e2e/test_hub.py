"""Runs on the hub: what the hub's own client sends to a stand-in for its server, and the model card."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.utils.errors import ConfigError, DataError
from tests.hub_server import StandIn, stand_in

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
    with pytest.raises(ConfigError, match=r"push_to_hub\('me/it'\).*401.*hf auth login"):
        run.push_to_hub("me/it")
    with pytest.raises(ConfigError, match=r"push_to_hub\('a/b/c'\)"):
        run.push_to_hub("a/b/c")
    assert not hub.files


def test_a_run_that_has_not_finished_is_not_uploaded(hub, tmp_path: Path):
    (tmp_path / "config.yaml").write_text("run: {name: none}\n")
    with pytest.raises(DataError, match="has not finished"):
        lightrft.Run(tmp_path).push_to_hub("me/it")
    assert not hub.made
