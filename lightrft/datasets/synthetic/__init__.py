"""Tasks whose rows are made on the spot, from a seed."""
