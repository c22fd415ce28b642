"""LightRFT's batches of experience: whole batches, single items, and the changes between them.

The fields of one sample, such as ``advantages``, are rows ``[S]`` or ``[A]``: ``S`` tokens of a
sequence and ``A`` actions. A batch holds rectangles, or with ``packing_samples`` lists of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from lightrft.utils.errors import DataError

Rows = Tensor | list[Tensor]
"""A rectangle ``[B, L]``, or one row per sample."""

OF_ACTIONS = (
    "action_log_probs",
    "base_action_log_probs",
    "values",
    "returns",
    "advantages",
    "action_mask",
    "action_entropy",
)
RAW_IMAGES = "raw_images"
OF_TOKENS = ("sequences", "attention_mask")
MEDIA = (
    ("pixel_values", "image_grid_thws", "image_num"),
    ("pixel_values_videos", "video_grid_thws", "video_num"),
)
"""Fields of patches and of their grids, and the entry of ``info`` that counts a sample's grids."""


class Movable:
    """A dataclass of tensors, lists of tensors, and ``info``, that moves as a whole."""

    def to_device(self, device: torch.device | str) -> Self:
        """Move all tensors to ``device``, in place. Return the batch."""
        return self._change(lambda tensor: tensor.to(device))

    def pin_memory(self) -> Self:
        """Move all tensors to pinned memory, in place. Return the batch."""
        return self._change(lambda tensor: tensor.pin_memory())

    def _change(self, change: Callable[[Tensor], Tensor]) -> Self:
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(self, name, {key: _changed(own, change) for key, own in value.items()})
            else:
                setattr(self, name, _changed(value, change))
        return self


@dataclass
class Experience(Movable):
    """A batch of B samples of text. Sequences are padded on the left.

    Attributes:
        sequences: ``[B, S]`` token ids of prompts and responses.
        action_log_probs: ``[B, A]`` of the policy that sampled.
        base_action_log_probs: ``[B, A]`` of the reference.
        values: ``[B, A]``.
        returns: ``[B, A]``.
        advantages: ``[B, A]``.
        attention_mask: ``[B, S]``, 0 for padding.
        action_mask: ``[B, A]``, 1 for actions.
        info: Further values, one per sample.
        kl: ``[B, A]`` distance to the reference.
        action_entropy: ``[B, A]``.
        labels: Labels of the samples.
        references: Reference answers of the samples.
    """

    sequences: Rows
    action_log_probs: Rows | None
    base_action_log_probs: Rows | None
    values: Rows | None
    returns: Rows | None
    advantages: Rows | None
    attention_mask: Rows | None
    action_mask: Rows | None
    info: dict[str, Any] | None
    kl: Rows | None = None
    action_entropy: Rows | None = None
    labels: list[str] | None = None
    references: list[str] | None = None


@dataclass
class ExperienceVL(Movable):
    """A batch of B samples with images or videos.

    Attributes:
        sequences: ``[B, S]`` token ids of prompts and responses.
        pixel_values: Patches of all images.
        image_grid_thws: ``[images, 3]`` patches along time, height and width.
        raw_images: Images of each sample.
        pixel_values_videos: Patches of all videos.
        video_grid_thws: ``[videos, 3]`` patches along time, height and width.
        action_log_probs: The further fields are those of ``Experience``.
    """

    sequences: Rows
    pixel_values: Tensor | None = None
    image_grid_thws: Rows | None = None
    raw_images: list[Any] | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Rows | None = None
    action_log_probs: Rows | None = None
    base_action_log_probs: Rows | None = None
    values: Rows | None = None
    returns: Rows | None = None
    advantages: Rows | None = None
    attention_mask: Rows | None = None
    action_mask: Rows | None = None
    info: dict[str, Any] | None = None
    kl: Rows | None = None
    action_entropy: Rows | None = None
    labels: list[str] | None = None
    references: list[str] | None = None


AnyExperience = Experience | ExperienceVL


@dataclass
class BufferItem:
    """One sample of an ``Experience``, without padding. The fields are rows."""

    sequences: Tensor
    action_log_probs: Tensor | None
    base_action_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    advantages: Tensor | None
    attention_mask: Tensor | None
    action_mask: Tensor | None
    info: dict[str, Any] | None
    action_entropy: Tensor | None = None


