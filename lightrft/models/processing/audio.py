"""Sound: log-mel frames by the feature extractor of the folder, no more of them than the clip has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, WhisperFeatureExtractor

from lightrft.models.processing.base import Part, spelling
from lightrft.models.settings import ModelConfig
from lightrft.models.towers_audio import kept_frames, qwen2_audio_features
from lightrft.types import Extent


def qwen2_audio(config: ModelConfig, settings: Any, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Part]:
    """Clips up to the extractor's window. Raises ``ValueError`` when that is not the tower's."""
    extractor = WhisperFeatureExtractor.from_pretrained(config.path, revision=config.revision or "main")
    tower = settings.audio_config
    made, taken = (extractor.feature_size, extractor.nb_max_frames), (tower.num_mel_bins, 2 * tower.max_source_positions)
    if made != taken:
        raise ValueError(f"the feature extractor makes (mel bins, frames) = {made}, the audio tower takes {taken}")
    return {"audio": Clip(extractor, spelling(tokenizer, settings.audio_token_index), qwen2_audio_features)}


@dataclass(frozen=True, slots=True)
class Clip:
    """Sound of at most one window. ``written`` is one placeholder; ``features`` gives their number for a number of frames."""

    extractor: Any
    written: str
    features: Callable[[int], int]

    @property
    def rate(self) -> int:
        return self.extractor.sampling_rate

    def expand(self, extent: Extent) -> str:
        return self.written * self._features(extent.shape[0])

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        self._features(len(value))
        frames = self._frames(len(value))
        kept = kept_frames(frames, self.extractor.nb_max_frames)
        # Silence up to the end of the last window of samples that is kept: there is no need to fill up all that the model can hear.
        enough = (kept + -(-self.extractor.n_fft // self.extractor.hop_length) + 1) * self.extractor.hop_length
        made = self.extractor(
            value, sampling_rate=self.rate, max_length=min(enough, self.extractor.n_samples), return_tensors="pt"
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
        return min(-(-samples // self.extractor.hop_length), self.extractor.nb_max_frames)

    def _features(self, samples: int) -> int:
        """Raises ``ValueError`` for a clip that the model cannot hear as a whole, or of which it would hear nothing."""
        if samples > self.extractor.n_samples:
            raise ValueError(
                f"a clip of {samples / self.rate:.3g} s at {self.rate} samples a second, and the model hears at most "
                f"{self.extractor.chunk_length} s: cut it into shorter clips"
            )
        count = self.features(self._frames(samples)) if samples else 0
        if not count:
            raise ValueError(f"a clip of {samples} samples ({samples / self.rate:.3g} s) is too short to hear anything in it")
        return count
