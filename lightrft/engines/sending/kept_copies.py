"""Copies of sent weights, of which each sender keeps those that it has sent.

A worker that is restarted gets all of them: the first sender asks each of the others, which listen
in a thread.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from lightrft.distributed.worker_api import Worker, WorkerLost
from lightrft.engines.sending.tensor_slices import fill
from lightrft.engines.weight_transport import (
    LOOK_SECONDS,
    Meeting,
    ProcessGroupBroadcast,
    SenderPlace,
    open_meeting,
)
from lightrft.utils.errors import first_line

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
COMMIT_SECONDS = 10.0
"""Longest time between the end of an update on two ranks, in seconds."""
TAKEN = "taken"
"""Key of the store of a transfer that says that the worker has all copies."""


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """The newest copies of the weights that a sender has sent.

    Attributes:
        version: Version of the policy.
        update: Number of the update. All ranks count alike.
        weights: Tensors on the CPU, by name.
    """

    version: int = 0
    update: int = 0
    weights: Mapping[str, Tensor] = field(default_factory=dict)


class CopyRequests:
    """Asks the other senders for their copies. Belongs to the first sender.

    Args:
        host: Address of this machine, as the workers and the other senders reach it.
        senders: Number of senders.
        seconds: Timeout of a call.
        bucket: Bytes of a bucket.
    """

    def __init__(self, host: str, senders: int, seconds: float, bucket: int) -> None:
        # the senders are the members of this meeting, and ask nobody to send weights
        self._place = open_meeting(host, senders, 0, seconds)
        self._seconds, self._bucket = seconds, bucket
        self._numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._lock = threading.Lock()

    @property
    def meeting(self) -> Meeting:
        """Where the other senders listen."""
        return self._place.meeting

    def send_to(self, worker: Worker, update: int) -> None:
        """Have all other senders send their copies of ``update`` to ``worker``.

        Raises:
            WorkerLost: The worker did not get them. It must be restarted.
        """
        for sender in range(1, self.meeting.senders):
            place = open_meeting(self.meeting.host, 1, 1, self._seconds)
            self._ask(sender, place.meeting, update)
            host, port = place.meeting.host, place.meeting.port
            joins = (host, port, 1, 2, self._bucket, "cpu", self._seconds)
            try:
                worker.call("weights", "join", *joins).result(self._seconds)
                # A turn for each bucket, so that no call takes long. The last one is empty.
                while worker.call("weights", "receive", 0).result(self._seconds):
                    pass
                place.store.set(TAKEN, "")
                worker.call("weights", "leave").result(self._seconds)
            except RuntimeError as error:
                raise WorkerLost(
                    f"sender {sender} did not send its weights: {first_line(error)}"
                ) from error

    def _ask(self, sender: int, meeting: Meeting, update: int) -> None:
        # several workers may be restarted at once
        with self._lock:
            key = request_key(sender, next(self._numbers[sender]))
        body = {"meeting": asdict(meeting), "update": update}
        self._place.store.set(key, json.dumps(body))


class CopyServer:
    """Sends the copies of a sender when the first one asks for them, in a thread.

    Args:
        meeting: Where the first sender asks.
        sender: Index of this sender.
        kept: Returns the newest copies.
        seconds: Timeout of a call.
        bucket: Bytes of a bucket.
    """

    def __init__(
        self,
        meeting: Meeting,
        sender: int,
        kept: Callable[[], KeptCopies],
        seconds: float,
        bucket: int,
    ) -> None:
        self._store = meeting.enter(sender, seconds).store
        self._sender, self._kept = sender, kept
        self._seconds, self._bucket = seconds, bucket
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="weight copies")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        for number in itertools.count():
            request = self._next(request_key(self._sender, number))
            if request is None:
                return
            # In a thread each, since the workers wait for one another in none of them.
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _next(self, key: str) -> str | None:
        """Wait for a request. Return None once nobody asks any more."""
        try:
            while not self._store.check([key]):
                if self._closed.wait(LOOK_SECONDS):
                    return None
            found = self._store.get(key).decode()
            self._store.delete_key(key)
        except RuntimeError:
            # the first sender has ended
            return None
        return found

    def _answer(self, request: str) -> None:
        body = json.loads(request)
        try:
            place = Meeting(**body["meeting"]).enter(0, self._seconds)
            send_copies(self._updated(body["update"]), place, self._seconds, self._bucket)
        except (RuntimeError, TimeoutError) as error:
            # The first sender restarts the worker, or ends the run.
            log.warning("copies of weights did not reach a worker (%s)", first_line(error))

    def _updated(self, update: int) -> Mapping[str, Tensor] | None:
        """Return the copies of ``update``, or None if there are others."""
        until = time.monotonic() + COMMIT_SECONDS
        # This rank may end the update a little later than the first one.
        while self._kept().update < update and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        kept = self._kept()
        return kept.weights if kept.update == update else None


def send_copies(
    weights: Mapping[str, Tensor] | None, place: SenderPlace, seconds: float, bucket: int
) -> None:
    """Send ``weights`` to the one receiver of a transfer. Without any, end the transfer.

    Args:
        weights: Tensors on the CPU, by name.
        place: The place of this sender.
        seconds: Timeout of a call.
        bucket: Bytes of a bucket.
    """
    carrier = ProcessGroupBroadcast((), bucket, CPU, seconds, place)
    try:
        if weights is None:
            return
        for slot, layout in fill(weights.items(), carrier.slots):
            carrier.send(slot, layout)
            carrier.end_turn()
        carrier.end_turn()
        carrier.flush()
        # A group that ends earlier could take the last bucket with it.
        place.store.wait([TAKEN], timedelta(seconds=seconds))
    finally:
        carrier.close()


def request_key(sender: int, number: int) -> str:
    """Return the key of the store where request ``number`` to ``sender`` is written."""
    return f"request/{sender}/{number}"
