"""Parts of ``lightrft doctor``."""
