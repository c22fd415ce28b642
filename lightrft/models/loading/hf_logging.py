"""Messages of libraries in a program's output, and the errors of reading a model."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Generator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

BROKEN = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)
"""Errors of libraries for files of a model that are missing or damaged."""


@contextmanager
def suppress_hf_warnings(*, local: bool) -> Generator[None]:
    """Suppress warnings about future library changes.

    With ``local``, nothing is downloaded, so progress bars are suppressed too.
    """
    hidden = local and transformers_logging.is_progress_bar_enabled()
    if hidden:
        transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # they tell library authors what will change, and a user of a run can do nothing about
            # it
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if hidden:
            transformers_logging.enable_progress_bar()
