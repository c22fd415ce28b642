"""Explain the objective of a run: formulas, numbers in force, and models of a step."""
