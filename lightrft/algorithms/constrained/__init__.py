"""Algorithms that limit the cost of responses."""
