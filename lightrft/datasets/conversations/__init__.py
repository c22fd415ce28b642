"""Conversations as the input of a model that scores or judges them."""
