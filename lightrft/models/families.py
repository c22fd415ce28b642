"""A table of model families: how to load, score and decode each one.

A test on a tiny model proves each row.

``benchmarks/families.py`` and ``tests/unit/models/test_families.py`` prove the rows. A family
without a row is refused at start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.config.model import Layout
from lightrft.models.multimodal import audio_towers, derived, towers
from lightrft.utils.errors import ModelError, first_line


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one family from a plain transformer decoder.

    Attributes:
        decoder: Path of the module that yields last hidden states. Empty uses the model's
            ``get_decoder``.
        softcap: Config field with the soft-cap of the logits.
        multiplier: Config field by which the head's output is multiplied.
        divisor: Config field by which the head's output is divided.
        layout: The most efficient layout that is exact.
        padded_attention: The transformers implementation that supports all of the family's
            attention. ``None`` leaves the choice to transformers.
        loader: The transformers class that loads the model.
        reader: The towers and inputs of a multimodal family. ``None`` for text alone.
        refused: The reason why no model of the family can be trained. ``None`` for families that
            can.
        own: The family reads media by its own processor and methods. ``family_of`` gives it a
            reader, and the rest of its text model's row. ``None`` for other families.
    """

    decoder: str = "model"
    softcap: str = "final_logit_softcapping"
    multiplier: str | None = None
    divisor: str | None = None
    layout: Layout = "prefix_shared"
    padded_attention: str | None = "sdpa"
    loader: str = "AutoModelForCausalLM"
    reader: towers.ModalityEncoder | None = None
    refused: str | None = None
    own: derived.Own | None = None

    @property
    def reads_media(self) -> bool:
        """``True`` for a family with inputs besides text."""
        return self.reader is not None or self.own is not None

    @property
    def own_forward(self) -> towers.OwnForward | None:
        """Rules by which the model's own forward reads media. ``None``: features replace
        embeddings."""
        return None if self.reader is None else self.reader.own_forward

    @property
    def loaded_attention(self) -> str | None:
        """The implementation to load a model with. ``None`` leaves the choice to transformers,
        since not every tower supports the usual one."""
        return None if self.own and self.padded_attention == "sdpa" else self.padded_attention

    @property
    def is_prefix_lm(self) -> bool:
        """``True`` if the tokens of a prompt attend to each other in both directions."""
        return self.reader is not None and self.reader.both_ways == "prompt"


_LANGUAGE = "model.language_model"

_PLAIN = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cwm"),
    *("dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "helium"),
    *("hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder"),
    *("jais2", "jetmoe", "kolibri1", "laguna", "llama", "longcat_flash", "mellum", "minimax_m2"),
    *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo"),
    *("olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2"),
)
"""Every layer attends through transformers' attention interface, with at most a sliding window or a
soft-cap."""

