"""The documented actor and critic that read pictures and videos besides text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.public_actor import DocumentedActor, DocumentedCritic

Grid = Tensor | Sequence[Tensor | None]
"""``[n, 3]`` patches along time, height and width of each picture or video; or a list of what each sample has."""


class ActorVL(DocumentedActor):
    """A policy that reads text, pictures and videos.

    ``pixel_values`` and ``pixel_values_videos`` are those of the batch's samples laid end to end, as the family's processor makes
    them; ``sequences`` hold one placeholder token for each feature that its tower makes of them.
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
    ) -> Any:
        """Log-probs of the actions: see ``DocumentedActor.score_rows``."""
        media = _media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        return self.score_rows(sequences, num_actions, attention_mask, return_output, packed_seq_lens, media)

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Grid | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Grid | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled rows and their masks: see ``DocumentedActor.sample_rows``."""
        return self.sample_rows(input_ids, _media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw), kwargs)


class CriticVL(DocumentedCritic):
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
    ) -> Any:
        """Values of the states before the actions: see ``DocumentedCritic.value_rows``."""
        media = _media(pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        return self.value_rows(input_ids, num_actions, attention_mask, return_output, packed_seq_lens, media)


def _media(
    pixel_values: Tensor | None, image_grid_thw: Grid | None, pixel_values_videos: Tensor | None, video_grid_thw: Grid | None
) -> dict[str, Tensor | None]:
    return {
        "pixel_values": pixel_values,
        "image_grid_thw": _grid(image_grid_thw),
        "pixel_values_videos": pixel_values_videos,
        "video_grid_thw": _grid(video_grid_thw),
    }


def _grid(grid: Grid | None) -> Tensor | None:
    if grid is None or isinstance(grid, Tensor):
        return grid
    some = [rows.reshape(-1, 3) for rows in grid if rows is not None]
    return torch.cat(some) if some else None
