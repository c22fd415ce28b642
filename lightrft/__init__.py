"""Reinforcement-learning fine-tuning of language, vision-language and audio-language models."""

from importlib import metadata

try:
    __version__ = metadata.version("lightrft")
except metadata.PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0+source"

__all__ = ["__version__"]
