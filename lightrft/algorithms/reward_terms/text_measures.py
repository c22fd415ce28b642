"""Measures of the text of a response: repetition, and words of reflection.

Source of both: ``lightrft/utils/trajectory_saver.py`` of LightRFT.
"""

from __future__ import annotations

import re

REFLECTIONS = re.compile(
    r"\b(?:let\s+me\s+(?:think|reconsider)|actually|wait|correction|mistake|wrong|rethink)\b",
    re.IGNORECASE,
)
"""Words by which a response looks back at itself."""


def reflections(text: str) -> int:
    """Return the number of words of reflection in ``text``."""
    return len(REFLECTIONS.findall(text))


def repetition(text: str) -> float:
    """Return the share of the substrings of ``text`` that occurred before, from 0 to 1.

    With n characters and d distinct substrings it is ``1 - d / (n (n + 1) / 2)``, which equals
    the sum of the longest common prefixes of neighbours in the suffix array, divided by
    ``n (n + 1) / 2``. The suffix automaton counts d in time linear in n.
    """
    count = len(text)
    if count < 2:
        return 0.0
    following: list[dict[str, int]] = [{}]
    link, length = [-1], [0]
    last, distinct = 0, 0
    for character in text:
        new, state = len(link), last
        following.append({})
        length.append(length[last] + 1)
        link.append(0)
        while state >= 0 and character not in following[state]:
            following[state][character] = new
            state = link[state]
        if state >= 0:
            target = following[state][character]
            if length[target] > length[state] + 1:
                # Split off the substrings of ``target`` that also end here.
                copy = len(link)
                following.append(dict(following[target]))
                length.append(length[state] + 1)
                link.append(link[target])
                link[target] = copy
                while state >= 0 and following[state].get(character) == target:
                    following[state][character] = copy
                    state = link[state]
                target = copy
            link[new] = target
        last = new
        distinct += length[new] - length[link[new]]
    return 1 - distinct / (count * (count + 1) / 2)