@dataclass
class BufferItemVL:
    """One sample of an ``ExperienceVL``, without padding, with its own media."""

    sequences: Tensor
    pixel_values: Tensor | None = None
    image_grid_thws: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thws: Tensor | None = None
    raw_images: list[Any] | None = None
    action_log_probs: Tensor | None = None
    base_action_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    advantages: Tensor | None = None
    attention_mask: Tensor | None = None
    action_mask: Tensor | None = None
    info: dict[str, Any] | None = None
    action_entropy: Tensor | None = None


Item = BufferItem | BufferItemVL


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_changed(own, change) for own in value]
    return value


def is_vl_experience(experience: AnyExperience) -> bool:
    """Return True if ``experience`` has fields for media."""
    return hasattr(experience, "pixel_values")


def zero_pad_sequences(sequences: Sequence[Tensor], side: str = "left") -> Tensor:
    """Return rows ``[L_i]`` as a rectangle ``[B, L]``, padded with 0.

    Args:
        sequences: The rows.
        side: ``left`` or ``right``.

    Raises:
        DataError: ``side`` is another word.
    """
    if side not in ("left", "right"):
        raise DataError(f"side = {side!r}: must be left or right")
    width = max(len(row) for row in sequences)
    padded = []
    for row in sequences:
        missing = width - len(row)
        padded.append(functional.pad(row, (missing, 0) if side == "left" else (0, missing)))
    return torch.stack(padded)


def split_experience_batch(experience: AnyExperience) -> list[Item]:
    """Return the samples of a batch, with their padding.

    Args:
        experience: The batch. ``info`` counts the images and videos of each sample by
            ``image_num`` and ``video_num``. Without these, each sample has one. Without grids,
            which families such as LLaVA do not have, they count rows of the patches.

    Raises:
        DataError: A field has another number of samples, or media do not belong to samples.
    """
    count = len(experience.sequences)
    columns = {name: _samples(experience, name, count) for name in (*OF_TOKENS, *OF_ACTIONS)}
    if is_vl_experience(experience):
        for patches, grids, number in MEDIA:
            columns |= _own_media(experience, patches, grids, number, count)
        images = getattr(experience, RAW_IMAGES)
        columns[RAW_IMAGES] = [None] * count if images is None else list(images)
    infos: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in (experience.info or {}).items():
        for info, own in zip(infos, _infos(value, count), strict=True):
            info[name] = own
    build = BufferItemVL if is_vl_experience(experience) else BufferItem
    return [
        build(**{name: values[i] for name, values in columns.items()}, info=infos[i])
        for i in range(count)
    ]


def _samples(experience: AnyExperience, name: str, count: int) -> list[Any]:
    value = getattr(experience, name)
    if value is None:
        return [None] * count
    if len(value) != count:
        raise DataError(f"{name} has {len(value)} samples, and sequences has {count}")
    return list(value)


def _infos(value: Any, count: int) -> list[Any]:
    if isinstance(value, Tensor) and value.dim() and len(value) == count:
        return [own.item() if own.numel() == 1 else own for own in value]
    if isinstance(value, list) and len(value) == count:
        return value
    return [value] * count


def _own_media(
    experience: AnyExperience, patches: str, grids: str, number: str, count: int
) -> dict[str, list[Any]]:
    """Return patches and grids of each sample, by field."""
    grid, values = getattr(experience, grids), getattr(experience, patches)
    if grid is None:
        parts = [None] * count if values is None else _by_number(experience, patches, number, count)
        return {grids: [None] * count, patches: parts}
    if isinstance(grid, Tensor):
        own = _by_number(experience, grids, number, count)
    else:
        own = [part if part is None else part.reshape(-1, 3) for part in grid]
    if values is None:
        return {grids: own, patches: [None] * count}
    sizes = [0 if part is None else int(part.prod(-1).sum()) for part in own]
    if sum(sizes) != len(values):
        raise DataError(f"{patches} has {len(values)} patches, and {grids} counts {sum(sizes)}")
    parts = zip(own, values.split(sizes), strict=True)
    return {grids: own, patches: [None if grid is None else part for grid, part in parts]}


