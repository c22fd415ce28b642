"""The calls of tinker's client: ``lightrft serve-tinker``."""
