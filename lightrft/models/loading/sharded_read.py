"""Models built on the meta device, whose weights are read once each rank knows its shards.

Parameters have the names of transformers' own loading, with its renamings applied. Where
transformers builds one weight from several (experts stored one by one), only that weight is
assembled in full, cut, and released.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import cached_file

from lightrft.config.model import ModelConfig
from lightrft.distributed.shards import ShardLayout, local_shard_of
from lightrft.models.families import family_of
from lightrft.models.loading.adapter_base import base_of, saved_adapters
from lightrft.models.loading.adapter_folder import INDEX, SINGLE, base_change, with_saved_adapters
from lightrft.models.loading.from_pretrained import (
    freeze,
    from_settings,
    known_settings,
    load_model,
    use_own_modules,
    where_of,
)
from lightrft.models.loading.hf_logging import BROKEN
from lightrft.models.loading.meta_device import dtype_of
from lightrft.models.lora import add_adapters, base_model, is_adapted, saved_modules
from lightrft.utils.errors import ModelError
from lightrft.utils.module_tensors import exchange, plain_name

PIECE = 2**20
"""Bytes that are read at once. A full slice would be in memory twice until it is copied."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, of which any part can be read by its index."""

    file: str
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        with self.opened() as tensor:
            return tuple(tensor.get_shape())

    @contextmanager
    def opened(self) -> Generator[Any]:
        """Yield an object that any part can be read from.

        Close it soon: an open file keeps everything read from it in memory.
        """
        with safe_open(self.file, framework="pt") as opened:
            yield opened.get_slice(self.key)

    def whole(self) -> Tensor:
        with self.opened() as tensor:
            return tensor[...]


Source = StoredTensor | Tensor
"""A weight to read: in a file, or in memory."""