_OWN_ATTENTION = (
    *("axk2", "bailing_hybrid", "bamba", "deepseek_v32", "doge", "dots3_note_text", "falcon"),
    *("glm_moe_dsa", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama4_text"),
    *("minimax", "nemotron", "nemotron_h", "olmo_hybrid", "phimoe", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_next", "qwen4_exp_text", "stablelm", "zamba", "zamba2", "zaya"),
)
"""Some layer carries a recurrent state, selects keys, or bypasses the attention interface. Only the
``padded`` layout is exact."""

_OWN_EAGER_ATTENTION = (*("deepseek_v4", "flint", "gpt_oss", "hy_v4", "mimo_v2_flash"),)
"""As ``_OWN_ATTENTION``, where only the eager implementation is exact: learned sinks or position
biases."""

# nothing is assumed: the model's own decoder and attention, over one sample per row
_UNPROVED = Family(decoder="", layout="padded", padded_attention=None)
_PADDED = Family(layout="padded")
_EAGER = Family(layout="padded", padded_attention="eager")
_GPT = Family(decoder="transformer")
_MAMBA = replace(_EAGER, decoder="backbone")
_GRANITE = Family(divisor="logits_scaling")

_OWN = derived.Own()
_PALIGEMMA = """{%- for message in messages -%}
{%- if message.role == 'user' and loop.first -%}
{%- if message.content is string -%}{{ bos_token + message.content + '\\n' }}
{%- else -%}
{%- for part in message.content if part.type == 'image' -%}<image>{%- endfor -%}
{{- bos_token -}}
{%- for part in message.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{{- '\\n' -}}
{%- endif -%}
{%- elif message.role == 'assistant' and loop.index == 2 -%}
{{- message.content + eos_token -}}
{%- else -%}
{{- raise_exception('PaliGemma reads one question, and no ' + message.role + ' message more') -}}
{%- endif -%}
{%- endfor -%}"""
"""A prompt as ``PaliGemmaProcessor`` writes it: pictures, the token of the beginning, the question,
and a line break."""

_OWN_MEDIA = {
    "aria": _OWN,
    "aya_vision": derived.Own(plain_head=True),
    "cohere2_vision": derived.Own(plain_head=True),
    "cosmos3_edge": _OWN,
    "cosmos3_omni": _OWN,
    "deepseek_vl": _OWN,
    "deepseek_vl_hybrid": _OWN,
    "ernie4_5_vl_moe": derived.Own(marks=("image_start_token_id", "image_end_token_id")),
    "audioflamingo3": _OWN,
    "exaone4_5": _OWN,
    "fast_vlm": _OWN,
    "fun_asr_nano": _OWN,
    "gemma3n": derived.Own(forward=derived.GEMMA3N),
    "gemma4": _OWN,
    "glm46v": _OWN,
    "glm4v": _OWN,
    "glm4v_moe": _OWN,
    "glm_ocr": _OWN,
    "granite_speech": _OWN,
    "granite_speech_plus": _OWN,
    "glmasr": _OWN,
    "qwen3_asr": _OWN,
    "glmga": _OWN,
    "granite4_vision": derived.Own(deep=True, text="granite"),
    "hunyuan_vl": derived.Own(text="hunyuan_v1_dense"),
    "hyperclovax_vision_v2": _OWN,
    "idefics2": _OWN,
    "janus": _OWN,
    "kimi_k25": _OWN,
    "lfm2_vl": _OWN,
    "lfm3_vl": _OWN,
    "lighton_ocr": _OWN,
    "mllama": derived.Own(forward=derived.MLLAMA, writes_start=True),
    "minicpmv4_6": _OWN,
    "minicpmv4_7": _OWN,
    "mistral3": _OWN,
    "molmo2": derived.Own(
        forward=derived.MOLMO2,
        marks=(*derived.MOLMO2_STARTS, *derived.MOLMO2_ENDS),
        adds_start=True,
        text="qwen3",
    ),
    "moss_transcribe_diarize": _OWN,
    "musicflamingo": derived.Own(forward=derived.SOUNDS),
    "ovis2": derived.Own(featured="visual_indicator_token_ids"),
    "perception_lm": _OWN,
    "paddleocr_vl": derived.Own(text="ernie4_5"),
    "phi4_multimodal": derived.Own(forward=derived.PHI4_MULTIMODAL, decoder="model", text="phi3"),
    "paligemma": derived.Own(prefix=True, chat_template=_PALIGEMMA),
    "llama4": derived.Own(decoder="language_model.model", projector="multi_modal_projector"),
    "llava": _OWN,
    "llava_next": _OWN,
    "llava_next_video": _OWN,
    "qianfan_ocr": _OWN,
    "video_llama_3": _OWN,
    "video_llava": _OWN,
    "vipllava": _OWN,
}
"""Families that read media by their own processor and methods, and facts about them that
transformers' classes do not state."""

FAMILIES: dict[str, Family] = {
    **{name: Family(own=own) for name, own in _OWN_MEDIA.items()},
    **dict.fromkeys(_PLAIN, Family()),
    **dict.fromkeys(_OWN_ATTENTION, _PADDED),
    **dict.fromkeys(_OWN_EAGER_ATTENTION, _EAGER),
    # Scores are soft-capped.
    **dict.fromkeys(("gemma2", "vaultgemma"), Family(padded_attention="eager")),
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "ctrl"), _GPT),
    **dict.fromkeys(
        (
            "bloom",
            "codegen",
            "gpt_neo",
            "gptj",
            "mpt",
            "openai-gpt",
        ),
        replace(_EAGER, decoder="transformer"),
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _MAMBA),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), replace(_EAGER, divisor="logits_scaling")),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), Family(multiplier="logit_scale")),
    "falcon_h1": replace(_PADDED, multiplier="lm_head_multiplier"),
    "gpt_neox": Family(decoder="gpt_neox"),
    "gpt_neox_japanese": replace(_EAGER, decoder="gpt_neox_japanese"),
    "granitemoehybrid": replace(_PADDED, divisor="logits_scaling"),
    "hyperclovax": Family(multiplier="logits_scaling"),
    "inkling_text": replace(_EAGER, divisor="logits_mup_width_multiplier"),
    "inkling2_text": _EAGER,
    "minicpm3": Family(divisor="logits_scaling"),
    "modernbert-decoder": Family(refused="its head has more than one layer"),
    "opt": Family(decoder="model.decoder"),
    "recurrent_gemma": replace(_PADDED, softcap="logits_soft_cap"),
    "rwkv": Family(
        refused="transformers changes its weights in place between training and evaluation"
    ),
    "xglm": _EAGER,
    "youtu": Family(
        refused="transformers zeroes its pad token's embedding whenever it loads the model"
    ),
    "xlstm": replace(_MAMBA, softcap="output_logit_soft_cap"),
    "qwen2_vl": Family(
        decoder=_LANGUAGE, loader="Qwen2VLForConditionalGeneration", reader=towers.QWEN2_VL
    ),
    "qwen2_5_vl": Family(
        decoder=_LANGUAGE, loader="Qwen2_5_VLForConditionalGeneration", reader=towers.QWEN2_5_VL
    ),
    "qwen3_vl": Family(
        decoder=_LANGUAGE, loader="Qwen3VLForConditionalGeneration", reader=towers.QWEN3_VL
    ),
    "qwen3_vl_moe": Family(
        decoder=_LANGUAGE, loader="Qwen3VLMoeForConditionalGeneration", reader=towers.QWEN3_VL
    ),
    "qwen3_5": replace(
        _PADDED, decoder=_LANGUAGE, loader="Qwen3_5ForConditionalGeneration", reader=towers.QWEN3_5
    ),
    "qwen3_5_moe": replace(
        _PADDED,
        decoder=_LANGUAGE,
        loader="Qwen3_5MoeForConditionalGeneration",
        reader=towers.QWEN3_5,
    ),
    "internvl": Family(
        decoder=_LANGUAGE, loader="InternVLForConditionalGeneration", reader=towers.INTERNVL
    ),
    "llava_onevision": Family(
        decoder=_LANGUAGE,
        loader="LlavaOnevisionForConditionalGeneration",
        reader=towers.ONEVISION,
    ),
    "qwen2_audio": Family(
        decoder=_LANGUAGE,
        loader="Qwen2AudioForConditionalGeneration",
        reader=audio_towers.QWEN2_AUDIO,
    ),
    "voxtral": Family(
        decoder=_LANGUAGE, loader="VoxtralForConditionalGeneration", reader=audio_towers.VOXTRAL
    ),
    "gemma3": Family(
        decoder=_LANGUAGE, loader="Gemma3ForConditionalGeneration", reader=towers.GEMMA_3
    ),
    "smolvlm": Family(
        decoder="model.text_model", loader="SmolVLMForConditionalGeneration", reader=towers.SMOL_VLM
    ),
    # SmolVLM was derived from it: its processor, tower and connector do the same.
    "idefics3": Family(
        decoder="model.text_model",
        loader="Idefics3ForConditionalGeneration",
        reader=towers.SMOL_VLM,
    ),
    "qwen2_5_omni_thinker": Family(
        decoder=_LANGUAGE,
        loader="Qwen2_5OmniThinkerForConditionalGeneration",
        reader=audio_towers.OMNI,
    ),
    "qwen3_omni_moe_thinker": Family(
        decoder=_LANGUAGE,
        loader="Qwen3OmniMoeThinkerForConditionalGeneration",
        reader=audio_towers.OMNI3,
    ),
}


