"""Load and save models, tokenizers and chat templates."""
