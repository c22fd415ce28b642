"""Training runs and inference verbs: the only layer that composes all others."""
