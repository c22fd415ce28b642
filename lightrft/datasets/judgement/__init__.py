"""Questions to a judge, made from rows of responses."""
