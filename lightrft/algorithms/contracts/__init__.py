"""Contracts that every registered function keeps, and batches that reveal a violation."""
