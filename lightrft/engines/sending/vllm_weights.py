"""Two ways of new weights to a vLLM server: whole weights by broadcasts, and adapters by files.

Broadcasts go to a process group with the processes of the server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightrft.config.engine import EngineConfig
from lightrft.config.model import LoRAConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import HeldDtypes, changed_weights, checksum
from lightrft.engines.sending.server_calls import (
    Answer,
    address_towards,
    ask_in_thread,
    wait_until,
)
from lightrft.engines.sending.tensor_slices import Layout, fill, slice_to_json, used
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.vllm_parts.weight_receiver import (
    UPDATE_KEY,
    GroupInfo,
    dtype_key,
    report_key,
)
from lightrft.engines.vllm_parts.weights import read_adapter, stored_name, write_adapter
from lightrft.engines.weight_transport import WeightTransport, group_of, open_store, sender_keys
from lightrft.utils.atomic_files import whole_folder
from lightrft.utils.errors import ConfigError, ModelError, first_line
from lightrft.utils.http_client.server_client import ServerClient, Unanswered
from lightrft.utils.module_tensors import plain_name

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]

BUCKET = 256 * 2**20
"""Bytes of a bucket. This machine has two, and the server one."""
UPDATE_TRIALS = 5
"""Trials of an update that breaks, e.g. since the server was restarted."""
FIRST_NAME = "default"
"""Name that vLLM gives the weights that it has loaded itself."""


class VLLMSender(Protocol):
    """A way of new weights to the server."""

    def load(self, weights: Weights, version: str) -> Fingerprint:
        """Send ``weights``, and name them ``version``.

        Returns:
            The checksums of what the server has read.

        Raises:
            ModelError: The server did not take them.
            Unanswered: It did not answer.
        """
        ...

    def check(self) -> bool:
        """Send the weights of the last ``load`` again if the server was restarted.

        Returns:
            The weights were sent again.

        Raises:
            ModelError: Somebody else has replaced them.
            Unanswered: The server did not answer.
        """
        ...

    def close(self) -> None:
        """Delete what ``load`` left."""
        ...


class BroadcastToVLLM:
    """Broadcasts the layers that changed, and all layers to a server that was restarted.

    vLLM fuses tensors of a layer, such as the projections to queries, keys and values, and loads
    them as a whole. So a layer with a changed tensor is sent as a whole. This machine keeps a copy
    of all weights in CPU memory. The server answers nobody during an update.

    Args:
        client: Sends requests to the server.
        config: Settings of the engine.
        refusal: Returns the error for a server that takes no weights from this run.
        cost: Gets the bytes of the tensors that are sent.
    """

    def __init__(
        self,
        client: ServerClient,
        config: EngineConfig,
        refusal: Callable[[object], ConfigError],
        cost: UpdateCost,
    ) -> None:
        self.client = client
        self.cost = cost
        self._config = config
        self._refusal = refusal
        self._group: VLLMGroup | None = None
        self._has_joined = self._has_warned = False
        self._updates = itertools.count()
        self._device = torch.device("cpu")
        self._dtypes = HeldDtypes()
        # of all weights, in the dtypes of the server; and what the server has received
        self._copies: dict[str, Tensor] = {}
        self._sums: Fingerprint = {}
        self._received: Fingerprint = {}
        self._version = ""

    def load(self, weights: Weights, version: str) -> Fingerprint:
        """See ``VLLMSender.load``. Weights that are left out stay as they are."""
        stream = iter(weights)
        for first in stream:
            self._device = first[1].device
            stream = itertools.chain([first], stream)
            break
        if not self._has_joined:
            # its dtype must be known before copies are made
            self._join_first()
        for name, tensor in changed_weights(stream, self._sums, self._dtypes):
            self._copies[name] = tensor.to("cpu", copy=True)
        before, self._version = self._version, version
        self._send(before)
        return dict(self._received)

    def check(self) -> bool:
        """See ``VLLMSender.check``."""
        held = self._held()
        if held == self._version:
            return False
        self._send(self._version)
        return True

    def close(self) -> None:
        """See ``VLLMSender.close``."""
        self._leave()

    @property
    def _url(self) -> str:
        return f"engine.url = {self._config.url!r}"

    def _held(self) -> str:
        """Return the name of the weights that the server holds."""
        return str(self.client.ask("GET", "/weight_info").get("weight_version"))

    def _lacking(self) -> dict[str, Tensor]:
        """Return the layers with a tensor that the server has not received."""
        sums, received = self._sums, self._received
        layers = {layer_of(name) for name in sums if received.get(name) != sums[name]}
        return {name: t for name, t in self._copies.items() if layer_of(name) in layers}

    def _send(self, before: str) -> None:
        """Send what the server lacks. That is all unless it holds the weights ``before``."""
        problem: Exception | None = None
        for _ in range(UPDATE_TRIALS):
            # waits until the server answers
            held = self._held()
            if before and held != before:
                if held != FIRST_NAME:
                    raise ModelError(
                        f"{self._url} holds the weights {held!r} in place of {before!r}; let no "
                        "other run update this server, and resume"
                    )
                # it was restarted, and a group ends with its server
                self._leave()
            try:
                self._update(self._lacking())
                return
            except (Unanswered, RuntimeError, TimeoutError) as error:
                log.warning(
                    "weights did not reach %s (%s); all are sent again",
                    self._url,
                    first_line(error),
                )
                self._leave()
                problem, before = error, ""
        assert problem is not None
        raise ModelError(
            f"{self._url} did not take the weights {self._version!r}: {first_line(problem)}"
        ) from problem

    def _update(self, weights: Mapping[str, Tensor]) -> None:
        ask = self.client.ask
        ask("POST", "/pause?mode=keep", {}, once=True)
        # an update that ends early leaves a name that no run expects
        self._rename(f"{self._version}-incomplete")
        if weights:
            sent = self.cost.counted(weights.items())
            group = self._joined()
            for received in group.update(sent, f"{next(self._updates)}"):
                self._compare(received, weights)
                self._received |= received
            self._warn_of(group.uncompared)
        self._rename(self._version)
        ask("POST", "/resume", {}, once=True)

    def _rename(self, version: str) -> None:
        self.client.ask("POST", "/update_weight_version", {"new_version": version}, once=True)

    def _compare(self, received: Mapping[str, str], sent: Mapping[str, Tensor]) -> None:
        """Raise ``ModelError`` unless a process of the server holds what was sent."""
        expected = {name: self._sums[name] for name in sent}
        if odd := {name for name, _ in received.items() ^ expected.items()}:
            raise ModelError(
                f"weights {self._version!r} were not transferred: {self._url} holds {len(odd)} of "
                f"{len(expected)} tensors wrong or not at all, e.g. {min(odd)!r}"
            )

    def _warn_of(self, names: set[str]) -> None:
        """Warn of tensors that the server cannot find in its model, once."""
        if names and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s has %d tensors under other names, e.g. %s: only the log-probs of a batch show "
                "that an update of them arrived",
                self._url,
                len(names),
                min(names),
            )

    def _join_first(self) -> None:
        try:
            self._dtypes = HeldDtypes(of_matrices=self._joined().dtype)
        except (Unanswered, RuntimeError, TimeoutError) as error:
            raise self._refusal(first_line(error)) from error
        self._has_joined = True

    def _joined(self) -> VLLMGroup:
        """Return the group, which is made where there is none."""
        if self._group is None:
            processes = int(self.client.ask("GET", "/get_world_size")["world_size"])
            self._group = VLLMGroup(
                self.client, processes, BUCKET, self._device, self._config.timeout
            )
        return self._group

    def _leave(self) -> None:
        """Leave the group. Everything is sent to the next one."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._received = {}


