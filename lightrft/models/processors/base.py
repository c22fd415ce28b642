"""The common part of all processors.

A processor is a table of parts, one for each kind of media.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lightrft.config.model import ModelConfig
from lightrft.models.families import family_of
from lightrft.models.loading.from_pretrained import model_settings
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
    """``parts`` by kind, and the id of each kind's placeholder token."""

    parts: Mapping[str, ModalityProcessor]
    tokens: Mapping[str, int]

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> Processor:
        if min_pixels is None and max_pixels is None:
            return self
        parts = {kind: part.limited(min_pixels, max_pixels) for kind, part in self.parts.items()}
        return replace(self, parts=parts)

    def save(self, path: str | Path) -> None:
        for part in self.parts.values():
            part.save(Path(path))


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


def write_settings(file: Path, fields: Mapping[str, object]) -> None:
    """Write ``fields`` as JSON, as transformers does."""
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


Build = Callable[
    [ModelConfig, PreTrainedConfig, PreTrainedTokenizerBase], Mapping[str, ModalityProcessor]
]
"""Maps ``(model settings, the model's config, tokenizer)`` to the parts of a family."""


def load_processor(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Load the media processor of ``config.path``; ``None`` for a model that reads text alone.

    Raises ``ModelError`` if the folder lacks the files that its processor is built from.
    """
    settings = model_settings(config)
    reader = family_of(settings).reader
    if reader is None:
        return None
    from lightrft.models.processors.registry import BUILD

    folder = Path(config.path).expanduser()
    # transformers does not expand ``~`` in a path
    placed = config.model_copy(update={"path": str(folder)}) if folder.is_dir() else config
    try:
        parts = BUILD[settings.model_type](placed, settings, tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.path = {config.path!r}: how it reads media cannot be loaded ({error})"
        ) from error
    tokens = {tower.kind: tower.token_id(settings) for tower in reader.towers}
    return Processor(parts, {kind: tokens[kind] for kind in parts})
