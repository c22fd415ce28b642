"""One small reader per public data set."""

from lightrft.datasets.benchmarks import (
    audio_preferences,
    audio_questions,
    gsm8k,
    image_preferences,
    instructions,
    maths,
    omnirewardbench,
    verl,
    video_preferences,
    visual_maths,
)

__all__ = [
    "audio_preferences",
    "audio_questions",
    "gsm8k",
    "image_preferences",
    "instructions",
    "maths",
    "omnirewardbench",
    "verl",
    "video_preferences",
    "visual_maths",
]
