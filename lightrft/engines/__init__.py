"""Sampling engines behind one protocol."""
