"""Parts of the engine vLLM: weights, options and media."""
