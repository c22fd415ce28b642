"""One reader of rows for all verbs, and a record of the columns that it reads."""
