"""Strategies that train, shard and save models on one or many devices."""

from __future__ import annotations

from lightrft.utils.public_names import names_in, resolver

__all__ = names_in(__name__)
__getattr__ = resolver(__name__)
