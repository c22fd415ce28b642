"""Any family, by its own transformers processor.

The processor writes the placeholders of an item and computes the tensors. It is tried on three
pictures, alone and together, which shows how the tensors of several items are joined.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.processing_utils import ProcessorMixin
from transformers.utils import cached_file

from lightrft.config.model import ModelConfig
from lightrft.models.families import family_of
from lightrft.models.multimodal.derived import SHAPE, places_name
from lightrft.models.multimodal.towers import Tower
from lightrft.models.processors.base import (
    PROCESSOR_FILES,
    ModalityProcessor,
    bounded,
    token_text,
    within,
)
from lightrft.types import Extent
from lightrft.utils.errors import DataError, first_line

_TRIED = ((40, 60, 3), (24, 72, 3), (72, 24, 3))
"""Shapes of the pictures by which the rules of a processor are found."""


def build(
    config: ModelConfig,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Mapping[str, ModalityProcessor]:
    """Build the parts of the family's own processor.

    Args:
        config: Settings with the folder of the model.
        settings: Config of the model.
        tokenizer: Gives placeholders and marks.

    Raises:
        ValueError: The processor cannot be built, or does something that is not known here.
    """
    reader = family_of(settings).reader
    assert reader is not None
    processor, files = _load(config, settings, tokenizer)
    parts: dict[str, ModalityProcessor] = {}
    for tower in reader.towers:
        # clips and sounds need a processor of their own
        if tower.kind == "image":
            parts[tower.kind] = _picture_part(processor, tower, settings, tokenizer, files)
    if not parts:
        raise ValueError(f"{type(processor).__name__} reads no pictures")
    return parts


def _load(
    config: ModelConfig, settings: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, dict[str, str]]:
    """Return the processor, and the texts of its files by name."""
    files: dict[str, str] = {}
    for name in PROCESSOR_FILES:
        file = cached_file(
            config.path,
            name,
            revision=config.revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            files[name] = Path(file).read_text(encoding="utf-8")
    fields = json.loads(files.get(PROCESSOR_FILES[2], "{}"))
    name = fields.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(settings.model_type)
    known = None if name is None else _class(name)
    if known is None:
        raise ValueError(f"transformers {transformers.__version__} has no processor {name!r}")
    given: list[Any] = []
    for part in known.get_attributes():
        if part == "tokenizer":
            given.append(copy.copy(tokenizer))
        elif part == "image_processor":
            options = {"backend": "pil", "revision": config.revision or "main"}
            given.append(AutoImageProcessor.from_pretrained(config.path, **options))
        else:
            given.append(None)
    # A processor of pictures alone has no processor of clips.
    lenient: Any = type(known.__name__, (known,), {"check_argument_for_proper_class": _lenient})
    return lenient.from_args_and_dict(given, fields), files


def _class(name: str) -> Any:
    """Return a processor class of transformers, or ``None``.

    Some are hidden without torchvision, which they need for clips only.
    """
    found = getattr(transformers, name, None)
    if found is None or issubclass(found, ProcessorMixin):
        return found
    family = name.removesuffix("Processor").lower()
    try:
        module = import_module(f"transformers.models.{family}.processing_{family}")
    except ImportError:
        return None
    return getattr(module, name, None)


def _lenient(self: Any, name: str, argument: Any) -> Any:
    """Accept a part that is left out."""
    if argument is None:
        return type(None)
    return ProcessorMixin.check_argument_for_proper_class(self, name, argument)


class _Recorder:
    """Stands for a tokenizer, and keeps the text that it was called with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any = None, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _call(processor: Any, text: str, pictures: list[Any]) -> tuple[str, dict[str, Any]]:
    """Return the text with placeholders, and the outputs for one prompt."""
    own = copy.copy(processor)
    own.tokenizer = _Recorder(processor.tokenizer)
    options = {"return_tensors": "pt", "text_kwargs": {"add_special_tokens": False}}
    try:
        made = own(text=[text], images=[pictures], **options)
    except ValueError:
        # Some take one list of pictures, and not one for each prompt.
        made = own(text=[text], images=pictures, **options)
    return own.tokenizer.text, dict(made)


