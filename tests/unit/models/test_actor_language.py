import subprocess
import sys

import pytest
import torch

import lightrft.models as models
from lightrft.models import ActorLanguage, ActorModality, ActorText, CriticLanguage, utils
from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.utils.errors import ModelError
from tests.model_helpers import small_model

PAD, EOS = 0, 3


@pytest.fixture
def path(tmp_path):
    save_model(small_model("qwen2"), tiny_tokenizer(), tmp_path)
    return str(tmp_path)


def rows():
    """Two rows, the second with two pads on the left, and their mask."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, EOS], [PAD, PAD, 20, 21, 22, 23, 24]])
    return ids, (ids != PAD).long()


def plain(model, ids):
    """Log-prob of each token of one row, first left out, by the model's own forward."""
    logp = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("which", ["path", "module"])
def test_a_path_and_a_module_give_the_logprobs_of_the_actions(path, which):
    actor = ActorLanguage(path if which == "path" else small_model("qwen2"), bf16=False)
    ids, mask = rows()
    logprobs = actor(ids, num_actions=3, attention_mask=mask)
    expected = torch.stack([plain(actor.model, ids[0])[-3:], plain(actor.model, ids[1, 2:])[-3:]])
    assert torch.allclose(logprobs, expected, atol=1e-5)
    again, output = actor(ids, num_actions=3, attention_mask=mask, return_output=True)
    assert torch.equal(again, logprobs)
    assert output.logits.shape == (2, 7, 100)
    assert "action_entropy" not in output
    assert torch.equal(actor(ids, attention_mask=mask, return_output=True).logits, output.logits)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("which", ["path", "module"])
def test_packed_rows_give_what_separate_rows_give(tmp_path, which, family):
    model = small_model(family)
    save_model(model, tiny_tokenizer(), tmp_path)
    actor = ActorLanguage(
        str(tmp_path) if which == "path" else model, bf16=False, packing_samples=True
    )
    first, second = torch.tensor([10, 11, 12, 13, EOS]), torch.tensor([20, 21, 22])
    packed, mask = torch.cat([first, second])[None], torch.tensor([[1] * 5 + [2] * 3])
    logprobs = actor(packed, num_actions=[2, 1], attention_mask=mask, packed_seq_lens=[5, 3])
    actor.actor.use_attention("padded")
    expected = torch.cat([plain(actor.model, first)[-2:], plain(actor.model, second)[-1:]])
    assert logprobs.shape == (1, 3)
    assert torch.allclose(logprobs[0], expected, atol=1e-5)


def test_packed_rows_without_lengths_are_an_error():
    actor = ActorLanguage(small_model("qwen2"), packing_samples=True)
    with pytest.raises(ValueError, match="packed_seq_lens"):
        actor(
            torch.tensor([[10, 11]]),
            num_actions=[1],
            attention_mask=torch.ones(1, 2, dtype=torch.long),
        )


def test_nothing_to_return_is_an_error():
    with pytest.raises(ValueError, match="return_output"):
        ActorLanguage(small_model("qwen2"))(rows()[0])


def test_entropy_comes_with_the_output_when_asked_for():
    actor = ActorLanguage(small_model("qwen2"), high_entropy_token_ratio=0.2)
    ids, mask = rows()
    _, output = actor(ids, num_actions=4, attention_mask=mask, return_output=True)
    expected = torch.distributions.Categorical(logits=output.logits[:, -5:-1]).entropy()
    assert torch.allclose(output.action_entropy, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": False}, {"top_k": 5, "top_p": 0.9, "temperature": 0.7}]
)
def test_generate_yields_rows_and_masks(path, options):
    actor = ActorLanguage(path, bf16=False)
    ids, mask = rows()
    torch.manual_seed(0)
    sequences, attention, actions = actor.generate(
        ids, attention_mask=mask, max_new_tokens=6, eos_token_id=EOS, pad_token_id=PAD, **options
    )
    assert torch.equal(sequences[:, :6], ids[:, :6])
    assert attention.shape == sequences.shape
    assert actions.shape == (2, sequences.shape[1] - 7)
    assert actions[:, 0].all()
    actor(sequences, num_actions=actions.shape[1], attention_mask=attention)


def test_unknown_keywords_are_rejected(path):
    actor = ActorLanguage(path)
    with pytest.raises(TypeError, match="max_tokens"):
        actor.generate(rows()[0], max_tokens=3)
    with pytest.raises(TypeError):
        ActorLanguage(path, lora_ranks=3)
    with pytest.raises(TypeError):
        actor(rows()[0], pixel_values=None)


