"""A process group with the processes of a server, to broadcast tensors to them.

The members find each other as those of a group of SGLang's ``init_custom_process_group`` do: by the
keys that ``torch.distributed`` uses under the name of the group. So the server needs no code of
ours.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.engines.sending.server_calls import (
    Answer,
    address_towards,
    ask_in_thread,
    wait_until,
)
from lightrft.engines.weight_transport import backend_group, open_store
from lightrft.utils.http_client.server_client import ServerClient, Unanswered

NUMBERS = itertools.count()
"""Numbers of groups, so that each has another name."""


class ServerGroup:
    """A process group of this process, as rank 0, and the processes of a served SGLang.

    Args:
        client: Sends requests to the server.
        run: Name of the run. It begins the name of the group.
        processes: Number of the server's processes.
        device: Device of the tensors to send. A CUDA device selects NCCL, any other Gloo.
        seconds: Timeout of joining and of each broadcast.

    Raises:
        Unanswered: The server does not join.
        RuntimeError: The processes do not reach each other.
        TimeoutError: The server has not joined within ``seconds``.
    """

    def __init__(
        self,
        client: ServerClient,
        run: str,
        processes: int,
        device: torch.device,
        seconds: float,
    ) -> None:
        self.client = client
        self.device = device
        self.name = f"lightrft-{run}-{next(NUMBERS)}"
        self._seconds = seconds
        patience, size = timedelta(seconds=seconds), processes + 1
        host = address_towards(client.url)
        self._store = open_store(host, size, patience)
        backend = "nccl" if device.type == "cuda" else "gloo"
        before = self._store.num_keys()
        joined = self._ask(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": self._store.port,
                "rank_offset": 1,
                "world_size": size,
                "group_name": self.name,
                "backend": backend,
            },
        )
        # Gloo waits for no member that joins late, and a refusal must not take as long as that.
        self._look(lambda: self._store.num_keys() > before, joined)
        self._group: Any = backend_group(self._keys(device), 0, size, device, patience)
        self._answer(joined)

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Broadcast ``tensors`` to the server, which loads them.

        Raises:
            Unanswered: The server refuses them.
            RuntimeError: The connection broke.
            TimeoutError: They did not arrive in time.
        """
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": dtypes,
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "flush_cache": False,
        }
        answer = self._ask("/update_weights_from_distributed", {**body, "group_name": self.name})
        works = [self._group.broadcast(tensor, 0) for _, tensor in tensors]
        self._look(lambda: all(work.is_completed() for work in works), answer)
        for work in works:
            work.wait()
        self._answer(answer)

    def finish(self, version: str) -> None:
        """Make the server drop its cache, and name its weights ``version``.

        Raises ``Unanswered`` if it does not.
        """
        body = {"names": [], "dtypes": [], "shapes": [], "flush_cache": True}
        names = {"group_name": self.name, "weight_version": version}
        self._answer(self._ask("/update_weights_from_distributed", {**body, **names}))

    def close(self) -> None:
        """Make the server leave the group, and leave it."""
        # The server must leave first: that ends a broadcast which it has not taken part in, and a
        # group cannot be freed before. A server that was restarted does not know the group.
        with contextlib.suppress(Unanswered, TimeoutError):
            left = self._ask("/destroy_weights_update_group", {"group_name": self.name})
            left.result(min(self._seconds, self.client.patience))
        self._group = None

    def _keys(self, device: torch.device) -> dist.Store:
        """Return the part of the store in which ``torch.distributed`` looks for the members.

        ``init_custom_process_group`` prefixes the name of the group, and torch prefixes it again,
        and the first type of device of the backend.
        """
        store: dist.Store = dist.PrefixStore(self.name, self._store)
        store = dist.PrefixStore(f"{self.name}/", store)
        return dist.PrefixStore("cuda/" if device.type == "cuda" else "cpu/", store)

    def _ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        # once, and in a thread, since the server must join the group meanwhile
        return ask_in_thread(self.client, path, body)

    def _look(self, done: Callable[[], bool], answer: Answer) -> None:
        """Wait until ``done`` returns True. Raise what the server refuses meanwhile."""

        def look() -> None:
            if answer.done():
                self._answer(answer)

        wait_until(done, look, self._seconds, self.client.url)

    def _answer(self, future: Answer) -> None:
        """Wait for an answer of the server. Raise ``Unanswered`` unless it succeeded."""
        answer = future.result(self._seconds)
        if not answer.get("success"):
            raise Unanswered(f"{self.client.url}: {answer.get('message')}")
