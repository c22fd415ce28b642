"""Texts about settings: their descriptions, and messages in the form of Python."""
