"""Reject combinations of algorithm settings that make no sense."""
