"""Write a model, its tokenizer and its processor as a folder that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.loading.adapter_folder import write_base
from lightrft.models.loading.hf_logging import suppress_hf_warnings
from lightrft.models.loading.older_readers import add_older_names, published_layout
from lightrft.models.lora import is_adapted, merged_model
from lightrft.models.multimodal.tower_attention import kept_implementations
from lightrft.utils.atomic_files import write_json
from lightrft.utils.chat_template import turn_ends

log = logging.getLogger(__name__)


class Saved(Protocol):
    """An object that writes its files next to a model's weights."""

    def save(self, path: str | Path, /) -> None: ...


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    *,
    processor: Saved | None = None,
    merge: bool = True,
) -> None:
    """Write a folder that ``from_pretrained`` loads.

    Args:
        model: A transformers or peft model, or an actor.
        tokenizer: Written too, unless ``None``.
        path: The folder.
        processor: Written too, unless ``None``.
        merge: Add adapters into the written weights, not into the model in memory. If ``False``,
            write only the adapters.
    """
    # an actor holds its transformers or peft model in ``model``
    inner: Any = model if isinstance(model, PreTrainedModel) or is_adapted(model) else model.model
    is_tied = None
    with suppress_hf_warnings(local=True):
        if is_adapted(inner) and not merge:
            inner.save_pretrained(str(path))
            own = inner.get_base_model().config
            commit = vars(own).get("_commit_hash")
            write_base(Path(path), ModelConfig(path=own.name_or_path, revision=commit))
        else:
            whole = merged_model(inner) if is_adapted(inner) else inner
            if whole is not inner:
                _report_shared_layers(whole)
            with kept_implementations(whole), published_layout(whole):
                whole.save_pretrained(str(path))
            is_tied = _is_tied(whole)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))

        write_ends(Path(path), tokenizer)

    add_older_names(Path(path), is_tied=is_tied)

    if processor is not None:
        processor.save(path)


def write_ends(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the ends of turns of the chat template to ``generation_config.json`` of a model folder.

    Other programs then end a response where the model learned to end it. A folder without this file
    stays as it is.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    fields = json.loads(file.read_text(encoding="utf-8"))
    ends = end_list(fields.get("eos_token_id")) or end_list(tokenizer.eos_token_id)
    missing = [end for end in turn_ends(tokenizer).ids if end not in ends]
    if missing:
        fields["eos_token_id"] = [*ends, *missing]
        write_json(file, fields)


def end_list(eos: int | Iterable[int] | None) -> list[int]:
    """Return the end tokens of a field ``eos_token_id``, which is one token, several or none."""
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def _is_tied(model: PreTrainedModel) -> bool | None:
    """Return whether the output head is the embeddings; ``None`` for a model without one."""
    head, embeddings = _ends(model)
    if head is None or embeddings is None:
        return None
    return head.weight is embeddings.weight


def _ends(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the output head and the embeddings, or None for each that the model lacks."""
    try:
        return model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:
        # A model of several language models, such as one that can speak, names no embeddings.
        return None, None


def _report_shared_layers(model: PreTrainedModel) -> None:
    """Warn of weights that the family shares between layers and that adapters made different."""
    of_ends = {id(weight) for end in _ends(model) if end is not None for weight in end.parameters()}
    apart = [
        (other, one)
        for one, other in model.all_tied_weights_keys.items()
        if id(model.get_parameter(one)) not in of_ends
        and not torch.equal(model.get_parameter(one), model.get_parameter(other))
    ]
    if apart:
        log.warning(
            "%s shares weights between layers, and adapters made %d of them different, e.g. %s "
            "and %s. transformers 5 reads both; programs that share the layers, such as "
            "transformers 4, read one of them. For those programs, train full weights, or name "
            "other layers in model.lora.targets",
            model.config.model_type,
            len(apart),
            *apart[0],
        )
