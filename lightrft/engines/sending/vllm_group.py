"""A process group with the processes of a vLLM server, which broadcasts buckets of weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor

from lightrft.engines.base import Fingerprint
from lightrft.engines.sending.server_calls import (
    Answer,
    address_towards,
    ask_in_thread,
    wait_until,
)
from lightrft.engines.sending.tensor_slices import Layout, fill, slice_to_json, used
from lightrft.engines.vllm_parts.weight_receiver import (
    UPDATE_KEY,
    GroupInfo,
    dtype_key,
    report_key,
)
from lightrft.engines.weight_transport import WeightTransport, group_of, open_store, sender_keys
from lightrft.utils.http_client.server_client import ServerClient, Unanswered


class VLLMGroup(WeightTransport):
    """A process group of this process, as rank 0, and all processes of a vLLM server.

    The server must run the backend of ``vllm_parts.weight_receiver``.

    Args:
        client: Sends requests to the server.
        processes: Number of the server's processes.
        size: Bytes of a bucket.
        device: Device of the buckets. A CUDA device selects NCCL, any other Gloo.
        seconds: Timeout of joining and of each broadcast.

    Attributes:
        dtype: The dtype of the server's model.
        uncompared: Names of tensors that were sent and cannot be found in the server's model.

    Raises:
        Unanswered: The server does not join.
        RuntimeError: The processes do not reach each other.
        TimeoutError: The server has not joined within ``seconds``.
    """

    def __init__(
        self,
        client: ServerClient,
        processes: int,
        size: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        super().__init__((), size, device, seconds)
        self.client = client
        self._ranks = range(1, processes + 1)
        self._work: Any = None
        self.uncompared: set[str] = set()
        host, members = address_towards(client.url), processes + 1
        self._store = open_store(host, members, timedelta(seconds=seconds))
        bucket = self.slots[0].numel()
        info = GroupInfo(host, self._store.port, members, bucket, device.type, seconds)
        joined = ask_in_thread(client, "/init_weight_transfer_engine", {"init_info": asdict(info)})
        keys = sender_keys(self._store, 0)
        self._group: Any = group_of(
            keys, 0, members, device, seconds, lambda: raise_refusal(joined)
        )
        joined.result(seconds)
        names = {self._store.get(dtype_key(rank)).decode() for rank in self._ranks}
        self.dtype: torch.dtype = getattr(torch, names.pop().removeprefix("torch."))

    def update(self, weights: Iterable[tuple[str, Tensor]], name: str) -> list[Fingerprint]:
        """Send ``weights``. Return the checksums of what each process of the server received.

        Args:
            weights: Tensors by name: all of a layer, or none.
            name: Name of the update. No other update of this group may have it.

        Raises:
            Unanswered: The server refuses them.
            RuntimeError: The connection broke.
            TimeoutError: They did not arrive in time.
        """
        self._store.set(UPDATE_KEY, name)
        try:
            self._ask_once("/start_weight_update")
        except Unanswered:
            # A run that ended during its update has left it open.
            self._ask_once("/finish_weight_update")
            self._ask_once("/start_weight_update")
        for slot, layout in fill(weights, self.slots):
            self.send(slot, layout)
        self.flush()
        self.client.ask("POST", "/finish_weight_update", {}, once=True)
        said = [json.loads(self._store.get(report_key(name, rank))) for rank in self._ranks]
        self.uncompared |= {other for one in said for other in one["uncompared"]}
        return [one["received"] for one in said]

    def _ask_once(self, path: str) -> None:
        """Ask ``path`` once. After an error vLLM closes the connection, so no other request may be
        sent over it."""
        self.client.ask("POST", path, {}, headers={"Connection": "close"}, once=True)

    def _send(self, slot: int, layout: Layout) -> list[Future[object]]:
        body = {"update_info": {"layout": [slice_to_json(piece) for piece in layout]}}
        # the server must be asked first: the broadcast waits until it takes part
        answer = ask_in_thread(self.client, "/update_weights", body)
        self._work = self._group.broadcast(self.slots[slot][: used(layout)], 0)
        url = self.client.url
        wait_until(self._work.is_completed, lambda: raise_refusal(answer), self.seconds, url)
        self._work.wait()
        self._work = None
        return [cast("Future[object]", answer)]

    def close(self) -> None:
        """Leave the group, and make the server leave it."""
        if self._work is None:
            # first, since it ends the wait of a server that is blocked in a broadcast
            self._group = None
        # a group with a broadcast that the server has not taken part in cannot be freed before
        answer = ask_in_thread(self.client, "/shutdown_weight_transfer_engine", {})
        with contextlib.suppress(Unanswered, TimeoutError):
            answer.result(min(self.seconds, self.client.patience))
        self._group = self._work = None


def raise_refusal(answer: Answer) -> None:
    """Raise what the server has refused, if it has answered."""
    if answer.done():
        answer.result()
