"""The common part of all processors.

A processor is a table of parts, one for each kind of media.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightrft.config.data import MediaConfig
from lightrft.config.model import ModelConfig
from lightrft.models.families import check_family, family_of
from lightrft.models.loading.adapter_base import saved_adapters
from lightrft.models.loading.from_pretrained import model_settings
from lightrft.models.loading.processor_files import (
    PROCESSOR_FILES,
    processor_texts,
    settings_files,
    write_missing,
)
from lightrft.types import Extent, Media
from lightrft.utils.errors import DataError, ModelError


class ModalityProcessor(Protocol):
    """One kind of media of one family.

    It gives the numbers of the family's transformers processor, without torchvision.
    """

    @property
    def written(self) -> str:
        """The placeholder text that the chat template writes for one item.

        ``expand`` replaces it.
        """
        ...

    @property
    def around(self) -> tuple[str, str]:
        """The text that the family's chat template writes before and after ``written``.

        Prompts without a template must contain it.
        """
        ...

    @property
    def rate(self) -> int:
        """Samples per second that ``inputs`` expects; 0 for kinds without a rate."""
        ...

    def placeholder_text(self, extent: Extent) -> str:
        """Return the text, with placeholders, for one item of this size.

        Raises ``ValueError`` for a size that cannot be read.
        """
        ...

    def inputs(self, value: np.ndarray, extent: Extent) -> dict[str, Tensor]:
        """Return the tower inputs of one item.

        Pictures are ``[H, W, 3]`` and frames ``[T, H, W, 3]`` uint8. Audio is ``[N]`` float32 in
        [-1, 1].
        """
        ...

    def count(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the number of features that the tower computes from ``inputs``.

        It must equal the number of placeholders.
        """
        ...

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> ModalityProcessor:
        """Return the same part with other bounds on the pixels of a picture or frame."""
        ...

    def save(self, path: Path) -> None:
        """Write the files from which transformers builds the same processor."""
        ...


@dataclass(frozen=True, slots=True)
class Processor:
    """The parts of a model that read media.

    Attributes:
        parts: Part of each kind.
        tokens: Id of each kind's placeholder token.
        source: Settings of the model's folder by file, with those that no part reads.
        limits: Limits of pixels that were set by ``limited``.
        files: Contents of the files that settings of the processor name, such as a font.
    """

    parts: Mapping[str, ModalityProcessor]
    tokens: Mapping[str, int]
    source: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    limits: Bounds = (None, None)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Processor:
        """Return the same processor with other limits of pixels. ``None`` keeps a limit."""
        if min_pixels is None and max_pixels is None:
            return self
        parts = {kind: part.limited(min_pixels, max_pixels) for kind, part in self.parts.items()}
        return replace(self, parts=parts, limits=newer(self.limits, min_pixels, max_pixels))

    def expanded(
        self, pieces: Sequence[str], items: Sequence[tuple[ModalityProcessor, Extent]]
    ) -> str:
        """Return the text of a prompt with the placeholders of its items.

        Args:
            pieces: The texts before, between and after the items.
            items: Part and extent of each item.
        """
        joint: list[Any] = []
        texts, shapes = [pieces[0]], []
        for (part, extent), after in zip(items, pieces[1:], strict=True):
            if getattr(part, "apart", True):
                texts[-1] += part.placeholder_text(extent) + after
            else:
                joint.append(part)
                shapes.append(joint[-1].read_shape(extent.shape))
                texts.append(after)
        return joint[0].in_text(texts, shapes) if joint else texts[0]

    def save(self, path: str | Path) -> None:
        """Write files from which transformers builds the same processor.

        Settings of the model's folder that no part reads are kept.
        """
        folder = Path(path)
        for part in self.parts.values():
            part.save(folder)
        for name, content in self.files.items():
            write_missing(folder / name, content)
        for name in PROCESSOR_FILES:
            file = folder / name
            own = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            fields = {**self.source.get(name, {}), **own}
            if own and name == PROCESSOR_FILES[0]:
                low, high = self.limits
                # a family may have no setting of its own for a limit
                given = {"min_pixels": low, "max_pixels": high}
                set_limits = {limit: value for limit, value in given.items() if value is not None}
                fields |= {LIMITS: set_limits} if set_limits else {}
            if fields != own:
                write_settings(file, fields)


LIMITS = "lightrft_limits"
"""Key of the limits of pixels in ``preprocessor_config.json``."""
_NESTED = {
    PROCESSOR_FILES[0]: ("image_processor", "feature_extractor"),
    PROCESSOR_FILES[1]: ("video_processor",),
    PROCESSOR_FILES[2]: (),
}
"""Sections of ``processor_config.json`` that may stand in place of another file."""
_REPLACED = ("min_pixels", "max_pixels", "chat_template", LIMITS)
"""Settings that the files of a saved processor have elsewhere: in ``size``, or in a file."""


