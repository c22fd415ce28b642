"""Conversations as input of models that score them, and the check of chat templates."""
