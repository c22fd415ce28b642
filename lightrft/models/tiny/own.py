"""Tiny models of families that read media by their own processor and methods."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from lightrft.models.processors.audio import save_beside_pictures
from lightrft.models.tiny import audio
from lightrft.models.tiny.own_rows import CROPPED, ROWS, OwnRow
from lightrft.models.tiny.spec import Fields, SavedProcessor, Tiny
from lightrft.models.tiny.text_families import text_sizes

_TOWER: Fields = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "depth": 2,
    "embed_dim": 32,
    "projection_dim": 32,
    "head_dim": 16,
    "initializer_range": 0.1,
    "drop_path_rate": 0.0,
}
"""Fields of a tower's config that are set if it has them."""

_OF_TOKENS = ("vocab_size", "pad_token_id", "eos_token_id", "max_position_embeddings")


def _fitting(kind: Any, sizes: Fields) -> Fields:
    """Return the fields of ``sizes`` that a config class has, under any of its names."""
    known = {item.name for item in dataclasses.fields(kind)}
    return {k: v for k, v in sizes.items() if k in known or kind.attribute_map.get(k) in known}


def _fields_of(kind: Any, values: Fields) -> Fields:
    """Return the entries of ``values`` that a config class has a field for."""
    return {
        item.name: values[item.name] for item in dataclasses.fields(kind) if item.name in values
    }


def _config(model_type: str, row: OwnRow) -> Callable[[Fields, dict[str, int], Fields], Any]:
    def build(sizes: Fields, ids: dict[str, int], tower: Fields) -> PreTrainedConfig:
        kind: Any = CONFIG_MAPPING[model_type]
        sections: Fields = {}
        placeholders = {
            f"{attribute}_{end}": ids[token]
            for attribute, token in row.tokens.items()
            for end in ("id", "index")
        }
        of_tokens = {k: v for k, v in sizes.items() if k in _OF_TOKENS}
        for name, section in kind.sub_configs.items():
            if section is AutoConfig:
                section = type(getattr(kind(), name))
            is_text = name == "text_config"
            fields = {**text_sizes(section.model_type), **of_tokens} if is_text else _TOWER | tower
            known = {k: v for k, v in fields.items() if v is not None}
            # Configs of timm's models have fields that their class does not list.
            is_given = is_text or section.model_type == "timm_wrapper"
            own = row.text if is_text else row.vision
            if name == "audio_config" and row.hearing:
                own = row.hearing
            sections[name] = {
                "model_type": section.model_type,
                **_fitting(section, known),
                **(own if is_given else _fitting(section, own)),
                **({} if is_text else _fields_of(section, placeholders)),
            }
        if "text_config" in sections:
            # A config may repeat sizes of its text config.
            text = sections["text_config"]
            repeated = _fields_of(
                kind, {name: text[name] for name in ("vocab_size", "hidden_size")}
            )
        else:
            known = {**text_sizes(model_type), **of_tokens}
            repeated = _fitting(kind, {k: v for k, v in known.items() if v is not None})
        fields = {**repeated, **row.config, **_fields_of(kind, placeholders)}
        for name, token in row.ids.items():
            fields[name] = ids[token] if isinstance(token, str) else [ids[one] for one in token]
        return kind(**sections, **fields)

    return build


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a processor: of pictures, of clips, and the processor's."""

    picture: SavedProcessor
    clip: Fields
    fields: Fields
    sound: Any = None

    def save_pretrained(self, path: str, /) -> None:
        self.picture.save_pretrained(path)
        if self.sound is not None:
            save_beside_pictures(self.sound, Path(path))
        if self.clip:
            video = json.dumps(self.clip, indent=2, sort_keys=True)
            (Path(path) / "video_preprocessor_config.json").write_text(video, encoding="utf-8")
        text = json.dumps(self.fields, indent=2, sort_keys=True)
        (Path(path) / "processor_config.json").write_text(text + "\n", encoding="utf-8")


def _processor(model_type: str, row: OwnRow) -> Callable[..., SavedProcessor]:
    def build(**settings: Any) -> SavedProcessor:
        kind = row.like or model_type
        fields = {"processor_class": PROCESSOR_MAPPING_NAMES[kind], **row.processor}
        if not row.written:
            extractor = audio.extractor(row.extractor, **{**row.picture, **settings})
            return _Files(extractor, {}, fields)
        names = IMAGE_PROCESSOR_MAPPING_NAMES[kind]
        name = names.get("pil") or names["torchvision"]
        picture = getattr(transformers, str(name))(**{**row.picture, **settings})
        sound = audio.extractor(row.extractor) if row.sound and row.extractor else None
        return _Files(picture, CROPPED if row.clip else row.frames, fields, sound)

    return build


FAMILIES: dict[str, Tiny] = {
    name: Tiny(
        tuple(row.tokens.values()),
        {
            kind: text
            for kind, text in (("image", row.written), ("video", row.clip), ("audio", row.sound))
            if text
        },
        _config(name, row),
        _processor(name, row),
        {**row.tokens, **row.named},
    )
    for name, row in ROWS.items()
    if name in CONFIG_MAPPING
}
PACKAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("cohere2_vision", "kimi_k25", "lfm2_vl", "llama4", "mistral3", "molmo2"),
            "phi4_multimodal",
        ),
        ("torchvision",),
    ),
    **dict.fromkeys(("fun_asr_nano", "granite_speech", "granite_speech_plus"), ("torchaudio",)),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), ("torchvision", "timm")),
}
"""Optional packages that the processor or the tower of a family needs."""
