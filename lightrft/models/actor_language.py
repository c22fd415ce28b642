"""The public text actor and critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightrft.models.actor_modality import ActorModality
from lightrft.models.public.actor import PublicActor, PublicCritic, refuse


class ActorLanguage(PublicActor):
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
        """Return the log-probs of the actions, see ``PublicActor.score_rows``.

        They are ``[B, num_actions]``, or ``[1, sum]`` of packed samples. With ``return_output``,
        return the pair of them and the model's output.

        Args:
            sequences: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Actions at the end of each row, or one number per packed sample. ``None``
                returns the model's output alone.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            return_output: Also return the model's output, with logits of every token.
            packed_seq_lens: Lengths of the packed samples.
        """
        return self.score_rows(
            sequences, num_actions, attention_mask, return_output, packed_seq_lens, {}
        )

    def generate(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: object = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sampled rows and their masks, see ``PublicActor.sample_rows``.

        They are ``(sequences [B, L], attention_mask [B, L], action_mask [B, L - L_in])``, where
        the prompts have ``L_in`` columns.

        Args:
            input_ids: ``[B, L]`` prompts, padded on the left.
            pixel_values: Must be ``None``. It exists so that one loop can call every actor.
            image_grid_thw: Must be ``None``, as ``pixel_values``.
            **kwargs: Options of ``PublicActor.sample_rows``.

        Raises:
            ModelError: Pictures are given.
        """
        refuse(
            "ActorLanguage reads text alone; use ActorVL",
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
        )
        return self.sample_rows(input_ids, {}, kwargs)


ActorText = ActorLanguage


class CriticLanguage(PublicCritic):
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
        """Return the values of the states before the actions, see ``PublicCritic.value_rows``.

        Args:
            input_ids: ``[B, L]`` token ids, or ``[1, sum L]`` of packed samples.
            num_actions: Actions at the end of each row, or one number per packed sample. ``None``
                returns the values of all states.
            attention_mask: ``[B, L]``, 0 for padding. ``None`` means no padding.
            return_output: Also return the values of all states.
            packed_seq_lens: Lengths of the packed samples.
        """
        return self.value_rows(
            input_ids, num_actions, attention_mask, return_output, packed_seq_lens, {}
        )
