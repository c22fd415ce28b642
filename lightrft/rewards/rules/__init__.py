"""Rule-based rewards."""
