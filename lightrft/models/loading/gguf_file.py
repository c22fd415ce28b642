"""Models in GGUF files, the format of llama.cpp."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.models.loading.export_check import check_export, probe_logits
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.models.loading.save_model import save_model
from lightrft.utils.errors import ConfigError, ModelError, install_extra, whole_message

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