def _picture_part(
    processor: Any,
    tower: Tower,
    settings: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    files: Mapping[str, str],
) -> OwnImage:
    names = tuple(name for name in tower.inputs if not name.endswith(SHAPE))[:-1]
    token = token_text(tokenizer, tower.token_id(settings))
    written, tail = _written(processor, token)
    blanks = [Image.fromarray(np.full(shape, 100, np.uint8)) for shape in _TRIED]
    rules, several = _rules(processor, written, names, blanks)
    part = OwnImage(processor, written, token, rules, files, several=several, tail=tail)
    counts = {part.placeholder_text(Extent(shape)).count(token) for shape in (*_TRIED, (64, 64, 3))}
    return replace(part, fixed=len(counts) == 1, around=_around(tokenizer, written))


_MARKS = ("image_token", "boi_token", "image_placeholder_token", "start_of_image_token")
"""Attributes of processors with the text that may stand for a picture."""

_ENDS = ("image_start_token", "image_end_token")


def _written(processor: Any, token: str) -> tuple[str, str]:
    """Return the text that the processor replaces by placeholders, and what it adds to a prompt."""
    picture = Image.fromarray(np.full(_TRIED[0], 100, np.uint8))
    reason = ""
    marks = [str(getattr(processor, name, None) or "") for name in _MARKS]
    ends = [str(getattr(processor, name, None) or "") for name in _ENDS]
    for text in dict.fromkeys([*marks, ends[0] + marks[0] + ends[1]]):
        if not text:
            continue
        try:
            whole, _ = _call(processor, f"a{text}b", [picture])
        except Exception as error:  # processors raise arbitrary errors
            reason = first_line(error)
            continue
        if token not in whole or not whole.startswith("a") or "b" not in whole:
            reason = f"it writes {whole[:60]!r} for {text!r}"
            continue
        spaced, _ = _call(processor, f"a {text}\nb", [picture])
        if whole[1 : whole.rindex("b")] != spaced[2 : spaced.rindex("\nb")]:
            reason = f"what it writes for {text!r} depends on the words around it"
            continue
        return text, whole[whole.rindex("b") + 1 :]
    name = type(processor).__name__
    raise ValueError(f"{name}: the text that stands for a picture was not found ({reason})")


def _around(tokenizer: PreTrainedTokenizerBase, written: str) -> tuple[str, str]:
    """Return the text around ``written`` in the chat template."""
    usual = ("", "\n")
    if not tokenizer.chat_template:
        return usual
    word = {"type": "text", "text": "(word)"}
    texts = []
    for content in ([{"type": "image"}, word], [word]):
        message: Any = {"role": "user", "content": content}
        try:
            text = tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # templates raise arbitrary errors
            return usual
        texts.append(str(text))
    before, found, after = texts[0].partition(written)
    start = texts[1].partition("(word)")[0]
    if not found or not before.startswith(start):
        return usual
    return before.removeprefix(start), after.partition("(word)")[0]


def _rules(
    processor: Any, written: str, names: tuple[str, ...], pictures: list[Any]
) -> tuple[dict[str, str], bool]:
    """Return the rule of each tensor, and whether a prompt may have several pictures.

    The first axis of ``rows`` joins items. Items of a ``flat`` input differ in shape.
    """
    alone = [_call(processor, written, [picture]) for picture in pictures]
    rules: dict[str, str] = {}
    for name in names:
        tensors = [_tensor(made[name]) for _, made in alone if name in made]
        if tensors:
            # Tiles: their number depends on the picture, and may be equal by chance.
            tiles = any(t.ndim > 4 for t in tensors)
            same = len({t.shape[1:] for t in tensors}) == 1 and not tiles
            rules[name] = "rows" if same else "flat"
    known = {*names, *_TEXT}
    unread = sorted({name for _, made in alone for name in made} - known)
    if unread:
        raise ValueError(f"{type(processor).__name__} makes {', '.join(unread)}, which are unread")
    try:
        text, joint = _call(processor, written * len(pictures), pictures)
    except Exception:  # a family of one picture per prompt
        return rules, False
    several = text == "".join(one for one, _ in alone)
    for name, rule in rules.items():
        parts = [_tensor(made[name]) for _, made in alone]
        whole = _tensor(joint[name])
        several = several and _joins(parts, whole, rule)
    return rules, several


