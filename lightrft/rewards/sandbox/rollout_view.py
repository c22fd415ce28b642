"""What a reward function sees: the attributes of ``Rollout`` and ``Prompt``, in classes that a worker loads in an instant.

Media stay behind (a reward that wants the original input finds it among ``prompt.columns``), and so do the fields that
scoring fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrft.types import Rollout


@dataclass(slots=True)
class PromptView:
    """See ``lightrft.types.Prompt``."""

    id: str
    token_ids: list[int]
    text: str
    label: Any
    reference: Any
    data_source: str
    columns: Mapping[str, Any]


@dataclass(slots=True)
class RolloutView:
    """See ``lightrft.types.Rollout``."""

    prompt: PromptView
    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    seed: int
    sample: int
    text: str

    def __len__(self) -> int:
        return len(self.token_ids)


def view_of(rollout: Rollout) -> RolloutView:
    """``rollout`` as its reward functions see it; the lists are shared."""
    p = rollout.prompt
    prompt = PromptView(p.id, p.token_ids, p.text, p.label, p.reference, p.data_source, dict(p.columns))
    r = rollout
    return RolloutView(prompt, r.token_ids, r.sampled, r.logprobs, r.versions, r.finish_reason, r.seed, r.sample, r.text)