class AdapterToVLLM:
    """Writes adapters into ``engine.weights_dir``, from where the server loads them by name.

    The server must hold the frozen weights.

    Args:
        client: Sends requests to the server.
        folder: The folder.
        lora: Settings of the adapters.
        refusal: Returns the error for a server that takes no adapters from this run.
        cost: Gets the bytes of the tensors that are sent.
    """

    def __init__(
        self,
        client: ServerClient,
        folder: str,
        lora: LoRAConfig,
        refusal: Callable[[object], ConfigError],
        cost: UpdateCost,
    ) -> None:
        self.client = client
        self.cost = cost
        self._root = Path(folder).expanduser()
        self._lora = lora
        self._refusal = refusal
        # newest last; more than one while they are replaced
        self._versions: list[str] = []

    def load(self, weights: Weights, version: str) -> Fingerprint:
        """See ``VLLMSender.load``. The fingerprint is of the adapter alone."""
        trained = ((name, tensor) for name, tensor in weights if plain_name(name) is None)
        adapter = dict(self.cost.counted(trained))
        folder = self._root / version
        with whole_folder(folder) as begun:
            write_adapter(begun, adapter, self._lora)
        self._versions.append(version)
        if problem := self._load():
            if len(self._versions) == 1:
                raise self._refusal(problem)
            raise ModelError(f"the adapter {version!r} was not transferred: {problem}")
        self._forget(self._versions[:-1])
        read = read_adapter(folder)
        return {name: checksum(read[stored_name(name)]) for name in adapter}

    def check(self) -> bool:
        """See ``VLLMSender.check``."""
        if self._versions[-1] in self._served():
            return False
        if problem := self._load():
            raise ModelError(f"the adapter {self._versions[-1]!r} was not transferred: {problem}")
        return True

    def close(self) -> None:
        """See ``VLLMSender.close``."""
        self._forget(self._versions[:])

    def _load(self) -> str:
        """Make the server load the newest adapter. Return the reason if it does not."""
        version = self._versions[-1]
        body = {"lora_name": version, "lora_path": str(self._root / version)}
        problem = "the server has none of that name"
        for _ in range(UPDATE_TRIALS):
            try:
                path = "/v1/load_lora_adapter"
                self.client.ask("POST", path, body, once=True, is_text=True)
            except Unanswered as error:
                # also if a trial whose answer was lost has loaded it
                problem = str(error)
            # waits until the server answers
            if version in self._served():
                return ""
        return problem

    def _served(self) -> Iterator[str]:
        """Yield the names of the models and adapters that the server has."""
        return (str(entry.get("id")) for entry in self.client.ask("GET", "/v1/models")["data"])

    def _forget(self, versions: Iterable[str]) -> None:
        """Make the server drop adapters, and delete their files."""
        for version in versions:
            with contextlib.suppress(Unanswered):
                path, body = "/v1/unload_lora_adapter", {"lora_name": version}
                patience = self.client.patience
                self.client.ask("POST", path, body, once=True, is_text=True, silence=patience)
            shutil.rmtree(self._root / version, ignore_errors=True)
            self._versions.remove(version)


def layer_of(name: str) -> str:
    """Return the layer of the tensor ``name``: up to its first number, or else its module."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1])


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
