"""Checks of a config before a run starts."""
