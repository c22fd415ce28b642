"""Scorers of responses: by reward models and judges, in this process or behind HTTP."""
