"""Losses of process reward models, which score each step of a response."""
