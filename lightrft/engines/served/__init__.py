"""Engines behind HTTP: what they share, and the form in which weights travel."""
