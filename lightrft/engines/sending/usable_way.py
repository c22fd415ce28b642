"""The transport of weights that the devices of engines allow."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from lightrft.engines.weight_transport import Way

log = logging.getLogger(__name__)


def usable_way(sender: str, workers: Sequence[str | None]) -> Way:
    """Return the way that replaces ``broadcast`` where processes share a GPU.

    NCCL refuses a process group with two members on one device. Memory of a GPU serves workers that
    all share the GPU of the sender, and messages serve any others.

    Args:
        sender: Name of the sender's GPU, from ``device_name``.
        workers: Names of the workers' GPUs. ``None`` for a worker that did not answer.

    Returns:
        ``broadcast`` if every process has a GPU of its own, else ``shared`` or ``message``.
    """
    known = Counter(name for name in (sender, *workers) if name is not None)
    if max(known.values()) == 1:
        return "broadcast"
    way: Way = "shared" if set(workers) == {sender} else "message"
    log.warning(
        "launch.ray.weights = broadcast is replaced by %s: NCCL refuses processes that share a "
        "GPU, as %d of %d do here; set launch.ray.weights=%s, or give engines whole devices",
        way,
        sum(count for count in known.values() if count > 1),
        sum(known.values()),
        way,
    )
    return way
