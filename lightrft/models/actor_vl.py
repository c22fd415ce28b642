"""The public actor and critic that read text, pictures and videos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.attention.padded import Given
from lightrft.models.public.actor import PublicActor, PublicCritic, split_tensors, uncounted

Grid = Tensor | Sequence[Tensor | None]
"""``[n, 3]`` patches along time, height and width of each picture or video, or a list with one
entry per sample."""


class ActorVL(PublicActor):
    """A policy that reads text, pictures and videos.

    All tensors of the family's processor are taken by name, joined over the samples of the batch.
    ``pixel_values`` and ``pixel_values_videos`` concatenate the media of the batch's samples, in
    the format of the family's processor. ``sequences`` hold one placeholder token for each feature
    that the tower computes from them.
    """

    modality: ClassVar[ActorModality] = ActorModality.VISION_LANGUAGE

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Grid | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Grid | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
        **others: Tensor | None,
    ) -> Any:
        """Return the log-probs of the actions, see ``PublicActor.score_rows``.

        They are ``[B, num_actions]``, or ``[1, sum]`` of packed samples. With ``return_output``,
        return the pair of them and the model's output.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Actions at the end of each row, or one number per packed sample. ``None``
                returns the model's output alone.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            pixel_values: Patches of all pictures. ``None`` for none.
            image_grid_thw: ``[pictures, 3]`` patches along time, height and width.
            pixel_values_videos: Patches of all videos. ``None`` for none.
            video_grid_thw: ``[videos, 3]`` patches along time, height and width.
            return_output: Also return the model's output, with logits of every token.
            packed_seq_lens: Lengths of the packed samples.
            **others: Further tensors of the family's processor, such as ``image_sizes``.
        """
        grids = image_grid_thw, video_grid_thw
        media = vision_media(pixel_values, grids[0], pixel_values_videos, grids[1], others)
        return self.score_rows(
            sequences, num_actions, attention_mask, return_output, packed_seq_lens, media
        )

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Grid | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Grid | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sampled rows and their masks, see ``PublicActor.sample_rows``.

        They are ``(sequences [B, L], attention_mask [B, L], action_mask [B, L - L_in])``, where
        the prompts have ``L_in`` columns.

        Args:
            input_ids: ``[B, L]`` prompts, padded on the left.
            pixel_values: Patches of all pictures. ``None`` for none.
            image_grid_thw: ``[pictures, 3]`` patches along time, height and width.
            pixel_values_videos: Patches of all videos. ``None`` for none.
            video_grid_thw: ``[videos, 3]`` patches along time, height and width.
            **kwargs: Options of ``PublicActor.sample_rows``, and tensors as in ``forward``.
        """
        others, options = split_tensors(kwargs)
        grids = image_grid_thw, video_grid_thw
        media = vision_media(pixel_values, grids[0], pixel_values_videos, grids[1], others)
        return self.sample_rows(input_ids, media, options)


class CriticVL(PublicCritic):
    """A value function over text, pictures and videos."""

    modality: ClassVar[ActorModality] = ActorModality.VISION_LANGUAGE

    def forward(
        self,
        input_ids: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Grid | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Grid | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
        **others: Tensor | None,
    ) -> Any:
        """Return the values of the states before the actions, see ``PublicCritic.value_rows``.

        Args:
            input_ids: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Actions at the end of each row, or one number per packed sample. ``None``
                returns the values of all states.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            pixel_values: Patches of all pictures. ``None`` for none.
            image_grid_thw: ``[pictures, 3]`` patches along time, height and width.
            pixel_values_videos: Patches of all videos. ``None`` for none.
            video_grid_thw: ``[videos, 3]`` patches along time, height and width.
            return_output: Also return the values of all states.
            packed_seq_lens: Lengths of the packed samples.
            **others: Further tensors of the family's processor, such as ``image_sizes``.
        """
        grids = image_grid_thw, video_grid_thw
        media = vision_media(pixel_values, grids[0], pixel_values_videos, grids[1], others)
        return self.value_rows(
            input_ids, num_actions, attention_mask, return_output, packed_seq_lens, media
        )


def vision_media(
    pixel_values: Tensor | None,
    image_grid_thw: Grid | None,
    pixel_values_videos: Tensor | None,
    video_grid_thw: Grid | None,
    others: Given | None = None,
) -> dict[str, Tensor | None]:
    """Return pictures and videos by input name.

    Args:
        pixel_values: Patches of all pictures. ``None`` for none.
        image_grid_thw: ``[pictures, 3]`` patches along time, height and width.
        pixel_values_videos: Patches of all videos. ``None`` for none.
        video_grid_thw: ``[videos, 3]`` patches along time, height and width.
        others: Further tensors by name. ``None`` for none.
    """
    return {
        "pixel_values": pixel_values,
        "image_grid_thw": _grid(image_grid_thw),
        "pixel_values_videos": pixel_values_videos,
        "video_grid_thw": _grid(video_grid_thw),
        **uncounted(others),
    }


def _grid(grid: Grid | None) -> Tensor | None:
    if grid is None or isinstance(grid, Tensor):
        return grid
    some = [rows.reshape(-1, 3) for rows in grid if rows is not None]
    return torch.cat(some) if some else None
