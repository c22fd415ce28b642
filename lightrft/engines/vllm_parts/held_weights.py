"""Compare the tensors that a process of vLLM computes with to those that it was sent.

Kernels on a CPU keep copies of matrices in a layout of their own, which are compared too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.engines.fingerprint import checksum
from lightrft.engines.fused_layers import FUSED
from lightrft.utils.errors import ModelError

TRANSPOSED: Mapping[str, Sequence[str]] = {
    "gpt2": ("c_attn.weight", "c_proj.weight", "c_fc.weight")
}
"""Endings of the names of matrices that vLLM transposes, by model type."""
PART = 1 << 24
"""Elements that are prepared for a checksum at once."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process holds a tensor, or its shard of it.

    Attributes:
        layer: The layer, which may hold several tensors in one parameter.
        leaf: Name of the parameter.
        rows: Rows of the parameter. ``None`` for all.
        sent: Ranges of rows of the whole tensor that this process holds. Empty for all.
        columns: Columns of the whole tensor that this process holds. ``None`` for all.
    """

    layer: nn.Module
    leaf: str
    rows: Range | None = None
    sent: tuple[Range, ...] = ()
    columns: Range | None = None

    def shard(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole ``tensor`` that this process holds."""
        return self.shard_columns(self.shard_rows(tensor))

    def shard_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of the whole ``tensor`` that this process holds."""
        if not self.sent:
            return tensor
        return torch.cat([tensor[start:end] for start, end in self.sent])

    def shard_columns(self, tensor: Tensor) -> Tensor:
        """Return the columns of the whole ``tensor`` that this process holds."""
        return tensor if self.columns is None else tensor[:, slice(*self.columns)]

    def held(self, columns: int) -> Iterator[Tensor]:
        """Yield the tensor as each of its users reads it.

        Args:
            columns: Number of its columns, if it is a matrix.
        """
        parameter: Any = self.layer._parameters[self.leaf]
        rows = slice(None) if self.rows is None else slice(*self.rows)
        if parameter.numel():
            yield parameter.detach()[rows]
        if self.leaf == "weight" and has_copy(self.layer):
            yield read_copy(self.layer, columns)[rows]


class HeldWeights:
    """Records the weights that a process of vLLM is sent, and finds those that it does not hold.

    Args:
        model: vLLM's model in this process.
        about: vLLM's ``ModelConfig``.
    """

    def __init__(self, model: nn.Module, about: Any) -> None:
        self._model = model
        self._dtype: torch.dtype = about.dtype
        self._renamed = renames(model)
        self._transposed = tuple(TRANSPOSED.get(about.hf_config.model_type, ()))
        # number of columns and checksum by name; None where no place is known
        self._sent: dict[str, tuple[int, str] | None] = {}
        self._places: Mapping[str, Sequence[Place]] = {}

    def begin(self) -> None:
        """Forget what was sent. Called before an update, while layers have their weights."""
        self._sent.clear()
        self._places = places(self._model)

    def recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return ``weights``, by the names that vLLM loads, and record each as it is read."""
        self.begin()
        return self._recorded(weights)

    def _recorded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.record(name, tensor)
            yield name, tensor

    def record(self, name: str, tensor: Tensor) -> None:
        """Record that the whole ``tensor`` was sent as ``name``."""
        found = self._places.get(self._renamed(name))
        if found is None:
            self._sent[name] = None
            return
        plain = tensor.detach()
        # every place of a tensor holds the same part of it
        shard = found[0].shard(plain.T if name.endswith(self._transposed) else plain)
        self._sent[name] = shard.shape[-1], _total(shard, self._dtype)

    def check(self) -> set[str]:
        """Return the names of tensors that cannot be compared.

        Raises ``ModelError`` if vLLM does not hold one of the others.
        """
        lost = self.lost()
        if lost:
            raise ModelError(
                f"after a weight update, vLLM does not hold {len(lost)} of {len(self._sent)} "
                f"tensors that it was sent, e.g. {lost[0]}. Cause: a lost update"
            )
        return set(self.unknown())

    def lost(self) -> list[str]:
        """Return the names of tensors that were sent and are not held."""
        # an update may replace parameters
        now = places(self._model)
        return [
            name
            for name, one in self._sent.items()
            if one is not None and not self._holds(now[self._renamed(name)], *one)
        ]

    def unknown(self) -> list[str]:
        """Return the names of tensors that were sent and cannot be found in vLLM's model."""
        return [name for name, one in self._sent.items() if one is None]

    def _holds(self, found: Sequence[Place], columns: int, total: str) -> bool:
        return all(
            _total(tensor, self._dtype) == total
            for place in found
            for tensor in place.held(columns)
        )


def places(model: nn.Module) -> dict[str, list[Place]]:
    """Return where ``model`` holds each tensor, by its name before layers were fused.

    Args:
        model: A model of vLLM, or the shard of it in this process.
    """
    found: dict[str, list[Place]] = {}
    names: dict[int, list[str]] = {}
    for path, layer in model.named_modules():
        for leaf, parameter in layer._parameters.items():
            if parameter is None:
                continue
            made = dict(places_in(model, path, layer, leaf))
            # tied layers hold one tensor, which is sent under the name of the first
            shared = names.setdefault(id(parameter), list(made))
            for name, place in zip(shared, made.values()):
                found.setdefault(name, []).append(place)
    return found


