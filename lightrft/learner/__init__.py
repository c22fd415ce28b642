"""Turn a scored batch into optimizer steps: forward passes, micro-batches, loss, update."""
