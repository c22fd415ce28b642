"""Registry of readers, which convert a row of one layout to the usual columns.

The usual columns are ``prompt``, ``response``, ``label``, ``reference``, ``data_source`` and
``id``. A reader has the signature ``reader(row, **options) -> row`` and keeps the other columns of
the row. ``KeyError`` and ``ValueError`` become errors that name the row.
"""

from __future__ import annotations

from collections.abc import Callable

from lightrft.datasets.row_tables import Row
from lightrft.utils.registry import Registry

READERS: Registry[Callable[..., Row]] = Registry("reader")
