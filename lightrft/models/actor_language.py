"""The documented text actor and critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.public_actor import DocumentedActor, DocumentedCritic, refuse


class ActorLanguage(DocumentedActor):
    """A policy that reads and writes text."""

    modality: ClassVar[ActorModality] = ActorModality.LANGUAGE_ONLY

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
    ) -> Any:
        """Log-probs of the actions: see ``DocumentedActor.score_rows``."""
        return self.score_rows(sequences, num_actions, attention_mask, return_output, packed_seq_lens, {})

    def generate(
        self, input_ids: Tensor, pixel_values: Tensor | None = None, image_grid_thw: object = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled rows and their masks: see ``DocumentedActor.sample_rows``.

        ``pixel_values`` and ``image_grid_thw`` must be ``None``: they are parameters so that one loop can call every actor. Raises
        ``ModelError`` for pictures.
        """
        refuse("ActorLanguage reads text alone; use ActorVL", pixel_values=pixel_values, image_grid_thw=image_grid_thw)
        return self.sample_rows(input_ids, {}, kwargs)


ActorText = ActorLanguage


class CriticLanguage(DocumentedCritic):
    """A value function over text."""

    modality: ClassVar[ActorModality] = ActorModality.LANGUAGE_ONLY

    def forward(
        self,
        input_ids: Tensor,
        num_actions: int | Sequence[int] | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: Sequence[int] | None = None,
    ) -> Any:
        """Values of the states before the actions: see ``DocumentedCritic.value_rows``."""
        return self.value_rows(input_ids, num_actions, attention_mask, return_output, packed_seq_lens, {})
