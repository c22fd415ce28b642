"""Stop strings, found in the decoded text, since a stop string may span several tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Finds the first of ``stop`` that the newest token of a response completes.

    Text is decoded only if the newest token can end a stop string, and only the last tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._special = set(tokenizer.all_special_ids)
        # a token that completes a stop string contains its last character
        self._ends = {s[-1] for s in stop}
        # A token is at least one byte of text. 8 more tokens: a tail may decode differently at its
        # very start.
        self._window = max(len(s.encode()) for s in stop) + 8
        self._may_end: dict[int, bool] = {}

    def may_end(self, token: int) -> bool:
        """Return ``False`` only if this newest token cannot end a stop string.

        ``True`` may be a false alarm.
        """
        known = self._may_end.get(token)
        if known is None:
            piece = self._tokenizer.decode([token])
            # Tokenizers may strip blanks from a lone token, and decode part of a character as
            # U+FFFD.
            unsure = "\ufffd" in piece or any(end.isspace() for end in self._ends)
            fits = unsure or any(end in piece for end in self._ends)
            known = token not in self._special and fits
            # kept for the run: a vocabulary has far fewer tokens than the responses
            self._may_end[token] = known
        return known

    def cut(self, tokens: np.ndarray) -> str | None:
        """Return the text of a response before its stop string, or ``None``.

        The stop string must end within the newest token of ``tokens [T]``.
        """
        tail = self._tail(tokens)
        text = self._decode(tail)
        # U+FFFD at the end is part of a character that the newest token may complete.
        before = len(self._decode(tail[:-1]).rstrip("\ufffd"))
        starts = []
        for stop in self._stop:
            # the newest token must complete it, so it ends after ``before``
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                starts.append(start)
        if not starts:
            return None
        # counted from the end, since the tail is a suffix of the whole text
        cut = min(starts) - len(text)
        return self._decode(tokens.tolist())[: cut or None]

    def _tail(self, tokens: np.ndarray) -> list[int]:
        tail: list[int] = []
        for token in tokens[::-1].tolist():
            if token in self._special:
                continue
            tail.append(token)
            if len(tail) == self._window:
                break
        return tail[::-1]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
