"""Run reward functions in worker processes under limits."""
