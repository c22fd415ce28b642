"""The function that builds the parts of each family."""

from __future__ import annotations

from lightrft.models.processors import audio, gemma, own, qwen, smolvlm, tiles
from lightrft.models.processors.base import Build

BUILD: dict[str, Build] = {
    "qwen2_vl": qwen.build,
    "qwen2_5_vl": qwen.build,
    "qwen3_vl": qwen.build,
    "qwen3_vl_moe": qwen.build,
    "qwen3_5": qwen.build,
    "qwen3_5_moe": qwen.build,
    "internvl": tiles.internvl,
    "llava_onevision": tiles.onevision,
    "qwen2_audio": audio.qwen2_audio,
    "voxtral": audio.voxtral,
    "gemma3": gemma.build,
    "smolvlm": smolvlm.build,
    "idefics3": smolvlm.build,
    "qwen2_5_omni_thinker": audio.omni,
    "qwen3_omni_moe_thinker": audio.omni,
}


def build_of(model_type: str) -> Build:
    """Return the function that builds the parts of ``model_type``."""
    return BUILD.get(model_type, own.build)
