"""What a part owes the loop, whatever its formula, and the batches that show whether it keeps to that."""
