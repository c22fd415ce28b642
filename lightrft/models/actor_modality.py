"""Which inputs a kind of actor takes, so that a loop passes what it has and knows nothing of the model."""

from __future__ import annotations

from enum import Enum


class ActorModality(Enum):
    """What a policy reads besides text."""

    LANGUAGE_ONLY = "text"
    VISION_LANGUAGE = "vision"
    AUDIO_LANGUAGE = "audio"
    OMNI = "multimodal"


_VISION = frozenset({"pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"})

MODALITY_PARAMETERS: dict[ActorModality, frozenset[str]] = {
    ActorModality.LANGUAGE_ONLY: frozenset(),
    ActorModality.VISION_LANGUAGE: _VISION,
    ActorModality.AUDIO_LANGUAGE: frozenset({"audio_values", "image_grid_thw"}),
    ActorModality.OMNI: _VISION | {"audio_values"},
}


def get_supported_parameters(modality: ActorModality) -> set[str]:
    """Names of the inputs that an actor of ``modality`` takes besides tokens and masks; none for what is not a modality."""
    return set(MODALITY_PARAMETERS.get(modality, frozenset()))


def supports_parameter(modality: ActorModality, parameter: str) -> bool:
    """Whether an actor of ``modality`` takes the input ``parameter``."""
    return parameter in get_supported_parameters(modality)
