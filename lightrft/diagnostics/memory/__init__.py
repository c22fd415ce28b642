"""Estimate the memory of a run."""
