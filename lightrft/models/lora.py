"""Low-rank adapters by peft, and merged weights that leave model and adapters unchanged."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.models.families import Family, family_of
from lightrft.models.loading.hf_logging import suppress_hf_warnings
from lightrft.models.multimodal.submodules import (
    LANGUAGE,
    TOWER,
    check_parts,
    is_selected,
    part_of,
    parts_of,
)
from lightrft.utils.errors import ModelError, did_you_mean, whole_message
from lightrft.utils.module_tensors import changed_name

if TYPE_CHECKING:
    from peft import LoraConfig

_log = logging.getLogger(__name__)

# Projections between a tower and the language model, and towers themselves: trained only on
# request.
_TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower")
_FUSED_MAMBA = frozenset(("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"))
"""Model types whose kernels read the weight of ``out_proj``, so that peft refuses to adapt it."""
_CONNECTORS = ("multi_modal_projector", "merger", "embed_vision", "embed_audio")


def add_adapters(
    model: PreTrainedModel,
    config: LoRAConfig,
    *,
    exclude: Iterable[str] = (),
) -> nn.Module:
    """Add trainable adapters to ``model`` and freeze everything else. Return the peft model.

    Args:
        model: A transformers model.
        config: Rank, scale, dropout, targets and parts of the adapters, and the modules that are
            trained whole.
        exclude: Path components. Modules below them get no adapters.

    Raises:
        ModelError: The model lacks one of ``config.parts``, or ``config.targets`` names no module
            of one. A module of ``config.modules_to_save`` cannot be trained whole.
    """
    from peft import LoraConfig, get_peft_model

    check_parts(model.config, "model.lora.parts", config.parts)
    check_saved_modules(model, config)
    exclude = tuple(exclude)
    # a text model without exclusions leaves the search for targets to peft
    some = bool(exclude) or family_of(model.config).reader is not None
    targets = target_modules(model, config, exclude) if some else config.targets
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # ty: ignore[invalid-argument-type]
        lora_dropout=config.dropout,
        use_dora=config.dora,
        use_rslora=config.rslora,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(config.modules_to_save) or None,
        task_type="CAUSAL_LM",
        bias="none",
    )
    if targets == "all-linear":
        _leave_out(model, settings)
    try:
        with suppress_hf_warnings(local=True):
            check_targets(model, config)
            adapted = get_peft_model(model, settings)
    except (ValueError, TypeError) as error:
        problem = whole_message(error)
        if "modules_to_save" in problem:
            # Stacked experts: peft puts adapters on parameters, where no name of a layer shows it.
            raise ModelError(
                f"model.lora.modules_to_save = {list(config.modules_to_save)}: "
                f"model.lora.targets = {config.targets!r} gives these modules adapters too; name "
                "other layers in model.lora.targets, such as [q_proj, v_proj]"
            ) from None
        if isinstance(targets, str) and "not found" in problem:
            names = [name for name, _ in model.named_modules() if name]
            raise _no_end(f"model.lora.targets = {targets!r}", targets, names) from None
        raise ModelError(f"model.lora.targets = {config.targets!r}: {problem}") from None
    for name, module in saved_modules(adapted):
        if any(hasattr(inner, "lora_A") for inner in module.modules()):
            raise _both(config, name)
    _check_places(adapted, config)
    if config.targets == "all-linear":
        _report_experts(adapted, config)
    share_configs(adapted)
    return adapted


def _check_places(adapted: nn.Module, config: LoRAConfig) -> None:
    """Raise ``ModelError`` if peft put adapters outside of ``config.parts``.

    It takes names that a tower shares with experts for those of the experts.
    """
    family = family_of(base_model(adapted).config)
    for name, parameter in adapted.named_parameters():
        part = part_of(family, name)
        if ".lora_" in name and parameter.requires_grad and part not in config.parts:
            parts = ", ".join(config.parts)
            raise ModelError(
                f"model.lora.parts = {parts}: peft puts adapters on {part} too ({name}), whose "
                "experts have layers of the same names; set model.lora.targets to names that only "
                f"{parts} has"
            )


def _report_experts(adapted: nn.Module, config: LoRAConfig) -> None:
    """Log a warning if experts stay as they are: peft leaves out stacked weights in silence."""
    family = family_of(base_model(adapted).config)
    stacked, trained = set(), set()
    for name, parameter in adapted.named_parameters():
        place, found, _ = name.partition(".experts.")
        if found and parameter.ndim == 3 and part_of(family, name) in config.parts:
            stacked.add(place)
        if found and parameter.requires_grad:
            trained.add(place)
    if stacked - trained:
        reason = "peft knows no adapters for those of this family"
        if config.dora or config.dropout:
            reason = "that allows neither model.lora.dora nor model.lora.dropout"
        _log.warning(
            "the experts get no adapters: their weights are stacked, and %s; "
            "model.lora.modules_to_save=[experts] trains them whole",
            reason,
        )


def share_configs(model: nn.Module) -> None:
    """Give modules that are trained whole the config of the model.

    peft copies it with them. The attention of the model is selected in its config.
    """
    for _, module in saved_modules(model):
        for copied in module.modules_to_save.values():
            for new, old in zip(copied.modules(), module.original_module.modules(), strict=True):
                for name, value in vars(old).items():
                    if isinstance(value, PreTrainedConfig):
                        setattr(new, name, value)


def check_saved_modules(model: nn.Module, config: LoRAConfig) -> None:
    """Raise ``ModelError`` if a module of ``config.modules_to_save`` cannot be trained whole.

    Args:
        model: A model without adapters.
        config: Settings of the adapters.
    """
    given = f"model.lora.modules_to_save = {list(config.modules_to_save)}"
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: list[str] = []
    for ending in config.modules_to_save:
        found = [name for name in modules if name.endswith(ending)]
        if not found:
            raise _no_end(given, ending, modules)
        chosen += found
    for target in () if isinstance(config.targets, str) else config.targets:
        hits = [name for name in modules if f".{name}".endswith(f".{target}")]
        if hits and all(_is_inside(name, chosen) for name in hits):
            raise _both(config, hits[0])
    for name in chosen:
        module = modules[name]
        inside = [other for other in chosen if other.startswith(f"{name}.")]
        weights = list(module.parameters())
        why = ""
        if inside:
            why = f"{inside[0]} is inside of {name}, which is trained whole; name one of them"
        elif not weights:
            why = f"{name} has no weights; leave it out"
        elif not all(weight.is_floating_point() for weight in weights):
            why = f"{name} is quantised; leave it out, or set model.load_in_4bit=false"
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            why = f"{name} is a list of modules; name modules inside of it"
        if why:
            raise ModelError(f"{given}: {why}")


def check_targets(model: nn.Module, config: LoRAConfig) -> None:
    """Raise ``ModelError`` if a name in ``config.targets`` is the end of no module's name.

    Weights of experts may be stacked in a parameter, which peft finds by the names of their layers.
    It raises ``ValueError`` for some of several names whose weights are fused.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    if isinstance(config.targets, str):
        return
    settings = LoraConfig(target_modules=list(config.targets))
    convert_peft_config_for_transformers(settings, model, None)
    modules = [name for name, _ in model.named_modules() if name]
    for target in sorted(settings.target_modules or ()):
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise _no_end(f"model.lora.targets = {list(config.targets)}", target, modules)


