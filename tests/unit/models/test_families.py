"""Every family of the table is proved on a tiny model; every other is refused with a message, and so is a head that is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from benchmarks.families import prove, stored
from lightrft.config.model import ModelConfig
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.attention.layout_check import check_layout
from lightrft.models.families import FAMILIES, UNREAD, attention_reach
from lightrft.models.loading.from_pretrained import load_model
from lightrft.models.loading.meta_device import meta_model
from lightrft.models.tiny import ALL_MEDIA_FAMILIES
from lightrft.models.tiny.text_families import TEXT_FAMILIES, WINDOW, family_config, family_model
from lightrft.types import Rollout
from lightrft.utils.errors import ModelError
from tests.model_helpers import by_family, ragged_batch, unproved_model

KNOWN = [family for family in TEXT_FAMILIES if not FAMILIES[family].refused]
REFUSED = [family for family in TEXT_FAMILIES if FAMILIES[family].refused]


@pytest.mark.parametrize("family", by_family(KNOWN))
def test_a_family_loads_scores_in_three_layouts_and_learns_as_its_own_forward_says(
    family, tmp_path
):
    """What it samples is proved in ``tests/unit/engines/test_engine_families.py``."""
    proof = prove(family, tmp_path, sampling=False)
    assert (proof.verdict, proof.reason) == ("right", "")
    assert proof.layout == FAMILIES[family].layout


@pytest.mark.parametrize("family", ["qwen3", "mamba"])
def test_the_proof_of_a_family_includes_what_it_samples(family, tmp_path, monkeypatch):
    proof = prove(family, tmp_path / "right")
    assert (proof.verdict, proof.reason) == ("right", "")
    assert proof.decoding
    monkeypatch.setattr(
        NativeEngine,
        "generate",
        lambda engine, requests, sampling: [_unlikely(r) for r in requests],
    )
    proof = prove(family, tmp_path / "wrong")
    assert proof.verdict == "wrong"
    assert "log-probs of sampled tokens differ" in proof.reason


def _unlikely(request):
    """Return an answer whose log-prob is not the model's."""
    return Rollout(request.prompt, [7], [True], [-50.0], [0], "stop", request.seed)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused_with_the_reason(family, tmp_path):
    proof = prove(family, tmp_path)
    assert proof.verdict == "refused"
    assert FAMILIES[family].refused in proof.reason


def test_every_row_has_a_tiny_model_and_at_least_95_text_families_are_right():
    assert set(FAMILIES) - set(ALL_MEDIA_FAMILIES) - {"qwen2_5_omni_thinker"} <= set(TEXT_FAMILIES)
    assert len(KNOWN) >= 95
    assert len(REFUSED) <= 5


def test_the_committed_result_names_every_family_with_the_verdict_of_its_row():
    found = {proof.family: proof for proof in stored()}
    assert set(found) == {*TEXT_FAMILIES, *ALL_MEDIA_FAMILIES}
    for name, proof in found.items():
        family = FAMILIES.get(name, FAMILIES["qwen2_5_omni_thinker"])
        assert proof.verdict == ("refused" if family.refused else "right")
        if family.own is None:
            assert proof.layout == ("" if family.refused else family.layout)


def test_a_family_without_a_row_is_refused_with_the_setting_that_allows_it(tmp_path):
    unproved_model().save_pretrained(tmp_path)
    for load in (load_model, meta_model):
        with pytest.raises(
            ModelError,
            match=r"'trocr' is not known.*model\.unproved_family=allow.*Known families: .*qwen3",
        ):
            load(ModelConfig(path=str(tmp_path)))
    actor = Actor.load(ModelConfig(path=str(tmp_path), unproved_family="allow"))
    assert check_layout(actor, ragged_batch([9, 4], [5, 6, 7], [0, 0, 1])) == ""
    assert actor.layout == "padded"


UNKNOWN_WITH_PARTS = ("blip-2", "instructblip")


@pytest.mark.parametrize("family", UNKNOWN_WITH_PARTS)
@pytest.mark.parametrize("allowed", ["refuse", "allow"])
def test_an_unknown_family_with_parts_besides_text_is_refused_and_never_loaded_in_part(
    family, allowed, tmp_path
):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=rf"'{family}' is not known.*would be left out.*qwen2_5_vl"
    ) as error:
        load_model(ModelConfig(path=str(tmp_path), unproved_family=allowed))
    assert "weights" not in str(error.value)


@pytest.mark.parametrize("family", UNREAD)
@pytest.mark.parametrize("allowed", ["refuse", "allow"])
def test_a_family_whose_media_cannot_be_read_is_refused_with_the_reason(family, allowed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    config = ModelConfig(path=str(tmp_path), unproved_family=allowed)
    for load in (load_model, meta_model):
        with pytest.raises(ModelError) as error:
            load(config)
        assert f"models of type {family!r} are not supported: {UNREAD[family]}" in str(error.value)


def test_no_family_is_both_read_and_refused():
    assert not set(UNREAD) & set(FAMILIES)


def test_an_attention_that_the_class_lacks_is_blamed_instead_of_the_weights(tmp_path):
    family_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"model\.attention = 'flex_attention'.*no model can be made"
    ) as error:
        load_model(ModelConfig(path=str(tmp_path), attention="flex_attention"))
    assert "weights" not in str(error.value)


