"""Settings of how tokens are chosen, and of the servers that answer requests."""
