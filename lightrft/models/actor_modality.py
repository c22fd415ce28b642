"""Input names of each kind of actor.

A loop uses them to pass its media without knowledge of the model.
"""

from __future__ import annotations

from enum import Enum


class ActorModality(Enum):
    """The kinds of input that a policy reads besides text."""

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
    """Return the input names that an actor of ``modality`` takes.

    Tokens and masks are left out. It is empty for an unknown modality.
    """
    return set(MODALITY_PARAMETERS.get(modality, frozenset()))


def supports_parameter(modality: ActorModality, param_name: str) -> bool:
    """Return ``True`` if an actor of ``modality`` takes the input ``param_name``."""
    return param_name in get_supported_parameters(modality)
