"""Measuring and decoding of media items and their conversion to model inputs, with a cache."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightrft.config.data import MediaConfig
from lightrft.datasets.media.access import Access
from lightrft.datasets.media.audio import SAMPLE_BYTES, AudioSettings, read_sound, sound_length
from lightrft.datasets.media.fetch import Content, Fetch, digest, shown
from lightrft.datasets.media.image import attachment, corrupted, picture_size, read_picture
from lightrft.datasets.media.items import MARK, Item, replaced
from lightrft.datasets.media.prefetch import Workers
from lightrft.datasets.media.video import VideoSettings, clip_extent, read_clip
from lightrft.datasets.row_tables import MalformedRow
from lightrft.types import Attachment, Extent, Media, Ragged
from lightrft.utils.atomic_files import human_bytes
from lightrft.utils.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """The model inputs of one item, its extent and its preview."""

    inputs: Mapping[str, Tensor]
    extent: Extent
    attachment: Attachment

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return sum(t.nbytes for t in self.inputs.values()) + len(self.attachment.data)


class MediaReader:
    """Reads media items for a processor.

    The reader can be pickled. Every method may be called from several threads. An unreadable item
    raises ``MalformedRow``, which names row, column and file. A missing library raises
    ``DataError``.

    Args:
        config: the settings of media.
        processor: the media processor (see ``lightrft.models.processors``).
    """

    def __init__(self, config: MediaConfig, processor: Any) -> None:
        self.config = config
        self.processor = processor.limited(config.min_pixels, config.max_pixels)
        self.workers = Workers(config.workers)
        access = Access(config.allow.roots, config.allow.hosts)
        folder, largest = Path(config.downloads).expanduser(), round(config.max_file_mb * 2**20)
        self.fetch = Fetch(folder, config.timeout, config.offline, largest, access)
        self._ready = _Recent(config.cache_mb << 20)
        self._warned = False

    @property
    def parts(self) -> Mapping[str, Any]:
        """Return the part of the processor for each kind."""
        return self.processor.parts

    def measured(self, items: Sequence[Item]) -> list[Extent | MalformedRow]:
        """Return the extent of each item, measured concurrently.

        An unreadable item is returned as its ``MalformedRow`` error.
        """
        return self.workers.map(self._measured, items)

    def check_total(self, items: Sequence[Item], extents: Sequence[Extent], where: str) -> None:
        """Raise ``MalformedRow`` if the items of one row exceed ``max_row_mb`` in total.

        Args:
            items: the items of the row.
            extents: the extent of each item.
            where: location of the row, for messages.
        """
        total = 0
        for item, extent in zip(items, extents, strict=True):
            # Pictures and frames take a byte for each number of their extent.
            bytes_of_one = SAMPLE_BYTES if item.kind == "audio" else 1
            total += bytes_of_one * math.prod(extent.shape)
        if total > self.config.max_row_mb * 2**20:
            raise MalformedRow(
                f"{where}: its {len(items)} pictures, "
                f"videos and sounds take {human_bytes(total)} once they are decoded, more than "
                f"data.media.max_row_mb = {self.config.max_row_mb:g}"
            )

    def measure(self, item: Item) -> Extent:
        """Return the extent of an item once decoded, from its header if that is sufficient."""
        return self._told(item, lambda: self._measure(item))

    def expanded(
        self, texts: Sequence[str], items: Sequence[Item], extents: Mapping[int, Extent]
    ) -> list[str]:
        """Return texts in which each mark is replaced by the text of its item.

        Args:
            texts: texts of one row, with marks.
            items: the items of the row.
            extents: the extents of the items that the texts have, by number.
        """
        put = {number: self.expand(items[number], extent) for number, extent in extents.items()}
        if all(getattr(part, "apart", True) for part in self.parts.values()):
            return [replaced(text, lambda _, number: put[number]) for text in texts]
        found = []
        for text in texts:
            # The split gives: text, kind, number, text, kind, number, text ...
            cut = MARK.split(text)
            numbers = list(map(int, cut[2::3]))
            pairs = [(self._part(items[number]), extents[number]) for number in numbers]
            found.append(self.processor.expanded(cut[::3], pairs))
        return found

    def expand(self, item: Item, extent: Extent) -> str:
        """Return the text of an item, with its placeholders."""
        text = self._told(item, lambda: self._part(item).placeholder_text(extent))
        # of some video processors only
        passed = getattr(self.parts[item.kind], "passed", None)
        if passed is not None and not self._warned and (places := passed(extent)):
            self._warned = True
            log.warning(
                "%s: the clip reaches position %d in time, and the text after it begins at %d, so "
                "that text and clip share positions in this and other rows. lightrft computes them "
                "as transformers' forward does; its generate and vLLM place a response elsewhere. "
                "Give shorter clips or larger frames, or lower data.media.fps",
                item.where,
                *places,
            )
        return text

    def inputs(
        self, items: Sequence[Item], ids: Sequence[int], where: str
    ) -> tuple[Media, tuple[Attachment, ...]]:
        """Return the model inputs and previews of one sample.

        Args:
            items: the items, in the order of their placeholders.
            ids: token ids of the sample.
            where: location of the row, for messages.

        Raises:
            MalformedRow: an item is unreadable, or ``ids`` does not have one placeholder per
                feature.
        """
        ready = [self.load(item) for item in items]
        self._check(items, ready, ids, where)
        return joined(ready), tuple(one.attachment for one in ready)

    def split(
        self, items: Sequence[Item], parts: tuple[list[int], list[int]], where: str
    ) -> tuple[Media, Media]:
        """Return the model inputs of the items of the first part and of the second part.

        Args:
            items: the items, in the order of their placeholders.
            parts: token ids of the two parts.
            where: location of the row, for messages.

        Raises:
            MalformedRow: an item is unreadable or is split between the parts, or placeholders and
                features do not match.
        """
        ready = [self.load(item) for item in items]
        # number of placeholders of the first part that have no item yet
        room = {token: parts[0].count(token) for token in set(self.processor.tokens.values())}
        first: list[int] = []
        second: list[int] = []
        for k, (item, one) in enumerate(zip(items, ready)):
            token = self.processor.tokens[item.kind]
            size = self._part(item).count(one.inputs)
            # Items are in the order of their placeholders, so the first part fills up first.
            if size <= room[token]:
                room[token] -= size
                first.append(k)
            else:
                second.append(k)
        whole: list[Media] = []
        for ids, numbers in zip(parts, (first, second)):
            own = [ready[k] for k in numbers]
            self._check([items[k] for k in numbers], own, ids, where)
            whole.append(joined(own))
        return whole[0], whole[1]

    def load(self, item: Item) -> PreparedMedia:
        """Return the decoded and processed item. A cache by content is used."""
        return self._told(item, lambda: self._load(item))

    def _check(
        self, items: Sequence[Item], ready: Sequence[PreparedMedia], ids: Sequence[int], where: str
    ) -> None:
        features = dict.fromkeys(self.processor.tokens.values(), 0)
        for item, one in zip(items, ready):
            features[self.processor.tokens[item.kind]] += self._part(item).count(one.inputs)
        for token, expected in features.items():
            held = ids.count(token)
            if held != expected:
                kinds = "/".join(kind for kind, t in self.processor.tokens.items() if t == token)
                problem = f"{held} {kinds} placeholders for {expected} features"
                raise MalformedRow(
                    f"{where}: {problem}; has a file changed since the data was opened?"
                )

    def _part(self, item: Item) -> Any:
        part = self.parts[item.kind]
        try:
            if item.min_pixels is not None or item.max_pixels is not None:
                part = part.limited(item.min_pixels, item.max_pixels)
            if item.total_pixels is not None or item.height is not None:
                if not hasattr(part, "sized"):
                    named = (
                        "total_pixels" if item.height is None else "resized_height, resized_width"
                    )
                    problem = f"{named}: this model does not read a {item.kind} of any size"
                    raise ValueError(f"{problem}; set max_pixels, or leave them out")
                part = part.sized(item.height, item.width, item.total_pixels)
        except (UserError, ValueError) as error:
            raise MalformedRow(f"{item.where}: {error}") from error
        return part

    def _told(self, item: Item, work: Callable[[], T]) -> T:
        try:
            return work()
        except UserError:
            raise
        except Exception as error:  # decoders raise arbitrary errors
            reason = str(error) or type(error).__name__
            if not isinstance(error, ValueError):
                reason = f"{type(error).__name__}: {reason}"
            raise MalformedRow(f"{item.where}: {shown(item.value)}: {reason}") from error

    def _measured(self, item: Item) -> Extent | MalformedRow:
        try:
            return self.measure(item)
        except MalformedRow as error:
            return error

    def _measure(self, item: Item) -> Extent:
        content = self.fetch.content(item.value, item.root)
        if item.kind == "image":
            return Extent(self._picture_size(content))
        if item.kind == "video":
            return clip_extent(content, self._viewing(item))
        return Extent((sound_length(content, self._hearing(item)),))

    def _load(self, item: Item) -> PreparedMedia:
        content = self.fetch.content(item.value, item.root)
        # by content: rows may name one file in several ways, and a file may change
        key = (digest(content), *item.settings)
        return self._ready.get(key, lambda: self._made(item, content))

    def _made(self, item: Item, content: Content) -> PreparedMedia:
        value, extent = self._decoded(item, content)
        if item.corruption is not None:
            value = corrupted(value, item.kind, item.corruption)
        part = self._part(item)
        return PreparedMedia(
            dict(part.inputs(value, extent)),
            extent,
            attachment(item.kind, value, extent, part.rate),
        )

    def _decoded(self, item: Item, content: Content) -> tuple[np.ndarray, Extent]:
        if item.kind == "video":
            return read_clip(content, self._viewing(item))
        if item.kind == "image":
            self._picture_size(content)
            value = read_picture(content, self.config.max_source_pixels)
        else:
            value = read_sound(content, self._hearing(item))
        return value, Extent(value.shape)

    def _picture_size(self, content: Content) -> tuple[int, int, int]:
        size = picture_size(content, self.config.max_source_pixels)
        if math.prod(size) > self.config.max_decoded_mb * 2**20:
            raise ValueError(
                f"the picture takes {human_bytes(math.prod(size))} once it is decoded, "
                "more than data.media.max_decoded_mb = "
                f"{self.config.max_decoded_mb:g}"
            )
        return size

    def _viewing(self, item: Item) -> VideoSettings:
        config = self.config
        part = self.parts[item.kind]
        return VideoSettings(
            fps=_first_of(item.fps, config.fps),
            max_frames=_first_of(item.max_frames, config.max_frames),
            max_seconds=config.max_seconds,
            max_source_pixels=config.max_source_pixels,
            # only some video processors require a minimum
            least=_first_of(item.min_frames, config.min_frames, getattr(part, "least", 1)),
            most_bytes=config.max_decoded_mb * 2**20,
            nframes=item.nframes,
            start=item.start,
            end=item.end,
            rule=getattr(part, "frames", None),
        )

    def _hearing(self, item: Item) -> AudioSettings:
        config = self.config
        return AudioSettings(
            self.parts[item.kind].rate,
            config.resample,
            config.max_seconds,
            config.max_decoded_mb * 2**20,
            declared=item.sampling_rate,
        )


def _first_of(*values: Any) -> Any:
    """Return the first of ``values`` that is not None, or None."""
    return next((value for value in values if value is not None), None)


def joined(ready: Sequence[PreparedMedia]) -> Media:
    """Return the model inputs of one sample with all items of ``ready``."""
    made: dict[str, list[Tensor]] = {}
    for one in ready:
        for name, tensor in one.inputs.items():
            made.setdefault(name, []).append(tensor)
    media: Media = {}
    for name, tensors in made.items():
        length = sum(map(len, tensors))
        # one item is not copied
        values = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        media[name] = Ragged(values, torch.tensor([length]))
    return media


@dataclass
class _Recent:
    """A least-recently-used cache of at most ``limit`` bytes. Pickling empties it."""

    limit: int
    _kept: OrderedDict[object, PreparedMedia] = field(default_factory=OrderedDict)
    _size: int = 0
    _lock: Lock = field(default_factory=Lock)

    def get(self, key: object, make: Callable[[], PreparedMedia]) -> PreparedMedia:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        # outside the lock, so that items are made concurrently
        made = make()
        with self._lock:
            # another thread may have made it meanwhile
            if key not in self._kept:
                self._kept[key] = made
                self._size += made.size
            while self._size > self.limit and self._kept:
                _, dropped = self._kept.popitem(last=False)
                self._size -= dropped.size
        return made

    def __getstate__(self) -> dict[str, object]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, int]) -> None:
        # A new lock: locks cannot be pickled.
        self.__init__(state["limit"])
