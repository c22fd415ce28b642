"""Algorithms and loops: the only layer that composes the others."""