_TEXT = ("labels", "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _joins(parts: list[Tensor], whole: Tensor, rule: str) -> bool:
    """Return ``True`` if ``whole`` is made of ``parts`` as the model's inputs are."""
    if rule == "rows":
        joined = torch.cat(parts)
        return whole.numel() == joined.numel() and torch.equal(joined, whole.reshape(joined.shape))
    row = 0
    for part in parts:
        own = whole[row : row + len(part)]
        if own.ndim != part.ndim or len(own) != len(part):
            return False
        corner = tuple(slice(0, n) for n in part.shape)
        if not torch.equal(own[corner], part):
            return False
        rest = own.clone()
        rest[corner] = 0
        if rest.any():
            return False
        row += len(part)
    return row == len(whole)


def _tensor(value: Any) -> Tensor:
    """Return an output of a processor as one tensor."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        value = torch.cat([each if each.ndim else each[None] for each in value])
    return torch.as_tensor(value)


@dataclass(frozen=True, slots=True)
class OwnImage:
    """Pictures, by the family's processor.

    Attributes:
        processor: The processor.
        written: Text that the processor replaces by placeholders.
        token: Text of a placeholder.
        rules: Rule of each tensor, see ``_rules``.
        files: Texts of the processor's files.
        several: Several pictures of one prompt are read as one by one.
        fixed: Every picture has as many placeholders.
        tail: Text that the processor adds to a prompt.
        bounds: Limits of pixels.
    """

    processor: Any
    written: str
    token: str
    rules: Mapping[str, str]
    files: Mapping[str, str]
    several: bool = True
    fixed: bool = False
    tail: str = ""
    bounds: tuple[int | None, int | None] = (None, None)
    around: tuple[str, str] = ("", "\n")
    rate: int = 0
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict, compare=False)

    def placeholder_text(self, extent: Extent) -> str:
        shape = (*self._bounded(*extent.shape[:2]), 3)
        if shape not in self._texts:
            # Only the size is read.
            blank = Image.fromarray(np.zeros(shape, np.uint8))
            text, _ = _call(self.processor, f"a{self.written}b", [blank])
            self._texts[shape] = text[1 : text.rindex("b")]
        return self._texts[shape]

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        height, width = self._bounded(*value.shape[:2])
        picture = Image.fromarray(value)
        if (height, width) != value.shape[:2]:
            picture = picture.resize((width, height), resample=Image.Resampling.BICUBIC)
        text, made = _call(self.processor, self.written, [picture])
        stored: dict[str, Tensor] = {}
        for name, rule in self.rules.items():
            tensor = _tensor(made[name])
            if rule == "flat":
                stored[name] = tensor.flatten()
                stored[name + SHAPE] = torch.tensor([list(tensor.shape)])
            else:
                stored[name] = tensor
        stored[places_name("image")] = torch.tensor([text.count(self.token)])
        return stored

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        places = inputs[places_name("image")]
        if len(places) > 1 and not self.several:
            raise DataError(
                f"a prompt with {len(places)} pictures: {type(self.processor).__name__} reads "
                "several pictures of one prompt in another way than one by one; give one"
            )
        return int(places.sum())

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> OwnImage:
        low, high = self.bounds
        low = low if min_pixels is None else min_pixels
        high = high if max_pixels is None else max_pixels
        size = getattr(self.processor.image_processor, "crop_size", None)
        size = size or getattr(self.processor.image_processor, "size", None) or {}
        if self.fixed and "height" in size:
            within(size["height"] * size["width"], min_pixels, max_pixels)
        return replace(self, bounds=(low, high), _texts={})

    def save(self, path: Path) -> None:
        for name, text in self.files.items():
            (path / name).write_text(text, encoding="utf-8")

    def _bounded(self, height: int, width: int) -> tuple[int, int]:
        """Return the size at which the picture is read."""
        return bounded(height, width, *self.bounds)
