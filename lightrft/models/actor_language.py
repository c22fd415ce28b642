"""The documented text actor and critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.documented import DocumentedActor, DocumentedCritic


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

    def generate(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled rows and their masks: see ``DocumentedActor.sample_rows``."""
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
