"""The backend of weight transfer that a vLLM server loads as a plugin.

vLLM calls ``register`` in each of its processes, by the entry point ``vllm.general_plugins``. A
server that is started with ``--weight-transfer-config '{"backend": "lightrft"}'`` then receives
weights as workers of Ray do: in buckets, which a process group broadcasts. It also places the text
after a video where the trainer does.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.engines.fingerprint import checksum
from lightrft.engines.sending.tensor_slices import slice_from_json
from lightrft.engines.vllm_parts.held_weights import HeldWeights, pack_experts, repack_tied_layers
from lightrft.engines.vllm_parts.media import place_text
from lightrft.engines.vllm_parts.parameter_names import VLLMNames
from lightrft.engines.weight_transport import WeightBuffer

BACKEND = "lightrft"
"""Name of the backend, for ``--weight-transfer-config``."""
NOT_HELD = "not held"
"""Reported in place of the checksum of a tensor that was received and is not in the model."""
UPDATE_KEY = "update"
"""Key of the store where the trainer names the update that it sends."""


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The process group that the server joins.

    Attributes:
        host: Address of the trainer's TCP store.
        port: Port of the trainer's TCP store.
        size: Number of members, the trainer included.
        bucket: Bytes of a bucket.
        device: Type of the device of the buckets.
        seconds: Timeout of joining and of each broadcast.
    """

    host: str
    port: int
    size: int
    bucket: int
    device: str
    seconds: float


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """A bucket to receive.

    Attributes:
        layout: Its slices, as ``slice_to_json`` has them.
    """

    layout: Sequence[Mapping[str, Any]]


class WeightReceiver:
    """Receives weights in a process of vLLM and loads them. Mixed into vLLM's own base class.

    After the last bucket, the process writes the checksums of all tensors that it received into the
    trainer's store, and ``NOT_HELD`` for those that its model does not hold then. vLLM replaces the
    tensors of all layers by empty ones when an update begins, and fills a fused layer once its last
    part has come.

    Attributes of vLLM's base class: ``model``, ``model_config``, ``parallel_config``, ``device``.
    """

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    model: Any
    model_config: Any
    parallel_config: Any
    device: torch.device
    _buffer: WeightBuffer | None = None
    _report: Any = None
    _rank = 0
    _is_begun = False
    _received: dict[str, str]
    _names: VLLMNames | None = None
    _compared: HeldWeights | None = None
    _sources: dict[str, str]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        place_text(self.model)

    def init_transfer_engine(self, info: GroupInfo) -> None:
        """Join the group of ``info``. Leave the group of an earlier trainer.

        Raises ``ValueError`` if buckets are on another type of device than this process uses, or if
        this process has the layers of one stage of a pipeline.
        """
        self.shutdown()
        config = self.parallel_config
        if config.pipeline_parallel_size > 1:
            raise ValueError(
                f"--pipeline-parallel-size {config.pipeline_parallel_size}: updates of stages were "
                "not tested; start the server with --tensor-parallel-size in place of it"
            )
        if info.device not in ("cpu", self.device.type):
            raise ValueError(
                f"the trainer sends weights on {info.device}, and this server computes on "
                f"{self.device.type}"
            )
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        patience = timedelta(seconds=info.seconds)
        report = dist.TCPStore(info.host, info.port, info.size, is_master=False, timeout=patience)
        report.set(dtype_key(rank), str(self.model_config.dtype))
        buffer = WeightBuffer(self._load)
        buffer.join(info.host, info.port, rank, info.size, info.bucket, info.device, info.seconds)
        self._buffer, self._report, self._rank = buffer, report, rank

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights."""
        if self._is_begun:
            # Layers that an interrupted update has filled in part would count its tensors twice.
            self._finalize()
        if self._compared is None:
            self._names = VLLMNames(self.model_config)
            self._compared = HeldWeights(self.model, self.model_config)
        self._compared.begin()
        self._received, self._sources = {}, {}
        self._is_begun = True
        pack_experts(self.model)
        reload_module().initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket.

        In place of vLLM's own method, which waits for an accelerator on CPUs too.
        """
        self.receive_weights(BucketInfo(**update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, info: BucketInfo) -> None:
        """Receive a bucket, and load the tensors that it completes."""
        if self._buffer is None:
            raise RuntimeError("no trainer has called /init_weight_transfer_engine")
        self._buffer.put_broadcast(tuple(slice_from_json(entry) for entry in info.layout))

    def finish_weight_update(self) -> None:
        """Put the new weights in place, and report them. Layers that got none keep theirs."""
        self._finalize()
        if self._report is not None:
            assert self._compared is not None
            for name in self._compared.lost():
                self._received[self._sources[name]] = NOT_HELD
            said = {"received": self._received, "uncompared": self._compared.unknown()}
            update = self._report.get(UPDATE_KEY).decode()
            self._report.set(report_key(update, self._rank), json.dumps(said))

    def shutdown(self) -> None:
        """Leave the group."""
        if self._buffer is not None:
            self._buffer.leave()
        self._buffer = self._report = None

    def _finalize(self) -> None:
        reload_module().finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_layers(self.model)
        self._is_begun = False

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self._names is not None and self._compared is not None
        for name, tensor in weights:
            self._received[name] = checksum(tensor)
            for own, part in self._names.named(name, tensor):
                self._sources[own] = name
                self._compared.record(own, part)
                self.model.load_weights([(own, part)])


def dtype_key(rank: int) -> str:
    """Return the key of the store where process ``rank`` writes the dtype of its model."""
    return f"dtype/{rank}"


def report_key(update: str, rank: int) -> str:
    """Return the key of the store where process ``rank`` reports what it received."""
    return f"received/{update}/{rank}"


def reload_module() -> Any:
    """Return vLLM's functions that replace the weights of a model."""
    return importlib.import_module("vllm.model_executor.model_loader.reload")


def register() -> None:
    """Register the backend in this process of vLLM."""
    base = importlib.import_module("vllm.distributed.weight_transfer.base")
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
    made = type("LightRFTWeightTransfer", (WeightReceiver, base.WeightTransferEngine), {})
    factory.WeightTransferEngineFactory.register_engine(BACKEND, made)
