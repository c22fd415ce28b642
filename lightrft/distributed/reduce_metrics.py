"""Merge metrics over ranks."""

from __future__ import annotations

from lightrft.distributed.process_group import Ranks
from lightrft.observability.metrics import Metrics


def merged(metrics: Metrics, ranks: Ranks) -> Metrics:
    """Merge ``metrics`` of all ranks and return the result on each."""
    if ranks.size == 1:
        return metrics
    metrics.compute()  # tensors become numbers, which can be gathered
    joined = Metrics()
    for theirs in ranks.gather(metrics):
        joined.merge(theirs)
    return joined
