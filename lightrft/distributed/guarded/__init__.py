"""Processes that end with the run, with every process that they start."""
