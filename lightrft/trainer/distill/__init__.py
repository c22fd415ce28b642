"""The verb ``distill``: train a model towards the distributions of teachers."""
