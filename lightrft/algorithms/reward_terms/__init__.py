"""Combine the terms of a reward."""