def _no_end(given: str, ending: str, modules: Iterable[str]) -> ModelError:
    """Return the error for a name that is the end of no name in ``modules``."""
    modules = set(modules)
    leaves = modules - {name.rpartition(".")[0] for name in modules}
    ends = {name.rpartition(".")[2] for name in leaves} | modules
    known = sorted(name for name in ends if not name.isdigit())
    hint = did_you_mean(ending, known)
    if given.startswith("model.lora.targets"):
        layers = ", ".join(name for name in known if "." not in name and name.endswith("_proj"))
        every = f"; name layers, such as [{layers}], or give all-linear"
        hint = "; did you mean 'all-linear'?" if ending == "all" else hint or every
    return ModelError(f"{given}: {ending!r} is the end of no module's name{hint}")


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _both(config: LoRAConfig, name: str) -> ModelError:
    return ModelError(
        f"model.lora.modules_to_save = {list(config.modules_to_save)} and model.lora.targets = "
        f"{config.targets!r} both name {name}: a module is trained whole or gets adapters; leave "
        "it out of one of them"
    )


def check_frozen(family: Family, config: ModelConfig, names: Iterable[str]) -> None:
    """Raise ``ModelError`` if adapters change weights that ``config.freeze`` selects.

    Modules that are trained whole change the weights that they are copies of.

    Args:
        family: Family of the model.
        config: Settings of the model.
        names: Trained parameters of the peft model.
    """
    for name, what in product(names, config.freeze):
        weight = changed_name(name)
        if not is_selected(family, weight, what):
            continue
        other = f"the adapters of model.path = {config.path!r}"
        if config.lora is not None and ".modules_to_save." in name:
            other = f"model.lora.modules_to_save = {list(config.lora.modules_to_save)}"
        elif config.lora is not None:
            other = f"model.lora.targets = {config.lora.targets!r}"
        raise ModelError(
            f"model.freeze = {what!r} and {other} both name {weight.rpartition('.')[0]}: a frozen "
            "module is not trained; leave it out of one of them"
        )


