"""How models are trained, saved and sampled from on one or many devices."""
