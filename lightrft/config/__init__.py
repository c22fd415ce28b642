"""The settings of a run, one file per section."""
