"""Media of prompts in the messages of a vLLM server.

vLLM reads the tensors of an item as base64 of msgpack, in the layout that its processes exchange.
No package of vLLM is needed to write it. The layout is that of vLLM 0.32.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrft.engines.vllm_parts.media import (
    MediaKind,
    check_media,
    check_positions,
    media_digest,
    refuse_media,
    tensors_of,
)
from lightrft.types import Prompt
from lightrft.utils.errors import ModelError

VERSIONS = ("0.32.0",)
"""Versions of vLLM whose layout this is."""
START_OPTION = "--no-mm-device-do-normalize"
"""Option of a server that reads pictures as they are. vLLM would normalize them again."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of the rows of a tensor to the items of a prompt.

    Attributes:
        grid: Name of the tensor whose rows have the sizes of the items, for a tensor that has the
            rows of all items. Empty for a tensor with one row per item.
        keep_on_cpu: vLLM reads it on the CPU.
    """

    grid: str = ""
    keep_on_cpu: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "pixel_values": Layout("image_grid_thw"),
    "image_grid_thw": Layout(keep_on_cpu=True),
    "pixel_values_videos": Layout("video_grid_thw"),
    "video_grid_thw": Layout(keep_on_cpu=True),
    "second_per_grid_ts": Layout(keep_on_cpu=True),
    "input_features": Layout(),
    "feature_attention_mask": Layout(),
}
"""Tensors of the families in ``SERVED_KINDS``, as vLLM's processors of these families have them."""


class ServedMedia:
    """Writes the media of prompts for a vLLM server.

    Args:
        settings: The config of the model, of transformers.
        kinds: Kinds of media that the model reads.
        own_positions: The server places text after a video as vLLM does. One with our backend of
            weight transfer places it as the trainer does.
    """

    def __init__(
        self, settings: Any, kinds: Sequence[MediaKind], *, own_positions: bool = False
    ) -> None:
        self._settings = settings
        self._kinds = kinds
        self._own_positions = own_positions
        # requests for one prompt follow each other
        self._last: tuple[Prompt, str, dict[str, Any]] | None = None

    def refuse(self, kinds: Collection[str]) -> None:
        """Raise ``ConfigError`` unless vLLM is known to compute media of ``kinds``."""
        refuse_media(self._settings, sorted(kinds))

    def check(self, prompt: Prompt) -> None:
        """Raise ``ConfigError`` if vLLM computes the media of ``prompt`` in another way."""
        check_media(self._settings, self._kinds, prompt)
        if self._own_positions:
            check_positions(self._settings, prompt)

    def features(self, prompt: Prompt, weights: str) -> dict[str, Any]:
        """Return the field ``features`` of the request for ``prompt``.

        Args:
            prompt: A prompt with media.
            weights: Name of the weights. Features of other weights are never found by it.

        Raises:
            ModelError: The prompt has not one run of placeholders for each item.
        """
        last = self._last
        if last is None or last[0] is not prompt or last[1] != weights:
            last = self._last = (prompt, weights, self._features(prompt, weights))
        return last[2]

    def _features(self, prompt: Prompt, weights: str) -> dict[str, Any]:
        # Imported here, since runs of text do not need it.
        import msgpack

        hashes, places, data = {}, {}, {}
        for kind in self._kinds:
            tensors = tensors_of(kind, prompt)
            if not tensors:
                continue
            items = divided(kind.adapt(tensors))
            runs = runs_of(prompt.token_ids, kind.token)
            if len(runs) != len(items):
                raise ModelError(
                    f"prompt {prompt.id!r} has {len(runs)} runs of placeholders for {kind.name}, "
                    f"and {len(items)} items; text must separate them for a vLLM server, or set "
                    "engine.kind=native"
                )
            content = media_digest(tensors)
            hashes[kind.name] = [f"{weights}-{content}-{k}" for k in range(len(items))]
            places[kind.name] = [{"offset": start, "length": size} for start, size in runs]
            data[kind.name] = [
                base64.b64encode(msgpack.packb(item)).decode("ascii") for item in items
            ]
        return {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": data}


def runs_of(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """Return the start and the length of each run of ``token`` in ``ids``."""
    found: list[tuple[int, int]] = []
    for place, id in enumerate(ids):
        if id != token:
            continue
        if found and sum(found[-1]) == place:
            start, size = found[-1]
            found[-1] = (start, size + 1)
        else:
            found.append((place, 1))
    return found


def divided(tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tensors of each item, as vLLM's ``MultiModalKwargsItem`` has them.

    Args:
        tensors: The tensors of all items of one kind, by name.
    """
    items: list[dict[str, Any]] = []
    for name, values in tensors.items():
        layout = LAYOUTS[name]
        sizes = tensors[layout.grid].prod(-1).tolist() if layout.grid else [1] * len(values)
        items = items or [{} for _ in sizes]
        for item, part in zip(items, values.split(sizes), strict=True):
            field: list[Any] = ["batched", {"keep_on_cpu": layout.keep_on_cpu}]
            if layout.grid:
                whole = [[0, len(part), None]]
                field = ["flat", {"keep_on_cpu": layout.keep_on_cpu, "slices": whole, "dim": 0}]
            data = part if layout.grid else part[0]
            item[name] = {"data": written(data), "field": field}
    return items


def written(values: Tensor) -> list[Any]:
    """Return type, shape and bytes of a tensor."""
    plain = values.detach().cpu().contiguous()
    # a scalar has no bytes to view
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), content]
