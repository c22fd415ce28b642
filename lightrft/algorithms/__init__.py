"""Pure functions: advantages, losses, KL, importance sampling, filters."""
