"""Names of parameters in vLLM. ``tests/contracts/test_engine_media.py`` has the real class."""

from __future__ import annotations

import pytest

from lightrft.engines.vllm_parts.parameter_names import vllm_name
from lightrft.utils.errors import ModelError


def test_names_that_vllm_maps_itself_stay() -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    assert vllm_name("qwen2_vl", name) == name


def test_a_parameter_without_a_known_name_in_vllm_is_refused() -> None:
    assert vllm_name("qwen2_audio", "model.audio_tower.conv1.bias") == "audio_tower.conv1.bias"
    with pytest.raises(ModelError, match=r"'model\.new_part\.bias'.*engine\.kind=native"):
        vllm_name("qwen2_audio", "model.new_part.bias")
