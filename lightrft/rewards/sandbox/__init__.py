"""Worker processes that call reward functions under limits."""
