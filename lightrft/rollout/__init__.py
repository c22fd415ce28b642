"""Turn prompts into scored groups: generation, filters, refill, asynchronous generation."""
