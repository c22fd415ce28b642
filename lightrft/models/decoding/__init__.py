"""Decode token by token from keys and values, or from a model's own cache."""
