"""The prompts of a config: their form, and rows as a run reads them."""
