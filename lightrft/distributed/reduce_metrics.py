"""Reduce metrics over the ranks."""

from __future__ import annotations

from lightrft.distributed.process_group import Ranks
from lightrft.observability.metrics import Metrics


def merged(metrics: Metrics, ranks: Ranks) -> Metrics:
    """``metrics`` of all ranks as one, the same on each."""
    if ranks.size == 1:
        return metrics
    metrics.compute()  # tensors become numbers
    joined = Metrics()
    for theirs in ranks.gather(metrics):
        joined.merge(theirs)
    return joined
