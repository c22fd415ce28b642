"""Serve models over HTTP.

``http_server`` is the HTTP side: tokens, limits, repeated requests, shutdown. ``batcher`` makes
batches of waiting requests. ``reward_service`` scores. ``chat`` generates.
"""
