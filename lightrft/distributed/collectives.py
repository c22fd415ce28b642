"""Equal calls of ranks that shard weights, and metrics merged over ranks.

A call of a sharded module waits for all ranks. Where the data decide about the calls, as media do,
a rank with fewer calls makes the others on blanks, which count for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lightrft.distributed.process_group import ProcessGroup
from lightrft.observability.metrics import Metrics

T = TypeVar("T")


@dataclass
class EqualCalls:
    """Makes the calls of a model equal on all ranks that shard its weights.

    Attributes:
        ranks: These ranks. ``None`` for none.
        seen: A blank for each kind of call that some rank has made with gradient. Later passes with
            gradient have at least one such call: DeepSpeed keeps the gradient of the step before
            for a parameter without one.
    """

    ranks: ProcessGroup | None = None
    seen: dict[Hashable, Any] = field(default_factory=dict)

    def missing(self, calls: Mapping[Any, tuple[int, T]]) -> dict[Any, list[T]]:
        """Return the blanks on which this rank calls the model so that all make the same calls.

        Every rank must call it.

        Args:
            calls: For each kind of call, the number of this rank's calls and a blank for one.
        """
        if self.ranks is None:
            return {}
        most, blanks = {}, {}
        if torch.is_grad_enabled():
            most, blanks = dict.fromkeys(self.seen, 1), self.seen
        for each in self.ranks.gather(calls):
            for kind, (count, blank) in each.items():
                most[kind] = max(count, most.get(kind, 0))
                blanks.setdefault(kind, blank)
        own = {kind: count for kind, (count, _) in calls.items()}
        return {kind: [blanks[kind]] * (n - own.get(kind, 0)) for kind, n in most.items()}


def all_reduce_metrics(metrics: Metrics, ranks: ProcessGroup) -> Metrics:
    """Merge ``metrics`` of all ranks and return the result on each."""
    if ranks.size == 1:
        return metrics
    metrics.compute()  # tensors become numbers, which can be gathered
    joined = Metrics()
    for theirs in ranks.gather(metrics):
        joined.merge(theirs)
    return joined
