"""Parts of the native engine."""
