"""Datasets: from rows of data to prompts and conversations."""
