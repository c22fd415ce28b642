import json
import time

import pytest
import torch
from huggingface_hub import constants
from transformers import GenerationConfig

from lightrft.config.model import ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.from_pretrained import (
    config_ends,
    load_model,
    load_tokenizer,
    where_of,
)
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny.text import FAMILIES, tiny_model, tiny_tokenizer
from lightrft.utils.errors import ModelError
from tests.unit.datasets.published_templates import PUBLISHED


@pytest.fixture
def folder(tmp_path):
    save_model(tiny_model("qwen2"), tiny_tokenizer(), tmp_path)
    return tmp_path


def config(path, **settings):
    return ModelConfig(path=str(path), **settings)


@pytest.mark.parametrize("path", ["runs/model", "./model", "model/", "a/b/c", "model.safetensors"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, path):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="there is no such folder"):
        where_of(ModelConfig(path=path))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="there is no such folder"):
        load_model(config(tmp_path / "nowhere"))


def test_a_hub_name_without_a_hub_says_so():
    with pytest.raises(
        ModelError, match="no folder of that name here, and the model hub did not give it"
    ):
        load_model(config("someone/some-model"))


def test_a_hub_that_cannot_be_reached_is_reported_at_once_or_replaced_by_its_cache(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(ModelError, match=r"http://127.0.0.1:9 cannot be reached .* give a folder"):
        load_tokenizer(config("someone/some-model"))
    assert time.monotonic() - begun < 10
    cached = tmp_path / "models--someone--some-model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert where_of(config("someone/some-model")) == str(cached / "snapshots" / "abc")
    # A start asks several times, and waits for the hub once.
    cached.rename(tmp_path / "elsewhere")
    assert where_of(config("someone/some-model")) == str(cached / "snapshots" / "abc")


def test_an_unset_path_is_an_error():
    with pytest.raises(ModelError, match=r"model\.path is not set"):
        load_model(ModelConfig())


def test_a_folder_that_is_no_model_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(config(tmp_path))


@pytest.mark.parametrize("load", [load_model, meta_model])
def test_adapters_that_do_not_name_their_base_are_an_error(tmp_path, load):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="does not name a base model"):
        load(ModelConfig(path=str(tmp_path)))


def test_a_broken_config_is_an_error(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load_model(config(folder))


def test_truncated_weights_are_an_error(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="weights cannot be read"):
        load_model(config(folder))


def test_missing_weights_are_an_error(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights cannot be read"):
        load_model(config(folder))


def test_weights_that_lack_a_layer_are_an_error(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = 3
    settings.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="weights are missing"):
        load_model(config(folder))


def test_weights_of_another_width_are_an_error(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["intermediate_size"] = 192
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="weights"):
        load_model(config(folder))


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_the_dtype_is_the_one_asked_for(folder, name, dtype):
    assert load_model(config(folder, dtype=name)).dtype == dtype
    assert load_model(config(folder, dtype=name), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("prefix", ["model.layers.0.", "layers.0."])
def test_frozen_prefixes_get_no_gradient(folder, prefix):
    model = load_model(config(folder, freeze=(prefix,)))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")
    }


def test_a_frozen_prefix_that_names_nothing_is_an_error(folder):
    with pytest.raises(ModelError, match=r"'visual' names no parameter.*model\.layers"):
        load_model(config(folder, freeze=("visual",)))


def test_quantisation_without_its_package_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("lightrft.models.loading.from_pretrained.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[quant\]'"):
        load_model(config(folder, load_in_4bit=True))


def test_gradient_checkpointing_is_switched_on_by_its_setting(folder):
    assert Actor.load(config(folder, gradient_checkpointing=True)).base.is_gradient_checkpointing
    assert not Actor.load(config(folder)).base.is_gradient_checkpointing


def test_a_tokenizer_of_its_own_comes_back_padding_on_the_left(folder):
    tokenizer = load_tokenizer(config(folder))
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_character_survives_saving_and_loading_a_tokenizer(family, tmp_path):
    save_model(tiny_model(family), tiny_tokenizer(), tmp_path)
    text = "1 + 2 =\n<tag> x"
    loaded = load_tokenizer(config(tmp_path))
    assert loaded(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    save_model(tiny_model("qwen2"), None, tmp_path)
    with pytest.raises(ModelError, match=r"model\.path.*no tokenizer"):
        load_tokenizer(config(tmp_path))


def test_a_tokenizer_larger_than_the_embedding_is_an_error(folder):
    tiny_tokenizer("äöü").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"103 tokens.*only 100"):
        load_tokenizer(config(folder))


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_a_pad_that_is_missing_or_the_end_token_is_replaced_with_a_warning(folder, pad, caplog):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(folder)
    found = load_tokenizer(config(folder))
    assert found.pad_token == "<pad>"
    assert found.pad_token_id != found.eos_token_id
    assert "using <pad> to pad" in caplog.text


def test_without_a_free_token_the_end_token_pads_and_a_warning_says_so(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("lightrft.models.loading.from_pretrained._PADS", ())
    save_model(tiny_model("qwen2"), tiny_tokenizer(), tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(config(tmp_path)).pad_token_id == 3
    assert "no token is free" in caplog.text


def test_a_free_row_of_the_embedding_becomes_the_pad_without_growing_it(tmp_path, monkeypatch):
    monkeypatch.setattr("lightrft.models.loading.from_pretrained._PADS", ())
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    save_model(tiny_model("qwen2", vocab_size=128), tokenizer, tmp_path)
    found = load_tokenizer(config(tmp_path))
    assert found.pad_token == "<|pad|>"
    assert found.pad_token_id == 100


def test_a_chat_template_is_text_or_a_file(folder, tmp_path):
    text = "{{ messages[0]['content'] }}"
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    for given in (text, str(file)):
        assert load_tokenizer(config(folder, chat_template=given)).chat_template == text
    with pytest.raises(ModelError, match=r"model\.chat_template = 'nothing'"):
        load_tokenizer(config(folder, chat_template="nothing"))


@pytest.mark.parametrize("eos", [None, 1, [1, 4]])
def test_the_end_of_turn_of_the_chat_template_is_saved_as_an_end_token(tmp_path, eos):
    tokenizer = PUBLISHED["chatml"].tokenizer()
    model = tiny_model("qwen2", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = eos
    save_model(model, tokenizer, tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    before = [tokenizer.eos_token_id] if eos is None else [1] if eos == 1 else eos
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [*before, end]
    assert end in config_ends(ModelConfig(path=str(tmp_path)))
    # a template of known ends changes nothing
    tokenizer.eos_token = "<|im_end|>"
    model.generation_config.eos_token_id = end
    save_model(model, tokenizer, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == end
