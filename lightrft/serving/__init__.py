"""Serve models over HTTP.

``http_server`` is the HTTP side: tokens, limits, repeated requests, shutdown. ``field_table``
describes the fields of requests. ``work_queue`` holds waiting requests, and ``batcher`` makes
batches of them. ``reward_service`` scores. ``chat`` generates. ``tinker``
trains too.
"""
