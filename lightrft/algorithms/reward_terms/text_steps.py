"""Split a text in steps."""

from __future__ import annotations

from collections.abc import Sequence


def split_steps(text: str, separator: str) -> tuple[list[str], list[int]]:
    """Return the steps of ``text``, and the end of each in ``text``.

    An end includes the separator and all white space up to the next step. The last end is that of
    the text. Empty parts are no steps.
    """
    steps: list[str] = []
    ends: list[int] = []
    at = 0
    for piece in text.split(separator):
        at = min(at + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append(piece.strip())
            ends.append(at)
        elif ends:
            ends[-1] = at
    return steps, ends


def last_tokens(lengths: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the index of the token that contains the last character before each end.

    Args:
        lengths: Number of characters of the first 1, 2, 3, ... tokens; it never falls.
        ends: Ends of steps in the text, in order.
    """
    found: list[int] = []
    at = 0
    for end in ends:
        while at < len(lengths) - 1 and lengths[at] < end:
            at += 1
        found.append(at)
    return found
