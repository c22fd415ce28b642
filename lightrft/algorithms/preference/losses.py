"""All preference losses: importing this module fills ``PREFERENCE_LOSSES``."""

from __future__ import annotations

from lightrft.algorithms.preference import (
    extended_losses,
    labelled_losses,
    log_ratio_losses,
    ranked_losses,
    reference_free_losses,
)
from lightrft.algorithms.preference.registry import PREFERENCE_LOSSES

MODULES = (
    log_ratio_losses,
    reference_free_losses,
    extended_losses,
    labelled_losses,
    ranked_losses,
)
"""The modules whose functions are registered."""

__all__ = ["MODULES", "PREFERENCE_LOSSES"]
