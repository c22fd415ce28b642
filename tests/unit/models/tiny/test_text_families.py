"""The table of tiny models holds every text family that transformers can make."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.tiny.text_families import OTHERS, TEXT_FAMILIES, family_config, family_model
from lightrft.utils.errors import ModelError


def test_every_causal_model_of_transformers_is_in_the_table_or_named_with_the_reason_why_not():
    others = {name for names in OTHERS.values() for name in names}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(TEXT_FAMILIES) - others == set()
    assert not others & set(TEXT_FAMILIES)


def test_a_tiny_model_has_no_weight_at_an_initial_0_or_1_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    model = family_model("gpt2")
    assert torch.equal(before, torch.get_rng_state())
    assert not any(bool(((p == 0) | (p == 1)).any()) for p in model.parameters())


def test_a_family_that_is_not_in_the_table_is_named():
    with pytest.raises(ModelError, match="unknown family 'bert'"):
        family_config("bert")
