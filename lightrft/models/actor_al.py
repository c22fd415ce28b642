"""The public actor that reads text and audio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightrft.models.actor import Backbone
from lightrft.models.actor_modality import ActorModality
from lightrft.models.attention.padded import Given
from lightrft.models.multimodal.derived import padded
from lightrft.models.public.actor import PublicActor, refuse, split_tensors, uncounted
from lightrft.utils.errors import ModelError

Clips = Tensor | Sequence[Tensor]
"""Log-mel frames ``[clips, mels, frames]`` of a batch's clips in order, or a list of ``[mels,
frames]`` of different lengths."""

_NO_PICTURES = (
    "ActorAL reads text and hears; give sound as audio_values, and use ActorVL for pictures and "
    "videos"
)


def clips_of(audio_values: Clips | None, pixel_values: Clips | None) -> Clips | None:
    """Return the clips of one call. ``pixel_values`` is another name for them.

    LightRFT's callers pass one tensor by both names. Log-mel frames of a clip have two axes, which
    patches of a picture have not.

    Args:
        audio_values: Log-mel frames of the clips, or ``None``.
        pixel_values: The same clips, or ``None``.

    Raises:
        ModelError: The names hold different clips, or ``pixel_values`` holds pictures.
    """
    if pixel_values is None:
        return audio_values
    if any(clip.dim() != 2 for clip in pixel_values):
        raise ModelError(f"pixel_values: {_NO_PICTURES}")
    if audio_values is None or audio_values is pixel_values:
        return pixel_values
    if len(audio_values) == len(pixel_values) and all(map(torch.equal, audio_values, pixel_values)):
        return audio_values
    raise ModelError(
        "pixel_values and audio_values are two names of one input, and differ: give one of them"
    )


class ActorAL(PublicActor):
    """A policy that reads text and audio.

    ``audio_values`` are padded with zeros, or cut, to the tower's window.
    ``feature_attention_mask [clips, frames]`` marks the valid frames of a clip. Without it all
    given frames are valid. If these make more features than the clip has placeholders in
    ``sequences``, only as many count as fit the placeholders. A batch without placeholders is text
    alone. Other families than Qwen2-Audio and Voxtral take the tensors of their own processor, of
    which ``audio_values`` and ``feature_attention_mask`` are names of the content and its mask.
    """

    modality: ClassVar[ActorModality] = ActorModality.AUDIO_LANGUAGE

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Clips | None = None,
        image_grid_thw: object = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: object = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
        audio_values: Clips | None = None,
        feature_attention_mask: Tensor | None = None,
        **others: Tensor | None,
    ) -> Any:
        """Return the log-probs of the actions, see ``PublicActor.score_rows``.

        They are ``[B, num_actions]``, or ``[1, sum]`` of packed samples. With ``return_output``,
        return the pair of them and the model's output.

        Pictures and videos must be ``None``: the parameters exist so that one loop can call every
        actor. A grid without pictures has no effect. ``pixel_values`` is another name of
        ``audio_values``, as LightRFT's loop has it.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Actions at the end of each row, or one number per packed sample. ``None``
                returns the model's output alone.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            pixel_values: Another name of ``audio_values``.
            image_grid_thw: Ignored.
            pixel_values_videos: Must be ``None``.
            video_grid_thw: Must be ``None``.
            return_output: Also return the model's output, with logits of every token.
            packed_seq_lens: Lengths of the packed samples.
            audio_values: Log-mel frames of the clips, in order. ``None`` for text alone.
            feature_attention_mask: ``[clips, frames]``, 1 for valid frames.
            **others: Further tensors of the family's processor, such as ``audio_embed_sizes``.

        Raises:
            ModelError: Pictures or videos are given, or two names hold different clips.
        """
        refuse(_NO_PICTURES, pixel_values_videos=pixel_values_videos, video_grid_thw=video_grid_thw)
        clips = clips_of(audio_values, pixel_values)
        media = audio_media(self.actor, sequences, clips, feature_attention_mask, others)
        return self.score_rows(
            sequences, num_actions, attention_mask, return_output, packed_seq_lens, media
        )

    def generate(
        self,
        input_ids: Tensor,
        audio_values: Clips | None = None,
        pixel_values: Clips | None = None,
        image_grid_thw: object = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: object = None,
        feature_attention_mask: Tensor | None = None,
        input_features: Clips | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sampled rows and their masks, see ``PublicActor.sample_rows``.

        They are ``(sequences [B, L], attention_mask [B, L], action_mask [B, L - L_in])``, where
        the prompts have ``L_in`` columns.

        Pictures and videos are as in ``forward``.

        Args:
            input_ids: ``[B, L]`` prompts, padded on the left.
            audio_values: Log-mel frames of the clips, in order. ``None`` for text alone.
            pixel_values: Another name of ``audio_values``.
            image_grid_thw: Ignored.
            pixel_values_videos: Must be ``None``.
            video_grid_thw: Must be ``None``.
            feature_attention_mask: ``[clips, frames]``, 1 for valid frames.
            input_features: Another name of ``audio_values``.
            **kwargs: Options of ``PublicActor.sample_rows``, and tensors as in ``forward``.

        Raises:
            ModelError: Pictures or videos are given, or two names of the audio input.
        """
        refuse(_NO_PICTURES, pixel_values_videos=pixel_values_videos, video_grid_thw=video_grid_thw)
        if audio_values is None:
            audio_values = input_features
        elif input_features is not None:
            raise ModelError(
                "input_features and audio_values are two names of one input: give one of them"
            )
        clips = clips_of(audio_values, pixel_values)
        others, options = split_tensors(kwargs)
        media = audio_media(self.actor, input_ids, clips, feature_attention_mask, others)
        return self.sample_rows(input_ids, media, options)


