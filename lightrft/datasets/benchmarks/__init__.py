"""One small reader per public data set."""
