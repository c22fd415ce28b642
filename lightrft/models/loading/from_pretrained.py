"""Load a model and a tokenizer that fit each other. Errors name the setting and the fix."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from lightrft.config.model import ModelConfig
from lightrft.models.families import check_family, check_members, check_read, family_of
from lightrft.models.loading.adapter_base import SWITCHED, base_of, saved_adapters
from lightrft.models.loading.adapter_folder import lora_of, with_saved_adapters
from lightrft.models.loading.chat_template import fit_template
from lightrft.models.loading.export_check import check_export, probe_logits
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.models.loading.packaged import packaged_folder
from lightrft.models.loading.save_model import end_list, save_model
from lightrft.models.multimodal.submodules import PARTS, check_parts, is_selected
from lightrft.models.multimodal.tower_attention import join_segments
from lightrft.models.onednn.layers import replace_patch_embeddings, use_onednn
from lightrft.utils.atomic_files import is_gguf, looks_like_path, nearest_name
from lightrft.utils.chat_template import turn_ends
from lightrft.utils.errors import ConfigError, ModelError, first_line, install_extra, whole_message
from lightrft.utils.peft_folder import ADAPTER_CONFIG

_log = logging.getLogger(__name__)
_PADS = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|vision_pad|>",
    "<unk>",
)
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "*.spm")
# Newer and older name of the same class.
_PLAIN_CLASSES = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
)


def load_model(
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    device_map: str | dict[str, object] | None = None,
    output_head: bool = True,
) -> PreTrainedModel:
    """Load the model of ``config.path`` in evaluation mode, with ``config.freeze`` applied.

    A folder of adapters gives its base model with trainable adapters.

    Args:
        config: Path and settings of the model.
        device: Device of the weights.
        dtype: Dtype of the weights. ``None`` uses ``config.dtype``.
        device_map: Placement of parts as in transformers, which replaces ``device``. ``None`` for
            none.
        output_head: Require the weights of the output head. Otherwise a missing head is 0.

    Raises:
        ModelError: There is no such folder and no hub, or it is not a model folder. The family is
            not known. The class lacks the attention. Weights are damaged or missing. Quantisation
            lacks bitsandbytes. A frozen part or prefix names nothing.
    """
    if (found := saved_adapters(config)) is not None:
        model = load_model(found.base, device=device, dtype=dtype, output_head=output_head)
        return with_saved_adapters(model, found, config)  # ty: ignore[invalid-explicit-return]
    options = _options(config, device, dtype)
    if device_map is not None:
        options["device_map"] = device_map
    settings = known_settings(config)
    family = family_of(settings)
    implementation = config.attention or family.loaded_attention
    where = where_of(config)
    try:
        with suppress_hf_warnings(local=Path(where).is_dir()):
            loaded: Any = getattr(transformers, family.loader).from_pretrained(
                where,
                config=settings,
                attn_implementation=implementation,
                output_loading_info=True,
                **options,
            )
        model, info = loaded
    except ImportError as error:
        if "quantization_config" in settings.to_dict() and config.attention is None:
            raise ModelError(
                f"model.path = {config.path!r}: its weights are quantised ({first_line(error)}); "
                "give the model that is not, and model.load_in_4bit=true with model.lora"
            ) from error
        raise ModelError(
            f"model.attention = {implementation!r}: {first_line(error)}; leave model.attention "
            "out for sdpa, or install the package"
        ) from error
    except BROKEN as error:
        # first the class: if it cannot be built at all, the weights are not to blame
        check_class(config, settings)
        raise ModelError(
            f"model.path = {config.path!r}: the weights cannot be read ({first_line(error)}); "
            "copy the folder again, or give another"
        ) from error
    missing = set(map(str, info["missing_keys"]))
    if not output_head:
        missing -= _empty_output_head(model, missing)
    if missing or info["mismatched_keys"]:
        lacking = sorted([*missing, *map(str, info["mismatched_keys"])])
        problem = f"model.path = {config.path!r}: {len(lacking)} weights are missing or misshapen"
        kind = next(iter(settings.architectures or ()), "")
        way = "copy its files again"
        if "Classification" in kind:
            way = f"it is a {kind}: give it to eval-rm or serve-rm, adapters after lightrft merge"
        raise ModelError(f"{problem}, e.g. {lacking[0]}; {way}")
    # parts placed by a device map stay there, and a 4-bit model refuses to be moved
    if "device_map" not in options:
        model = model.to(device)
    if config.load_in_4bit:
        for module in model.modules():
            # bitsandbytes would repack weights for CPUs with AVX512-BF16, which breaks training
            if hasattr(module, "support_avx512bf16_for_cpu"):
                setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010
    check_members(model, f"model.path = {config.path!r}")
    freeze(model, config.freeze)
    use_own_modules(model)
    return model.eval()


def use_own_modules(model: nn.Module) -> None:
    """Make modules of ``model`` compute the same in less time, on the meta device too."""
    replace_patch_embeddings(model)
    join_segments(model)
    use_onednn(model)


def _empty_output_head(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Set the output head to 0 if its weights are ``missing``. Return their names."""
    head = model.get_output_embeddings()
    if head is None:
        return set()
    names = {name for name, weight in model.named_parameters() if weight is head.weight}
    if names & missing:
        torch.nn.init.zeros_(head.weight)
    return names