@pytest.mark.parametrize("which", ["path", "module"])
def test_lora_acts_on_a_path_and_on_a_module(path, which, capsys):
    actor = ActorLanguage(
        path if which == "path" else small_model("qwen2"), bf16=False, lora_rank=4, lora_alpha=8
    )
    trainable = [name for name, p in actor.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    actor.print_trainable_parameters()
    assert "trainable params" in capsys.readouterr().out
    with actor.actor.reference():
        actor(rows()[0], num_actions=2)
    with pytest.raises(ModelError, match="adapters already"):
        ActorLanguage(actor.model, lora_rank=4)


def test_what_is_printed_without_adapters_counts_everything(capsys):
    ActorLanguage(small_model("qwen2")).print_trainable_parameters()
    assert "trainable%: 100.0000" in capsys.readouterr().out
    critic = CriticLanguage(small_model("qwen2"), lora_rank=4)
    critic.print_trainable_parameters()
    counts = [
        sum(p.numel() for p in critic.parameters() if p.requires_grad or every)
        for every in (False, True)
    ]
    assert capsys.readouterr().out.startswith(
        f"trainable params: {counts[0]:,} || all params: {counts[1]:,} || trainable%: "
    )
    assert 0 < counts[0] < counts[1]


def test_bf16_sets_the_dtype_of_what_is_loaded(path):
    assert next(ActorLanguage(path).model.parameters()).dtype == torch.bfloat16
    assert next(ActorLanguage(path, bf16=False).model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("made", [ActorLanguage, CriticLanguage])
def test_gradient_checkpointing_goes_on_and_off(made):
    actor = made(small_model("qwen2"))
    actor.gradient_checkpointing_enable()
    assert actor.model.model.layers[0].gradient_checkpointing
    actor.gradient_checkpointing_disable()
    assert not actor.model.model.layers[0].gradient_checkpointing


def test_something_that_is_no_model_is_an_error():
    with pytest.raises(ModelError, match="Linear"):
        ActorLanguage(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="Linear"):
        CriticLanguage(torch.nn.Linear(2, 2))


class Causal(torch.nn.Module):
    """A language model of somebody else: a running mean of embeddings, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids) * mask[..., None]
        return {"logits": self.head(x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None])}


class Unmasked(Causal):
    """The same without a mask, which returns a tensor."""

    def forward(self, input_ids):
        return super().forward(input_ids)["logits"]


def test_any_module_with_the_forward_of_a_language_model_is_scored():
    model = Causal()
    actor = ActorLanguage(model, high_entropy_token_ratio=0.5)
    ids, mask = rows()
    logprobs, output = actor(ids, num_actions=3, attention_mask=mask, return_output=True)
    alone = [model(row[None])["logits"][0].log_softmax(-1) for row in (ids[0], ids[1, 2:])]
    expected = torch.stack(
        [a[:-1].gather(1, r[1:, None])[-3:, 0] for a, r in zip(alone, (ids[0], ids[1, 2:]))]
    )
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert torch.allclose(
        output.action_entropy[0], -(alone[0].exp() * alone[0]).sum(-1)[-4:-1], atol=1e-6
    )
    assert output.logits.shape == (2, 7, 100)
    logprobs.sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0
    assert torch.allclose(
        ActorLanguage(Unmasked())(ids[:1], num_actions=3)[0], expected[0], atol=1e-6
    )
    with pytest.raises(ModelError, match="attention_mask"):
        ActorLanguage(Unmasked())(ids, num_actions=3, attention_mask=mask)


def test_any_module_with_the_forward_of_a_language_model_generates():
    actor, (ids, mask) = ActorLanguage(Causal()), rows()
    limits = {"eos_token_id": EOS, "pad_token_id": PAD, "max_new_tokens": 5}
    sequences, attention, actions = actor.generate(
        ids[:, :6], attention_mask=mask[:, :6], do_sample=False, **limits
    )
    seen = ids[1, 2:6]
    for _ in range(5):
        seen = torch.cat([seen, actor.model(seen[None])["logits"][0, -1].argmax()[None]])
    assert sequences[1, 2:10].tolist() == seen[:-1].tolist()
    assert attention[1].tolist() == [0, 0] + [1] * 9
    assert actions.shape == (2, 5)
    torch.manual_seed(0)
    few = actor.generate(ids[:1], top_k=1, temperature=0.5, **limits)[0]
    assert torch.equal(few, actor.generate(ids[:1], do_sample=False, **limits)[0])
    assert actor.generate(ids[:1], top_p=0.9, **limits)[0].shape[1] <= 12
    with pytest.raises(ModelError, match="num_beams"):
        actor.generate(ids[:1], num_beams=2, **limits)


def test_a_response_of_a_module_ends_with_its_end_token():
    model = Causal()
    with torch.no_grad():
        model.head.bias[EOS] = 100.0
    actor = ActorLanguage(model)
    limits = {"eos_token_id": EOS, "pad_token_id": PAD, "max_new_tokens": 5}
    # One token, since min_new_tokens is 1, and the end.
    assert actor.generate(rows()[0][:1, :6], **limits)[0].shape[1] == 8
    assert actor.generate(rows()[0][:1, :6], min_new_tokens=0, **limits)[0].shape[1] == 7


def test_what_a_module_cannot_do_is_refused():
    for options in ({"lora_rank": 4}, {"packing_samples": True}):
        with pytest.raises(ModelError, match="Causal"):
            ActorLanguage(Causal(), **options)
    with pytest.raises(ModelError, match="gradient_checkpointing_enable"):
        ActorLanguage(Causal()).gradient_checkpointing_enable()


def test_flash_attention_that_cannot_run_falls_back_with_a_warning(path, caplog, monkeypatch):
    monkeypatch.setattr("lightrft.models.public.actor.is_flash_attn_2_available", lambda: False)
    ids, mask = rows()
    expected = ActorLanguage(path, bf16=False)(ids, num_actions=3, attention_mask=mask)
    assert "flash" not in caplog.text
    for made in (ActorLanguage, CriticLanguage):
        caplog.clear()
        model = made(path, use_flash_attention_2=True, bf16=False)
        assert "use_flash_attention_2 = True, but flash-attn is not installed" in caplog.text
    actor = ActorLanguage(path, use_flash_attention_2=True, bf16=False)
    assert torch.equal(actor(ids, num_actions=3, attention_mask=mask), expected)
    assert model(ids, num_actions=3, attention_mask=mask).shape == (2, 3)


def test_the_text_actor_takes_no_pictures_and_says_so(path):
    actor = ActorLanguage(path, bf16=False)
    given = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": EOS, "pad_token_id": PAD}
    plainly = actor.generate(rows()[0][:1], **given)[0]
    assert torch.equal(
        actor.generate(rows()[0][:1], pixel_values=None, image_grid_thw=None, **given)[0], plainly
    )
    for name in ("pixel_values", "image_grid_thw"):
        with pytest.raises(ModelError, match=f"{name}: ActorLanguage reads text alone"):
            actor.generate(rows()[0], **{name: torch.ones(1, 3)}, **given)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_critic_gives_values_of_the_states_before_actions(path, normalize):
    model = small_model("qwen2")
    model.config.mean, model.config.std = 1.5, 2.0
    critic = CriticLanguage(model, normalize_reward=normalize, value_head_prefix="score")
    ids, mask = rows()
    values, everything = critic(ids, num_actions=3, attention_mask=mask, return_output=True)
    states = critic.critic.base.model(input_ids=ids[1:, 2:]).last_hidden_state[0]
    expected = critic.score(states)[-4:-1, 0]
    expected = (expected - 1.5) / 2.0 if normalize else expected
    assert torch.allclose(values[1], expected, atol=1e-5)
    assert everything.shape == (2, 7)
    packed = CriticLanguage(small_model("qwen2"), packing_samples=True)
    flat = packed(
        ids[:1],
        num_actions=[2, 1],
        attention_mask=torch.tensor([[1, 1, 1, 1, 2, 2, 2]]),
        packed_seq_lens=[4, 3],
    )
    assert flat.shape == (1, 3)


def test_processed_sequences_follow_the_documented_rules():
    sequences = torch.tensor(
        [
            # Stopped: an end token inside the prompt stays attended.
            [
                PAD,
                10,
                EOS,
                11,
                12,
                EOS,
                PAD,
                PAD,
            ],
            # Cut by the limit: its last token becomes the end token.
            [
                10,
                11,
                12,
                13,
                14,
                15,
                16,
                17,
            ],
            [PAD, PAD, 10, 11, EOS, EOS, EOS, EOS],  # stopped at once
        ]
    )
    before = sequences.clone()
    found, attention, actions = utils.process_sequences(sequences, 4, EOS, PAD)
    assert torch.equal(sequences, before)
    assert found.tolist() == [
        [PAD, 10, EOS, 11, 12, EOS, PAD, PAD],
        [10, 11, 12, 13, 14, 15, 16, EOS],
        [PAD, PAD, 10, 11, EOS, EOS, EOS, EOS],
    ]
    assert attention.tolist() == [[0, 1, 1, 1, 1, 1, 0, 0], [1] * 8, [0, 0, 1, 1, 1, 0, 0, 0]]
    assert actions.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_positions_restart_with_each_packed_sample():
    mask = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 0]])
    assert utils.reset_position_ids(mask).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 0],
        [0, 0, 1, 2, 3, 4, 5, 0],
    ]


def test_kl_estimates_follow_their_formulas_and_the_mask():
    d = torch.tensor([[0.5, -0.25]], dtype=torch.float64)
    base = torch.zeros_like(d)
    assert utils.compute_approx_kl(d, base).tolist() == [[0.5, -0.25]]
    assert utils.compute_approx_kl(d, base, kl_estimator="k2").tolist() == [[0.125, 0.03125]]
    assert torch.allclose(utils.compute_approx_kl(d, base, kl_estimator="k3"), (-d).exp() - 1 + d)
    assert utils.compute_approx_kl(d, base, torch.tensor([[1, 0]]), "k1").tolist() == [[0.5, 0.0]]
    with pytest.raises(ValueError, match="k4"):
        utils.compute_approx_kl(d, base, kl_estimator="k4")


def test_the_reward_lands_on_the_last_action():
    kl, mask = torch.full((3, 4), 2.0), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    found = utils.compute_reward(
        torch.tensor([1.0, 20.0, 5.0]), 0.1, kl, mask, reward_clip_range=(-10, 10)
    )
    assert torch.allclose(
        found, torch.tensor([[-0.2, 0.8, 0, 0], [-0.2, -0.2, -0.2, 9.8], [0, 0, 0, 0]])
    )
    assert torch.equal(
        utils.compute_reward(torch.ones(3), -1.0, kl, mask).sum(1), torch.tensor([1.0, 1.0, 0.0])
    )
    pieces = utils.compute_reward(
        torch.tensor([1.0, 2.0]), 0.5, [torch.ones(2), torch.ones(1)], num_actions=[2, 1]
    )
    assert [p.tolist() for p in pieces] == [[-0.5, 0.5], [1.5]]


def test_the_high_entropy_mask_keeps_the_top_share_of_each_row():
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.7], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert utils.create_high_entropy_mask(entropy, mask, 0.5).tolist() == [
        [0, 1, 0, 1],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]
    assert utils.create_high_entropy_mask(entropy, mask, 0.01).tolist() == [
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 0],
    ]
    assert utils.create_high_entropy_mask(entropy, mask, 0.0).tolist() == mask.tolist()
    assert utils.create_high_entropy_mask(entropy, None, 0.5).tolist() == [
        [0, 1, 0, 1],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
    ]
    assert utils.create_high_entropy_mask(entropy, None, 1.0).tolist() == torch.ones(3, 4).tolist()


def test_linear_modules_are_found_by_their_last_names():
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert utils.find_all_linear_modules(small_model("qwen2"), True) == names
    assert utils.find_all_linear_modules(small_model("qwen2"), False) == names


def test_masked_means_and_unpacking():
    x, mask = torch.tensor([[1.0, 3.0], [torch.nan, 5.0]]), torch.tensor([[1, 1], [0, 0]])
    assert utils.masked_mean(x, mask).item() == 2.0
    assert utils.masked_mean(x, mask, 1).tolist() == [2.0, 0.0]
    assert [p.tolist() for p in utils.unpacking_samples(torch.arange(5)[None], [2, 3])] == [
        [0, 1],
        [2, 3, 4],
    ]
    with pytest.raises(ValueError, match="add up to 4"):
        utils.unpacking_samples(torch.arange(5), [2, 2])


def test_modalities_name_their_inputs():
    assert ActorText is ActorLanguage
    assert ActorLanguage.modality is ActorModality.LANGUAGE_ONLY
    assert models.get_supported_parameters(ActorModality.LANGUAGE_ONLY) == set()
    assert models.supports_parameter(ActorModality.VISION_LANGUAGE, "pixel_values")
    assert not models.supports_parameter(ActorModality.AUDIO_LANGUAGE, "pixel_values")
    omni = models.MODALITY_PARAMETERS[ActorModality.OMNI]
    assert omni == models.MODALITY_PARAMETERS[ActorModality.VISION_LANGUAGE] | {"audio_values"}
    assert [m.value for m in ActorModality] == ["text", "vision", "audio", "multimodal"]


def test_every_public_name_exists_and_importing_the_package_loads_no_torch():
    assert all(getattr(models, name) is not None for name in models.__all__)
    code = (
        "import sys, lightrft.models; sys.exit('torch' in sys.modules or 'transformers' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