def saved_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a peft model that are trained whole, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "original_module") and hasattr(module, "modules_to_save"):
            yield name, module


def untied_modules(model: nn.Module) -> list[str]:
    """Return the embeddings and the head that are trained whole, if the model without adapters ties
    them. The list is empty where they stay one tensor."""
    base = base_model(model)
    ends: list[Any] = [base.get_output_embeddings(), base.get_input_embeddings()]
    if any(end is None for end in ends) or ends[0].weight is ends[1].weight:
        return []
    starts = [end.original_module if hasattr(end, "original_module") else end for end in ends]
    if starts[0].weight is not starts[1].weight:
        return []
    return [name for name, module in saved_modules(base) if module in ends]


def _leave_out(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Change ``settings`` for all linear layers, so that none is a layer that peft cannot adapt."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    names = linear_modules(model)
    excluded = [name for name in names if not _is_linear(model.get_submodule(name))]
    if model.config.model_type in _FUSED_MAMBA:
        excluded += [name for name in names if name.rpartition(".")[2] == "out_proj"]
    # peft matches last components, which modules around a linear layer may share (Gemma 4)
    endings = {name.rpartition(".")[2] for name in names}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in endings and _is_around(module):
            excluded.append(name)
    if excluded:
        settings.exclude_modules = excluded
    if not settings.use_dora and not settings.lora_dropout:
        return
    # peft adapts the stacked weights of experts, but neither with DoRA nor with dropout
    whole = LoraConfig(target_modules="all-linear")
    convert_peft_config_for_transformers(whole, model, None)
    if whole.target_parameters:
        listed = LoraConfig(target_modules=[name for name in names if name not in set(excluded)])
        convert_peft_config_for_transformers(listed, model, None)
        settings.target_modules = listed.target_modules


def _is_linear(layer: nn.Module) -> bool:
    """Return ``False`` for routers and grouped layers, which only inherit from ``nn.Linear``."""
    is_plain = not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward
    # Quantized weights do not move to the meta device.
    if is_plain or hasattr(layer.weight, "quant_state"):
        return True
    with torch.device("meta"):
        states = torch.empty(1, 1, layer.in_features, dtype=layer.weight.dtype)
        try:
            found = deepcopy(layer).to("meta")(states)
        except RuntimeError:
            return False
    return isinstance(found, Tensor) and found.shape == (1, 1, layer.out_features)


def target_modules(
    model: PreTrainedModel,
    config: LoRAConfig,
    exclude: Iterable[str] = (),
) -> list[str]:
    """Return the full names of the modules that ``config.targets`` selects inside ``config.parts``.

    Full names, because a last component alone would match modules of other parts too.

    Args:
        model: A transformers model.
        config: ``targets`` is ``all-linear``, a regular expression of full names, or last
            components of names.
        exclude: Path components to skip.

    Raises:
        ModelError: Some part has no such module.
    """
    targets = config.targets
    if targets == "all-linear":
        every = linear_modules(model, exclude)
        named = [name for name in every if _is_linear(model.get_submodule(name))]
    else:
        excluded = set(exclude)
        endings = () if isinstance(targets, str) else tuple(f".{target}" for target in targets)
        named = []
        for name, _ in model.named_modules():
            if isinstance(targets, str):
                hit = re.fullmatch(targets, name) is not None
            else:
                hit = f".{name}".endswith(endings)
            # the model itself has no name
            if name and hit and not excluded & set(name.split(".")):
                named.append(name)
    family = family_of(model.config)
    part_by_name = {name: part_of(family, f"{name}.") for name in named}
    for part in config.parts:
        if part not in part_by_name.values():
            problem = f"names no module of {part}, which is one of model.lora.parts"
            raise ModelError(f"model.lora.targets = {targets!r} {problem}")
    return [name for name in named if part_by_name[name] in config.parts]


def adapted_modules(model: PreTrainedModel) -> list[str]:
    """Return the full names of the layers of the language model that peft can adapt.

    Raises:
        ModelError: There are none.
    """
    skipped = "out_proj" if model.config.model_type in _FUSED_MAMBA else None
    return [
        name
        for name in target_modules(model, LoRAConfig())
        if isinstance(model.get_submodule(name), nn.Linear) and name.rpartition(".")[2] != skipped
    ]


def linear_modules(model: nn.Module, exclude: Iterable[str] = ()) -> list[str]:
    """Return the full names of the linear layers that get adapters.

    The output head and modules below ``exclude`` get none.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    skipped = {"lm_head", "output_layer", *exclude}
    names = []
    for name, module in model.named_modules():
        # some quantised layers are linear by name, not by class, and some are around one
        named = "Linear" in type(module).__name__ and not _is_around(module)
        if (
            (named or isinstance(module, nn.Linear))
            and module is not head
            and not skipped & set(name.split("."))
        ):
            names.append(name)
    return names


def _is_around(module: nn.Module) -> bool:
    """Return ``True`` for a module with a linear layer inside of it."""
    return any(isinstance(inner, nn.Linear) for inner in module.modules() if inner is not module)


def find_all_linear_modules(model: nn.Module, freeze_vision_tower: bool = True) -> set[str]:
    """Return the last name components of the layers that get adapters.

    An example is ``q_proj``. The output head and the connectors of towers are left out; with
    ``freeze_vision_tower``, also the towers. A layer of a tower may share its last component with a
    layer of the language model. Pass the names to ``apply_lora_configuration``, which separates the
    two.
    """
    names = linear_modules(model, _excluded(freeze_vision_tower))
    return {name.rsplit(".", 1)[-1] for name in names}


def _excluded(freeze_vision_tower: bool) -> tuple[str, ...]:
    return _CONNECTORS + (_TOWERS if freeze_vision_tower else ())


def apply_lora_configuration(
    model: PreTrainedModel,
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float,
    target_modules: str | list[str] | None = None,
    freeze_vision_tower: bool = True,
) -> nn.Module:
    """Add LoRA adapters to ``model``, scaled by ``lora_alpha / lora_rank``. Return the peft model.

    Connectors of towers get no adapters.

    Args:
        model: A transformers model.
        lora_rank: Rank of the adapters.
        lora_alpha: Numerator of their scale.
        lora_dropout: Dropout probability of their input.
        target_modules: Names or a pattern. ``None`` selects every linear layer but the output head.
        freeze_vision_tower: Put no adapters on towers.

    Raises:
        ModelError: The rank is below 1, alpha is not positive, or the targets name no module.
    """
    if lora_rank < 1 or lora_alpha <= 0:
        problem = f"lora_rank = {lora_rank} and lora_alpha = {lora_alpha}"
        raise ModelError(f"{problem}: both must be positive for adapters to learn")
    targets = "all-linear" if target_modules is None else target_modules
    parts = (LANGUAGE,)
    if not freeze_vision_tower and TOWER in parts_of(family_of(model.config)):
        parts = (LANGUAGE, TOWER)
    config = LoRAConfig(
        rank=lora_rank,
        alpha=lora_alpha,
        dropout=lora_dropout,
        targets=targets if isinstance(targets, str) else tuple(targets),
        parts=parts,
    )
    # with frozen embeddings, gradient checkpointing would see no input that needs a gradient
    model.enable_input_require_grads()
    return add_adapters(model, config, exclude=_excluded(freeze_vision_tower))


def is_adapted(model: nn.Module) -> bool:
    """Return ``True`` if ``model`` is a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_dropout(model: nn.Module) -> float:
    """Return the largest dropout probability of the adapters of ``model``; 0 without adapters."""
    adapted: Any = model
    settings = adapted.peft_config.values() if is_adapted(model) else ()
    return max((vars(each).get("lora_dropout", 0.0) for each in settings), default=0.0)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside. Its layers keep their adapters."""
    # a peft model keeps the transformers model inside
    return model.get_base_model() if is_adapted(model) else model  # ty: ignore


def can_merge(model: nn.Module) -> bool:
    """Return ``False`` if ``model`` has adapters on quantised layers.

    They cannot be added to the weights.
    """
    return _quantised_layer(model) is None


def _quantised_layer(model: nn.Module) -> str | None:
    """Return the name of a quantised layer with adapters; ``None`` if there is none."""
    for name, layer in model.named_modules():
        # Layers with adapters are known by their method: the import of peft takes a second.
        if hasattr(layer, "get_base_layer"):
            adapted: Any = layer
            weights = adapted.get_base_layer().parameters(recurse=False)
            if not all(torch.is_floating_point(weight) for weight in weights):
                return name
    return None


@torch.no_grad()
def merged_model(model: nn.Module) -> PreTrainedModel:
    """Return a transformers model with the adapters of the peft model ``model`` added in.

    ``model`` is left bit for bit as it was. Weights without adapters are shared with it.

    Tied weights are separate tensors where an adapter changes one of them. ``tie_word_embeddings``
    of the result is then ``False``.

    Raises:
        ModelError: Some adapters are on quantised layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if (quantised := _quantised_layer(model)) is not None:
        way_out = "write the adapters alone, by lightrft export with adapters=keep"
        raise ModelError(f"{quantised} is quantised, so adapters cannot be added in: {way_out}")
    # A recurrent layer keeps the state of its last forward, which no copy is allowed of.
    states = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor))
    tensors = (*model.parameters(), *model.buffers(), *states)
    copied: Any = deepcopy(model, {id(tensor): tensor for tensor in tensors})
    adapted = [m.get_base_layer() for m in copied.modules() if isinstance(m, BaseTunerLayer)]
    # peft adds adapters in place, so each layer gets weights that nothing shares
    for layer in {id(layer): layer for layer in adapted}.values():
        for name, weight in layer.named_parameters(recurse=False):
            layer.register_parameter(name, nn.Parameter(weight.detach().clone(), False))
    with suppress_hf_warnings(local=True):
        merged = copied.merge_and_unload(progressbar=False)
    _untie(merged)
    return merged


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of ``merged_model`` by name. Raises ``ModelError`` as it does."""
    return dict(merged_model(model).state_dict())


def _untie(model: PreTrainedModel) -> None:
    """Set ``tie_word_embeddings`` to ``False`` if head and embeddings are different tensors.

    transformers then ties no other weights either, such as those of layers that Zamba shares, so
    each of them gets a tensor of its own.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or head.weight is embeddings.weight:
        return
    for settings in (model.config, model.config.get_text_config(decoder=True)):
        if hasattr(settings, "tie_word_embeddings"):
            settings.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    seen: set[int] = set()
    for name, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) in seen:
            module, _, last = name.rpartition(".")
            copied = nn.Parameter(weight.detach().clone(), False)
            model.get_submodule(module).register_parameter(last, copied)
        seen.add(id(weight))
