"""Weights for an SGLang on the same machine, by memory that both processes share."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

# registers the reductions of tensors, by which they are shared and not copied
from torch.multiprocessing import reductions  # noqa: F401

from lightrft.engines.sending.sglang_weights import BucketWeights
from lightrft.engines.sending.tensor_slices import ALIGNED
from lightrft.utils.http_client.server_client import Unanswered

PATH = "/update_weights_from_tensor"


class TensorWeights(BucketWeights):
    """Sends handles of memory with the weights: CUDA IPC on a GPU, shared memory on a CPU.

    The server must run on the same device, with one process, and share the authentication key of
    ``multiprocessing`` with this process. Weights are copied into a bucket, since a handle is of a
    whole allocation, and since PyTorch keeps a record of each handle until its memory is freed.
    """

    _shared: Tensor | None = None

    def _send(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        copies = self._copied(bucket)
        self._ask({"serialized_named_tensors": [serialized(copies)], "flush_cache": False})
        if self._device.type == "cuda":
            del copies
            # frees the bucket once SGLang has dropped its tensors
            torch.cuda.ipc_collect()

    def _finish(self) -> None:
        empty = {"serialized_named_tensors": [serialized([])]}
        self._ask({**empty, "flush_cache": True, "weight_version": self._version})

    def _ask(self, body: dict[str, Any]) -> None:
        # once: the handles of a bucket can be opened once
        answer = self.client.ask("POST", PATH, body, once=True)
        if not answer.get("success"):
            raise Unanswered(f"{self.client.url}: {answer.get('message')}")

    def _copied(self, bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return copies of the tensors in memory that can be shared."""
        starts, size = [], 0
        for _, tensor in bucket:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNED) * ALIGNED
        memory = self._memory(size)
        copies = []
        for start, (name, tensor) in zip(starts, bucket, strict=True):
            flat = memory[start : start + tensor.nbytes].view(tensor.dtype)
            copies.append((name, flat.view(tensor.shape).copy_(tensor)))
        return copies

    def _memory(self, size: int) -> Tensor:
        """Return ``size`` bytes of memory on the device of the weights."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        # One for all updates: a handle that a killed server did not open keeps its memory.
        if self._shared is None or self._shared.nbytes < size:
            self._shared = torch.empty(size, dtype=torch.uint8).share_memory_()
        return self._shared


def serialized(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return handles of ``tensors`` with their names, in the form that SGLang reads.

    SGLang accepts tensors, their types and the functions that open a handle, and no other class.

    Args:
        tensors: Tensors by name. Their memory must stay until SGLang has answered.
    """
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode("ascii")
