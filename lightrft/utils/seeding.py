"""Every random generator of the process: seeded together, captured and restored as plain data."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from lightrft.utils.errors import CheckpointError

log = logging.getLogger(__name__)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng() -> dict[str, Any]:
    """The state of every generator that ``seed_everything`` seeds, as nested lists, numbers and uint8 tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put back what ``capture_rng`` gave. Generators of devices that are not here are left out, with a warning.

    Raises ``CheckpointError`` when a part is missing or malformed.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random generators' state is malformed: {type(error).__name__}: {error}") from error
    saved, here = state.get("cuda", []), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(saved) != here:
        log.warning("random state of %d CUDA devices was saved, %d are here: draws on the others will differ", len(saved), here)
    for i in range(min(len(saved), here)):
        torch.cuda.set_rng_state(saved[i], i)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
