"""Ways of new weights to a served SGLang: by a folder, and in buckets of tensors by broadcasts.

Broadcasts go to a process group with the processes of the server. The members find each other as
those of a group of SGLang's ``init_custom_process_group`` do: by the keys that
``torch.distributed`` uses under the name of the group. So the server needs no code of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import HeldDtypes, changed_weights
from lightrft.engines.fused_layers import FUSED
from lightrft.engines.sending.server_calls import (
    Answer,
    address_towards,
    ask_in_thread,
    wait_until,
)
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.weight_transport import backend_group, open_store
from lightrft.utils.atomic_files import whole_folder
from lightrft.utils.errors import ConfigError, ModelError, first_line
from lightrft.utils.http_client.server_client import ServerClient, Unanswered

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]

SHARD = 2**30
"""Bytes of a file of weights. A larger tensor has a file of its own."""
BUCKET = 2**29
"""Bytes of tensors that the server receives before it loads them. A larger tensor comes alone."""
UPDATE_TRIALS = 5
"""Trials of an update that breaks, e.g. since the server was restarted."""


class SGLangWeights(Protocol):
    """A way of new weights to the server.

    Attributes:
        cost: Gets the bytes of the tensors that are sent.
    """

    cost: UpdateCost

    def load(self, weights: Weights, version: str) -> None:
        """Send ``weights``, and name them ``version``.

        Raises:
            ModelError: The server did not take them.
            Unanswered: It did not answer.
        """
        ...

    def resend(self) -> None:
        """Send the weights of the last ``load`` again, to a server that was restarted."""
        ...

    def forget(self) -> None:
        """Take note that the server has dropped its weights."""
        ...

    def close(self) -> None:
        """Delete what ``load`` left."""
        ...


class FolderWeights:
    """Writes weights to ``engine.weights_dir``, which the server reads.

    Args:
        client: Sends requests to the server.
        folder: The folder.
        cost: Gets the bytes of the tensors that are sent.
    """

    def __init__(self, client: ServerClient, folder: str, cost: UpdateCost) -> None:
        self.client = client
        self.cost = cost
        self._root = Path(folder).expanduser()
        self._folder: Path | None = None
        self._version = ""

    def load(self, weights: Weights, version: str) -> None:
        """See ``SGLangWeights.load``."""
        old, self._folder, self._version = self._folder, self._root / version, version
        on_host = ((name, tensor.detach().cpu().contiguous()) for name, tensor in weights)
        with whole_folder(self._folder) as folder:
            for number, shard in enumerate(shards(self.cost.counted(on_host), SHARD)):
                save_file(shard, folder / f"model-{number:05d}.safetensors", {"format": "pt"})
        self.resend()
        if old is not None and old != self._folder:
            shutil.rmtree(old, ignore_errors=True)

    def resend(self) -> None:
        """See ``SGLangWeights.resend``."""
        body = {
            "model_path": str(self._folder),
            "weight_version": self._version,
            # keys and values of older weights are never found
            "flush_cache": True,
        }
        answer = self.client.ask("POST", "/update_weights_from_disk", body)
        if not answer.get("success"):
            raise ModelError(
                f"{self.client.url} did not read the weights {self._version!r} from "
                f"{self._folder}: {answer.get('message')}"
            )

    def forget(self) -> None:
        """See ``SGLangWeights.forget``. The server reads whole weights anyway."""

    def close(self) -> None:
        """See ``SGLangWeights.close``."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class BucketWeights(ABC):
    """Sends the weights that changed since the last time, in buckets.

    All are sent to a server that was restarted. This machine keeps a copy in CPU memory for that.
    The last call of an update has no tensors. It names the version and empties the cache, so a
    server with half an update has the old name.

    Args:
        client: Sends requests to the server.
        where: The server, for messages.
        server: What the server says about itself.
        held: Returns the version of the weights that the server holds.
        cost: Gets the bytes of the tensors that are sent.
    """

    def __init__(
        self,
        client: ServerClient,
        where: str,
        server: Mapping[str, Any],
        held: Callable[[], str | None],
        cost: UpdateCost,
    ) -> None:
        self.client = client
        self.cost = cost
        self._where = where
        self._dtypes = HeldDtypes(of_matrices=server_dtype(server))
        self._held = held
        self._session = UpdateSession(client)
        self._checksums = HeldChecksums(client, where, server)
        self._matrices: list[str] = []
        self._device = torch.device("cpu")
        self._copies: dict[str, Tensor] = {}
        self._sums: Fingerprint = {}
        self._lacks_all = True
        self._version = ""

    @abstractmethod
    def _send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Make the server load a bucket of tensors."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the server empty its cache and name its weights by ``_version``."""

    def _leave(self) -> None:
        """Take note that the server lacks all weights. Everything is sent to it the next time."""
        self.forget()

    def load(self, weights: Weights, version: str) -> None:
        """See ``SGLangWeights.load``.

        Raises:
            ModelError: The server did not take the weights, or holds changed ones as before.
        """
        is_whole = self._lacks_all
        self._matrices.clear()
        problem = self._failure(self._session.open)
        for bucket in shards(self._changed(weights), BUCKET):
            # on after a failure too, since the copies must be of one version
            if problem is None:
                problem = self._failure(self._send_counted, bucket)
        self._version = version
        if problem is None:
            problem = self._failure(self._close)
        if problem is not None:
            log.warning(
                "weights did not reach %s (%s); all are sent again",
                self._where,
                first_line(problem),
            )
            self.resend()
        elif is_whole:
            self._checksums.note()
        else:
            self._checksums.check(self._matrices)

    def resend(self) -> None:
        """See ``SGLangWeights.resend``."""
        problem: Exception | None = None
        for _ in range(UPDATE_TRIALS):
            self._leave()
            # waits until the server answers
            self._held()
            problem = self._failure(self._send_all)
            if problem is None:
                self._checksums.note()
                return
        assert problem is not None
        raise ModelError(
            f"{self._where} did not take the weights {self._version!r}: {first_line(problem)}; set "
            "engine.weights_dir to a folder that both read if this comes again"
        ) from problem

    def forget(self) -> None:
        """See ``SGLangWeights.forget``."""
        self._lacks_all = True

    def close(self) -> None:
        """See ``SGLangWeights.close``."""
        self._leave()

    def _changed(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``weights`` that the server lacks, in its dtype, and keep a copy of each."""
        found = changed_weights(weights, self._sums, self._dtypes, all_of_them=self._lacks_all)
        for name, tensor in found:
            self._device = tensor.device
            self._copies[name] = tensor.to("cpu", copy=True)
            # the server may hold others in a coarser type, in which they have not changed
            if tensor.ndim > 1:
                self._matrices.append(name)
            yield name, tensor.contiguous()

    def _failure(self, step: Callable[..., None], *args: object) -> Exception | None:
        """Run ``step`` and return its error, after which the server has no whole weights."""
        try:
            step(*args)
        except (Unanswered, RuntimeError, TimeoutError) as error:
            return error
        return None

    def _send_counted(self, bucket: Mapping[str, Tensor]) -> None:
        self._send(list(self.cost.counted(bucket.items())))

    def _send_all(self) -> None:
        self._session.open()
        for bucket in shards(self._copies.items(), BUCKET):
            self._send_counted({name: t.to(self._device) for name, t in bucket.items()})
        self._close()

    def _close(self) -> None:
        self._finish()
        self._session.close()
        self._lacks_all = False


class BroadcastWeights(BucketWeights):
    """Broadcasts weights in a process group with the server's processes.

    Args:
        client: Sends requests to the server.
        where: The server, for messages.
        server: What the server says about itself.
        held: Returns the version of the weights that the server holds.
        cost: Gets the bytes of the tensors that are sent.
        run: Name of the run.
        seconds: Timeout of joining and of each broadcast.
    """

    def __init__(
        self,
        client: ServerClient,
        where: str,
        server: Mapping[str, Any],
        held: Callable[[], str | None],
        cost: UpdateCost,
        run: str,
        seconds: float,
    ) -> None:
        super().__init__(client, where, server, held, cost)
        self._run = run
        self._seconds = seconds
        self._processes = int(server.get("tp_size") or 1)
        self._group: ServerGroup | None = None

    def load(self, weights: Weights, version: str) -> None:
        """See ``SGLangWeights.load``."""
        if self._group is not None and self._held() != self._version:
            # A group ends with its server. SGLang ends if it is asked for a group that it lacks.
            self._leave()
        super().load(weights, version)

    def _send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        self._joined().send(bucket)

    def _finish(self) -> None:
        self._joined().finish(self._version)

    def _joined(self) -> ServerGroup:
        """Return the group, which is made where there is none."""
        if self._group is None:
            self._group = ServerGroup(
                self.client, self._run, self._processes, self._device, self._seconds
            )
        return self._group

    def _leave(self) -> None:
        """Leave the group. Everything is sent to the next one."""
        if self._group is not None:
            self._group.close()
        self._group = None
        super()._leave()


def refuse_layout(server: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` for a server whose processes cannot all join one group.

    Args:
        server: What the server says about itself.
        where: The setting that names the server.
    """
    replicas = int(server.get("dp_size") or 1) > 1 and not server.get("enable_dp_attention")
    for name, is_refused in (("dp_size", replicas), ("pp_size", (server.get("pp_size") or 1) > 1)):
        if is_refused:
            raise ConfigError(
                f"{where} runs with {name} = {server[name]}, and SGLang takes broadcasts of "
                "weights by tensor parallelism alone; set engine.weights_dir to a folder that both "
                f"read, or start SGLang with {name} = 1"
            )


def shards(weights: Weights, most: int) -> Iterator[dict[str, Tensor]]:
    """Yield ``weights`` in groups of about ``most`` bytes. A larger tensor is a group alone."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        count = tensor.numel() * tensor.element_size()
        if shard and size + count > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += count
    if shard:
        yield shard


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


DTYPES = {"half": "float16", "float": "float32"}
"""Names of dtypes that SGLang has besides those of torch."""
PATH = "/weights_checker"
Sums = tuple[Mapping[str, str], ...]
"""Checksums by name, of each process."""


class UpdateSession:
    """A session of weight updates. Older versions of SGLang have none.

    Args:
        client: Sends requests to the server.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def open(self) -> None:
        """Open a session. One that an update left open, since it broke off, is closed first.

        Raises ``Unanswered`` if the server refuses it.
        """
        try:
            self._ask("begin")
        except Unanswered as error:
            if not error.refused:
                raise
            self._ask("end")
            self._ask("begin")

    def close(self) -> None:
        """Close the session: the server finishes what it does once for all tensors of an update.

        Raises ``Unanswered`` if it fails.
        """
        self._ask("end")

    def _ask(self, step: str) -> None:
        try:
            self._client.ask("POST", f"/{step}_weight_update", {}, once=True)
        except Unanswered as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise


class HeldChecksums:
    """Compares the checksums of a server before and after an update.

    They are of SGLang's own layouts, so they are compared with one another. A tensor that was sent
    with other values must have another checksum in some process.

    Args:
        client: Sends requests to the server.
        where: The server, for messages.
        server: What the server says about itself.
    """

    def __init__(self, client: ServerClient, where: str, server: Mapping[str, Any]) -> None:
        self._client, self._where = client, where
        self._before: Sums = ()
        # In an unknown or coarser type, weights may stay as they are though the trainer's change.
        self._is_able = not server.get("quantization") and server_dtype(server) is not None

    def note(self) -> None:
        """Take the checksums of an update whose tensors may equal those that were there."""
        self._before = self._asked()

    def check(self, changed: Collection[str]) -> None:
        """Raise ``ModelError`` if the server holds one of the ``changed`` matrices as before."""
        before, after = self._before, self._asked()
        self._before = after
        if len(before) != len(after):
            return
        lost = [name for name in changed if _is_same(_held_name(name), before, after)]
        if lost:
            raise ModelError(
                f"{self._where} holds {len(lost)} of {len(changed)} changed tensors as before the "
                f"update, e.g. {lost[0]}. Cause: a lost update"
            )

    def _asked(self) -> Sums:
        """Return the checksums of the server, or nothing if it has none."""
        if not self._is_able:
            return ()
        try:
            answer = self._client.ask("POST", PATH, {"action": "checksum"})
            return tuple(dict(rank["checksums"]) for rank in answer["ranks"])
        except Unanswered as error:
            if not error.refused:
                raise
            problem: object = error
        except (KeyError, TypeError, ValueError) as error:
            problem = f"its answer has no {error}"
        self._is_able = False
        log.warning(
            "%s does not show checksums of its weights (%s): only the log-probs of a batch show "
            "that an update arrived, and in bfloat16 they show no small one",
            self._where,
            problem,
        )
        return ()


def server_dtype(server: Mapping[str, Any]) -> torch.dtype | None:
    """Return the type of the server's matrices, or ``None`` if it does not say.

    Args:
        server: What the server says about itself.
    """
    name = str(server.get("dtype"))
    dtype = getattr(torch, DTYPES.get(name, name), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _held_name(name: str) -> str:
    """Return SGLang's name of the parameter that holds the tensor ``name``."""
    for fused, parts in FUSED.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name


def _is_same(name: str, before: Sums, after: Sums) -> bool:
    """Return True if ``name`` is known and has one checksum before and after in every process."""
    known = [(old[name], new.get(name)) for old, new in zip(before, after) if name in old]
    return bool(known) and all(old == new for old, new in known)
