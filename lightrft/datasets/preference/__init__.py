"""Preference data: rows of any published layout, and their token sequences."""