def _by_number(experience: AnyExperience, name: str, number: str, count: int) -> list[Any]:
    """Return the rows of the field ``name`` of each sample, ``None`` for a sample without any."""
    rows: Tensor = getattr(experience, name)
    numbers = [int(n) for n in (experience.info or {}).get(number, [1] * count)]
    if len(numbers) != count or sum(numbers) != len(rows):
        raise DataError(
            f"{name} has {len(rows)} rows for {count} samples; give the number of rows of "
            f"each sample as info[{number!r}]"
        )
    return [part if len(part) else None for part in rows.split(numbers)]


def remove_padding_in_sequences(items: list[Item]) -> list[Item]:
    """Cut the padding of each sample, in place. Return ``items``.

    The padding is left of the first attended token, and right of the last action. An action that
    is masked between others stays. LightRFT cuts as many actions as are masked.

    Args:
        items: Samples with both masks.

    Raises:
        DataError: A sample has no action or no mask.
    """
    for item in items:
        if item.action_mask is None or item.attention_mask is None:
            raise DataError("padding is found by action_mask and attention_mask; give both")
        acts = item.action_mask.bool().nonzero()[:, 0]
        if not len(acts):
            raise DataError("a sample has no action: drop it before it is added")
        kept = int(acts[-1]) + 1
        cut = len(item.action_mask) - kept
        first = int(item.attention_mask.long().argmax())
        for name in OF_TOKENS:
            row = getattr(item, name)
            setattr(item, name, row[first : len(row) - cut])
        for name in OF_ACTIONS:
            row = getattr(item, name)
            setattr(item, name, None if row is None else row[:kept])
    return items


def make_experience_batch(items: Sequence[Item], packing_samples: bool = False) -> AnyExperience:
    """Return a batch of samples.

    ``info`` of a batch with media counts the images and videos of each sample, so that it can be
    split again. LightRFT does not keep the counts.

    Args:
        items: The samples, all with or all without fields for media.
        packing_samples: Return lists of rows. Otherwise rows are padded with 0 on the left.

    Raises:
        DataError: There is no sample, or only some samples have a field or an entry of ``info``.
    """
    if not items:
        raise DataError("a batch needs at least one sample")
    columns: dict[str, Any] = {}
    for name in (*OF_TOKENS, *OF_ACTIONS):
        rows = _column(name, [getattr(item, name) for item in items])
        is_padded = rows is not None and not packing_samples
        columns[name] = zero_pad_sequences(rows) if is_padded else rows
    columns["info"] = _joined_info(items)
    if not all(isinstance(item, BufferItemVL) for item in items):
        return Experience(**columns)
    for patches, grids, number in MEDIA:
        own = [getattr(item, grids) for item in items]
        shaped = [grid.reshape(-1, 3) for grid in own if grid is not None]
        values = [getattr(item, patches) for item in items]
        given = [value for value in values if value is not None and len(value)]
        columns[grids] = torch.cat(shaped) if shaped else None
        columns[patches] = torch.cat(given) if given else None
        if shaped or given:
            counted = own if shaped else values
            counts = [
                0 if rows is None else len(rows.reshape(-1, 3) if shaped else rows)
                for rows in counted
            ]
            columns["info"][number] = torch.tensor(counts)
    images = [getattr(item, RAW_IMAGES) for item in items]
    columns[RAW_IMAGES] = None if all(own is None for own in images) else images
    return ExperienceVL(**columns)


def _column(name: str, values: list[Any]) -> list[Any] | None:
    """Return ``values``, or ``None`` if all are ``None``."""
    missing = sum(value is None for value in values)
    if 0 < missing < len(values):
        raise DataError(f"{missing} of {len(values)} samples have no {name}")
    return None if missing else values


def _joined_info(items: Sequence[Item]) -> dict[str, Any]:
    infos = [item.info or {} for item in items]
    if any(info.keys() != infos[0].keys() for info in infos):
        names = sorted(set().union(*infos) - set.intersection(*map(set, infos)))
        raise DataError(f"only some samples have info {names}")
    joined: dict[str, Any] = {}
    for name in infos[0]:
        values = [info[name] for info in infos]
        is_number = all(isinstance(value, int | float) for value in values)
        joined[name] = torch.tensor(values) if is_number else values
    return joined
