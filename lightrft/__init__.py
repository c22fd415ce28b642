"""Reinforcement-learning fine-tuning of language, vision-language and audio-language models."""

from __future__ import annotations

from lightrft.utils.public_names import install

__all__ = ["__version__"]

install()


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata  # a tenth of a second, which most commands need not spend

    try:
        return metadata.version("lightrft")
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        return "0+source"
