"""Weights of the policy in vLLM: whole weights, or an adapter over frozen ones."""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightrft.config.model import LoRAConfig
from lightrft.engines.base import Fingerprint
from lightrft.engines.fingerprint import checksum
from lightrft.engines.sending.merged_adapters import dequantized, noted, whole_weights
from lightrft.engines.sending.update_cost import UpdateCost
from lightrft.engines.vllm_parts.held_adapter import lost_adapter
from lightrft.engines.vllm_parts.held_weights import HeldWeights
from lightrft.engines.vllm_parts.kernel_copies import pack_experts, repack_tied_layers
from lightrft.engines.vllm_parts.parameter_names import VLLMNames
from lightrft.engines.vllm_parts.quantized_weights import QuantizedWeights
from lightrft.engines.vllm_parts.row_formats import RowFormat
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import plain_name

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]
Shapes = Mapping[str, tuple[int, ...]]

_STORED = re.compile(r"\.default(?=\.weight$|$)")


class VLLMWeights:
    """The policy's weights in vLLM.

    An adapter that vLLM can serve is loaded alone, under a name that holds its version. Other
    adapters are added to the weights that vLLM loads.

    Args:
        package: The package ``vllm``.
        llm: Its ``LLM``, made with ``llm_options``.
        lora: Settings of the policy's adapters. ``None`` without adapters.
        shapes: Shapes of the adapters' tensors, by name.
        form: Format of quantized weights. ``None`` for an engine that quantizes nothing.

    Raises:
        ConfigError: vLLM cannot quantize this model.

    Attributes:
        adapter: The ``LoRARequest`` that every request must carry. ``None`` if none is served.
        frozen: Parameters that ``load`` reads first, for callers that send the trained ones alone.
        uncompared: Names of tensors that were sent and cannot be found in vLLM's model.
        cost: Bytes that vLLM has read, and seconds that ``load`` has taken.
    """

    def __init__(
        self,
        package: Any,
        llm: Any,
        lora: LoRAConfig | None,
        shapes: Shapes,
        form: RowFormat | None = None,
    ) -> None:
        self.adapter: Any = None
        self.cost = UpdateCost()
        self.frozen: Mapping[str, Tensor] = {}
        self._llm, self._lora, about = llm, lora, llm.model_config
        self._names = VLLMNames(about)
        # vLLM computes in this process
        [self._model] = llm.apply_model(lambda model: model)
        self._compared: HeldWeights | QuantizedWeights
        if form is None:
            self._compared = HeldWeights(self._model, about)
        else:
            self._compared = QuantizedWeights(self._model, about, form)
        self.uncompared: set[str] = set()
        self._request = package.lora.request.LoRARequest
        self._numbers = itertools.count(1)
        self._held: Fingerprint = {}
        self.serves_adapters = False
        if lora is not None and llm.llm_engine.vllm_config.lora_config is not None:
            self.serves_adapters = self._accepts(shapes)

    def load(self, weights: Weights, version: int) -> Fingerprint:
        """Load ``weights``. Return the checksums of all tensors that vLLM has read.

        The first call must get all weights. Later calls may leave out frozen ones.

        Args:
            weights: Parameters of the policy, by name.
            version: Their version.

        Raises:
            ModelError: vLLM does not hold all that it was sent.
        """
        found: Fingerprint = {}
        if self.serves_adapters:
            self._load_adapter(weights, version, found)
        else:
            given = itertools.chain(self.frozen.items(), weights)
            self._reload(whole_weights(noted(given, found), self._lora))
        self._held |= found
        return dict(self._held)

    def forget(self) -> None:
        """Load frozen weights again in the next call, after vLLM has discarded them."""
        self._held = {}

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        weights = (one for name, tensor in weights for one in self._names.named(name, tensor))
        weights = self._compared.recorded(weights)
        self._llm.collective_rpc(reload, args=(self.cost.counted(weights),))
        # reading may be a collective call, so it must go to the end on all ranks
        left = [name for name, _ in weights]
        if left:
            raise ModelError(
                f"vLLM stopped reading before {len(left)} tensors of a weight update, e.g. "
                f"{left[0]}. Cause: a lost update"
            )
        self.uncompared |= self._compared.check()

    def _load_adapter(self, weights: Weights, version: int, found: Fingerprint) -> None:
        adapter: dict[str, Tensor] = {}

        def unknown() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                plain = plain_name(name)
                if plain is None:
                    adapter[name] = tensor
                elif name not in self._held:
                    found[name] = checksum(tensor)
                    yield plain, dequantized(tensor)

        base = unknown()
        for first in base:
            self._reload(itertools.chain([first], base))
        deque(self.cost.counted(adapter.items()), maxlen=0)
        found |= self._serve(f"policy-v{version}", adapter)

    def _serve(self, name: str, adapter: Mapping[str, Tensor]) -> Fingerprint:
        """Replace the served adapter. Return the checksums of the tensors that vLLM has read."""
        assert self._lora is not None
        core = self._llm.llm_engine
        # only its owner may read the folder
        with tempfile.TemporaryDirectory(prefix="lightrft-adapter-") as folder:
            write_adapter(Path(folder), adapter, self._lora)
            for old in core.list_loras():
                core.remove_lora(old)
            request = self._request(name, next(self._numbers), folder)
            core.add_lora(request)
            read = read_adapter(Path(folder))
        if core.list_loras() != {request.lora_int_id}:
            raise ModelError(
                f"Cause: the adapter {name!r} was not transferred, vLLM holds "
                f"{len(core.list_loras())} adapters and none of that name"
            )
        scaling = self._lora.scale
        lost, unknown = lost_adapter(self._model, adapter, scaling, self._llm.model_config.dtype)
        if lost:
            raise ModelError(
                f"Cause: the adapter {name!r} was not transferred, vLLM does not hold {len(lost)} "
                f"of its {len(adapter)} tensors, e.g. {lost[0]}"
            )
        self.uncompared |= set(unknown)
        self.adapter = request
        return {name: checksum(read[stored_name(name)]) for name in adapter}

    def _accepts(self, shapes: Shapes) -> bool:
        """Return True if vLLM can serve an adapter of these ``shapes``."""
        try:
            self._serve("zeros", {name: torch.zeros(shape) for name, shape in shapes.items()})
        except (ValueError, RuntimeError) as error:
            log.info("vLLM cannot serve this adapter and gets merged weights: %s", error)
            return False
        finally:
            for number in self._llm.llm_engine.list_loras():
                self._llm.llm_engine.remove_lora(number)
            self.adapter = None
        return True


def reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load whole ``weights`` in vLLM's ``worker``."""
    model = worker.get_model()
    keep_scales(model)
    pack_experts(model)
    worker.reload_weights(weights_iterator=weights)
    repack_tied_layers(model)


class ScaleKeeper:
    """Keeps the scales of a layer in memory from one update to the next.

    Args:
        process: Prepares the tensors of a layer for its kernel.
    """

    def __init__(self, process: Callable[[nn.Module], None]) -> None:
        self._process = process
        self.scales: Any = None

    def __call__(self, layer: nn.Module) -> None:
        """Prepare ``layer``, and keep its new scales."""
        self._process(layer)
        self.scales = layer.weight_scale


def keep_scales(model: nn.Module) -> None:
    """Keep the scales of INT8 layers of vLLM's ``model`` where its kernel reads them.

    On a CPU, oneDNN keeps the address of the scales that a layer has when it is prepared. An update
    copies them into an older tensor and frees them, which leaves an address without scales.
    """
    for layer in model.modules():
        scheme: Any = getattr(layer, "scheme", None)
        scales = getattr(layer, "weight_scale", None)
        if scheme is None or scales is None or scales.device.type != "cpu":
            continue
        process = scheme.process_weights_after_loading
        if not isinstance(process, ScaleKeeper):
            scheme.process_weights_after_loading = ScaleKeeper(process)


def write_adapter(folder: Path, adapter: Mapping[str, Tensor], lora: LoRAConfig) -> None:
    """Save the tensors of ``adapter`` into ``folder`` in the layout of peft.

    Args:
        folder: An existing folder.
        adapter: Tensors by their name in the policy.
        lora: Settings of the adapter.
    """
    tensors = {
        stored_name(name): tensor.detach().cpu().contiguous() for name, tensor in adapter.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter in ``folder``, by their stored names."""
    return load_file(folder / "adapter_model.safetensors")


def stored_name(name: str) -> str:
    """Return the name of an adapter's tensor in a file of peft."""
    return _STORED.sub("", name)
