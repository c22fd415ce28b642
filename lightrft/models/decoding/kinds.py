"""The way to decode each model type: by an attention plan, or with its own cache.

Tests prove it for each type.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig

from lightrft.models.families import family_of

PLAN_FAMILIES: frozenset[str] = frozenset(
    (
        *("apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere"),
        *("cohere2", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
        *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2"),
        *("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4"),
        *("glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "granite"),
        *("granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3"),
        *("iquestcoder", "jais2", "kolibri1", "laguna", "llama", "longcat_flash", "mellum"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo"),
        *("olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"),
        "youtu",
        # models of several modalities, and their text models
        *(
            "gemma3",
            "idefics3",
            "internvl",
            "llava_onevision",
            "qwen2_5_omni_text",
            "qwen2_5_omni_thinker",
        ),
        *("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio", "qwen2_vl", "qwen2_vl_text"),
        *("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "smolvlm"),
        *("granite4_vision_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "voxtral"),
    )
)
"""Model types that decode by an attention plan.

``tests/unit/engines/test_engine_families.py`` compares each with the model's own forward. Other
types decode with their own cache, which is slower: a plan has no recurrent state, sink, ALiBi or
chunk.
"""

PLAN_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of attention that a plan supports. A config of a listed type with another kind decodes with
its own cache."""

REREADING_FAMILIES = frozenset({"qwen4_exp_text", "recurrent_gemma"})
"""Model types whose cache cannot be copied for each response. They run over the whole prefix for
each token.

recurrent_gemma keeps its state in its modules, and the cache of qwen4_exp_text has tensors without
a row axis.
"""

LONE_FAMILIES = frozenset({"rwkv"})
"""Model types that step one row at a time. transformers 5.23 mixes the rows of rwkv in a step of
several."""

_STEP_FLOOR_FAMILIES = frozenset({"nemotron_h", "zamba2"})
"""Model types that read the lower bound of a recurrent layer's time step from ``time_step_min``."""


def decodes_by_plan(config: PreTrainedConfig) -> bool:
    """Return ``True`` if tests prove that a model of ``config`` decodes by an attention plan."""
    text = config.get_text_config(decoder=True)
    family = family_of(config)
    if family.own_forward is not None:
        return False
    # A family with methods of its own merges media before the first layer, as the others do.
    types = {text.model_type} if family.own else {config.model_type, text.model_type}
    if not types <= PLAN_FAMILIES:
        return False
    return set(text.to_dict().get("layer_types") or ()) <= PLAN_LAYERS


def rereads_prefix(config: PreTrainedConfig) -> bool:
    """Return ``True`` if the cache of a model of ``config`` cannot be used.

    It is unusable, or gives other log-probs than the model's own forward. transformers bounds the
    time step of mamba2's layers in a forward over many tokens, but not in a step of one token.
    """
    text = config.get_text_config(decoder=True)
    if text.model_type in REREADING_FAMILIES:
        return True
    fields = text.to_dict()
    if text.model_type in _STEP_FLOOR_FAMILIES:
        return fields["time_step_min"] > 0
    low, high = fields.get("time_step_limit") or (0.0, float("inf"))
    return low > 0 or high < float("inf")


class LengthBound(NamedTuple):
    """The length up to which a token's log-prob depends only on earlier tokens.

    ``reason`` is the reason for the bound.
    """

    tokens: int
    reason: str


def length_bound(config: PreTrainedConfig) -> LengthBound | None:
    """Return the length bound of a model of ``config``. It is ``None`` if there is none.

    Beyond it a token's log-prob depends on other tokens of the row, or on the order of equal
    numbers. Token-by-token sampling then differs from training.
    """
    text = config.get_text_config(decoder=True)
    fields = text.to_dict()
    bounds: list[LengthBound] = []
    rope = fields.get("rope_parameters") or {}
    changes = "changes the frequencies of all tokens there"
    # one set of parameters, or one for each kind of layer
    for part in (rope, *rope.values()):
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "longrope":
            tokens = part["original_max_position_embeddings"]
            bounds.append(LengthBound(tokens, f"rope_type longrope {changes}"))
        elif isinstance(kind, str) and "dynamic" in kind:
            tokens = fields["max_position_embeddings"]
            bounds.append(LengthBound(tokens, f"rope_type {kind} {changes}"))
    for name in ("keep_window_size", "index_topk"):
        if fields.get(name):
            reason = f"{name} keys are chosen there, among equal ones by chance"
            bounds.append(LengthBound(fields[name], reason))
    return min(bounds, default=None)