@dataclass(slots=True)
class DeferredWeights:
    """The sources of a model's weights.

    A weight that is neither ``stored`` nor ``converted`` is read by rank 0 through transformers'
    own loading, and broadcast.

    Attributes:
        config: Path and settings of the model.
        dtype: Dtype of the model.
        types: Dtype of each weight by name.
        stored: Tensors that are used as they are, by weight name.
        converted: Conversions of several stored tensors, by the name of their first weight.
        new_adapters: Modules that are trained whole start from the weights, and adapters that
            decompose weights from the norms of their rows.
        output_head: The files must hold the output head. Otherwise a missing one is 0.
    """

    config: ModelConfig
    dtype: torch.dtype
    types: dict[str, torch.dtype]
    stored: dict[str, StoredTensor] = field(default_factory=dict)
    converted: dict[str, WeightConverter] = field(default_factory=dict)
    new_adapters: bool = False
    output_head: bool = True

    @torch.no_grad()
    def read(self, model: nn.Module, held: ShardLayout = local_shard_of) -> None:
        """Fill every parameter and stored buffer of ``model``.

        Each must have memory for the part that ``held`` selects.
        """
        tensors: dict[str, Tensor] = {}
        for stored_name, tensor in base_model(model).state_dict(keep_vars=True).items():
            plain = plain_name(stored_name)
            # adapters have values already
            if plain is not None:
                tensors[plain] = tensor
        magnitudes = _magnitudes(model) if self.new_adapters else {}
        copies = _copies(model) if self.new_adapters else {}
        filled: set[int] = set()

        def fill(name: str, tensor: Tensor, source: Source) -> None:
            for copy in (tensor, *copies.get(id(tensor), ())):
                self._fill(name, copy, source, held)
            for magnitude in magnitudes.get(id(tensor), []):
                self._fill_norms(name, magnitude, source, held)
            filled.add(id(tensor))

        for name, source in self._sources(base_model(model), tensors):
            tensor = tensors.get(name)
            if tensor is None:
                continue
            # tied weights are one tensor under two names
            if id(tensor) in filled:
                self._check_tied(name, tensor, source, held)
            else:
                fill(name, tensor, source)
        left = {name: tensor for name, tensor in tensors.items() if id(tensor) not in filled}
        if left:
            wanted = {name: (held(tensor).shape, tensor) for name, tensor in left.items()}
            for name, whole in self._from_first_rank(wanted):
                fill(name, left[name], whole)

    def _sources(
        self, base: PreTrainedModel, names: Container[str]
    ) -> Iterator[tuple[str, Source]]:
        """Yield the source of each weight. Those that are not in ``names`` need not be made."""
        yield from self.stored.items()
        for first, converter in self.converted.items():
            if first not in names:
                continue
            made = converter.convert(first, model=base, config=base.config)
            for name, tensor in made.items():
                yield name, tensor[0] if isinstance(tensor, list) else tensor

    def _check_tied(self, name: str, tensor: Tensor, source: Source, held: ShardLayout) -> None:
        known = held(tensor)
        with _opened(source) as stored:
            equal = tuple(source.shape) == known.shape
            for index, piece in known.pieces(PIECE):
                equal = equal and torch.equal(stored[index or ...].to(piece), piece)
        if equal:
            return
        tied = f"config.json says that {name} is tied to another weight"
        raise ModelError(
            f"model.path = {self.config.path!r}: "
            f"{tied}, and the files hold different values for them; "
            "set tie_word_embeddings to false there"
        )

    def _from_first_rank(
        self,
        wanted: Mapping[str, tuple[tuple[int, ...], Tensor]],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each of ``wanted`` in full, with that shape, and with that tensor's dtype and
        device."""
        several = dist.is_available() and dist.is_initialized()
        first = not several or dist.get_rank() == 0
        whole: dict[str, Tensor] = {}
        failure = [""]
        if first:
            try:
                # only the values are used; the model that gets them is frozen already
                unfrozen = self.config.model_copy(update={"freeze": ()})
                loaded = load_model(unfrozen, dtype=self.dtype, output_head=self.output_head)
                whole = loaded.state_dict()
            except ModelError as error:
                failure = [str(error)]
        # every rank must learn of a failure, or the others would wait for the broadcasts below
        if several:
            dist.broadcast_object_list(failure)
        if failure[0]:
            raise ModelError(failure[0])
        for name, (shape, tensor) in wanted.items():
            value = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            if first:
                # popped, so that rank 0 releases each weight once it is sent
                value.copy_(whole.pop(name))
            if several:
                dist.broadcast(value, src=0)
            yield name, value

    def _fill(self, name: str, tensor: Tensor, source: Source, held: ShardLayout) -> None:
        here = held(tensor)
        if tuple(source.shape) != here.shape:
            found = f"{name}, {list(source.shape)} where the model has {list(here.shape)}"
            problem = f"1 weights are missing or misshapen, e.g. {found}"
            raise ModelError(f"model.path = {self.config.path!r}: {problem}")
        with _opened(source) as stored:
            for index, part in here.pieces(PIECE):
                # Round as transformers' loading does, also where the optimizer keeps more precise
                # weights.
                part.copy_(stored[index or ...].to(self.types[name]))

    def _fill_norms(self, name: str, magnitude: Tensor, source: Source, held: ShardLayout) -> None:
        """Fill a new adapter's weight-decomposition magnitude: the norm of each row of the weight,
        which only its source has."""
        width = PIECE // max(1, source.shape[1])
        with _opened(source) as stored:
            for index, part in held(magnitude).pieces(width):
                rows = stored[(*index, slice(None))].to(self.types[name])
                part.copy_(torch.linalg.norm(rows, dim=1))


def build_model(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype | None,
    *,
    output_head: bool = True,
) -> tuple[nn.Module, DeferredWeights | None]:
    """Build the model of ``config.path`` with adapters on ``device``.

    On the meta device, also return the sources of its weights.

    Args:
        config: Path and settings of the model.
        device: Device of the weights.
        dtype: Dtype of the weights. ``None`` uses ``config.dtype``.
        output_head: Require the weights of the output head. Otherwise a missing head is 0.
    """
    if torch.device(device).type == "meta":
        on_meta, unread = build_on_meta(config, dtype)
        unread.output_head = output_head
        use_own_modules(on_meta)
        return on_meta, unread
    model: nn.Module = load_model(config, device=device, dtype=dtype, output_head=output_head)
    if config.lora is not None and not is_adapted(model):
        model = add_adapters(base_model(model), config.lora)
    return model, None


def build_on_meta(
    config: ModelConfig, dtype: torch.dtype | None = None
) -> tuple[nn.Module, DeferredWeights]:
    """Build the model of ``config.path`` with its weights on the meta device.

    It has adapters and frozen parts. Also return the sources of the weights. Adapters and computed
    buffers have memory and values.

    Args:
        config: Path and settings of the model.
        dtype: Dtype of the weights. ``None`` uses ``config.dtype``.

    Raises:
        ModelError: As ``load_model`` does for errors visible without weights, and for quantised
            weights.
    """
    found = saved_adapters(config)
    of_base = base_of(config)
    if found is not None and (changed := base_change(found.folder)):
        raise ModelError(
            f"model.path = {config.path!r}: its adapters change the base ({changed}), whose weights "
            "are spread over processes; set launch.processes=1, or write the model whole by "
            "lightrft merge"
        )
    settings = _settings(of_base)
    keys = _keys(of_base, settings)
    # before the model is built, since its parameters take their dtype from it
    kind = dtype or _stored_dtype(of_base, settings, keys)
    base = _without_weights(of_base, settings, kind)
    types = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    unread = _located(base, DeferredWeights(of_base, kind, types), keys)
    # before adapters are added, which stay trainable
    freeze(base, config.freeze)
    # peft puts adapters on the weights' device, so the weights must not be on the meta device yet.
    exchange(base, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape))
    # the adapters are not among them: they get memory and initial values
    hollow = {id(p) for p in base.parameters()}
    model: nn.Module = base
    if found is not None:
        model = with_saved_adapters(base, found, config)
    elif config.lora is not None:
        model = add_adapters(base, config.lora)
        unread.new_adapters = True
    exchange(
        model,
        lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta") if id(p) in hollow else None,
    )
    return model.eval(), unread


def _settings(config: ModelConfig) -> PreTrainedConfig:
    settings = known_settings(config)
    if config.load_in_4bit or vars(settings).get("quantization_config") is not None:
        raise ModelError(
            f"model.path = {config.path!r}: quantised weights cannot be spread over processes; "
            "set launch.processes=1, or take a model "
            "that is not quantised, with model.load_in_4bit=false"
        )
    return settings


def _stored_dtype(
    config: ModelConfig,
    settings: PreTrainedConfig,
    keys: Mapping[str, str],
) -> torch.dtype:
    """Return the dtype as transformers does: of the setting, of the model's config, or of the first
    float tensor."""
    if config.dtype != "auto" or settings.dtype is not None:
        return dtype_of(config, settings)
    for key, file in keys.items():
        with safe_open(file, framework="pt") as opened:
            found = _FLOATS.get(opened.get_slice(key).get_dtype())
        if found is not None:
            return found
    return torch.float32


def _without_weights(
    config: ModelConfig, settings: PreTrainedConfig, kind: torch.dtype
) -> PreTrainedModel:
    """Build the model without weights, on the meta device, except for computed buffers."""
    options = {"attn_implementation": config.attention or family_of(settings).loaded_attention}
    try:
        with torch.device("meta"):
            model = from_settings(settings, kind, **options)
    except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
        problem = f"no model can be made of its config ({error})"
        raise ModelError(f"model.path = {config.path!r}: {problem}") from error
    # the parameters that transformers keeps in another dtype than the rest
    for pattern, wanted in model._get_dtype_plan(kind).items():
        for name, parameter in model.named_parameters():
            if re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", name):
                parameter.data = parameter.data.to(wanted)
    # transformers' own loading sets this too, whatever the class has set
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    _compute_buffers(model)
    with suppress(OSError):  # not every model has a generation config
        revision = config.revision or "main"
        generation = GenerationConfig.from_pretrained(where_of(config), revision=revision)
        model.generation_config = generation
    return model


def _compute_buffers(model: PreTrainedModel) -> None:
    """Give non-stored buffers the values that they get when transformers loads a model."""
    # initialize_weights() skips a tensor with this mark, so that only buffers are computed
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    # the run's random numbers must not depend on how its model is loaded
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def _located(
    model: PreTrainedModel, unread: DeferredWeights, keys: Mapping[str, str]
) -> DeferredWeights:
    """Add to ``unread`` the source from which transformers' own loading would take each weight of
    ``model``."""
    targets = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern: dict[str, WeightConverter] = {}
    for converter in converters:
        by_pattern |= dict.fromkeys(converter.source_patterns, converter)
    prefix = model.base_model_prefix
    # in natural order, as transformers reads them: experts are stacked in the order of their keys
    for key, file in sorted(keys.items(), key=lambda item: dot_natural_key(item[0])):
        name, pattern = rename_source_key(key, renamings, converters, prefix, targets)
        # a renaming may match a key that is already right
        if name not in targets and key in targets:
            name, pattern = rename_source_key(key, [], [], prefix, targets)
        if name not in targets:
            continue
        if pattern is None:
            unread.stored.setdefault(name, StoredTensor(file, key))
            continue
        # a copy, since a converter collects the tensors of one weight
        converter = unread.converted.setdefault(name, deepcopy(by_pattern[pattern]))
        whole: Any = StoredTensor(file, key).whole  # called only when the weight is needed
        converter.add_tensor(name, key, pattern, whole)
    return unread


def _keys(config: ModelConfig, settings: PreTrainedConfig) -> dict[str, str]:
    """Return the file of each tensor of a folder or of the hub. It is empty without safetensors
    files of the usual names."""
    kind: Any = type(settings)
    if vars(settings).get("transformers_weights") or (
        hasattr(kind, "extra_files") and kind.extra_files
    ):
        return {}
    where = where_of(config)
    options: dict[str, object] = {
        "revision": config.revision,
        "_raise_exceptions_for_missing_entries": False,
    }
    try:
        if (single := cached_file(where, SINGLE, **options)) is not None:
            files = {Path(single).name: single}
        elif (index := cached_file(where, INDEX, **options)) is not None:
            file_of = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(file_of.values()))
            files = {name: cached_file(where, name, revision=config.revision) for name in names}
        else:
            return {}
        keys: dict[str, str] = {}
        for file in files.values():
            with safe_open(file, framework="pt") as opened:
                keys |= dict.fromkeys(opened.keys(), file)
        return keys
    except BROKEN as error:
        raise ModelError(
            f"model.path = {config.path!r}: the weights cannot be read ({error})"
        ) from error


def _opened(source: Source) -> AbstractContextManager[Any]:
    return source.opened() if isinstance(source, StoredTensor) else nullcontext(source)


def _magnitudes(model: nn.Module) -> dict[int, list[Tensor]]:
    """Return the magnitudes of new adapters with weight decomposition, by the id of the weight
    whose row norms they are."""
    found: dict[int, list[Tensor]] = {}
    for name, module in model.named_modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            adapted: Any = module
            layer = adapted.get_base_layer()
            if not isinstance(layer, nn.Linear):
                problem = f"model.lora.dora: {name} is no linear layer"
                raise ModelError(f"{problem}, and its weights are spread over processes")
            found.setdefault(id(layer.weight), []).append(magnitude.weight)
    return found


def _copies(model: nn.Module) -> dict[int, list[Tensor]]:
    """Return the tensors of modules that are trained whole, by the id of the weight that each
    starts from."""
    found: dict[int, list[Tensor]] = {}
    for _, module in saved_modules(model):
        for copied in module.modules_to_save.values():
            new = copied.state_dict(keep_vars=True)
            for name, weight in module.original_module.state_dict(keep_vars=True).items():
                found.setdefault(id(weight), []).append(new[name])
    return found


def put_together(model: PreTrainedModel) -> set[str]:
    """Return the parameters that transformers builds from several stored tensors."""
    patterns: list[str] = []
    for entry in get_model_conversion_mapping(model):
        if isinstance(entry, WeightConverter):
            patterns += entry.target_patterns
    names = set()
    for name, _ in model.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            names.add(name)
    return names
