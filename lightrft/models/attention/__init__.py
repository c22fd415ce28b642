"""Attention over shared prompts, packed rows and padded rows."""
