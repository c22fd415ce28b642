"""Build the roles of a run, as objects of this process or as workers."""
