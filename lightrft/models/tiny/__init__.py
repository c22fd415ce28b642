"""Small real models of every family, for demos, tests and benchmarks."""

from lightrft.models.tiny.media import (
    ALL_MEDIA_FAMILIES,
    MEDIA_FAMILIES,
    TORCHVISION_FAMILIES,
    missing_package,
    save_tiny_media,
    tiny_media_model,
    tiny_media_tokenizer,
)
from lightrft.models.tiny.text import tiny_tokenizer

__all__ = [
    "ALL_MEDIA_FAMILIES",
    "MEDIA_FAMILIES",
    "TORCHVISION_FAMILIES",
    "missing_package",
    "save_tiny_media",
    "tiny_media_model",
    "tiny_media_tokenizer",
    "tiny_tokenizer",
]