def known_settings(config: ModelConfig) -> PreTrainedConfig:
    """Return ``model_settings`` of a family that can be trained.

    Raises ``ModelError`` also as ``check_family`` does.
    """
    settings = model_settings(config)
    check_family(
        settings, f"model.path = {config.path!r}", allow_unproved=config.unproved_family == "allow"
    )
    return settings


def from_settings(
    settings: PreTrainedConfig, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Build a model of ``settings`` by transformers, on torch's default device."""
    loader: Any = getattr(transformers, family_of(settings).loader)
    # auto classes have from_config; the classes of single families only _from_config
    make = getattr(loader, "from_config", None) or loader._from_config
    with suppress_hf_warnings(local=True):
        return make(settings, dtype=dtype, **options)


def check_class(config: ModelConfig, settings: PreTrainedConfig) -> None:
    """Raise ``ModelError`` if no model can be built from ``settings``.

    Otherwise the error would blame the weights.
    """
    implementation = config.attention or family_of(settings).loaded_attention
    options: dict[str, object] = {"trust_remote_code": True} if config.trust_remote_code else {}
    try:
        with torch.device("meta"):
            from_settings(settings, torch.float32, attn_implementation=implementation, **options)
    except (*BROKEN, AttributeError, ImportError, TypeError) as error:
        name = f"model.path = {config.path!r}"
        if config.attention is not None:
            name = f"model.attention = {config.attention!r} with {name}"
        raise ModelError(
            f"{name}: no model can be made of its config ({first_line(error)})"
        ) from error


def where_of(config: ModelConfig) -> str:
    """Return the folder or hub name of the weights of ``config.path``.

    It is that of the base for a folder of adapters, and a folder in the cache for a packaged model.

    Raises:
        ConfigError: The model is packaged, and a package that it needs is not installed.
        ModelError: The path can be neither.
    """
    if not config.path:
        raise ModelError("model.path is not set: give a Hugging Face folder or name")
    path = base_of(config).path
    folder = Path(path).expanduser()
    if not folder.exists() and (packaged := packaged_folder(path, write_gguf_as_folder)):
        return str(packaged)
    is_folder = folder.is_dir()
    if is_folder and (folder / "config.json").is_file():
        return str(folder)
    file = next(folder.glob("*.gguf"), None) if is_folder else folder
    if file is not None and is_gguf(file):
        raise ModelError(
            f"model.path = {path!r}: a GGUF file must be written as a model folder first: lightrft "
            f"convert {file} output=FOLDER"
        )
    if is_folder:
        raise ModelError(f"model.path = {path!r}: not a model folder, since it has no config.json")
    if folder.exists():
        raise ModelError(
            f"model.path = {path!r}: it is a file; give the folder with config.json, weights and "
            "tokenizer"
        )
    if looks_like_path(path):
        raise ModelError(f"model.path = {path!r}: there is no such folder{nearest_name(folder)}")
    return on_hub(path, config.revision)


def model_settings(config: ModelConfig) -> PreTrainedConfig:
    """Return the config of ``config.path``, or of the base model for a folder of adapters.

    Raises ``ModelError``.

    For a model that also speaks, return the config of its text-generating part, since only that
    part is loaded.
    """
    config = base_of(config)
    where = where_of(config)
    try:
        found = AutoConfig.from_pretrained(
            where, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        if vars(found).get("has_lora_adapter") and _adapter_file(where, config.revision):
            raise ModelError(f"model.path = {config.path!r}: {SWITCHED}")
        return getattr(found, "thinker_config", found)
    except BROKEN as error:
        kind = ""
        with suppress(*BROKEN):
            fields, _ = PreTrainedConfig.get_config_dict(where, revision=config.revision)
            kind = str(fields.get("model_type"))
        check_read(kind, f"model.path = {config.path!r}")
        is_code = "custom code" in str(error)
        if Path(where).is_dir() or is_code:
            trust = ""
            if is_code and not config.trust_remote_code:
                trust = "; to run this code, set model.trust_remote_code=true"
            raise ModelError(
                f"model.path = {config.path!r}: config.json cannot be used ({first_line(error)})"
                f"{trust}"
            ) from error
        raise ModelError(
            f"model.path = {config.path!r}: "
            "there is no folder of that name here, and the model hub did not give it either "
            f"({first_line(error)}). Give a folder, or check the name and the network"
        ) from error


def _adapter_file(where: str, revision: str | None) -> str | None:
    """Return the settings of adapters in the folder or hub name ``where``, or ``None``."""
    missing: dict[str, bool] = {"_raise_exceptions_for_missing_entries": False}
    return cached_file(where, ADAPTER_CONFIG, revision=revision or "main", **missing)


def _options(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> dict[str, object]:
    kind = dtype or ("auto" if config.dtype == "auto" else getattr(torch, config.dtype))
    options: dict[str, object] = {
        "dtype": kind,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    if config.load_in_4bit:
        if find_spec("bitsandbytes") is None:
            raise ModelError(f"model.load_in_4bit needs bitsandbytes: {install_extra('quant')}")
        from transformers import BitsAndBytesConfig

        # as the other layers, and as engines that hold the whole weights
        compute = kind if isinstance(kind, torch.dtype) else model_settings(config).dtype
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=compute or torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )
        # bitsandbytes quantises weights as they are loaded, so they are loaded onto the device
        options["device_map"] = {"": str(device)}
    return options


def freeze(model: PreTrainedModel, what: tuple[str, ...]) -> None:
    """Disable gradients of the parameters that ``what`` selects.

    Parameters that no feature depends on are frozen too. An entry of ``what`` is a part of the
    model, or a prefix of parameter names, with or without a leading ``model.``. Raises
    ``ModelError`` for a part that the model lacks and for a prefix that matches nothing.
    """
    parameters = dict(model.named_parameters())
    check_parts(model.config, "model.freeze", [part for part in what if part in PARTS])
    family = family_of(model.config)
    if family.reader is not None:
        for name, parameter in parameters.items():
            # nothing in a loss depends on these, so they would never get a gradient
            if name.startswith(family.reader.unread):
                parameter.requires_grad_(False)
    for prefix in what:
        hit = [p for name, p in parameters.items() if is_selected(family, name, prefix)]
        if not hit:
            tops = sorted({".".join(name.split(".")[:2]) for name in parameters})
            problem = f"names no parameter; names start with {', '.join(tops)}"
            raise ModelError(f"model.freeze = {prefix!r} {problem}")
        for parameter in hit:
            parameter.requires_grad_(False)


def base_and_lora(config: ModelConfig) -> ModelConfig:
    """Return settings of the same policy, for an engine that loads the base and is sent adapters.

    Raises ``ModelError`` as ``lora_of`` does.
    """
    found = saved_adapters(config)
    if found is None:
        return config
    own = str(found.folder) if has_tokenizer(found.folder) else None
    update = {"lora": lora_of(config), "tokenizer": config.tokenizer or own}
    return found.base.model_copy(update=update)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``config.tokenizer`` or ``config.path``.

    It pads on the left, with a separate pad token if one is free.

    A multimodal model's tokenizer gets the chat template of the model's processor if its own is for
    text alone. Raises ``ModelError``: no tokenizer there, a vocabulary larger than the model's, or
    an unreadable chat template.
    """
    found = saved_adapters(config) if config.path else None
    base = config if found is None else found.base
    own = None if found is None else found.folder
    if config.tokenizer:
        tokenizer = read_tokenizer(config, config.tokenizer)
    elif own is not None and has_tokenizer(own):
        tokenizer = read_tokenizer(config, str(own))
    else:
        tokenizer = read_tokenizer(base, where_of(base))
    where = tokenizer.name_or_path
    settings = model_settings(base) if config.path else None
    rows = None
    if settings is not None:
        text = settings.get_text_config()
        # Some heads have no rows for special tokens that are never sampled.
        rows = text.vocab_size + vars(text).get("additional_vocab_size", 0)
    if rows is not None and len(tokenizer) > rows:
        own = f"the tokenizer {where!r} has {len(tokenizer)} tokens"
        way_out = "; give the tokenizer that the model was saved with"
        if found is not None:
            way_out = "; write the model whole by lightrft merge, or set model.base to a base of"
            way_out += f" {len(tokenizer)} tokens"
        raise ModelError(
            f"{own}, the model {base.path!r} only {rows}: they do not belong together{way_out}"
        )
    # responses follow the prompt without a gap
    tokenizer.padding_side = "left"
    _own_pad(tokenizer, rows)
    if config.chat_template is not None:
        tokenizer.chat_template = _template(config.chat_template)
    elif settings is not None:
        if own is not None and (template := own / "chat_template.jinja").is_file():
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        try:
            fit_template(tokenizer, settings, where_of(base), base.revision)
        except BROKEN as error:
            problem = f"the chat template of its processor cannot be read ({first_line(error)})"
            raise ModelError(
                f"model.path = {config.path!r}: {problem}; set model.chat_template"
            ) from error
    _own_eos(tokenizer)
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Return ``True`` if ``folder`` holds files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def read_tokenizer(config: ModelConfig, where: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the folder or hub name ``where``, as it is saved there.

    Raises ``ModelError`` if there is none, or it cannot be read.
    """
    setting = "model.tokenizer" if config.tokenizer else "model.path"
    folder = Path(where).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        problem = "the folder holds no tokenizer; set model.tokenizer"
        raise ModelError(f"{setting} = {where!r}: {problem}")
    try:
        said = get_tokenizer_config(where, revision=config.revision)
        # For some model types AutoTokenizer selects a class that replaces the file's
        # pre-tokenizer, and characters get lost. So a tokenizer saved by the plain class is
        # loaded by the plain class.
        plain = said.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in said
        loader: Any = PreTrainedTokenizerFast if plain else AutoTokenizer
        return loader.from_pretrained(
            where,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    except (*BROKEN, TypeError, AttributeError, ImportError) as error:
        problem = f"no tokenizer can be loaded from there ({first_line(error)})"
        if not Path(where).exists():
            problem += f"; there is no folder {where} here: give one, or check name and network"
        raise ModelError(f"{setting} = {where!r}: {problem}") from error


def _own_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without an end token that of its chat template, if there is one."""
    ends = turn_ends(tokenizer).ids
    if tokenizer.eos_token_id is None and ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
        _log.warning("the tokenizer names no end token: using %s", tokenizer.eos_token)


def _own_pad(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> None:
    """Give the tokenizer a pad token that differs from its end token, without growing the model."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return
    was = "no pad token" if tokenizer.pad_token_id is None else "its end token as pad"
    vocabulary = tokenizer.get_vocab()
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    free = [token for token in _PADS if token in vocabulary and token not in taken]
    # models often have more rows than the tokenizer has tokens, so a new token needs no new row
    if not free and rows is not None and len(tokenizer) < rows:
        free = ["<|pad|>"]
    if free:
        tokenizer.add_special_tokens({"pad_token": free[0]})
        _log.warning("the tokenizer has %s: using %s to pad", was, free[0])
        return
    tokenizer.pad_token = tokenizer.eos_token
    problem = f"the tokenizer has {was} and no token is free: padding with the end token"
    _log.warning("%s. Masks come from lengths, so a real end token is still trained", problem)


def _template(text: str) -> str:
    """Return a chat template that is given as text, or as a file that holds one."""
    if "{%" in text or "{{" in text:
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise ModelError(
            f"model.chat_template = {text!r} is neither a Jinja template nor a file; give one of "
            f"them, or leave it out for the tokenizer's own{nearest_name(file)}"
        )
    return file.read_text(encoding="utf-8")


def config_ends(config: ModelConfig) -> list[int]:
    """Return the end tokens that the configs of the model name, without loading it.

    Raises ``ModelError`` as ``model_settings`` does.
    """
    config = base_of(config)
    sources: list[Any] = [model_settings(config).get_text_config(decoder=True)]
    with suppress(OSError):  # not every model has a generation config
        revision = config.revision or "main"
        sources.append(GenerationConfig.from_pretrained(where_of(config), revision=revision))
    found = [end for source in sources for end in end_list(source.eos_token_id)]
    return list(dict.fromkeys(found))


SECONDS = 5.0
"""Longest time to wait for a connection to the hub."""


def on_hub(path: str, revision: str | None) -> str:
    """Return the hub name ``path``, or its folder in the cache if the hub cannot be reached.

    Raises ``ModelError`` if it is not in the cache either.
    """
    return path if constants.is_offline_mode() else _found(path, revision, constants.ENDPOINT)


# A start asks several times. Errors are not remembered, so that a later call may reach the hub.
@functools.cache
def _found(path: str, revision: str | None, endpoint: str) -> str:
    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # of httpx, or what a release of the hub's client has in its place
        try:
            return snapshot_download(path, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            raise ModelError(
                f"model.path = {path!r}: there is no such folder, and {endpoint} cannot "
                f"be reached ({first_line(error)}); give a folder, or check name and network"
            ) from None
    return path


_PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantized."""


@torch.no_grad()
def write_gguf_as_folder(path: str, folder: Path) -> str:
    """Write a GGUF file as a model folder in float32. Return a sentence about its types.

    The whole model is in memory.

    Args:
        path: The file. It may have any quantization and architecture that transformers reads.
        folder: The folder. It is empty, or does not exist.

    Raises:
        ConfigError: The package gguf is not installed.
        ModelError: The file cannot be read, holds an architecture that transformers does not read,
            or lacks weights, as a part of a split file does.
    """
    if find_spec("gguf") is None:
        raise ConfigError(f"path = {path!r} needs the package gguf: {install_extra('gguf')}")
    file = Path(path).expanduser()
    try:
        types = _types(file)
        with suppress_hf_warnings(local=True):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
            model, info = loaded
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (*BROKEN, TypeError, AttributeError, IndexError, ImportError) as error:
        raise ModelError(
            f"path = {path!r}: transformers cannot read the file ({whole_message(error)})"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"path = {path!r}: {len(missing)} weights are missing, e.g. {missing[0]}; join a file "
            "that was split first, by llama-gguf-split --merge of llama.cpp"
        )
    # The weights in memory are no longer quantized. The name is a title, and no path.
    for field in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(field, None)
    del model.hf_quantizer
    save_model(model, tokenizer, folder)
    check_export(folder, probe_logits(model.eval()), tokenizer)
    return types


def _types(file: Path) -> str:
    from gguf import GGUFReader

    counts = Counter(tensor.tensor_type.name for tensor in GGUFReader(file).tensors)
    kinds = {True: "not quantized", False: "dequantized"}
    parts = []
    for plain, title in kinds.items():
        of = [f"{n} of {kind}" for kind, n in counts.most_common() if (kind in _PLAIN) == plain]
        parts.append(f"{title}: {', '.join(of) or 'none'}")
    return f"tensors {'; '.join(parts)}"
