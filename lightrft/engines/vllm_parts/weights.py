"""Weights of the policy in vLLM: whole weights, or an adapter over frozen ones.

Whole weights, adapters and 8-bit values that vLLM computes with are compared with those that it was
sent. Each quantized layer computes rows of the identity matrix, which gives back its own weights.
So the proof reads through the kernel that samples, and depends on no layout in memory.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from lightrft.engines.vllm_parts.held_weights import (
    HeldWeights,
    Place,
    identity_rows,
    pack_experts,
    places,
    places_in,
    renames,
    repack_tied_layers,
    unfused,
)
from lightrft.engines.vllm_parts.parameter_names import VLLMNames
from lightrft.engines.vllm_parts.row_formats import RowFormat
from lightrft.utils.errors import ConfigError, ModelError
from lightrft.utils.module_tensors import Factor, factor_of, plain_name

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


SLOT = 0
"""Place of the adapter in vLLM's tensors, which have one place each."""

Held = Mapping[tuple[str, Factor], Tensor]


def lost_adapter(
    model: nn.Module, adapter: Mapping[str, Tensor], scaling: float, dtype: torch.dtype
) -> tuple[list[str], list[str]]:
    """Return the tensors of ``adapter`` that ``model`` does not hold, and those without a place.

    Args:
        model: A model of vLLM that serves one adapter.
        adapter: Tensors by their names in the policy.
        scaling: Factor of the adapter, which vLLM multiplies into ``lora_B``.
        dtype: Type of vLLM's tensors.
    """
    found, adapted, renamed = _places(model), places(model), renames(model)
    lost, unknown = [], []
    for name, tensor in adapter.items():
        layer, factor = factor_of(name) or (name, "base")
        weight = renamed(f"{layer}.weight")
        held = found.get((weight, factor))
        if held is None:
            unknown.append(name)
            continue
        # as vLLM computes it, in its type
        sent = tensor.detach().to(held.device, dtype)
        if factor == "b" and scaling != 1:
            sent = sent * scaling
        # a process that shards the layer holds its columns of one factor, or its rows of the other
        place = adapted[weight][0]
        sent = place.shard_columns(sent) if factor == "a" else place.shard_rows(sent)
        # the rank and the columns may be padded
        if not torch.equal(held[: sent.shape[0], : sent.shape[1]], sent):
            lost.append(name)
    return lost, unknown


def _places(model: nn.Module) -> Held:
    """Return the tensors of vLLM's adapter by the name of the adapted weight and the factor."""
    found: dict[tuple[str, Factor], Tensor] = {}
    for path, module in model.named_modules():
        layer: Any = module
        stacked = getattr(layer, "lora_a_stacked", None)
        # embeddings and output layers keep theirs in other layouts
        if not isinstance(stacked, tuple):
            continue
        parts = unfused(model, path)
        if len(parts) != len(stacked):
            continue
        for part, down, up in zip(parts, stacked, layer.lora_b_stacked):
            found[f"{part}.weight", "a"] = down[SLOT, 0]
            found[f"{part}.weight", "b"] = up[SLOT, 0]
    return found


CUT_OFF = 2**-8
"""Mean share that a product in bfloat16 lacks where its last bits are cut off."""


@dataclass(frozen=True, slots=True)
class SentLayer:
    """Expected contents of a quantized layer, or of its part, in this process of vLLM.

    Attributes:
        shape: Shape of the weight.
        total: Checksum of the 8-bit values.
        scales: ``[rows]``. Scale of each row.
    """

    shape: tuple[int, ...]
    total: str
    scales: Tensor


