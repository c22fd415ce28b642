"""Audio parts: log-mel frames by the folder's feature extractor.

Frames that do not affect the features are dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, WhisperFeatureExtractor

from lightrft.config.model import ModelConfig
from lightrft.models.multimodal import audio_towers
from lightrft.models.processors import qwen
from lightrft.models.processors.base import ModalityProcessor, known, token_text, write_settings
from lightrft.types import Extent


def qwen2_audio(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the part of clips up to the tower's window.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives the placeholder and its marks.

    Raises:
        ValueError: Extractor and tower do not fit, or the tokenizer lacks a token.
    """
    extractor, window = _extractor(config, settings.audio_config)
    kept = partial(audio_towers.frames_around, window=window)
    written = token_text(tokenizer, settings.audio_token_index)
    around = (known(tokenizer, "<|audio_bos|>"), known(tokenizer, "<|audio_eos|>"))
    return {"audio": Clip(extractor, written, around, audio_towers.qwen2_audio_features, kept)}


def voxtral(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the part of clips of any length, in as many windows as needed.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives the placeholder and its mark.

    Raises:
        ValueError: Extractor and tower do not fit, or the tokenizer lacks a token.
    """
    tower = settings.audio_config
    extractor, window = _extractor(config, tower)
    if extractor.n_fft > 4 * extractor.hop_length:
        problem = f"n_fft = {extractor.n_fft} is more than 4 * hop_length"
        unknown = "where the silence after a clip begins would not be known"
        raise ValueError(f"{problem} = {4 * extractor.hop_length}: {unknown}")
    stacked = tower.intermediate_size // tower.hidden_size
    features = partial(audio_towers.voxtral_features, window=window, stacked=stacked)
    kept = partial(audio_towers.frames_to_silence, window=window)
    written = token_text(tokenizer, settings.audio_token_id)
    around = (known(tokenizer, "[BEGIN_AUDIO]"), "")
    return {"audio": Clip(extractor, written, around, features, kept, windows=None)}


def omni(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the parts of Qwen2.5-Omni or Qwen3-Omni: clips, pictures and frames.

    Clips of Qwen2.5-Omni have up to the extractor's window, which is longer than the pieces of the
    tower. Pictures and frames are as in Qwen2.5-VL.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholders and marks.

    Raises:
        ValueError: Extractor and tower do not fit.
    """
    extractor = WhisperFeatureExtractor.from_pretrained(
        config.path, revision=config.revision or "main"
    )
    if extractor.feature_size != settings.audio_config.num_mel_bins:
        made = f"the feature extractor makes {extractor.feature_size} mel bins"
        taken = settings.audio_config.num_mel_bins
        raise ValueError(f"{made}, the audio tower takes {taken}")
    names = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")
    written, start, end = (token_text(tokenizer, getattr(settings, name)) for name in names)
    shared: Any = {"extractor": extractor, "written": written, "around": (start, end)}
    shared["kept"] = audio_towers.frames_alone
    if settings.model_type == "qwen3_omni_moe_thinker":
        window = settings.audio_config.n_window
        features = partial(audio_towers.omni3_features, window=window)
        clip = WholeClip(**shared, features=features, windows=None, piece=2 * window)
    else:
        clip = OmniClip(**shared, features=audio_towers.qwen2_audio_features)
    return {**qwen.build(config, settings, tokenizer), "audio": clip}


def _extractor(config: ModelConfig, tower: Any) -> tuple[WhisperFeatureExtractor, int]:
    """Return the folder's extractor and the tower's window in frames. Raises ``ValueError`` if they
    do not fit."""
    extractor = WhisperFeatureExtractor.from_pretrained(
        config.path, revision=config.revision or "main"
    )
    made = (extractor.feature_size, extractor.nb_max_frames)
    # the tower's second convolution halves the frames
    taken = (tower.num_mel_bins, 2 * tower.max_source_positions)
    if made != taken:
        problem = f"the feature extractor makes (mel bins, frames) = {made}"
        raise ValueError(f"{problem}, the audio tower takes {taken}")
    return extractor, taken[1]


@dataclass(frozen=True)
class Clip:
    """Audio clips.

    Attributes:
        extractor: The folder's feature extractor.
        written: One placeholder.
        around: Text before and after the placeholders.
        features: Maps the frames of a clip to its number of features.
        kept: Maps the frames of a clip to the number of frames that the tower reads.
        windows: Upper bound of windows of a clip. ``None`` for any length.
    """

    extractor: WhisperFeatureExtractor
    written: str
    around: tuple[str, str]
    features: Callable[[int], int]
    kept: Callable[[int], int]
    windows: int | None = 1

    @property
    def rate(self) -> int:
        return self.extractor.sampling_rate

    def placeholder_text(self, extent: Extent) -> str:
        return self.written * self.features(self._frames(extent.shape[0]))

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        frames = self._frames(len(value))
        kept = self.kept(frames)
        if self.windows is not None:
            # transformers cuts a clip at the end of the window, too
            value = value[: self.windows * self.extractor.n_samples]
        window, hop = self.extractor.n_samples, self.extractor.hop_length
        whole = -(-len(value) // window) * window
        # Pad with silence only to the end of the last kept window of samples, not to the model's
        # full window.
        enough = (kept + -(-self.extractor.n_fft // hop) + 1) * hop
        made = self.extractor(
            value, sampling_rate=self.rate, max_length=min(enough, whole), return_tensors="pt"
        )
        mels = made["input_features"][0, :, :kept].transpose(0, 1).contiguous()
        return {"input_features": mels, "feature_lengths": torch.tensor([frames])}

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        return sum(self.features(n) for n in inputs["feature_lengths"].tolist())

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Clip:
        return self

    def save(self, path: Path) -> None:
        self.extractor.save_pretrained(path)

    def _frames(self, samples: int) -> int:
        """Return the number of frames. Raises ``ValueError`` for a clip that is a frame longer than
        the window, or too short for one feature."""
        most = math.inf if self.windows is None else self.windows * self.extractor.n_samples
        # resampling and codecs add a few samples, less than one frame
        if samples >= most + self.extractor.hop_length:
            # with the digits that tell both lengths apart
            clip = f"a clip of {samples / self.rate:.6g} s at {self.rate} samples a second"
            problem = f"{clip}, and the model hears at most {most / self.rate:.6g} s"
            raise ValueError(f"{problem}: cut it into shorter clips")
        # the last frame may be incomplete: the extractor pads it with silence
        frames = -(-samples // self.extractor.hop_length)
        if not samples or not self.features(frames):
            clip = f"a clip of {samples} samples ({samples / self.rate:.3g} s)"
            raise ValueError(f"{clip} is too short to hear anything in it")
        if self.windows is None:
            return frames
        return min(frames, self.windows * self.extractor.nb_max_frames)


class OmniClip(Clip):
    """Clips of a model that also reads pictures.

    Its extractor's config shares one file with the picture processor's.
    """

    whole: ClassVar[str] = "Qwen2_5OmniProcessor"
    """Processor of the whole model, since transformers has none for this part."""

    def save(self, path: Path) -> None:
        save_beside_pictures(self.extractor, path)
        write_settings(path / "processor_config.json", {"processor_class": self.whole})


@dataclass(frozen=True)
class WholeClip(OmniClip):
    """Clips of any length, whose frames end with the clip: nothing is padded.

    Attributes:
        piece: Frames that the tower reads at once. It pads the last piece of each clip to the
            longest piece of a call, and the padding changes features. In clips of at least one
            piece, the longest is a whole one in each call.
    """

    piece: int = 1
    whole: ClassVar[str] = "Qwen3OmniMoeProcessor"

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        frames = self._frames(len(value))
        options: dict[str, Any] = {"padding": True, "truncation": False, "return_tensors": "pt"}
        made = self.extractor(value, sampling_rate=self.rate, **options)
        mels = made["input_features"][0, :, :frames].transpose(0, 1).contiguous()
        return {"input_features": mels, "feature_lengths": torch.tensor([frames])}

    def _frames(self, samples: int) -> int:
        hop = self.extractor.hop_length
        if samples < self.piece * hop:
            clip = f"a clip of {samples / self.rate:.6g} s at {self.rate} samples a second"
            raise ValueError(
                f"{clip}, and the features of a clip of less than {self.piece * hop / self.rate:g} "
                "s depend on other clips of a call: append silence"
            )
        return samples // hop


def save_beside_pictures(extractor: WhisperFeatureExtractor, path: Path) -> None:
    """Add the config of ``extractor`` to the file with the picture processor's config."""
    file = path / "preprocessor_config.json"
    pictures = json.loads(file.read_text(encoding="utf-8"))
    # an extractor read from such a file also has the settings of pictures, which a new one lacks
    own = type(extractor)().to_dict()
    fields = json.loads(extractor.to_json_string())
    sound = {name: value for name, value in fields.items() if name in own}
    text = json.dumps({**pictures, **sound}, indent=2, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")
