import pytest
import torch

from lightrft.models.tiny.text import FAMILIES, PRINTABLE, tiny_model, tiny_tokenizer
from lightrft.utils.errors import ModelError


def test_every_printable_character_survives_the_tokenizer():
    tokenizer = tiny_tokenizer("é")
    ids = tokenizer(PRINTABLE + "é")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == PRINTABLE + "é"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"


def test_the_chat_template_ends_turns_with_one_token():
    tokenizer = tiny_tokenizer()
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    ids = tokenizer.apply_chat_template(turns)["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 3
    prompt = tokenizer.apply_chat_template(turns[:2], add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_seeded_runs_and_keeps_the_global_generator(family):
    before = torch.get_rng_state()
    model = tiny_model(family, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    again = tiny_model(family, seed=3).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    other = tiny_model(family, seed=4).state_dict()
    assert any(not torch.equal(value, other[name]) for name, value in model.state_dict().items())
    ids = torch.arange(4, 28).reshape(1, -1)
    assert model(input_ids=ids).logits.shape == (1, 24, len(tiny_tokenizer()))
    head = (
        getattr(model.config, "head_dim", None)
        or model.config.hidden_size // model.config.num_attention_heads
    )
    assert head == 32


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_the_folder_are_real(family, tmp_path):
    model = tiny_model(
        family, vocab_size=50, hidden_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = torch.arange(4, 28).reshape(1, -1)
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    assert len(model.model.layers) == 3


def test_an_unknown_family_is_named():
    with pytest.raises(ModelError, match="qwen2"):
        tiny_model("gpt17")
