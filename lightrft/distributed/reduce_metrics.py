"""Merge metrics over ranks."""

from __future__ import annotations

from lightrft.distributed.process_group import ProcessGroup
from lightrft.observability.metrics import Metrics


def all_reduce_metrics(metrics: Metrics, ranks: ProcessGroup) -> Metrics:
    """Merge ``metrics`` of all ranks and return the result on each."""
    if ranks.size == 1:
        return metrics
    metrics.compute()  # tensors become numbers, which can be gathered
    joined = Metrics()
    for theirs in ranks.gather(metrics):
        joined.merge(theirs)
    return joined
