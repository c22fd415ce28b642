"""Prompts with media for vLLM: its own expansion of the placeholders, over our tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrft.types import Prompt
from lightrft.utils.errors import ConfigError, ModelError

SERVED_KINDS: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image",),
    "qwen2_audio": ("audio",),
}
"""Kinds of media of each family whose responses were compared with those of transformers."""
PLACED = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Classes of vLLM whose videos have positions in time."""
AUDIO_FRAMES = 3000
"""Frames of the only window of audio that vLLM takes: 30 seconds."""


@dataclass(frozen=True, slots=True)
class MediaKind:
    """One kind of media of a model.

    Attributes:
        name: ``image``, ``video`` or ``audio``.
        token: Id of its placeholder.
        inputs: Names of its tensors in a prompt.
        adapt: Maps these tensors to those that the processor of transformers makes.
    """

    name: str
    token: int
    inputs: tuple[str, ...]
    adapt: Callable[[dict[str, Tensor]], dict[str, object]] = dict


def refuse_media(settings: Any, kinds: Sequence[str]) -> None:
    """Raise ``ConfigError`` unless vLLM is known to compute media of ``kinds`` as transformers.

    Args:
        settings: The config of the model, of transformers.
        kinds: Kinds of media of the prompts.
    """
    family = settings.model_type
    served = SERVED_KINDS.get(family, ())
    for kind in kinds:
        if kind not in served:
            tested = "; ".join(f"{name}: {', '.join(of)}" for name, of in SERVED_KINDS.items())
            raise ConfigError(
                f"vLLM cannot generate for prompts with media of kind {kind} for the "
                f"model type {family}; tested are {tested}. Set engine.kind=native"
            )
    if "audio" in kinds:
        frames = 2 * settings.audio_config.max_source_positions
        if frames != AUDIO_FRAMES:
            raise ConfigError(
                f"vLLM takes audio in windows of {AUDIO_FRAMES} frames alone, and "
                f"this model has windows of {frames}; set engine.kind=native"
            )


def check_media(settings: Any, kinds: Sequence[MediaKind], prompt: Prompt) -> None:
    """Raise ``ConfigError`` if vLLM computes the media of ``prompt`` in another way.

    Args:
        settings: The config of the model, of transformers.
        kinds: Kinds of media that the model reads.
        prompt: The prompt.
    """
    refuse_media(settings, [kind.name for kind in kinds if tensors_of(kind, prompt)])


def place_text(model: Any) -> None:
    """Place text after the longer side of a frame, as the forward of transformers does.

    vLLM places it after the last position, which may be one of the time axis. It is called once for
    a model: by the engine in this process, and by the backend of weight transfer in a server.

    Args:
        model: vLLM's model.
    """
    if type(model).__name__ not in PLACED:
        return
    own = model.get_mrope_input_positions

    def positions(tokens: list[int], features: list[Any]) -> tuple[Tensor, int]:
        found, delta = own(tokens, features)
        for start, steps, height, width, _ in model.iter_mm_grid_thw(features):
            end = start + steps * height * width
            beyond = int(found[:, start:end].max() - found[0, start]) + 1 - max(height, width)
            found[:, end:] -= beyond
            delta -= beyond
        return found, delta

    model.get_mrope_input_positions = positions


def check_positions(settings: Any, prompt: Prompt) -> None:
    """Refuse videos after which a server without ``place_text`` counts positions in another way.

    Args:
        settings: The config of the model, of transformers.
        prompt: The prompt.

    Raises:
        ConfigError: The prompt has such a video.
    """
    if "video_grid_thw" not in prompt.media:
        return
    vision = settings.vision_config
    grids = prompt.media["video_grid_thw"].values.tolist()
    spacing = [1.0] * len(grids)
    if "second_per_grid_ts" in prompt.media:
        seconds = prompt.media["second_per_grid_ts"].values.tolist()
        spacing = [second * getattr(vision, "tokens_per_second", 1.0) for second in seconds]
    for (steps, height, width), each in zip(grids, spacing, strict=True):
        last = int((steps - 1) * each)
        side = max(height, width) // vision.spatial_merge_size
        if last >= side:
            raise ConfigError(
                f"engine.weights_dir: the server cannot generate for prompt {prompt.id!r}: a video "
                f"reaches position {last} in time and {side - 1} in its frames, and vLLM places "
                "the text after it elsewhere than transformers. Leave out engine.weights_dir: a "
                "server that gets whole weights places it alike. Or give shorter videos or larger "
                "frames"
            )


