"""Models made without weights, which are read later: the same as when they are loaded at once."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny import ALL_MEDIA_FAMILIES, save_tiny_media
from lightrft.models.tiny.text import FAMILIES, tiny_model, tiny_tokenizer
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import exchange


def with_memory(model):
    """``model`` with memory for what has none; a weight that nobody reads is not a number."""

    def memory(tensor):
        if not tensor.is_meta:
            return None
        return torch.full_like(
            tensor, torch.nan if tensor.is_floating_point() else 77, device="cpu"
        )

    exchange(model, memory, buffers=True)
    return model


def read(config, kind=Actor):
    """The model of ``config``, made without weights and filled."""
    torch.manual_seed(5)
    model = kind.load(config, device="meta")
    assert any(p.is_meta for p in model.parameters())
    with_memory(model).read_weights()
    return model


def loaded(config, kind=Actor):
    torch.manual_seed(5)
    return kind.load(config)


def check_same(found: nn.Module, expected: nn.Module) -> None:
    """Parameters, what is tied and trained, buffers, computed ones too, and what the model says of itself."""
    for kind in ("named_parameters", "named_buffers"):
        theirs, ours = (dict(getattr(m, kind)(remove_duplicate=False)) for m in (found, expected))
        assert list(theirs) == list(ours)
        for name, tensor in ours.items():
            assert theirs[name].dtype == tensor.dtype, name
            assert theirs[name].requires_grad == tensor.requires_grad, name
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0, msg=name)
    tied = [[n for n, _ in m.named_parameters()] for m in (found, expected)]
    assert tied[0] == tied[1]
    assert found.base.generation_config.to_dict() == expected.base.generation_config.to_dict()
    assert found.base.config.to_dict() == expected.base.config.to_dict()
    assert found.training == expected.training


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_text_is_what_loading_at_once_gives(family, dtype, tmp_path):
    save_model(tiny_model(family), tiny_tokenizer(), tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype=dtype)
    check_same(read(config), loaded(config))


@pytest.mark.parametrize("family", ALL_MEDIA_FAMILIES)
def test_every_family_that_reads_media_is_what_loading_at_once_gives(family, tmp_path):
    save_tiny_media(family, tmp_path)
    config = ModelConfig(path=str(tmp_path))
    check_same(read(config), loaded(config))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_weight_and_others_two(tied, tmp_path):
    save_model(tiny_model("qwen2", tie_word_embeddings=tied), tiny_tokenizer(), tmp_path)
    actor = read(ModelConfig(path=str(tmp_path)))
    check_same(actor, loaded(ModelConfig(path=str(tmp_path))))
    same = actor.base.get_output_embeddings().weight is actor.base.get_input_embeddings().weight
    assert same == tied


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_drawn_as_when_loaded_at_once(dora, tmp_path):
    save_model(tiny_model("qwen2"), tiny_tokenizer(), tmp_path)
    config = ModelConfig(
        path=str(tmp_path), lora=LoRAConfig(rank=4, dora=dora), freeze=("model.embed_tokens",)
    )
    check_same(read(config), loaded(config))


def test_saved_adapters_are_read_with_their_base_model(tmp_path):
    save_model(tiny_model("qwen2"), tiny_tokenizer(), tmp_path / "base")
    actor = loaded(ModelConfig(path=str(tmp_path / "base"), lora=LoRAConfig(rank=4)))
    nn.init.normal_(next(p for n, p in actor.named_parameters() if "lora_B" in n))
    save_model(actor, tiny_tokenizer(), tmp_path / "adapters", merge=False)
    config = ModelConfig(path=str(tmp_path / "adapters"))
    check_same(read(config), loaded(config))


def test_a_critic_has_its_drawn_head_and_a_saved_one_where_there_is_one(tmp_path):
    save_model(tiny_model("qwen2", tie_word_embeddings=False), tiny_tokenizer(), tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"), dtype="bfloat16")
    critic = loaded(config, Critic)
    check_same(read(config, Critic), critic)
    nn.init.normal_(critic.value_head.weight)
    critic.save(tiny_tokenizer(), tmp_path / "critic")
    config = ModelConfig(path=str(tmp_path / "critic"))
    check_same(read(config, Critic), loaded(config, Critic))


def test_experts_that_are_stored_one_by_one_in_several_files_are_put_together(tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.1." in name for name in files) and len(set(files.values())) > 2
    config = ModelConfig(path=str(tmp_path))
    check_same(read(config), loaded(config))


def test_a_folder_without_safetensors_is_read_as_one_process_would(tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    config = ModelConfig(path=str(tmp_path))
    check_same(read(config), loaded(config))


def test_a_weight_that_is_missing_is_named(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {k: v for k, v in load_file(file).items() if "layers.1.mlp.up" not in k},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError,
        match=r"1 weights are missing or misshapen, e\.g\. model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        read(ModelConfig(path=str(tmp_path)))


def test_a_weight_of_another_shape_is_named(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(
        {k: v[:5].clone() if k == "model.norm.weight" else v for k, v in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError, match=r"misshapen, e\.g\. model\.norm\.weight, \[5\] where the model has \[64\]"
    ):
        read(ModelConfig(path=str(tmp_path)))


def test_weights_that_are_tied_and_differ_are_refused(tmp_path):
    tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        file,
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError, match="is tied to another weight, and the files hold different values"
    ):
        read(ModelConfig(path=str(tmp_path)))


def test_the_type_is_that_of_the_files_where_the_config_names_none(tmp_path):
    tiny_model("qwen2", dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    config = ModelConfig(path=str(tmp_path))
    check_same(read(config), loaded(config))


def test_quantised_weights_are_refused(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ModelError,
        match=r"quantised weights cannot be spread over processes; set launch\.processes=1",
    ):
        Actor.load(ModelConfig(path=str(tmp_path)), device="meta")
