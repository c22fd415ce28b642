"""What differs between model families, one row each. A family that is not listed starts from the generic row, and the check of
the layout on a run's first batch says whether that was right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from lightrft.models import towers, towers_audio, towers_tiles
from lightrft.models.settings import Layout


@dataclass(frozen=True, slots=True)
class Family:
    """``loader`` names the transformers class, where it is not the one for causal language models, and ``reader`` says how the
    family reads what is not text.

    ``decoder``: path of the module that yields last hidden states. ``softcap``, ``multiplier`` and ``divisor`` name config
    fields that bend and scale the head's output. ``layout`` is the leanest layout that can be right; ``padded_attention`` is the
    implementation of transformers that honours everything the family's attention does."""

    decoder: str = "model"
    softcap: str = "final_logit_softcapping"
    multiplier: str | None = None
    divisor: str | None = None
    layout: Layout = "prefix_shared"
    padded_attention: str = "sdpa"
    loader: str = "AutoModelForCausalLM"
    reader: towers.Reader | None = None


_LANGUAGE = "model.language_model"

# A state that is carried from token to token cannot branch at the end of a prompt, nor restart in the middle of a row.
_RECURRENT = Family(layout="padded")

FAMILIES: dict[str, Family] = {
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "llama": Family(),
    "mistral": Family(),
    "gemma2": Family(padded_attention="eager"),  # scores are soft-capped
    "gemma3_text": Family(),
    "phi3": Family(),
    "olmo2": Family(),
    "cohere": Family(multiplier="logit_scale"),
    "cohere2": Family(multiplier="logit_scale"),
    "granite": Family(divisor="logits_scaling"),
    "granitemoe": Family(divisor="logits_scaling"),
    "gpt2": Family(decoder="transformer"),
    "gpt_oss": Family(layout="padded", padded_attention="eager"),  # learned attention sinks
    "qwen3_next": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "mamba": Family(decoder="backbone", layout="padded"),
    "mamba2": Family(decoder="backbone", layout="padded"),
    "falcon_h1": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "qwen2_vl": Family(decoder=_LANGUAGE, loader="Qwen2VLForConditionalGeneration", reader=towers.QWEN2_VL),
    "qwen2_5_vl": Family(decoder=_LANGUAGE, loader="Qwen2_5_VLForConditionalGeneration", reader=towers.QWEN2_5_VL),
    "qwen3_vl": Family(decoder=_LANGUAGE, loader="Qwen3VLForConditionalGeneration", reader=towers.QWEN3_VL),
    "qwen3_vl_moe": Family(decoder=_LANGUAGE, loader="Qwen3VLMoeForConditionalGeneration", reader=towers.QWEN3_VL),
    "internvl": Family(decoder=_LANGUAGE, loader="InternVLForConditionalGeneration", reader=towers_tiles.INTERNVL),
    "llava_onevision": Family(decoder=_LANGUAGE, loader="LlavaOnevisionForConditionalGeneration", reader=towers_tiles.ONEVISION),
    "qwen2_audio": Family(decoder=_LANGUAGE, loader="Qwen2AudioForConditionalGeneration", reader=towers_audio.QWEN2_AUDIO),
    "voxtral": Family(decoder=_LANGUAGE, loader="VoxtralForConditionalGeneration", reader=towers_audio.VOXTRAL),
    "gemma3": Family(decoder=_LANGUAGE, loader="Gemma3ForConditionalGeneration", reader=towers.GEMMA_3),
    "smolvlm": Family(decoder="model.text_model", loader="SmolVLMForConditionalGeneration", reader=towers.SMOL_VLM),
    "qwen2_5_omni_thinker": Family(
        decoder=_LANGUAGE, loader="Qwen2_5OmniThinkerForConditionalGeneration", reader=towers_audio.OMNI
    ),
}

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def context_length(config: PreTrainedConfig) -> int | None:
    """Tokens that a model of ``config`` was made for, with rotary scaling; ``None`` where it sets no bound."""
    fields = config.get_text_config(decoder=True).to_dict()
    bound = fields.get("max_position_embeddings")
    rope = fields.get("rope_parameters") or {}
    scaled = [
        int(part["original_max_position_embeddings"] * part["factor"])
        for part in (rope, *rope.values())
        if isinstance(part, dict) and part.get("original_max_position_embeddings") and part.get("factor")
    ]
    return None if bound is None else max(bound, *scaled) if scaled else bound


def family_of(config: PreTrainedConfig) -> Family:
    """The row of ``config.model_type``, or the generic one: padded where some layer is not plain or sliding attention."""
    known = FAMILIES.get(config.model_type)
    if known is not None:
        return known
    kinds = set(_field(config, "layer_types") or ())
    capped = _field(config, "attn_logit_softcapping") is not None
    return Family(layout="prefix_shared" if kinds <= _KNOWN_LAYERS else "padded", padded_attention="eager" if capped else "sdpa")


def decoder_of(model: nn.Module, family: Family) -> nn.Module:
    """The module of ``model`` that yields last hidden states."""
    try:
        return model.get_submodule(family.decoder)
    except AttributeError:
        return model.get_decoder()  # ty: ignore[not-callable]


def head_transform(config: PreTrainedConfig, family: Family) -> tuple[float | None, float | None]:
    """Soft-cap of the logits, and the factor from the head's output to them, as the config sets them."""
    multiplier = _field(config, family.multiplier)
    divisor = _field(config, family.divisor)
    scale = multiplier if divisor is None else 1.0 / divisor
    return _field(config, family.softcap), scale


def _field(config: PreTrainedConfig, name: str | None) -> Any:
    """Configs of some families have no such field at all: for them it means nothing."""
    return vars(config).get(name) if name else None
