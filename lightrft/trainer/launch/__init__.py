"""Where roles run."""
