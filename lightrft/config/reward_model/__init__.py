"""Settings of reward models and judges."""