UNREAD: dict[str, str] = {
    "idefics": (
        "its processor puts pictures behind the text and not at their marks, and its head has a "
        "second part for added tokens"
    ),
    "gemma4_unified": (
        "the tokens of a picture attend to each other in all layers of its forward, and in its "
        "generate in layers with a window alone"
    ),
    "qwen4_exp": "its embeddings of n-grams are computed from token ids, which placeholders replace",
    "vibevoice_asr": "its forward adds noise to features",
    "internvl_chat": "transformers reads the folders of OpenGVLab whose names end in -HF or -hf",
    "multi_modality": "transformers reads the folders of deepseek-community, for Janus too",
    "ovis": "transformers reads folders of Ovis2 whose names end in -hf",
    "phi4mm": "transformers reads folders of it whose type is phi4_multimodal",
    **dict.fromkeys(
        ("llava_llama", "llava_mistral", "llava_qwen"),
        "transformers reads the folders of llava-hf",
    ),
}
"""Families that read media and cannot be trained here, with the reason."""


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the context length of ``config`` in tokens, or ``None``.

    It includes rotary scaling.
    """
    fields = config.get_text_config(decoder=True).to_dict()
    longest = fields.get("max_position_embeddings")
    if longest is None:
        return None
    rope = fields.get("rope_parameters") or {}
    # one set of parameters, or one for each kind of layer
    for part in (rope, *rope.values()):
        if not isinstance(part, dict):
            continue
        original = part.get("original_max_position_embeddings")
        factor = part.get("factor")
        if original and factor:
            longest = max(longest, int(original * factor))
    return longest


_REACHES = re.compile(
    r"window|chunk|local_attention|block_size|topk|extent|floor|original_max_position"
)


def attention_reach(config: PreTrainedConfig, most: int) -> int:
    """Return the longest length, up to ``most``, at which attention changes.

    It is 0 if ``config`` names none. Such lengths are windows, chunks, the number of keys that an
    index keeps, and the context before rotary scaling.
    """
    sections = [config.to_dict()]
    # the text config of a multimodal model, and its settings of rotary positions
    for section in list(sections[0].values()):
        if isinstance(section, dict):
            sections.append(section)
            sections += [inner for inner in section.values() if isinstance(inner, dict)]
    longest = 0
    for section in sections:
        for name, value in section.items():
            # True and False are numbers too, but no lengths
            if type(value) is int and 1 < value <= most and _REACHES.search(str(name)):
                longest = max(longest, value)
    return longest


def family_of(config: PreTrainedConfig) -> Family:
    """Return the row of ``config.model_type``.

    A family without a row gets the model's own forward in the ``padded`` layout.
    """
    row = FAMILIES.get(config.model_type)
    code = derived.classes_of_code(config) if row is None else None
    if code is None and (row is None or row.own is None):
        return row or _UNPROVED
    text = config.get_text_config(decoder=True).model_type
    if code is not None:
        return _with_reader(code, "", text)
    near = vars(config.get_text_config()).get("use_bidirectional_attention") == "vision"
    return _with_reader(derived.classes_of(config.model_type), config.model_type, text, near=near)


@lru_cache
def _with_reader(
    classes: derived.Classes, model_type: str, text: str, *, near: bool = False
) -> Family:
    """Return the row of a family that reads media by its own methods.

    Args:
        classes: Classes of the family.
        model_type: Its type. Empty for code of a model folder, about which no facts are known.
        text: Model type of its language model.
        near: Tokens of a picture attend to each other, in layers with a sliding window.
    """
    own = FAMILIES[model_type].own if model_type else _OWN
    assert own is not None
    reader = derived.reader_of(classes, own)
    if near:
        reader = replace(reader, both_ways="windowed media")
    of_text = FAMILIES.get(own.text or text, _UNPROVED)
    if reader.own_forward is not None:
        of_text = replace(of_text, layout="padded")
    if own.plain_head:
        of_text = replace(of_text, multiplier=None, divisor=None)
    return replace(of_text, decoder=own.decoder, loader=classes.loader, reader=reader, own=own)


def check_read(kind: str, where: str) -> None:
    """Raise ``ModelError`` for a family of ``UNREAD``. The message begins with ``where``."""
    if kind in UNREAD:
        raise ModelError(f"{where}: models of type {kind!r} are not supported: {UNREAD[kind]}")


def check_family(config: PreTrainedConfig, where: str, *, allow_unproved: bool) -> None:
    """Refuse a family that no test proves.

    Args:
        config: Config of the model.
        where: Beginning of the error message, such as ``model.path = 'x'``.
        allow_unproved: Accept language models without a row.

    Raises:
        ModelError: The family has no row, reads media without a row, or cannot be trained.
    """
    kind = config.model_type
    row = FAMILIES.get(kind)
    if row is not None:
        if row.refused is not None:
            raise ModelError(f"{where}: models of type {kind!r} are not supported: {row.refused}")
        return
    by_code = derived.classes_of_code(config)
    if by_code is None:
        check_read(kind, where)
    unknown = f"{where}: the family {kind!r} is not known"
    # a config that holds a text config belongs to a multimodal model
    if by_code is None and config.get_text_config(decoder=True) is not config:
        known = ", ".join(name for name, family in FAMILIES.items() if family.reads_media)
        raise ModelError(
            f"{unknown}. It has parts besides a language model, which would be left out. "
            f"Families that read media: {known}"
        )
    if not allow_unproved:
        names = []
        for name, family in FAMILIES.items():
            if not family.reads_media and not family.refused:
                names.append(name)
        raise ModelError(
            f"{unknown}, so no test shows that it is trained and sampled right. "
            "Set model.unproved_family=allow to use it by its own forward and cache. "
            "If it is a renamed copy of a known family, set model_type in its config.json "
            f"to that family instead. Known families: {', '.join(sorted(names))}"
        )


MEMBERS: tuple[tuple[str, str, Callable[[Any, dict[str, Tensor]], object]], ...] = (
    (
        "config.vocab_size",
        "the number of token ids V",
        # in the config of its language model, where it has one
        lambda own, _: own.config.get_text_config(decoder=True).vocab_size + 0,
    ),
    (
        "get_input_embeddings()",
        "a module with weight [V, H]",
        lambda own, _: own.get_input_embeddings().weight.shape[1],
    ),
    (
        "get_output_embeddings()",
        "the head: a module with weight [V, H] that forward applies to the last hidden states",
        lambda own, _: own.get_output_embeddings().weight.shape[1],
    ),
    (
        "forward(input_ids, attention_mask, position_ids, use_cache)",
        "an object with logits [B, T, V]",
        lambda own, inputs: own(**inputs, use_cache=False).logits[0, 1, 0],
    ),
    (
        "get_decoder()",
        "the layers without the head: a module whose forward, with the same arguments, returns an "
        "object with last_hidden_state [B, T, H]",
        lambda own, inputs: own.get_decoder()(**inputs, use_cache=False).last_hidden_state[0, 1, 0],
    ),
)
"""Members of a model of a family without a row, what each returns, and a call that tries it."""


@torch.no_grad()
def check_members(model: PreTrainedModel, where: str) -> None:
    """Refuse a model of a family without a row that lacks one of ``MEMBERS``.

    Each member is tried on two tokens, on the meta device too.

    Args:
        model: The model.
        where: Beginning of the error message, such as ``model.path = 'x'``.

    Raises:
        ModelError: A member is missing, fails, or returns something else.
    """
    if model.config.model_type in FAMILIES:
        return
    ids = torch.arange(2, device=model.device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids}
    for member, returns, call in MEMBERS:
        try:
            call(model, inputs)
        except (AttributeError, TypeError, LookupError, ValueError, RuntimeError) as error:
            raise ModelError(
                f"{where}: {type(model).__name__}.{member} must return {returns} "
                f"({first_line(error)}); docs/families.md lists what a model of your own needs"
            ) from error


def decoder_of(model: nn.Module, family: Family) -> nn.Module:
    """Return the module of ``model`` that yields last hidden states."""
    if not family.decoder:
        return model.get_decoder()  # ty: ignore[not-callable]
    try:
        return model.get_submodule(family.decoder)
    except AttributeError:  # another class of the family names it differently
        return model.get_decoder()  # ty: ignore[not-callable]


def head_transform(config: PreTrainedConfig, family: Family) -> tuple[float | None, float | None]:
    """Return soft-cap and scale of the logits, as the config sets them.

    The scale is a factor on the head's output. Both are ``None`` if unset.
    """
    multiplier = _field(config, family.multiplier)
    divisor = _field(config, family.divisor)
    scale = multiplier if divisor is None else 1.0 / divisor
    return _field(config, family.softcap), scale


def unknown_scale(text: PreTrainedConfig, family: Family) -> str:
    """Return why the logits of a model's own forward may differ from those of its head.

    Args:
        text: Config of its language model.
        family: Its family.
    """
    divisor = _field(text, family.divisor)
    if divisor in (None, 1):
        return "It scales or caps them in a way that is not known here"
    return (
        f"Its config divides them by {family.divisor} = {divisor}, which the class of transformers "
        f"{transformers.__version__} may leave out: install a release that reads it, or set it to "
        "1 in config.json to train what this class computes"
    )


def _field(config: PreTrainedConfig, name: str | None) -> float | None:
    """Return the value of a field or property of ``config``; ``None`` for a family without it."""
    for part in (config, config.get_text_config(decoder=True)):
        if name and hasattr(part, name):
            return getattr(part, name)
    return None
