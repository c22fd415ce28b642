"""The order in which several senders send the tensors of an update, and their usable transport."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.engines.weight_transport import Way


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a sender.

    Attributes:
        sender: Index of the sender.
        begins: The turn begins with this tensor.
    """

    sender: int
    begins: bool


class SenderTurns:
    """Assigns each tensor to a sender, and each update to turns of the senders.

    A turn is a run of tensors of one sender, of about a bucket. A tensor that is new goes to the
    sender of the turn while it has room, and then to the sender with the fewest bytes. It keeps its
    sender in later updates. All ranks that see the same tensors in the same order find the same
    turns.

    Args:
        senders: Number of senders.
        room: Bytes of a turn. A larger tensor has a turn of its own.
    """

    def __init__(self, senders: int, room: int) -> None:
        self._room = room
        self._bytes = [0] * senders
        self._owners: dict[str, int] = {}
        self._sender, self._left = -1, 0

    def begin(self) -> None:
        """Begin an update."""
        self._sender, self._left = -1, 0

    def next(self, name: str, size: int) -> Turn:
        """Return the turn of the next tensor of the update.

        Args:
            name: Name of the tensor.
            size: Bytes of the tensor.
        """
        fits = self._sender >= 0 and size <= self._left
        sender = self._owners.get(name)
        if sender is None:
            fewest = self._bytes.index(min(self._bytes))
            sender = self._owners[name] = self._sender if fits else fewest
            self._bytes[sender] += size
        begins = sender != self._sender or not fits
        if begins:
            self._sender, self._left = sender, self._room
        self._left -= size
        return Turn(sender, begins)


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
