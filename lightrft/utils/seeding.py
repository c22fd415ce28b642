"""Every random generator of the process: seeded together, captured and restored as plain data."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightrft.utils.errors import CheckpointError

log = logging.getLogger(__name__)

HOST = torch.device("cpu")

_PARTS = ("python", "numpy", "torch", "mps")
"""Parts of a state that every process has, and that of Apple's GPUs, whose generator takes no device."""


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng(device: torch.device = HOST) -> dict[str, Any]:
    """The state of the generators that a process which computes on ``device`` draws from, as nested lists, numbers and uint8 tensors."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if _has_generator(device):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def _has_generator(device: torch.device) -> bool:
    """Return whether ``device`` draws from a generator of its own that torch addresses by device."""
    return device.type not in ("cpu", "mps", "meta")


def restore_rng(state: Mapping[str, Any], device: torch.device = HOST) -> None:
    """Put back what ``capture_rng`` gave, its device's state into ``device``, whichever that was: the ranks of a run take up that of the
    first. A state for another kind of device is left out, with a warning.

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
    kind = next((name for name in state if name not in _PARTS), None)
    saved = state.get(device.type) if _has_generator(device) else None
    if isinstance(saved, list):  # as it was saved once: of every device that the process saw
        saved = dict(enumerate(saved)).get(device.index or 0)
    if saved is not None:
        torch.get_device_module(device).set_rng_state(saved, device)
    elif kind is not None or _has_generator(device):
        there = "no accelerator" if kind is None else f"a {kind} device"
        log.warning("the random state of %s was saved, and this run is on %s: what it draws there will differ", there, device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def request_seed(*parts: int | str) -> int:
    """A seed below 2**63 that depends on nothing but ``parts``, so that a step can be drawn again after a restart."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
