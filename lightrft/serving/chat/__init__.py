"""Text generation behind HTTP: chat completions, completions and messages over one loop.

``generation_loop`` advances all open responses together. ``text_generator`` turns the fields of a
request into sampling settings and requests. The other modules are the addresses and their formats.
"""
