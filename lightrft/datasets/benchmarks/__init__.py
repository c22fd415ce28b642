"""Readers of public datasets. The import of each module registers its readers."""

from lightrft.datasets.benchmarks import (  # noqa: F401
    audio_qa,
    image_preferences,
    knowledge,
    math_sets,
    omni_preferences,
    recognized,
    reward_bench,
    training_layouts,
    video_preferences,
    visual_math,
)
