"""The weights that are sent to an engine: adapters merged, in its dtypes."""
