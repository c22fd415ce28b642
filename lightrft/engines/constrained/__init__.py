"""Constrained decoding: responses that match a JSON schema, a regular expression or a choice."""
