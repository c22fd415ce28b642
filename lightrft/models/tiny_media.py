"""Small real models that read media, made from the configs of their families, with tokenizer and processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from lightrft.models.families import FAMILIES
from lightrft.models.loading import save_model
from lightrft.models.tiny import tiny_tokenizer
from lightrft.utils.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Tiny:
    """``special``: tokens of the family, last in the vocabulary. ``written``: what the chat template writes for each kind of part.
    ``config`` is made from the text config's fields and the ids of ``special``; ``processor`` is what is saved beside the model."""

    special: tuple[str, ...]
    written: dict[str, str]
    config: Callable[[dict[str, Any], dict[str, int], dict[str, Any]], PreTrainedConfig]
    processor: Callable[..., Any]


def tiny_media_tokenizer(family: str, **options: Any) -> PreTrainedTokenizerFast:
    """``tiny_tokenizer`` with the tokens of ``family`` and a chat template that takes parts of its kinds."""
    tiny = _tiny(family)
    return tiny_tokenizer(special=tiny.special, chat_template=_chat_template(tiny.written), **options)


def tiny_media_model(
    family: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tower: dict[str, Any] | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A model of ``family`` with weights drawn from ``seed``; ``overrides`` are fields of its text config, ``tower`` of its tower's."""
    tiny = _tiny(family)
    tokenizer = tokenizer or tiny_media_tokenizer(family)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 3,
        "initializer_range": 0.1,
        **overrides,
    }
    sizes.setdefault("intermediate_size", 2 * sizes["hidden_size"])
    ids = {name: int(tokenizer.convert_tokens_to_ids(name)) for name in tiny.special}  # ty: ignore[invalid-argument-type]
    config = tiny.config(sizes, ids, tower or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, FAMILIES[config.model_type].loader)(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 3
    return model.to(dtype).eval()


def save_tiny_media(
    family: str, path: str | Path, *, chars: str | None = None, processor: dict[str, Any] | None = None, **options: Any
) -> PreTrainedModel:
    """Write a folder with a model of ``tiny_media_model``, its tokenizer and its processors; returns the model.

    ``processor`` are settings of the processor that is saved; those of the tower must fit them."""
    tokenizer = tiny_media_tokenizer(family, **({} if chars is None else {"chars": chars}))
    model = tiny_media_model(family, tokenizer, **options)
    save_model(model, tokenizer, path)
    _tiny(family).processor(**(processor or {})).save_pretrained(str(path))
    return model


def _tiny(family: str) -> _Tiny:
    if family not in _FAMILIES:
        raise ModelError(f"unknown family {family!r}; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[family]


def _chat_template(written: dict[str, str]) -> str:
    """The template of ``tiny.CHAT_TEMPLATE``, for content that is text or parts."""
    kinds = "".join(f"{{% elif p['type'] == '{kind}' %}}{text}" for kind, text in written.items())
    content = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
        f"{{% if p['type'] == 'text' %}}{{{{ p['text'] }}}}{kinds}{{% endif %}}{{% endfor %}}{{% endif %}}"
    )
    return (
        f"{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n{content}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


_QWEN_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_WRITTEN = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def _qwen_ids(ids: dict[str, int]) -> dict[str, Any]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids.values()))


def _qwen_processor(**settings: Any) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}, **settings}
    return Qwen2VLImageProcessorPil(**sizes)


def _qwen2_5_vl(sizes: dict[str, Any], ids: dict[str, int], tower: dict[str, Any]) -> PreTrainedConfig:
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": sizes["hidden_size"],
        "initializer_range": 0.1,
        **tower,
    }
    text = {**sizes, "rope_parameters": rope}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


def _whisper_extractor(**settings: Any) -> Any:
    """Windows of one second at 16 kHz, 16 mel bins: 100 frames."""
    sizes: dict[str, Any] = {"feature_size": 16, "chunk_length": 1, "sampling_rate": 16000, **settings}
    return transformers.WhisperFeatureExtractor(**sizes)


def _qwen2_audio(sizes: dict[str, Any], ids: dict[str, int], tower: dict[str, Any]) -> PreTrainedConfig:
    audio = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "initializer_range": 0.1,
        **tower,
    }
    audio.setdefault("encoder_ffn_dim", 2 * audio["d_model"])
    text = {"model_type": "qwen2", **sizes}
    return transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=ids["<|AUDIO|>"])


_FAMILIES: dict[str, _Tiny] = {
    "qwen2_5_vl": _Tiny(_QWEN_SPECIAL, _QWEN_WRITTEN, _qwen2_5_vl, _qwen_processor),
    "qwen2_audio": _Tiny(
        ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        _qwen2_audio,
        _whisper_extractor,
    ),
}
MEDIA_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
