"""Readers turn a row of one layout into the usual columns.

These are ``prompt``, ``response``, ``label``, ``reference``, ``data_source`` and ``id``.

A reader is ``reader(row, **options) -> row``. It keeps the row's other columns. ``KeyError`` and ``ValueError`` become errors
that name the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightrft.utils.registry import Registry

READERS: Registry[Callable[..., Mapping[str, Any]]] = Registry("reader")
