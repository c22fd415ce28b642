"""Instructions of IFEval that a program checks."""
