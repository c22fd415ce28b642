"""Settings of preference learning."""
