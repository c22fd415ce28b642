"""Load a written model folder by transformers alone, and compare it with the model in memory."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightrft.models.families import FAMILIES
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.utils.cpu import free_memory
from lightrft.utils.errors import ModelError, whole_message

log = logging.getLogger(__name__)

_UNREADABLE = (*BROKEN, TypeError, AttributeError, ImportError)
_PROBE = "1 + 1 = 2, naïve\n  {x: [0.5]}"


@torch.no_grad()
def probe_logits(model: nn.Module) -> Tensor:
    """Return logits ``[1, 8, V]`` of a transformers or peft model for eight tokens, on the CPU."""
    inner: Any = model
    rows = inner.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(4, 12)[None] % rows).to(next(inner.parameters()).device)
    return inner(input_ids=ids, use_cache=False).logits.cpu()


def folder_logits(folder: Path) -> Tensor | None:
    """Return ``probe_logits`` of a model folder; ``None`` if it is left unchecked."""
    try:
        loaded = _load(folder)
    except (*BROKEN, TypeError, AttributeError) as error:
        log.info("%s does not load in transformers (%s)", folder, whole_message(error))
        return None
    return None if loaded is None or not _is_known(loaded[0]) else probe_logits(loaded[0])


def check_export(
    folder: Path,
    expected: Tensor | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Check that plain transformers reads the model folder as the model that was written.

    The model is loaded a second time, on the CPU. A model too large for the free memory is left
    unchecked, and so is a class that this transformers lacks; both are logged.

    Args:
        folder: The folder.
        expected: Logits of the written model, of ``probe_logits``. ``None`` checks that the logits
            are finite.
        tokenizer: The written tokenizer. ``None`` to check none.

    Raises:
        ModelError: Weights are missing, superfluous or misshapen, the logits differ, or the folder
            cannot be loaded.
    """
    try:
        loaded = _load(folder)
    except (*BROKEN, TypeError, AttributeError) as error:
        raise ModelError(
            f"the written model does not load in transformers ({whole_message(error)})"
        ) from error
    if loaded is None:
        return
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, info.get(kind) or ())):
            raise ModelError(
                f"the written model does not load in transformers: {len(names)} "
                f"{kind.replace('_', ' ')}, e.g. {names[0]}"
            )
    if _is_known(model):
        _compare(probe_logits(model), expected)
    if tokenizer is not None:
        _compare_tokenizer(folder, tokenizer)


def check_adapters(folder: Path, adapted: nn.Module) -> None:
    """Warn of adapters of a folder that plain peft leaves out.

    On loading, peft applies the renamings that transformers has for the checkpoints of a family.
    Some of them change names that are right already.

    Args:
        folder: The folder.
        adapted: The peft model that was written to it. It keeps its weights.
    """
    import peft

    written = peft.load_peft_weights(str(folder), device="cpu")
    lost = peft.set_peft_model_state_dict(adapted, written).unexpected_keys
    if lost:
        log.warning(
            "peft %s reads %d of the %d tensors of the adapters under other names and leaves them "
            "out, e.g. %s. lightrft reads all; for other programs, write the whole model with "
            "adapters=merge",
            peft.__version__,
            len(lost),
            len(written),
            lost[0],
        )


def fits_memory(folder: Path) -> bool:
    """Return ``True`` if the folder holds weights that free memory has room for."""
    files = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    size, free = sum(file.stat().st_size for file in files), free_memory()
    if free and 2 * size > free:
        log.warning(
            "the written model is not checked: loading it takes more than half of the free memory"
        )
        return False
    return size > 0


def _is_known(model: PreTrainedModel) -> bool:
    """Return ``True`` for a family whose forward takes tokens alone."""
    return model.config.model_type in FAMILIES


def _load(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """Load a folder by the class that its config names; ``None`` if it is left unchecked."""
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = (tree.get("architectures") or [""])[0]
    loader: Any = getattr(transformers, name, None)
    if loader is None or "auto_map" in tree:
        log.info("%s is not checked: transformers has no class %r", folder, name)
        return None
    if not fits_memory(folder):
        return None
    family = FAMILIES.get(str(tree.get("model_type")))
    with suppress_hf_warnings(local=True):
        model, info = loader.from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            attn_implementation=None if family is None else family.loaded_attention,
        )
    return model.eval(), info


def _compare(found: Tensor, expected: Tensor | None) -> None:
    if not found.isfinite().all():
        if expected is None or expected.isfinite().all():
            raise ModelError(
                "the written model computes logits in transformers that are not finite"
            )
        return
    if expected is None:
        return
    # adapters round once more when they are added to weights in half precision
    bound = 1e-3 if found.dtype == expected.dtype == torch.float32 else 0.1
    found, expected = found.float(), expected.float()
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if gap > bound:
        raise ModelError(
            f"the written model computes other logits in transformers than the trained one: they "
            f"differ by {gap:.2g} of the largest"
        )


def _compare_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if the tokenizer that transformers loads encodes otherwise.

    Where transformers reads the tokenizer of the start model in the same other way, nothing was
    lost by writing it.
    """
    try:
        loaded = _auto_tokenizer(folder)
    except _UNREADABLE as error:
        log.warning("AutoTokenizer cannot load the written tokenizer (%s)", whole_message(error))
        return
    found = loaded(_PROBE)["input_ids"]
    if found == tokenizer(_PROBE)["input_ids"]:
        return
    level = logging.WARNING
    with contextlib.suppress(*_UNREADABLE):
        if _auto_tokenizer(tokenizer.name_or_path)(_PROBE)["input_ids"] == found:
            level = logging.INFO
    log.log(
        level,
        "AutoTokenizer loads a %s, which encodes text otherwise than the tokenizer of this "
        "run; load the written one by PreTrainedTokenizerFast",
        type(loaded).__name__,
    )


def _auto_tokenizer(folder: Path | str) -> Any:
    with suppress_hf_warnings(local=True):
        # Without the answer, it would ask at the terminal.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
