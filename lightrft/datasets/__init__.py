"""From rows of data to prompts and conversations."""
