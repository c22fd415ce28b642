"""Train process reward models."""
