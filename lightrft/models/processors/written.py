"""Read a written processor again, and compare it with the processor in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.loading.hf_logging import BROKEN, suppress_hf_warnings
from lightrft.models.processors.base import ModalityProcessor, Processor, load_processor
from lightrft.types import Extent
from lightrft.utils.errors import ModelError, whole_message

log = logging.getLogger(__name__)

_UNREADABLE = (*BROKEN, TypeError, AttributeError, RuntimeError, IndexError)
_PROBES = {
    "image": ((40, 60, 3), (900, 1300, 3)),
    "video": ((4, 24, 36, 3), (4, 900, 1300, 3)),
    "audio": ((7000,), (15000,)),
}
"""Shapes of the items that both processors read. The larger ones are beyond usual limits."""


def check_processor(
    folder: Path,
    processor: Processor,
    tokenizer: PreTrainedTokenizerBase,
    start: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Check that a model folder reads media as the processor that was written to it.

    Each kind of media is read by the processor of the folder: the placeholders and the tensors are
    equal. transformers' own class is compared too where it can be built: most processors of clips
    need torchvision.

    Args:
        folder: The folder, with the model's config and tokenizer.
        processor: The processor that was written.
        tokenizer: The tokenizer that was written.
        start: Path or name of the model that the processor was read from. ``None`` leaves
            transformers out: it reads no folder of adapters.
        trust_remote_code: Run the code of the folder, which is that of the start model.

    Raises:
        ModelError: The processor of the folder cannot be read, or reads an item otherwise.
    """
    own = ModelConfig(
        path=str(folder), unproved_family="allow", trust_remote_code=trust_remote_code
    )
    found = load_processor(own, tokenizer)
    for kind, part in processor.parts.items():
        again = None if found is None else found.parts.get(kind)
        if again is None:
            raise ModelError(f"the written model has no processor for media of the kind {kind}")
        for shape in _PROBES[kind]:
            if _text(again, kind, shape) != _text(part, kind, shape):
                raise ModelError(
                    f"the written processor gives an item of the kind {kind} with the shape "
                    f"{shape} other placeholders than the processor of the run"
                )
        _compare_tensors(kind, _inputs(again, kind), _inputs(part, kind))
    if start is not None:
        with suppress_hf_warnings(local=True):
            _compare_transformers(folder, processor, tokenizer, start)


def _compare_tensors(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected.keys() | found.keys():
        one, other = found.get(name), expected.get(name)
        if one is None or other is None or not torch.equal(one, other):
            raise ModelError(
                f"the written processor computes another {name} of an item of the kind {kind} "
                "than the processor of the run"
            )


def _compare_transformers(
    folder: Path, processor: Processor, tokenizer: PreTrainedTokenizerBase, start: str
) -> None:
    """Compare the placeholders that transformers' processor of the folder writes.

    Others are an error where the processor of the start model writes the right ones. Where both
    write the same others, nothing was lost by writing.
    """
    expected: dict[str, int | str] = {}
    for kind, part in processor.parts.items():
        ids = tokenizer(_text(part, kind, _PROBES[kind][0]))["input_ids"]
        expected[kind] = ids.count(processor.tokens[kind])
    try:
        found = _transformers_places(str(folder), processor)
        if found == expected:
            return
        before = _transformers_places(start, processor)
    except ImportError as error:
        log.info("transformers cannot build the written processor here (%s)", whole_message(error))
        return
    said = (
        f"an item of each kind has {_list(found)} placeholders in transformers, read by the "
        f"written processor, and {_list(expected)} in this run"
    )
    if before == expected:
        raise ModelError(said)
    # An error may name its folder.
    same = all(
        count == before[kind] or (isinstance(count, str) and isinstance(before[kind], str))
        for kind, count in found.items()
    )
    log.log(logging.INFO if same else logging.WARNING, "%s", said)


def _list(places: Mapping[str, int | str]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in places.items())


def _transformers_places(path: str, processor: Processor) -> dict[str, int | str]:
    """Return the number of placeholders that transformers' processor of a folder writes for an
    item of each kind, or its error.

    Raises ``ImportError`` if the processor needs a library that is not installed.
    """
    # imported here, since text models need none of the modules that they load
    from transformers import AutoProcessor

    from lightrft.models.processors.own import item_keywords

    places: dict[str, int | str] = {}
    try:
        own = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except _UNREADABLE as error:
        return dict.fromkeys(processor.parts, whole_message(error))
    for kind, part in processor.parts.items():
        before, after = part.around
        options = item_keywords(kind, [_item(kind, _PROBES[kind][0])], part.rate)
        if kind == "video":
            options["do_sample_frames"] = False
        try:
            made = own(text=[f"a{before}{part.written}{after}b"], **options, return_tensors="pt")
        except _UNREADABLE as error:
            places[kind] = whole_message(error)
        else:
            ids = np.asarray(made["input_ids"])[0].tolist()
            places[kind] = ids.count(processor.tokens[kind])
    return places


def _item(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an item whose entries differ."""
    ramp = np.arange(np.prod(shape)).reshape(shape)
    if kind == "audio":
        return np.sin(ramp / 7).astype(np.float32)
    return (ramp * 7 % 251).astype(np.uint8)


def _extent(kind: str, shape: tuple[int, ...]) -> Extent:
    if kind != "video":
        return Extent(shape)
    return Extent(shape, tuple(i / 2 for i in range(shape[0])), 2.0)


def _text(part: ModalityProcessor, kind: str, shape: tuple[int, ...]) -> str:
    """Return the text of an item, or why there is none."""
    try:
        return part.placeholder_text(_extent(kind, shape))
    except ValueError as error:
        return str(error)


def _inputs(part: ModalityProcessor, kind: str) -> dict[str, Tensor]:
    shape = _PROBES[kind][0]
    return part.inputs(_item(kind, shape), _extent(kind, shape))
