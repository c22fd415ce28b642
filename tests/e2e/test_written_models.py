"""What a run, ``export``, ``merge`` and ``convert`` write is loaded by transformers before they say that they are done."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from lightrft.config.base import build, deep_merge
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.verbs import SFTConfig
from lightrft.models.actor import Actor
from lightrft.models.loading import export_check
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import save_checked
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ModelError
from tests.e2e.command import command
from tests.media_helpers import rig


def saved(family: str, folder: Path, **fields: Any) -> Path:
    family_model(family, **fields).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tree(base: Path, data_folder: Path, folder: Path, **over: Any) -> SFTConfig:
    common = {
        "run": {"dir": str(folder), "name": "run"},
        "model": {"path": str(base), "lora": {"rank": 2}},
        "data": {"sources": [str(data_folder / "train.jsonl")]},
        "batch_size": 2,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 1},
        "log": {"tensorboard": False},
    }
    return build(SFTConfig, deep_merge(common, over))


WHOLE_EXPERTS = "DoRA and whole experts"
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"rslora": True},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "whole norms": {"modules_to_save": ["norm"]},
    WHOLE_EXPERTS: {"dora": True, "modules_to_save": ["experts"]},
}


@pytest.mark.parametrize(
    ("family", "kind"), [*product(("mixtral", "qwen3_moe"), KINDS), ("gpt_oss", WHOLE_EXPERTS)]
)
def test_adapters_on_experts_end_in_a_model_that_loads(family, kind, data_folder, tmp_path, capsys):
    sizes = {"vocab_size": len(tiny_tokenizer())}
    base = saved(family, tmp_path / "base", **sizes)
    run_sft(tree(base, data_folder, tmp_path, model={"lora": KINDS[kind]}))
    _, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert not any(info.values()), info
    kept = f"output={tmp_path / 'kept'}"
    assert command(capsys, "export", tmp_path / "run", "adapters=keep", kept).status == 0
    merged = command(capsys, "merge", tmp_path / "kept", f"output={tmp_path / 'merged'}")
    assert merged.status == 0, merged.err
    one, other = (
        AutoModelForCausalLM.from_pretrained(f).state_dict()
        for f in (tmp_path / "run" / "model", tmp_path / "merged")
    )
    start = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any("experts" in name and not value.equal(start[name]) for name, value in one.items())
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("mixtral", "LoRA"), ("qwen3_moe", "rsLoRA"), ("gpt_oss", WHOLE_EXPERTS)],
)
def test_rl_of_adapters_on_experts_ends_in_a_model_that_samples_as_the_run_did(
    family, kind, rl_config, tmp_path
):
    base = saved(family, tmp_path / "base", vocab_size=len(tiny_tokenizer()))
    lora = {"rank": 2, **KINDS[kind]}
    sampling = {"temperature": 0, "max_new_tokens": 6}
    greedy = {"data": {"sources": rl_config().data.sources}, "sampling": sampling}
    run_rl(rl_config(model={"path": str(base), "lora": lora}, train={"steps": 1}, eval=greedy))
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "model", output_loading_info=True
    )
    assert not any(info.values()), info
    # The last evaluation sampled by the model that is written.
    answers = (tmp_path / "run" / "rollouts" / "eval_000001.jsonl").read_text().splitlines()
    assert answers
    for answer in map(json.loads, answers):
        prompt, ids = answer["prompt"]["token_ids"], answer["token_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.all(logits.max(1).values - chosen < 1e-4)


@pytest.mark.parametrize(("family", "lost"), [("qwen3_moe", 0), ("laguna", 6)])
def test_adapters_that_plain_peft_leaves_out_are_reported(
    family, lost, data_folder, tmp_path, capsys, caplog
):
    base = saved(family, tmp_path / "base", vocab_size=len(tiny_tokenizer()))
    run_sft(tree(base, data_folder, tmp_path))
    kept = tmp_path / "kept"
    caplog.clear()
    assert (
        command(capsys, "export", tmp_path / "run", "adapters=keep", f"output={kept}").status == 0
    )
    warned = [r.getMessage() for r in caplog.records if "leaves them out" in r.getMessage()]
    assert len(warned) == bool(lost)
    model = AutoModelForCausalLM.from_pretrained(base)
    written = load_peft_weights(str(kept), device="cpu")
    read = PeftModel.from_pretrained(model, str(kept))
    missing = set_peft_model_state_dict(read, written).unexpected_keys
    assert len(missing) == lost
    assert not lost or (f"reads {lost} of the {len(written)} tensors" in warned[0])


@pytest.mark.parametrize(
    "problem", [AttributeError("no weight"), ModelError("it does not fit"), OSError("no disk")]
)
def test_an_error_at_the_end_of_a_run_leaves_the_trained_weights(
    problem, model_folder, data_folder, tmp_path, monkeypatch, capsys
):
    def fail(*_: Any, **__: Any) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr("lightrft.trainer.saved_policy.save_model", fail)
        with pytest.raises(type(problem)) as raised:
            run_sft(tree(model_folder, data_folder, tmp_path))
    said = str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))
    assert "the trained weights are kept in" in said and "lightrft export" in said
    assert not (tmp_path / "run" / "model").exists()
    assert command(capsys, "export", tmp_path / "run", f"output={tmp_path / 'out'}").status == 0


def test_a_model_that_transformers_reads_otherwise_is_not_written(tmp_path, monkeypatch):
    base = saved("qwen2", tmp_path / "base")
    actor = Actor.load(ModelConfig(path=str(base), lora=LoRAConfig(rank=2)))
    out = tmp_path / "out"
    probe = export_check.probe_logits
    monkeypatch.setattr(
        "lightrft.trainer.saved_policy.probe_logits", lambda model: 1.01 * probe(model)
    )
    with pytest.raises(ModelError, match="other logits in transformers"):
        save_checked(actor, out, tiny_tokenizer(), None)
    assert not out.exists()
    monkeypatch.undo()
    save_checked(actor, out, tiny_tokenizer(), None)
    (out / "model.safetensors").rename(tmp_path / "kept.safetensors")
    with pytest.raises(ModelError, match="does not load"):
        (out / "model.safetensors").write_bytes(b"12345678")
        export_check.check_export(out, None)


@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_a_folder_with_a_weight_too_few_is_refused(verb, tmp_path, capsys):
    base = saved("qwen2", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (base / "config.json").write_text(json.dumps(config))
    outcome = command(capsys, verb, base, f"output={tmp_path / 'out'}")
    assert outcome.status == 2 and "missing keys, e.g. model.layers.2" in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_model_beyond_the_memory_is_left_unchecked_and_said(tmp_path, monkeypatch, caplog):
    base = saved("qwen2", tmp_path / "base")
    monkeypatch.setattr(export_check, "free_memory", lambda: 1000)
    export_check.check_export(base, None)
    assert "the written model is not checked" in caplog.text


def test_settings_have_their_names_of_transformers_4_too(tmp_path):
    rope = {"rope_theta": 300.0, "rope_type": "default"}
    base = saved("qwen3_moe", tmp_path / "base", rope_parameters=rope)
    actor = Actor.load(ModelConfig(path=str(base)))
    save_checked(actor, tmp_path / "out", tiny_tokenizer(), None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 300.0 and "rope_scaling" not in config
    assert config["num_experts"] == config["num_local_experts"]
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(tokenizer["additional_special_tokens"], list)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.get_vocab() == tiny_tokenizer().get_vocab()
    assert loaded.all_special_tokens == tiny_tokenizer().all_special_tokens


def shapes_of_experts(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "layers.0.mlp.experts" in name]  # noqa: SIM118
        return {name.rpartition(".")[2]: tuple(file.get_slice(name).get_shape()) for name in names}


@pytest.mark.parametrize("of_five", [True, False])
def test_experts_of_qwen3_vl_moe_are_written_as_published_folders_have_them(of_five, tmp_path):
    """transformers 4 and vLLM read no other layout, and transformers 5 writes another."""
    r = rig("qwen3_vl_moe", tmp_path)
    published = {"down_proj": (4, 16, 64), "gate_up_proj": (4, 64, 32)}
    assert shapes_of_experts(r.path) == published
    if of_five:
        plain = AutoModelForImageTextToText.from_pretrained(r.path)
        plain.save_pretrained(r.path)
        assert shapes_of_experts(r.path)["down_proj"] == (4, 64, 16)
    actor = Actor.load(ModelConfig(path=str(r.path)))
    save_checked(actor, tmp_path / "out", r.tokenizer, r.processor)
    assert shapes_of_experts(tmp_path / "out") == published
    expected = actor.model.state_dict()
    for name, value in (
        AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict().items()
    ):
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_square_experts_are_written_as_transformers_reads_them(tmp_path):
    """Their shape does not say whether they are transposed."""
    config = Qwen3VLMoeConfig.from_dict(rig("qwen3_vl_moe", tmp_path).actor.model.config.to_dict())
    config.text_config.moe_intermediate_size = config.text_config.hidden_size
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(config)
    save_model(model, None, tmp_path / "out")
    again = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "out")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, again.state_dict()[name], rtol=0, atol=0)
