"""Speculative decoding: guess the next tokens of a response, and check them in one step.

A guess is kept while it equals the token that plain decoding samples there, with the random number
of its place. The responses are therefore those of plain decoding.
"""