def test_weights_that_are_damaged_are_blamed_themselves(tmp_path):
    family_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="the weights cannot be read"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_head_that_cuts_its_logits_is_refused_when_the_model_is_loaded(tmp_path):
    family_model("inkling_text", unpadded_vocab_size=90).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"'inkling_text' cannot be scored: its head gives .* its own forward 90"
    ):
        Actor.load(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    "family", ["granite", "cohere2_moe", "falcon_h1", "minicpm3", "recurrent_gemma", "hyperclovax"]
)
def test_a_scale_that_no_row_names_is_refused_when_the_model_is_loaded(
    family, tmp_path, monkeypatch
):
    family_model(family).save_pretrained(tmp_path)
    Actor.load(ModelConfig(path=str(tmp_path)))
    monkeypatch.setattr("lightrft.models.actor.head_transform", lambda config, row: (None, None))
    with pytest.raises(
        ModelError, match=rf"'{family}' cannot be scored: its own logits differ from its head's"
    ):
        Actor.load(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize("family", ["phimoe", "mpt", "falcon", "nemotron"])
def test_the_layout_check_sees_beyond_the_window_when_the_first_batch_is_shorter(family):
    """phimoe's window is in its mask alone; the others raise when their attention is exchanged."""
    actor = Actor(family_model(family))
    actor.layout = "prefix_shared"
    reason = check_layout(actor, ragged_batch([2], [3, 2], [0, 0]))
    assert "layout prefix_shared" in reason
    assert actor.layout == "padded"


def test_the_long_rows_of_the_layout_check_reach_beyond_the_window_and_no_further_than_the_run(
    monkeypatch,
):
    actor = Actor(family_model("mistral"))
    seen = []
    own = Actor.own_logprobs
    monkeypatch.setattr(
        Actor, "own_logprobs", lambda self, rows, at=None: seen.append(rows) or own(self, rows, at)
    )
    batch = ragged_batch([2], [3, 2], [0, 0])
    lengths = {}
    for longest in (None, 40, 5):
        seen.clear()
        actor.longest_row = longest
        assert check_layout(actor, batch) == ""
        lengths[longest] = [
            int((rows.prompts.lengths[rows.prompt_of] + rows.lengths).max()) for rows in seen
        ]
    assert lengths == {None: [5, WINDOW + 64], 40: [5, 40], 5: [5]}


def test_the_reach_of_attention_is_the_longest_length_that_the_config_names():
    assert attention_reach(family_config("llama"), 8192) == 0
    assert attention_reach(family_config("llama4_text"), 8192) == WINDOW
    assert attention_reach(family_config("apertus"), 8192) == 32
    assert attention_reach(family_config("mistral", sliding_window=9000), 8192) == 0


def test_text_models_that_transformers_runs_eagerly_load_without_a_setting(tmp_path):
    for family in ("mamba", "mamba2", "gpt_neo", "gptj", "bloom", "codegen", "xglm"):
        family_model(family).save_pretrained(tmp_path / family)
        model = load_model(ModelConfig(path=str(tmp_path / family)))
        assert model.config._attn_implementation == "eager"
        assert json.loads((tmp_path / family / "config.json").read_text())["model_type"] == family


class OwnConfig(PreTrainedConfig):
    model_type = "own_model"

    def __init__(self, vocab_size: int = 100, hidden_size: int = 8, **more: Any) -> None:
        super().__init__(**more)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1


class OwnLayers(nn.Module):
    """Each token sees the mean of the tokens so far."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids: Any, attention_mask: Any = None, **unread: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = self.embed(input_ids) * mask[..., None]
        count = mask.cumsum(1).clamp(min=1)[..., None]
        return BaseModelOutputWithPast(last_hidden_state=self.mix(states.cumsum(1) / count).tanh())


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    absent = ""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.layers = OwnLayers(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return None if self.absent == "get_input_embeddings" else self.layers.embed

    def get_output_embeddings(self) -> Any:
        return None if self.absent == "get_output_embeddings" else self.head

    def get_decoder(self) -> Any:
        return self if self.absent == "get_decoder" else self.layers

    def forward(self, input_ids: Any, attention_mask: Any = None, **unread: Any) -> Any:
        states = self.layers(input_ids, attention_mask).last_hidden_state
        if self.absent == "forward":
            return (self.head(states),)
        return CausalLMOutputWithPast(logits=self.head(states))


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    AutoConfig.register("own_model", OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)
    torch.manual_seed(0)
    OwnModel(OwnConfig()).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_the_users_own_trains_by_its_own_forward(own_model: Path) -> None:
    actor = Actor.load(ModelConfig(path=str(own_model), unproved_family="allow"))
    batch = ragged_batch([9, 4], [5, 6, 7], [0, 0, 1])
    assert check_layout(actor, batch) == ""
    assert actor.layout == "padded"
    actor(batch)[0].sum().backward()
    assert actor.base.layers.embed.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("load", [load_model, meta_model])
@pytest.mark.parametrize(
    "absent", ["get_input_embeddings", "get_output_embeddings", "forward", "get_decoder"]
)
def test_a_member_that_a_model_lacks_is_named(
    load: Any, absent: str, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnModel, "absent", absent)
    with pytest.raises(ModelError, match=rf"OwnModel\.{absent}\(.*must return .*docs/families"):
        load(ModelConfig(path=str(own_model), unproved_family="allow"))
