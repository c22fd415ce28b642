import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig, TrOCRConfig

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.actor import Actor
from lightrft.models.attention import interface
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.critic import Critic
from lightrft.models.families import family_of
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.loading.save_model import save_model
from lightrft.models.lora import apply_lora_configuration, can_merge, linear_modules, merged_state
from lightrft.models.tiny.text import FAMILIES, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from tests.model_helpers import float32_bound, gradients, hard_batch, small_actor, small_model


def folder(path, family="qwen2", **overrides):
    save_model(small_model(family, **overrides), tiny_tokenizer(), path)
    return str(path)


def trained_adapters(path, dora=False):
    """An actor whose adapters do something."""
    actor = Actor.load(ModelConfig(path=path, lora=LoRAConfig(rank=4, dora=dora)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if "lora_" in name:
                p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return actor


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
@pytest.mark.parametrize("dora", [False, True])
def test_the_reference_is_the_base_model_bit_for_bit(tmp_path, dora, layout):
    path, batch = folder(tmp_path), hard_batch()
    base, actor = Actor.load(ModelConfig(path=path, layout=layout)), trained_adapters(path, dora)
    actor.layout = layout
    expected, adapted = base.score(batch).logprobs, actor.score(batch).logprobs
    assert (expected - adapted).abs().max() > 0.1
    with actor.reference():
        assert torch.equal(actor.score(batch).logprobs, expected)
    assert torch.equal(actor.score(batch).logprobs, adapted)
    with pytest.raises(KeyError), actor.reference():
        raise KeyError
    assert torch.equal(actor.score(batch).logprobs, adapted)


def test_only_adapters_are_trained_and_get_gradient(tmp_path):
    actor = trained_adapters(folder(tmp_path))
    _, grads = gradients(actor, hard_batch())
    assert grads
    assert all("lora_" in name for name in grads)
    assert grads.keys() == {name for name, p in actor.named_parameters() if p.requires_grad}


def test_a_model_without_adapters_cannot_be_its_own_reference():
    with pytest.raises(ModelError, match=r"model\.lora"), small_actor("qwen2").reference():
        pass


@pytest.mark.parametrize("dora", [False, True])
def test_export_adds_adapters_into_the_weights_and_leaves_memory_alone(tmp_path, dora):
    torch.manual_seed(0)  # how far float32 rounding carries depends on the adapters drawn
    actor, batch = trained_adapters(folder(tmp_path / "base"), dora), hard_batch()
    before = {name: p.clone() for name, p in actor.state_dict().items()}
    expected = actor.score(batch).logprobs
    save_model(actor, tiny_tokenizer(), tmp_path / "merged")
    save_model(actor, None, tmp_path / "adapters", merge=False)
    assert all(torch.equal(p, before[name]) for name, p in actor.state_dict().items())
    assert torch.equal(actor.score(batch).logprobs, expected)
    merged = Actor.load(ModelConfig(path=str(tmp_path / "merged")))
    assert not merged.has_adapters
    assert (merged.score(batch).logprobs - expected).abs().max() < 1e-4
    again = Actor.load(ModelConfig(path=str(tmp_path / "adapters")))
    assert again.has_adapters
    assert torch.equal(again.score(batch).logprobs, expected)
    assert (
        actor.merge().keys()
        == load_model(ModelConfig(path=str(tmp_path / "base"))).state_dict().keys()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_exports_what_it_loads(tmp_path, family):
    path, batch = folder(tmp_path, family), hard_batch()
    actor = Actor.load(ModelConfig(path=path))
    assert check_layout(actor, batch) == ""
    assert actor.layout == "prefix_shared"
    save_model(actor, tiny_tokenizer(), tmp_path / "again")
    assert torch.equal(
        Actor.load(ModelConfig(path=str(tmp_path / "again"))).score(batch).logprobs,
        actor.score(batch).logprobs,
    )


def test_adapters_on_quantised_layers_are_known_not_to_merge(tmp_path):
    actor = trained_adapters(folder(tmp_path))
    assert can_merge(actor) and can_merge(small_actor("qwen2"))
    layer = actor.get_submodule("model.base_model.model.model.layers.1.mlp.up_proj.base_layer")
    # As bitsandbytes keeps its weights: packed integers.
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    assert not can_merge(actor)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj is quantised.*adapters=keep"):
        merged_state(actor.model)


def test_lora_targets_that_name_nothing_are_an_error(tmp_path):
    config = ModelConfig(path=folder(tmp_path), lora=LoRAConfig(targets=("nosuch_proj",)))
    with pytest.raises(ModelError, match=r"lora\.targets.*nosuch_proj"):
        Actor.load(config)


def test_the_public_lora_helper_leaves_the_output_head_and_named_paths_alone():
    model = small_model("qwen2", tie_word_embeddings=False)
    names = linear_modules(model, ["mlp"])
    assert "model.layers.1.self_attn.q_proj" in names
    assert not any("mlp" in name or "lm_head" in name for name in names)
    adapted = apply_lora_configuration(model, 2, 4, 0.0)
    changed = {name.split(".lora_")[0] for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(changed) == 2 * 7
    with pytest.raises(ModelError, match="lora_alpha = 0"):
        apply_lora_configuration(small_model("qwen2"), 2, 0, 0.0)


def test_the_layout_check_falls_back_where_a_plan_is_ignored(monkeypatch):
    """An attention that is not told of the plan; transformers' own sees by the positions where a new sample starts."""
    actor, batch = small_actor("qwen2"), hard_batch()
    expected = actor.score(batch).logprobs
    monkeypatch.setattr(interface, "NAME", "sdpa")
    reason = check_layout(actor, batch)
    assert actor.layout == "packed"
    assert "layout prefix_shared differs" in reason
    assert "using packed instead" in reason
    assert torch.allclose(actor.score(batch).logprobs, expected, atol=1e-5)


def test_the_layout_check_falls_back_to_padded_for_recurrent_layers():
    kinds = {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
    }
    widths = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": 4,
    }
    more = {
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "vocab_size": 100,
    }
    torch.manual_seed(0)
    actor = Actor(
        AutoModelForCausalLM.from_config(
            Qwen3NextConfig(**kinds, **widths, **sizes, **more, initializer_range=0.2)
        )
    )
    assert actor.layout == "padded"
    actor.layout = "prefix_shared"
    reason = check_layout(actor, hard_batch())
    assert actor.layout == "padded"
    assert "layout prefix_shared differs" in reason
    assert "layout packed differs" in reason


def test_the_layout_check_refuses_a_head_it_does_not_know(monkeypatch):
    actor = small_actor("gemma2", final_logit_softcapping=1.0)
    monkeypatch.setattr("lightrft.models.actor.head_transform", lambda config, family: (None, None))
    with pytest.raises(ModelError, match="gemma2"):
        check_layout(actor, hard_batch())


def test_a_recurrent_family_and_one_that_is_not_known_start_padded():
    assert family_of(Qwen3NextConfig()).layout == "padded"
    assert family_of(TrOCRConfig()).layout == "padded"


@pytest.mark.parametrize(
    "make",
    [
        lambda: small_model("qwen3", torch.float64),
        # Its last states are narrower than those of its layers.
        lambda: family_model("opt", dtype=torch.float64),
    ],
)
def test_values_are_read_before_each_token_and_after_the_last(make):
    batch = hard_batch()
    critic = Critic(make())
    values, final = critic.values(batch, final=True)
    again, none = critic.values(batch)
    assert none is None
    assert values.shape == (batch.tokens,)
    assert final.shape == (len(batch),)
    assert torch.allclose(values, again, atol=1e-5)
    prompts = batch.prompts.tokens.split(batch.prompts.lengths.tolist())
    start = 0
    critic.use_attention("padded")
    for row, answer in enumerate(batch.responses.tokens.split(batch.lengths.tolist())):
        prompt = prompts[int(batch.prompt_of[row])]
        states = critic.base.model(input_ids=torch.cat([prompt, answer])[None]).last_hidden_state[0]
        expected = (states @ critic.value_head.weight[0])[len(prompt) - 1 :]
        assert torch.allclose(values[start : start + len(answer)], expected[:-1], atol=1e-5)
        assert torch.allclose(final[row], expected[-1], atol=1e-5)
        start += len(answer)


@pytest.mark.parametrize("layout", ["prefix_shared", "packed", "padded"])
def test_the_value_head_is_seeded_trained_and_saved(tmp_path, layout):
    path = folder(tmp_path / "base")
    critic, other = (
        Critic.load(ModelConfig(path=path, layout=layout), seed=1),
        Critic.load(ModelConfig(path=path), seed=2),
    )
    assert not torch.equal(critic.value_head.weight, other.value_head.weight)
    assert critic.value_head.weight.std() < 3 / 65
    assert critic.value_head.bias is None
    values, final = critic.values(hard_batch(), final=True)
    (values.sum() + final.sum()).backward()
    assert critic.value_head.weight.grad.any()
    assert critic.base.model.layers[0].mlp.up_proj.weight.grad.any()
    critic.save(tiny_tokenizer(), tmp_path / "saved")
    again = Critic.load(ModelConfig(path=str(tmp_path / "saved"), layout=layout), seed=3)
    assert torch.equal(again.values(hard_batch(), final=True)[0], values)


def test_temperature_and_entropy_are_those_of_the_tempered_softmax():
    actor, batch = small_actor("qwen2", torch.float64), hard_batch()
    states, _ = actor.hidden(batch)
    logits = actor.base.lm_head(states) / 0.5
    scores = actor.score(batch, temperature=0.5, entropy=True)
    expected = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(scores.logprobs, expected.log_prob(batch.responses.tokens))
    assert torch.allclose(scores.entropy, expected.entropy())
    assert actor.score(batch).entropy is None


def logits_made(actor):
    """Elements of each array that the head gives."""
    made = []
    actor.base.get_output_embeddings().register_forward_hook(
        lambda module, given, out: made.append(out.numel())
    )
    return made


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_layout_check_makes_no_more_logits_than_the_bound_allows(family):
    """Whatever prompts and answers are long: one MiB of float32 are 262,144 logits."""
    vocabulary, config = 40_000, ModelConfig(logits_mb=1)
    actor = Actor(small_model(family, vocab_size=vocabulary), config)
    made = logits_made(actor)
    prompts, answers = (
        Segments.of([[5] * 300, [6] * 40]),
        Segments.of([[7] * 50, [8] * 90, [9] * 3]),
    )
    batch = Batch(
        prompts, answers, torch.tensor([0, 0, 1]), sampled=torch.ones(143, dtype=torch.bool)
    )
    assert check_layout(actor, batch) == ""
    assert made and max(made) <= 2**20 / 4
    assert max(made) == 6 * vocabulary


def test_own_log_probs_at_some_places_are_those_of_all_tokens():
    actor, batch = small_actor("gemma2"), hard_batch()
    every = actor.own_logprobs(batch)
    at = torch.tensor([0, every.numel() - 1, every.numel() // 2])
    bound = float32_bound(actor) * float(every.abs().max())
    assert torch.allclose(actor.own_logprobs(batch, at), every[at], rtol=0, atol=bound)
    assert torch.allclose(every, actor.score(batch).logprobs, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba2", "xlstm", "dots3_note_text"])
def test_layouts_of_layers_without_one_number_of_heads_are_checked(family: str) -> None:
    actor = Actor(family_model(family))
    assert check_layout(actor, hard_batch()) == ""
    assert actor.layout == "padded"
