"""Models and what one call of them computes. Names are imported when first used, so importing this package loads no torch."""