class QuantizedWeights:
    """Records the weights that vLLM is sent, and compares them with those that it holds.

    Args:
        model: vLLM's model, with the options of ``form``.
        about: vLLM's ``ModelConfig``.
        form: Format of the quantized layers.

    Raises:
        ConfigError: vLLM has quantized no layer of this model.
    """

    def __init__(self, model: nn.Module, about: Any, form: RowFormat) -> None:
        self._model, self._form = model, form
        self._dtype: torch.dtype = about.dtype
        self._others = HeldWeights(model, about)
        self._parts = quantized_parts(model)
        self._quantized: dict[str, Place] = {}
        for path, names in self._parts.items():
            found = dict(places_in(model, path, model.get_submodule(path), "weight"))
            self._quantized |= {name: found[name] for name in names}
        self._sent: dict[str, SentLayer] = {}
        if not self._quantized:
            raise ConfigError(
                f"engine.quantization = {form.name}: vLLM quantized no layer of this model; "
                "leave it out"
            )

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` as vLLM reads them, and record what it must hold of each."""
        self._sent.clear()
        self._others.begin()
        for name, tensor in weights:
            place = self._quantized.get(name)
            if place is None:
                self._others.record(name, tensor)
                yield name, tensor
                continue
            plain = tensor.detach().to(self._dtype)
            values, scales = self._form.quantize(plain)
            mine = place.shard(values)
            self._sent[name] = SentLayer(
                tuple(mine.shape), checksum(mine.contiguous()), place.shard_rows(scales)
            )
            yield name, values
            yield f"{name}_scale", scales[:, None]

    def check(self) -> set[str]:
        """Return an empty set: no tensor may be left out of the comparison.

        Raises ``ModelError`` unless vLLM holds all that was recorded.
        """
        for path, names in self._parts.items():
            problem = self._problem(path, names)
            if problem:
                raise ModelError(f"after a weight update, {problem}")
        for name in self._others.check():
            raise ModelError(
                f"vLLM's {type(self._model).__name__} has no tensor for {name}, so its "
                f"{self._form.kind} weights cannot be compared: leave out engine.quantization"
            )
        return set()

    def _problem(self, path: str, names: Sequence[str]) -> str:
        """Return what the layer ``path`` does not hold of the weights ``names``, or no text."""
        kind = self._form.kind
        lost = (
            f"vLLM does not hold {{}} {kind} values of {{}} that it was sent. Cause: a lost update"
        )
        wanted = [self._sent[name] for name in names if name in self._sent]
        if len(wanted) < len(names):
            return (
                f"vLLM was not sent all weights of {path}: {', '.join(names)}. Its {kind} weights "
                "cannot be compared: leave out engine.quantization"
            )
        layer: Any = self._model.get_submodule(path)
        if not hasattr(layer, "weight"):
            # so vLLM leaves a layer on a CPU that an update did not reach
            return lost.format("the", names[0])
        rows = [one.shape[0] for one in wanted]
        # a kernel may pad the rows
        scales = layer.weight_scale.detach().flatten()[: sum(rows)]
        for name, one, of_rows in zip(names, wanted, scales.split(rows)):
            # the trainer's weights, and so their scales, may be on another device
            if not torch.equal(one.scales.to(of_rows.device, of_rows.dtype), of_rows):
                return lost.format("the scales of the", name)
        read = partial(read_back, layer, wanted[0].shape[1], scales, self._form, self._dtype)
        # Kernels for processors without bfloat16 cut products off in place of rounding them.
        wrong = dict(zip(names, wanted, strict=True))
        for lack in (0.0, CUT_OFF):
            values = read(lack=lack)
            for name, held in zip(names, values.split(rows), strict=True):
                if name in wrong and checksum(held.contiguous()) == wrong[name].total:
                    del wrong[name]
            if not wrong:
                return ""
        first = next(iter(wrong))
        if torch.equal(values.float(), read(sign=-1, lack=CUT_OFF).float()):
            return lost.format("the", first)
        # a kernel without VNNI adds products in 16 bits
        return (
            f"the {kind} kernel of vLLM overflows on this processor: the weights of {first} have "
            "other products with x than with -x. Leave out engine.quantization, or use a processor "
            "with VNNI"
        )


def read_back(
    layer: nn.Module,
    columns: int,
    scales: Tensor,
    form: RowFormat,
    dtype: torch.dtype,
    sign: int = 1,
    lack: float = 0.0,
) -> Tensor:
    """Return the values of a quantized ``layer``, as ``RowFormat.round`` returns them.

    Args:
        layer: A linear layer of vLLM.
        columns: Number of its inputs.
        scales: ``[rows]``. Scale of each row.
        form: Format of the layer.
        dtype: Type of the inputs.
        sign: Sign of the inputs, 1 or -1. The values of an exact kernel do not depend on it.
        lack: Mean share that a product lacks.

    Returns:
        ``[rows, columns]``.
    """
    found = []
    method: Any = layer.quant_method
    # The scale of a row of inputs is exactly 1 at this value, so the product rounds once.
    value = sign * form.largest
    for rows in identity_rows(columns, scales.to(dtype), value):
        product = method.apply(layer, rows, None)[:, : len(scales)].float() / value
        # The product is rounded by 0.4 % at most, or cut off by 0.8 %. FP8 values are 6 % apart, and
        # INT8 values 0.8 %.
        found.append(form.round(product * (1 + lack) / scales).T)
    return torch.cat(found, dim=1)


def quantized_parts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights in each quantized layer, by the path of the layer.

    Args:
        model: A model of vLLM, which fuses some layers.
    """
    found = {}
    for path, module in model.named_modules():
        # a kernel may keep the values where no attribute shows them
        if isinstance(getattr(module, "weight_scale", None), Tensor):
            found[path] = tuple(f"{part}.weight" for part in unfused(model, path))
    return found
