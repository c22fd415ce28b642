"""Take and measure steps of process reward models."""
