"""Rule rewards."""
