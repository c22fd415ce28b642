"""Define the view of a rollout that a reward function receives.

The classes have the attributes of ``Rollout`` and ``Prompt`` and load in an instant in a worker.
Media are left out; a reward finds the original input in ``prompt.columns``. The fields that scoring
fills in are left out too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightrft.types import Rollout


@dataclass(slots=True)
class PromptView:
    """The prompt of a ``RolloutView``. See ``lightrft.types.Prompt``."""

    id: str
    token_ids: list[int]
    text: str
    label: object
    reference: object
    data_source: str
    columns: Mapping[str, object]
    begun: str = ""


@dataclass(slots=True)
class RolloutView:
    """The response that a reward function scores. See ``lightrft.types.Rollout``."""

    prompt: PromptView
    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    seed: int
    sample: int
    text: str

    @property
    def turn(self) -> str:
        """Return the whole turn of the assistant: its beginning in the prompt, and the response."""
        return self.prompt.begun + self.text

    def __len__(self) -> int:
        return len(self.token_ids)


def view_of(rollout: Rollout) -> RolloutView:
    """Return the view of ``rollout`` for reward functions; it shares the lists of ``rollout``."""
    p = rollout.prompt
    prompt = PromptView(
        p.id, p.token_ids, p.text, p.label, p.reference, p.data_source, dict(p.columns), p.begun
    )
    r = rollout
    return RolloutView(
        prompt,
        r.token_ids,
        r.sampled,
        r.logprobs,
        r.versions,
        r.finish_reason,
        r.seed,
        r.sample,
        r.text,
    )
