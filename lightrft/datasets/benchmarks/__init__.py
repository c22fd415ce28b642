"""Readers of public datasets. The import of each module registers its readers."""

from lightrft.datasets.benchmarks import (  # noqa: F401
    image_preferences,
    knowledge,
    math_sets,
    media_preferences,
    recognized,
    reward_bench,
    training_layouts,
    visual_math,
)
