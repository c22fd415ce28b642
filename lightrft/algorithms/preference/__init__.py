"""Preference losses: pure functions of the log-probs of whole responses."""
