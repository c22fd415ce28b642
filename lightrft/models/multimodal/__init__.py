"""Encode media and merge their features into the token embeddings."""
