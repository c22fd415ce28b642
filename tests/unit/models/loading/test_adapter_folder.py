"""Folders of adapters that plain peft writes: what is loaded computes what peft's own model does."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.adapter_folder import base_digest, lora_of, write_base
from lightrft.models.loading.from_pretrained import (
    base_and_lora,
    load_model,
    load_tokenizer,
    model_settings,
    where_of,
)
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.loading.save_model import save_model
from lightrft.models.lora import adapter_dropout
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import exchange
from tests.model_helpers import hard_batch, plain_rows

QV = ["q_proj", "v_proj"]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "lora": ("qwen2", UNTIED, {}),
    "dora": ("qwen2", UNTIED, {"use_dora": True}),
    "rslora": ("qwen2", TIED, {"use_rslora": True}),
    "ranks by layer": (
        "qwen2",
        TIED,
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 3}},
    ),
    "a whole head": ("qwen2", TIED, {"modules_to_save": ["lm_head"]}),
    "whole embeddings": ("qwen2", UNTIED, {"modules_to_save": ["embed_tokens"]}),
    "whole norms": ("qwen2", UNTIED, {"modules_to_save": ["norm"]}),
    "whole attention": ("qwen2", TIED, {"modules_to_save": ["1.self_attn"]}),
    "experts": ("mixtral", {}, {"target_modules": "all-linear"}),
    "experts of another kind": ("qwen3_moe", {}, {"target_modules": "all-linear"}),
    "shared experts": ("deepseek_v3", {}, {"target_modules": "all-linear"}),
}
CHANGES_BASE = {
    "single tokens": ("qwen2", TIED, {"trainable_token_indices": [5]}),
    "factors of embeddings": ("qwen2", UNTIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "factors of a tied head": ("qwen2", TIED, {"target_modules": ["lm_head"]}),
    "biases": ("qwen2", UNTIED, {"bias": "all"}),
    "pissa": ("qwen2", UNTIED, {"init_lora_weights": "pissa"}),
}


def saved(folder: Path, family: str, fields: dict[str, Any], given: dict[str, Any]) -> Path:
    """Write a base and adapters with random weights, and return the folder of the adapters."""
    return saved_with(folder, family, fields, given)[0]


def saved_with(
    folder: Path, family: str, fields: dict[str, Any], given: dict[str, Any]
) -> tuple[Path, PeftModel]:
    base = folder / "base"
    family_model(family, **fields).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    settings = {"r": 2, "target_modules": QV, "task_type": TaskType.CAUSAL_LM, **given}
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(folder / "adapters"))
    return folder / "adapters", adapted


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    return saved(tmp_path, *KINDS["lora"])


def expected(adapters: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(adapters.parent / "base")
    model = PeftModel.from_pretrained(base, adapters).eval()
    with torch.no_grad():
        return plain_rows(Actor(model, ModelConfig(path=str(adapters))), hard_batch())


@torch.no_grad()
def scores(actor: Actor) -> torch.Tensor:
    return actor.score(hard_batch()).logprobs


@pytest.mark.parametrize("kind", [*KINDS, *CHANGES_BASE])
def test_the_log_probs_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    adapters = saved(tmp_path, *{**KINDS, **CHANGES_BASE}[kind])
    wanted = expected(adapters)
    found = scores(Actor.load(ModelConfig(path=str(adapters))))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    base = scores(Actor.load(ModelConfig(path=str(tmp_path / "base"))))
    assert (found - base).abs().max() > 0.01


def read_later(adapters: Path) -> Actor:
    """Return the model of ``adapters``, which is built without weights and reads them then."""
    actor = Actor.load(ModelConfig(path=str(adapters)), device="meta")
    exchange(
        actor.model,
        lambda p: torch.zeros_like(p, device="cpu") if p.is_meta else None,
        buffers=True,
    )
    actor.read_weights()
    return actor


@pytest.mark.parametrize("family", ["laguna", "inkling2_text"])
def test_adapters_that_peft_renames_wrongly_are_read_as_they_were_written(
    tmp_path: Path, family: str
) -> None:
    adapters, adapted = saved_with(tmp_path, family, {}, {"target_modules": "all-linear"})
    wanted = scores(Actor(adapted.eval(), ModelConfig(path=str(adapters))))
    for actor in (Actor.load(ModelConfig(path=str(adapters))), read_later(adapters)):
        torch.testing.assert_close(scores(actor), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_over_deferred_weights_give_the_same_log_probs(tmp_path: Path, kind: str) -> None:
    adapters = saved(tmp_path, *KINDS[kind])
    actor = read_later(adapters)
    torch.testing.assert_close(scores(actor), expected(adapters), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", CHANGES_BASE)
def test_adapters_that_change_the_base_are_refused_where_its_values_are_deferred(
    tmp_path: Path, kind: str
) -> None:
    adapters = saved(tmp_path, *CHANGES_BASE[kind])
    with pytest.raises(ModelError, match=r"change the base \(.*launch\.processes=1"):
        Actor.load(ModelConfig(path=str(adapters)), device="meta")


@pytest.mark.parametrize("kind", ["dora", "a whole head", "experts"])
def test_continued_adapters_are_kept_as_peft_reads_them(tmp_path: Path, kind: str) -> None:
    adapters = saved(tmp_path, *KINDS[kind])
    actor = Actor.load(ModelConfig(path=str(adapters)))
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter += 0.05
    wanted = scores(actor)
    save_model(actor, None, tmp_path / "kept", merge=False)
    torch.testing.assert_close(expected(tmp_path / "kept"), wanted, atol=1e-5, rtol=1e-5)
    save_model(actor, load_tokenizer(actor.config), tmp_path / "merged")
    merged = scores(Actor.load(ModelConfig(path=str(tmp_path / "merged"))))
    torch.testing.assert_close(merged, wanted, atol=1e-4, rtol=1e-4)


def test_a_model_on_the_meta_device_has_the_adapters(adapters: Path) -> None:
    model = meta_model(ModelConfig(path=str(adapters)))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)


def test_the_config_and_the_weights_are_those_of_the_base(adapters: Path) -> None:
    config = ModelConfig(path=str(adapters))
    assert where_of(config) == str(adapters.parent / "base")
    assert model_settings(config).model_type == "qwen2"


def test_tokenizer_and_chat_template_come_from_the_adapters_where_they_have_them(
    adapters: Path,
) -> None:
    config = ModelConfig(path=str(adapters))
    base = load_tokenizer(ModelConfig(path=str(adapters.parent / "base")))
    assert load_tokenizer(config).chat_template == base.chat_template
    (adapters / "chat_template.jinja").write_text("{% for m in messages %}A{% endfor %}")
    assert load_tokenizer(config).chat_template.startswith("{% for m in messages %}A")
    (adapters / "chat_template.jinja").unlink()
    other = tiny_tokenizer()
    other.chat_template = "{% for m in messages %}B{% endfor %}"
    other.save_pretrained(adapters)
    assert load_tokenizer(config).chat_template == other.chat_template


def test_the_processor_comes_from_the_adapters_where_they_have_one(tmp_path: Path) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "base")
    base = ModelConfig(path=str(tmp_path / "base"))
    model = load_model(base)
    get_peft_model(model, LoraConfig(r=2, target_modules=QV)).save_pretrained(
        str(tmp_path / "adapters")
    )
    config = ModelConfig(path=str(tmp_path / "adapters"))
    of_base = load_processor(base, load_tokenizer(base))
    assert of_base is not None
    found = load_processor(config, load_tokenizer(config))
    assert found is not None and found.source == of_base.source
    of_base.limited(None, 3136).save(tmp_path / "adapters")
    own = load_processor(config, load_tokenizer(config))
    assert own is not None and own.limits == (None, 3136)


def test_an_engine_gets_the_base_and_settings_of_the_adapters(tmp_path: Path) -> None:
    given = {"use_dora": True, "lora_alpha": 6, "lora_dropout": 0.25}
    adapters = saved(tmp_path, "qwen2", UNTIED, given)
    model = base_and_lora(ModelConfig(path=str(adapters)))
    assert model.path == str(tmp_path / "base") and model.lora is not None
    assert (model.lora.rank, model.lora.alpha, model.lora.dora) == (2, 6, True)
    assert adapter_dropout(load_model(ModelConfig(path=str(adapters)))) == 0.25


def test_an_engine_gets_the_names_of_whole_modules(tmp_path: Path) -> None:
    lora = lora_of(ModelConfig(path=str(saved(tmp_path, *KINDS["a whole head"]))))
    assert lora is not None and lora.modules_to_save == ("lm_head",)


@pytest.mark.parametrize("kind", ["ranks by layer", "single tokens"])
def test_adapters_that_no_setting_describes_are_named(tmp_path: Path, kind: str) -> None:
    case = {**KINDS, **CHANGES_BASE}[kind]
    adapters = saved(tmp_path, *case)
    [name, *_] = case[2]
    with pytest.raises(ModelError, match=rf"{name} = .*engine\.kind=native"):
        lora_of(ModelConfig(path=str(adapters)))


def test_another_kind_than_lora_computes_what_peft_does_and_is_for_the_native_engine(
    tmp_path: Path, adapters: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoHaConfig(r=2, target_modules=QV, init_weights=False))
    model.save_pretrained(str(tmp_path / "loha"))
    config = ModelConfig(path=str(tmp_path / "loha"))
    torch.testing.assert_close(
        scores(Actor.load(config)), expected(tmp_path / "loha"), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ModelError, match=r"peft_type = 'LOHA'.*engine\.kind=native"):
        lora_of(config)


def test_adapters_of_prompts_are_refused(tmp_path: Path, adapters: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(base, prompts).save_pretrained(str(tmp_path / "prompts"))
    with pytest.raises(ModelError, match=r"PROMPT_TUNING.*adds tokens to a prompt"):
        load_model(ModelConfig(path=str(tmp_path / "prompts")))


def rewritten(adapters: Path, **fields: object) -> ModelConfig:
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return ModelConfig(path=str(adapters))


def test_a_missing_base_names_the_file_the_value_and_the_setting(adapters: Path) -> None:
    config = rewritten(adapters, base_model_name_or_path="/nowhere/at/all")
    for read in (load_model, load_tokenizer, model_settings):
        with pytest.raises(ModelError, match=r"adapter_config\.json.*/nowhere/at/all.*model\.base"):
            read(config)
    config = rewritten(adapters, base_model_name_or_path=None)
    with pytest.raises(ModelError, match=r"does not name a base model.*model\.base"):
        load_model(config)
    base = config.model_copy(update={"base": str(adapters.parent / "base")})
    torch.testing.assert_close(scores(Actor.load(base)), scores(Actor.load(base)))


def test_a_base_that_is_no_model_is_refused(tmp_path: Path, adapters: Path) -> None:
    (tmp_path / "empty").mkdir()
    config = rewritten(adapters, base_model_name_or_path=str(tmp_path / "empty"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(config)
    shutil.copytree(adapters, tmp_path / "more")
    config = rewritten(adapters, base_model_name_or_path=str(tmp_path / "more"))
    with pytest.raises(ModelError, match=r"folder of adapters too.*lightrft merge"):
        load_model(config)


def test_a_base_may_be_relative_to_the_folder_and_has_its_revision(adapters: Path) -> None:
    config = rewritten(adapters, base_model_name_or_path="../base", revision="abc")
    found = saved_adapters(config)
    assert found is not None and found.base.revision == "abc"
    assert Path(found.base.path).resolve() == (adapters.parent / "base").resolve()
    given = saved_adapters(config.model_copy(update={"revision": "def"}))
    assert given is not None and given.base.revision == "def"


def test_the_digest_is_of_the_weights_and_not_of_their_place(
    tmp_path: Path, adapters: Path
) -> None:
    base = ModelConfig(path=str(tmp_path / "base"))
    shutil.copytree(tmp_path / "base", tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "README.md").write_text("a model")
    digest = base_digest(base)
    assert digest == base_digest(ModelConfig(path=str(tmp_path / "elsewhere")))
    family_model("qwen2", seed=5, **UNTIED).save_pretrained(tmp_path / "elsewhere")
    assert digest != base_digest(ModelConfig(path=str(tmp_path / "elsewhere")))
    assert base_digest(ModelConfig(path=str(tmp_path / "nowhere"))) is None


def test_another_base_is_refused_and_one_that_is_set_is_taken(
    tmp_path: Path, adapters: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = ModelConfig(path=str(tmp_path / "base"))
    write_base(adapters, base)
    config = ModelConfig(path=str(adapters))
    load_model(config)
    family_model("qwen2", seed=5, **UNTIED).save_pretrained(tmp_path / "base")
    for load in (load_model, lambda c: Actor.load(c, device="meta")):
        with pytest.raises(ModelError, match=r"trained on other weights.*model\.base"):
            load(config)
    with caplog.at_level(logging.WARNING):
        load_model(config.model_copy(update={"base": base.path}))
    assert "model.base takes it anyway" in caplog.text
