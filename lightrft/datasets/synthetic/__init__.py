"""Tasks whose rows are generated from a seed."""
