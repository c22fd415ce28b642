"""The documented actor that hears besides reading text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.attention.padded import Given
from lightrft.models.public_actor import DocumentedActor, refuse
from lightrft.utils.errors import ModelError

Clips = Tensor | Sequence[Tensor]
"""Log-mel frames ``[clips, mels, frames]`` of a batch's clips in order, or a list of ``[mels, frames]`` that differ in length."""

_NO_PICTURES = "ActorAL reads text and hears; give sound as audio_values, and use ActorVL for pictures and videos"


class ActorAL(DocumentedActor):
    """A policy that reads text and hears.

    ``audio_values`` are filled up with zeros, or cut, to the tower's window. What of a clip counts is told by
    ``feature_attention_mask [clips, frames]``; without it, all frames that are given do, or where that makes more features than the
    clip has placeholders in ``sequences``, as many as fit these. A batch without any placeholder is text alone.
    """

    modality: ClassVar[ActorModality] = ActorModality.AUDIO_LANGUAGE

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: object = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: object = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
        audio_values: Clips | None = None,
        feature_attention_mask: Tensor | None = None,
    ) -> Any:
        """Log-probs of the actions: see ``DocumentedActor.score_rows``.

        Pictures and videos must be ``None``: they are parameters so that one loop can call every actor. A grid without pictures
        has no effect. Raises ``ModelError`` for pictures and videos.
        """
        refuse(_NO_PICTURES, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos, video_grid_thw=video_grid_thw)
        media = self._media(sequences, audio_values, feature_attention_mask)
        return self.score_rows(sequences, num_actions, attention_mask, return_output, packed_seq_lens, media)

    def generate(
        self,
        input_ids: Tensor,
        audio_values: Clips | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: object = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: object = None,
        feature_attention_mask: Tensor | None = None,
        input_features: Clips | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled rows and their masks: see ``DocumentedActor.sample_rows``, and ``forward`` for pictures and videos.

        ``input_features`` is another name of ``audio_values``. Raises ``ModelError`` where both are given.
        """
        refuse(_NO_PICTURES, pixel_values=pixel_values, pixel_values_videos=pixel_values_videos, video_grid_thw=video_grid_thw)
        if audio_values is None:
            audio_values = input_features
        elif input_features is not None:
            raise ModelError("input_features and audio_values are two names of one input: give one of them")
        return self.sample_rows(input_ids, self._media(input_ids, audio_values, feature_attention_mask), kwargs)

    def _media(self, ids: Tensor, values: Clips | None, mask: Tensor | None) -> Given:
        if values is None:
            return {}
        reader, config = self.actor.family.reader, self.actor.base.config
        tower = next((t for t in reader.towers if t.kind == "audio"), None) if reader else None
        if tower is None or tower.arrange is None:
            raise ModelError(f"audio_values: model type {config.model_type!r} cannot take them")
        placed = ids == tower.token_id(config)
        if not placed.any():
            return {}
        lengths = None if mask is None else mask.long().sum(-1).tolist()
        clips = list(values)
        places = _blocks(placed)
        return tower.arrange(self.actor.base, clips, lengths, places if len(places) == len(clips) else None)


def _blocks(placed: Tensor) -> list[int]:
    """Lengths of the runs of ``True`` in rows ``[B, L]``."""
    begins = placed.clone()
    begins[:, 1:] &= ~placed[:, :-1]
    return torch.bincount(begins.flatten().cumsum(0)[placed.flatten()])[1:].tolist()
