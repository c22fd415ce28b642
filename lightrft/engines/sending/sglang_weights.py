"""Ways of new weights to a served SGLang: by a folder, and in buckets of tensors by broadcasts."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightrft.engines.base import Fingerprint
from lightrft.engines.sending.changed_weights import HeldDtypes, changed_weights
from lightrft.engines.sending.server_group import ServerGroup
from lightrft.engines.sending.sglang_updates import HeldChecksums, UpdateSession, server_dtype
from lightrft.engines.sending.update_cost import UpdateCost
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