def _source(texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the settings in the files of the model's processor, one table for each file."""
    found = {name: json.loads(texts.get(name, "{}")) for name in PROCESSOR_FILES}
    whole = found[PROCESSOR_FILES[2]]
    for name, sections in _NESTED.items():
        for section in sections:
            found[name] = {**found[name], **whole.get(section, {})}
    sections = [section for names in _NESTED.values() for section in names]
    found[PROCESSOR_FILES[2]] = {k: v for k, v in whole.items() if k not in sections}
    return found


def check_placeholders(processor: Processor, ids: Sequence[int], media: Media) -> None:
    """Raise ``DataError`` unless ``ids`` have a placeholder for each feature of ``media``.

    Args:
        processor: The processor of the model.
        ids: Token ids of a prompt.
        media: Its media.
    """
    inputs = {name: rows.values for name, rows in media.items()}
    for kind, part in processor.parts.items():
        places = ids.count(processor.tokens[kind])
        try:
            features = part.count(inputs)
        except KeyError:
            features = 0
        if places != features:
            raise DataError(
                f"the prompt has {places} placeholders for {kind}, and its media make {features} "
                "features"
            )


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token."""
    return str(tokenizer.convert_ids_to_tokens(token))


def known(tokenizer: PreTrainedTokenizerBase, token: str) -> str:
    """Return ``token``. Raises ``ValueError`` if ``tokenizer`` does not have it."""
    if token not in tokenizer.get_vocab():
        raise ValueError(f"the tokenizer has no token {token!r}")
    return token


def within(pixels: int, min_pixels: int | None, max_pixels: int | None) -> None:
    """Refuse pixel bounds that exclude the only size of a family's pictures.

    Args:
        pixels: Pixels of every resized picture.
        min_pixels: Lower bound. ``None`` for none.
        max_pixels: Upper bound. ``None`` for none.

    Raises:
        ModelError: ``pixels`` is out of bounds.
    """
    problem = f"this model reads pictures of {pixels} pixels and cannot take it; leave it unset"
    if min_pixels is not None and pixels < min_pixels:
        raise ModelError(f"min_pixels = {min_pixels}: {problem}")
    if max_pixels is not None and pixels > max_pixels:
        raise ModelError(f"max_pixels = {max_pixels}: {problem}")


Bounds = tuple[int | None, int | None]
"""Lower and upper limit of pixels. ``None`` for no limit."""


def newer(bounds: Bounds, min_pixels: int | None, max_pixels: int | None) -> Bounds:
    """Return ``bounds`` with other limits.

    Args:
        bounds: Limits so far.
        min_pixels: New lower limit. ``None`` keeps it.
        max_pixels: New upper limit. ``None`` keeps it.
    """
    low, high = bounds
    return (
        low if min_pixels is None else min_pixels,
        high if max_pixels is None else max_pixels,
    )


def bounded(
    height: int, width: int, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """Return the size of a picture within limits of pixels, at its aspect ratio.

    Args:
        height: Height of the picture.
        width: Its width.
        min_pixels: Lower bound. ``None`` for none.
        max_pixels: Upper bound. ``None`` for none.
    """
    pixels = height * width
    if max_pixels is not None and pixels > max_pixels:
        scale = math.sqrt(max_pixels / pixels)
    elif min_pixels is not None and pixels < min_pixels:
        scale = math.sqrt(min_pixels / pixels)
    else:
        return height, width
    return max(1, int(height * scale)), max(1, int(width * scale))


def write_settings(file: Path, fields: Mapping[str, object]) -> None:
    """Write ``fields`` as JSON, as transformers does."""
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


Build = Callable[
    [ModelConfig, PreTrainedConfig, PreTrainedTokenizerBase], Mapping[str, ModalityProcessor]
]
"""Maps ``(model settings, the model's config, tokenizer)`` to the parts of a family."""


def _placed(config: ModelConfig) -> ModelConfig:
    """Return the settings of the folder of the processor: of adapters if they have one, or of
    their base."""
    found = saved_adapters(config)
    if found is None:
        return config
    if any((found.folder / name).is_file() for name in PROCESSOR_FILES):
        return config.at(str(found.folder)).model_copy(update={"revision": None})
    return found.base


def load_processor(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    media: MediaConfig | None = None,
) -> Processor | None:
    """Load the media processor of ``config.path``; ``None`` for a model that reads text alone.

    Args:
        config: Settings with the path of the model.
        tokenizer: Gives placeholders and marks.
        media: Limits of pixels, which belong to the model: rows, eval sets and saved models have
            them too. ``None`` keeps the limits of the folder.

    Raises:
        ModelError: The folder lacks the files that its processor is built from, or the family reads
            media and is not known.
    """
    settings = model_settings(config)
    reader = family_of(settings).reader
    if reader is None:
        # a family that reads media and has no row is no text model
        check_family(settings, f"model.path = {config.path!r}", allow_unproved=True)
        return None
    from lightrft.models.processors.registry import build_of

    config = _placed(config)
    folder = Path(config.path).expanduser()
    # transformers does not expand ``~`` in a path
    placed = config.model_copy(update={"path": str(folder)}) if folder.is_dir() else config
    try:
        parts = build_of(settings.model_type)(placed, settings, tokenizer)
        texts = processor_texts(placed)
        source = _source(texts)
        files = settings_files(placed, texts.values())
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path = {config.path!r}: how it reads media cannot be loaded ({error})"
        ) from error
    saved = source[PROCESSOR_FILES[0]].get(LIMITS, {})
    kept = {
        name: {key: value for key, value in fields.items() if key not in _REPLACED}
        for name, fields in source.items()
    }
    tokens = {tower.kind: tower.token_id(settings) for tower in reader.towers}
    processor = Processor(parts, {kind: tokens[kind] for kind in parts}, kept, files=files)
    processor = processor.limited(saved.get("min_pixels"), saved.get("max_pixels"))
    return processor if media is None else processor.limited(media.min_pixels, media.max_pixels)