def media_options() -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM`` for a model that reads media."""
    return {
        # vLLM's processor expands placeholders, and needs the tokenizer for it
        "skip_tokenizer_init": False,
        # tensors are normalized here, and the default would do it again
        "mm_device_do_normalize": False,
        # the size of the cache is given, so nothing needs to be measured
        "skip_mm_profiling": True,
        # every prompt brings its tensors
        "mm_processor_cache_gb": 0,
    }


class VLLMMedia:
    """Makes vLLM's inputs of prompts with media.

    vLLM gets un-expanded placeholders with the tensors that the trainer computes with. It decides
    how many placeholders each item has. Its token ids must be those of the prompt.

    Args:
        package: The package ``vllm``.
        llm: Its ``LLM``, made with ``media_options``.
        kinds: Kinds of media that the model reads.
    """

    def __init__(self, package: Any, llm: Any, kinds: Sequence[MediaKind]) -> None:
        self._kinds = kinds
        self._llm = llm
        self._config = llm.model_config.hf_config
        self._parse = package.multimodal.parse
        self._items = _items_class(self._parse.ModalityDataItems)
        # requests for one prompt follow each other
        self._last: tuple[Prompt, int, dict[str, Any]] | None = None
        llm.apply_model(place_text)

    def input(self, prompt: Prompt, version: int) -> dict[str, Any]:
        """Return vLLM's input of ``prompt``, with the ids and places of its placeholders.

        Args:
            prompt: A prompt with media.
            version: Version of the weights. Features of other weights are never found by it.

        Raises:
            ConfigError: vLLM computes such media in another way.
            ModelError: vLLM expands the placeholders to other token ids.
        """
        if self._last is None or self._last[0] is not prompt or self._last[1] != version:
            self._last = (prompt, version, self._input(prompt, version))
        return dict(self._last[2])

    def check(self, prompt: Prompt) -> None:
        """Raise ``ConfigError`` if vLLM computes the media of ``prompt`` in another way."""
        check_media(self._config, self._kinds, prompt)

    def _input(self, prompt: Prompt, version: int) -> dict[str, Any]:
        ids = folded(prompt.token_ids, {kind.token for kind in self._kinds})
        items, names = {}, {}
        for kind in self._kinds:
            tensors = tensors_of(kind, prompt)
            if not tensors:
                continue
            count = ids.count(kind.token)
            items[kind.name] = self._items(kind.adapt(tensors), kind.name, count)
            content = media_digest(tensors)
            names[kind.name] = [f"version-{version}-{content}-{k}" for k in range(count)]
        processor = self._llm.llm_engine.renderer.get_mm_processor()
        try:
            made = processor(ids, self._parse.MultiModalDataItems(items), names)
        except (RuntimeError, ValueError, LookupError, AssertionError) as error:
            raise ModelError(
                f"vLLM cannot read the media of prompt {prompt.id!r}: {error}; its placeholders and "
                "its media must agree"
            ) from error
        check_expanded(prompt, made["prompt_token_ids"])
        return dict(made)


def folded(ids: Sequence[int], placeholders: set[int]) -> list[int]:
    """Return ``ids`` with one placeholder for each run of equal placeholders."""
    return [id for k, id in enumerate(ids) if id not in placeholders or k == 0 or ids[k - 1] != id]


def check_expanded(prompt: Prompt, found: Sequence[int]) -> None:
    """Raise ``ModelError`` unless vLLM's ids of an expanded prompt are those of ``prompt``.

    Args:
        prompt: The prompt.
        found: The token ids that vLLM computes with.
    """
    ours = prompt.token_ids
    if list(found) == ours:
        return
    shorter = min(len(ours), len(found))
    at = next((k for k in range(shorter) if ours[k] != found[k]), shorter)
    raise ModelError(
        f"vLLM expands prompt {prompt.id!r} to {len(found)} tokens, and the trainer to "
        f"{len(ours)}; they differ from token {at} on. Both must read the same model folder; set "
        "engine.kind=native"
    )


def tensors_of(kind: MediaKind, prompt: Prompt) -> dict[str, Tensor]:
    """Return the tensors of ``kind``, or none if ``prompt`` has no such media."""
    return {
        name: prompt.media[name].values
        for name in kind.inputs
        if name in prompt.media and len(prompt.media[name].values)
    }


def media_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a name of the contents of ``tensors``, under which vLLM keeps their features."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _items_class(base: Any) -> Any:
    """Return a class of vLLM's items whose tensors pass its processor as they are."""

    class Items(base):
        def __init__(self, data: Mapping[str, object], modality: str, count: int) -> None:
            super().__init__(data, modality)
            self._count = count

        def get_count(self) -> int:
            return self._count

        def get(self, index: int) -> None:
            return None

        def get_processor_data(self) -> dict[str, Any]:
            return {}

        def get_passthrough_data(self) -> dict[str, Any]:
            return dict(self.data)

    return Items
