"""The settings of ``lightrft data``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightrft.config.base import Settings


class ShowConfig(Settings):
    """The settings of ``lightrft data`` itself, written as ``show.rows=5``. All others are of the
    config whose rows it prints."""

    verb: Literal[
        "auto", "rl", "sft", "dpo", "kto", "rm", "prm", "distill", "grm-sft", "grm-rl", "grm-dpo"
    ] = "auto"
    """Verb whose config this is. ``auto`` takes the verb whose settings fit."""
    rows: int = Field(3, ge=0)
    """Number of rows to print of each section of data."""
    read: int = Field(200, ge=1)
    """Number of rows to read of each source, for the counts of columns."""
    color: Literal["auto", "always", "never"] = "auto"
    """Color the trained tokens. ``auto`` does so on a terminal. Without colors, they are between
    ``[[`` and ``]]``."""