def audio_media(
    backbone: Backbone,
    ids: Tensor,
    values: Clips | None,
    mask: Tensor | None,
    others: Given | None = None,
) -> Given:
    """Return clips by input name, in the form of the model's tower.

    Args:
        backbone: The model.
        ids: Token ids of all samples, with a placeholder for each feature.
        values: Log-mel frames of the clips, in order. ``None`` for none.
        mask: ``[clips, frames]``, 1 for valid frames. ``None``: as many as fit the placeholders.
        others: Further tensors by name. ``None`` for none.

    Raises:
        ModelError: The model cannot hear.
    """
    further = {name: given for name, given in uncounted(others).items() if given is not None}
    if values is None and not further:
        return {}
    reader = backbone.family.reader
    config = backbone.base.config
    hearing = [t for t in (() if reader is None else reader.towers) if t.kind == "audio"]
    if not hearing:
        raise ModelError(f"audio_values: model type {config.model_type!r} cannot take them")
    placed = ids == hearing[0].token_id(config)
    if not placed.any():
        return {}
    content = hearing[0].inputs[0]
    if values is None and content not in further:
        return further
    values = further.pop(content) if values is None else values
    clips = list(values)
    if (arrange := hearing[0].arrange) is not None:
        lengths = None if mask is None else mask.long().sum(-1).tolist()
        places = _blocks(placed)
        # adjacent clips have one run of placeholders, which does not tell where one ends
        known = places if len(places) == len(clips) else None
        return {**arrange(backbone.base, clips, lengths, known), **further}
    inputs = hearing[0].inputs
    marks = [name for name in inputs if name.endswith("_mask")]
    if mask is not None and not marks:
        problem = f"model type {config.model_type!r} reads no mask of frames; leave it out"
        raise ModelError(f"feature_attention_mask: {problem}")
    media = {content: padded([clip[None] for clip in clips]), **further}
    if mask is not None:
        media[marks[0]] = mask
    for name in [name for name in further if name.endswith("_mask")]:
        if backbone.family.own_forward is None and name not in inputs:
            # Such a mask selects features after the padding of clips. Without padding, it selects all.
            if not media[name].all():
                raise ModelError(
                    f"{name}: model type {config.model_type!r} reads clips of unequal length in "
                    "separate calls; give clips of one length"
                )
            del media[name]
    return media


def _blocks(placed: Tensor) -> list[int]:
    """Return the lengths of the runs of ``True`` in rows ``[B, L]``."""
    begins = placed.clone()
    begins[:, 1:] &= ~placed[:, :-1]
    return torch.bincount(begins.flatten().cumsum(0)[placed.flatten()])[1:].tolist()
