"""The experts of the tokens that a decode session feeds to its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightrft.models.expert_replay import ExpertReplay


@dataclass(slots=True)
class RecordedExperts:
    """The experts of the prompts of a session, and of the last token of each row, on the host.

    Attributes:
        replay: Records the calls of the model.
        prompts: By handle, the experts ``[T, layers, k]`` of the tokens of a prompt.
        rows: By row, the experts ``[layers, k]`` of the token of the last step.
    """

    replay: ExpertReplay
    prompts: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(replay: ExpertReplay | None) -> RecordedExperts | None:
        """Return an empty record, or ``None`` if nothing is recorded."""
        return None if replay is None else RecordedExperts(replay)

    def read_prompts(self, handles: Sequence[int], lengths: Sequence[int]) -> None:
        """Read the experts of a call over prompts of these ``lengths``, one after another."""
        parts = self.replay.recorded().cpu().split(list(lengths))
        self.prompts.update(zip(handles, parts, strict=True))

    def read_rows(self, rows: Sequence[int]) -> None:
        """Read the experts of a call over ``rows``, each with the same number of tokens."""
        found = self.replay.recorded().cpu().unflatten(0, (len(rows), -1))[:, -1]
        self.rows.update(zip(rows, found.unbind(), strict=True))