def places_in(model: nn.Module, path: str, layer: Any, leaf: str) -> Iterator[tuple[str, Place]]:
    """Yield the tensors in the parameter ``leaf`` of ``layer``, with their places.

    Args:
        model: A model of vLLM.
        path: Path of the layer in it.
        layer: The layer.
        leaf: Name of the parameter.
    """
    whole = f"{path.replace('.base_layer', '')}.{leaf}"
    vocabulary = getattr(layer, "shard_indices", None)
    if vocabulary is not None:
        rows = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
        # the rows of a vocabulary may be padded
        yield whole, Place(layer, leaf, (0, rows[1] - rows[0]), (rows,))
        return
    rank, shards = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    inputs = getattr(layer, "input_size", 0)
    columns = getattr(layer, "input_size_per_partition", inputs)
    by_columns = columns < inputs
    parts, sizes = unfused(model, path), list(getattr(layer, "output_partition_sizes", ()))
    if not by_columns and sum(sizes) == getattr(layer, "output_size", None):
        # each process holds the whole layer, such as the router of experts
        rank, shards = 0, 1
    if by_columns or len(parts) != len(sizes):
        mine = (rank * columns, (rank + 1) * columns) if by_columns and leaf == "weight" else None
        yield whole, Place(layer, leaf, columns=mine)
        return
    # several processes may hold the same keys and values
    copies = [1, *[getattr(layer, "num_kv_head_replicas", 1)] * (len(sizes) - 1)]
    first = [rank // n * size for n, size in zip(copies, sizes)]
    for part, rows, start in zip(parts, pairwise(accumulate(sizes, initial=0)), first):
        size = rows[1] - rows[0]
        sent = ((start, start + size),) if shards > 1 else ()
        yield f"{part}.{leaf}", Place(layer, leaf, rows, sent)
    if len(parts) > 1:
        # a checkpoint may have them in one tensor too
        ends = accumulate([size * shards // n for n, size in zip(copies, sizes)], initial=0)
        sent = tuple((at + s, at + s + n) for at, s, n in zip(ends, first, sizes))
        yield whole, Place(layer, leaf, sent=sent)


def unfused(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the layers that vLLM has fused into ``path``, in order."""
    # adapters wrap a layer
    plain = path.replace(".base_layer", "")
    parent, dot, leaf = plain.rpartition(".")
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or FUSED
    return [f"{parent}{dot}{part}" for part in fused.get(leaf, [leaf])]


def renames(model: nn.Module) -> Callable[[str], str]:
    """Return the function that renames tensors as the class of ``model`` does.

    Layers that are fused keep the names of their parts.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    # vLLM 0.26 has no names of fused layers in it
    plain = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
    return lambda name: plain._map_name(name) or name


def _total(tensor: Tensor, dtype: torch.dtype) -> str:
    """Return a checksum of ``tensor`` in ``dtype`` that ``read_copy`` keeps."""
    tiny = torch.finfo(dtype).tiny
    found = []
    for part in tensor.detach().reshape(-1).split(PART):
        plain = part.to(dtype)
        found.append(checksum(torch.where(plain.abs() < tiny, torch.zeros_like(plain), plain)))
    return "/".join(found)


COLUMNS = 512
"""Columns of a matrix that are read back at once."""


def repack_tied_layers(model: nn.Module) -> None:
    """Renew the copies that layers of vLLM's ``model`` have of weights of another layer.

    On a CPU, an output layer that is tied to the embeddings packs them into a copy at the start. An
    update loads the embeddings alone.
    """
    found: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.device.type != "cpu":
            continue
        if id(weight) in found:
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
        found.add(id(weight))


class PackedExperts:
    """Prepares the experts of a layer for their kernel as at the start, also in an update.

    vLLM 0.32 packs experts on a CPU where a layer has no kernel yet, and leaves them as they were
    sent in an update.

    Args:
        method: The ``quant_method`` of the layer.
    """

    def __init__(self, method: Any) -> None:
        self._method, self._process = method, method.process_weights_after_loading

    def __call__(self, layer: nn.Module) -> None:
        """Prepare ``layer``."""
        self._method.moe_kernel = None
        self._process(layer)


def pack_experts(model: nn.Module) -> None:
    """Let updates of vLLM's ``model`` pack experts on a CPU. Called before an update."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        weight = layer._parameters.get("w13_weight")
        if weight is None or weight.device.type != "cpu" or not hasattr(method, "moe_kernel"):
            continue
        if not isinstance(method.process_weights_after_loading, PackedExperts):
            method.process_weights_after_loading = PackedExperts(method)


def has_copy(layer: nn.Module) -> bool:
    """Return True if the kernel of ``layer`` multiplies by a copy of its weight."""
    return hasattr(layer, "cpu_linear")


def read_copy(layer: Any, columns: int) -> Tensor:
    """Return the matrix ``[rows, columns]`` that the kernel of ``layer`` multiplies by.

    The product with rows of the identity matrix gives it back. Nothing is rounded, but -0.0 becomes
    0.0, and kernels may drop denormal values.
    """
    weight: Tensor = layer.weight
    found = [layer.cpu_linear(rows, weight, None).T for rows in identity_rows(columns, weight)]
    return torch.cat(found, dim=1)


def identity_rows(columns: int, like: Tensor, value: float = 1.0) -> Iterator[Tensor]:
    """Yield the rows of ``value`` times the identity matrix, in parts ``[n, columns]``.

    Args:
        columns: Number of its columns.
        like: Gives the type and the device.
        value: The value on the diagonal.
    """
    for start in range(0, columns, COLUMNS):
        count = min(COLUMNS, columns - start)
        rows = torch.zeros(count, columns, dtype=like.dtype, device=like.device)
        rows[torch.arange(count), torch.arange(start, start + count)] = value
        yield rows
