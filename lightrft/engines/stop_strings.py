"""The end of a response: end tokens, and stop strings, which may span several tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightrft.config.strategy import SamplingConfig
from lightrft.utils.chat_template import special_tokens, turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_ids(
    tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], sampling: SamplingConfig
) -> list[int]:
    """Return the sorted token ids that end a response.

    Args:
        tokenizer: Spells the special tokens among ``sampling.stop``.
        ends: End tokens of the model.
        sampling: Gives further end tokens.
    """
    return sorted({*ends, *sampling.stop_token_ids, *stop_tokens(tokenizer, sampling.stop)})


@functools.lru_cache(maxsize=64)
def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> tuple[int, ...]:
    """Return the special tokens of ``tokenizer`` that strings of ``stop`` spell."""
    special = special_tokens(tokenizer) if stop else {}
    return tuple(special[one] for one in stop if one in special)


def model_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> list[int]:
    """Return the tokens that end every response of a model.

    Args:
        tokenizer: Its end token, and the ends of turns of its chat template, end responses too. A
            tokenizer without an end token adds none.
        ends: End tokens of the configs of the model.
    """
    if tokenizer.eos_token_id is None:
        return list(dict.fromkeys(ends))
    return list(dict.fromkeys((*ends, tokenizer.eos_token_id, *turn_ends(tokenizer).ids)))


class StopMatch(NamedTuple):
    """A stop string that a response ends with.

    Attributes:
        text: The response before it.
        stop: The stop string.
    """

    text: str
    stop: str


class StopStrings:
    """Finds the first of ``stop`` that the newest token of a response completes.

    Text is decoded only if the newest token can end a stop string, and only the last tokens. A stop
    string may spell special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        special = special_tokens(tokenizer)
        self._special = {*tokenizer.all_special_ids, *special.values()}
        # special tokens are no part of a text, except for stop strings that spell them
        self._spelled = {
            token: text for text, token in special.items() if any(text in one for one in stop)
        }
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
            piece = self._spelled.get(token) or self._tokenizer.decode([token])
            # Tokenizers may strip blanks from a lone token, and decode part of a character as
            # U+FFFD.
            unsure = "\ufffd" in piece or any(end.isspace() for end in self._ends)
            fits = unsure or any(end in piece for end in self._ends)
            known = (token not in self._special or token in self._spelled) and fits
            # kept for the run: a vocabulary has far fewer tokens than the responses
            self._may_end[token] = known
        return known

    def cut(self, tokens: np.ndarray) -> str | None:
        """Return the text of a response before its stop string, or ``None``.

        The stop string must end within the newest token of ``tokens [T]``.
        """
        found = self.match(tokens)
        return None if found is None else found.text

    def match(self, tokens: np.ndarray) -> StopMatch | None:
        """Return the stop string that the newest token of ``tokens [T]`` completes, or ``None``."""
        tail = self._tail(tokens)
        text = self._decode(tail)
        # U+FFFD at the end is part of a character that the newest token may complete.
        before = len(self._decode(tail[:-1]).rstrip("\ufffd"))
        starts = []
        for stop in self._stop:
            # the newest token must complete it, so it ends after ``before``
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                starts.append((start, stop))
        if not starts:
            return None
        start, stop = min(starts)
        # counted from the end, since the tail is a suffix of the whole text
        rest = text[start:]
        for spelled in self._spelled.values():
            rest = rest.replace(spelled, "")
        whole = str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
        return StopMatch(whole[: len(whole) - len(rest)], stop)

    def _tail(self, tokens: np.ndarray) -> list[int]:
        tail: list[int] = []
        for token in tokens[::-1].tolist():
            if token in self._special and token not in self._spelled:
                continue
            tail.append(token)
            if len(tail) == self._window:
                break
        return tail[::-1]

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, with the special tokens that a stop string spells."""
        if self._spelled.keys().isdisjoint(tokens):
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        text, run = "", []
        for token in tokens:
            if token in self._spelled:
                text += str(self._tokenizer.decode(run, skip_special_tokens=True))
                text, run = text + self._spelled[token], []
            else:
                run.append(token)
        return text + str(self._tokenizer.decode(run, skip_special_tokens=True))
