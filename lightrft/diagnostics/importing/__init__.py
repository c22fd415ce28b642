"""Translation of configs of other frameworks."""
