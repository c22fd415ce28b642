"""Tiny audio models, with towers of two layers and windows of one second."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import transformers
from transformers import PreTrainedConfig

from lightrft.models.processors.audio import save_beside_pictures
from lightrft.models.tiny import qwen
from lightrft.models.tiny.spec import Fields, Tiny


def extractor(name: str = "WhisperFeatureExtractor", **settings: object) -> Any:
    """Build an extractor with windows of one second at 16 kHz and 16 mel bins: 100 frames.

    Args:
        name: Its class in transformers.
        **settings: Its other settings.
    """
    sizes: Fields = {
        "feature_size": 16,
        "chunk_length": 1,
        "sampling_rate": 16000,
        **settings,
    }
    return getattr(transformers, name)(**sizes)


def _qwen2_audio(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
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
    return transformers.Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=ids["<|AUDIO|>"]
    )


def _voxtral(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    audio = {
        "model_type": "voxtral_encoder",
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        # at 0.1, rounding errors over long silences would exceed the tests' tolerances in float32
        "initializer_range": 0.05,
        **tower,
    }
    audio.setdefault("intermediate_size", 2 * audio["hidden_size"])
    text = {
        "model_type": "llama",
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        **sizes,
    }
    return transformers.VoxtralConfig(
        audio_config=audio, text_config=text, audio_token_id=ids["[AUDIO]"]
    )


_OMNI_SPECIAL = (
    "<|audio_bos|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
    "<|vision_bos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|vision_eos|>",
)


_OMNI_WRITTEN = {
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
}


def _hearing(sizes: Fields, tower: Fields) -> Fields:
    """Return the fields of the config of a tower of sounds that also reads pictures."""
    return {
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "output_dim": sizes["hidden_size"],
        "initializer_range": 0.1,
        **tower.get("audio", {}),
    }


def _marks(ids: dict[str, int]) -> Fields:
    return {
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "initializer_range": 0.1,
    }


def _omni(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={"n_window": 10, **_hearing(sizes, tower)},
        vision_config=qwen.vision_2_5(sizes, tower.get("vision", {})),
        text_config=qwen.text(sizes),
        audio_token_index=ids["<|AUDIO|>"],
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        **_marks(ids),
    )


def _omni3(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
    # The class counts 13 features for a piece, that is, for a window of 50.
    pieces = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 8}
    return transformers.Qwen3OmniMoeThinkerConfig(
        audio_config={**pieces, **_hearing(sizes, tower)},
        vision_config={**qwen.vision_3(sizes, tower.get("vision", {})), "patch_size": 64},
        text_config=qwen.text_3_moe(sizes),
        audio_token_id=ids["<|AUDIO|>"],
        image_token_id=ids["<|IMAGE|>"],
        video_token_id=ids["<|VIDEO|>"],
        position_id_per_seconds=13,
        **_marks(ids),
    )


class _OmniProcessors:
    """Processors from ``settings`` by kind: ``image`` and ``audio``."""

    seen: ClassVar[Fields] = {}
    """Settings of pictures."""
    heard: ClassVar[Fields] = {}
    """Settings of sounds."""

    def __init__(self, **settings: Fields) -> None:
        self.pictures = qwen.processor(**{**self.seen, **settings.get("image", {})})
        self.sound = extractor(**{**self.heard, **settings.get("audio", {})})

    def save_pretrained(self, path: str) -> None:
        self.pictures.save_pretrained(path)
        save_beside_pictures(self.sound, Path(path))


class _Omni3Processors(_OmniProcessors):
    # Clips have at least 131072 pixels, whatever a folder says.
    seen: ClassVar[Fields] = {
        "patch_size": 64,
        "size": {"shortest_edge": 16384, "longest_edge": 131072},
    }
    # A sound has at least 100 frames.
    heard: ClassVar[Fields] = {"hop_length": 20}


FAMILIES = {
    "qwen2_audio": Tiny(
        ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        _qwen2_audio,
        extractor,
    ),
    "voxtral": Tiny(
        ("[BEGIN_AUDIO]", "[AUDIO]"),
        {"audio": "[BEGIN_AUDIO][AUDIO]"},
        _voxtral,
        extractor,
    ),
    "qwen2_5_omni_thinker": Tiny(
        _OMNI_SPECIAL,
        _OMNI_WRITTEN,
        _omni,
        _OmniProcessors,
    ),
    "qwen3_omni_moe_thinker": Tiny(_OMNI_SPECIAL, _OMNI_WRITTEN, _omni3, _Omni3Processors),
}
