"""Inspect a config or a finished run without training: doctor, memory, replay."""
