"""Errors for want of memory name the settings to lower."""

from __future__ import annotations

import pytest

from lightrft.api.start import memory_errors
from lightrft.utils.errors import ResourceError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
    ],
)
def test_an_error_for_want_of_memory_names_the_settings_to_lower(error: Exception) -> None:
    with pytest.raises(ResourceError, match=r"train\.max_tokens_per_micro_batch"), memory_errors():
        raise error


@pytest.mark.parametrize(
    "text", ["could not create a primitive descriptor for a matmul", "shapes do not fit"]
)
def test_other_errors_stay(text: str) -> None:
    with pytest.raises(RuntimeError, match=text), memory_errors():
        raise RuntimeError(text)
