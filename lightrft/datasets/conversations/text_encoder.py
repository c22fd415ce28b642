"""Encoding of texts in which a spelled-out special token does not act as one.

A special token that is spelled out in a row must not act as one. Otherwise a user could end the
turn and speak as the assistant. Each such spelling is therefore replaced by a marker before text
enters a template (``escape_special_tokens``). The rendered text is split at the markers. The
spellings are encoded as plain text, and everything else is encoded normally. What a model has
sampled may hold special tokens: ``encode_sampled``, and the setting ``special_tokens: responses``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lightrft.utils.chat_template import special_tokens, turn_ends
from lightrft.utils.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # Unicode noncharacters: never part of interchanged text
MARKER = re.compile(f"{OPEN}(\\d+){CLOSE}")
MARKUP = re.compile(r"[<\[]\S+[>\]]")


class TextEncoder:
    """Encodes texts for a tokenizer.

    Args:
        tokenizer: the tokenizer, with its chat template.
        spelled: what a spelled-out special token is: the setting ``data.special_tokens``.
        places: spellings of media.
        written: text that is written around media.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        spelled: Literal["text", "responses", "control"],
        places: Collection[str] = (),
        written: str = "",
    ) -> None:
        # the type that apply_chat_template() returns depends on its arguments
        self.tokenizer: Any = tokenizer
        self._as_text = spelled != "control"
        source = str(tokenizer.chat_template) + written
        special = set(tokenizer.all_special_tokens)
        special_ids = set(tokenizer.all_special_ids)
        markup: set[str] = set()
        written_ids: set[int] = set()
        for number, token in tokenizer.added_tokens_decoder.items():
            if token.special:
                special.add(token.content)
                special_ids.add(number)
            # markup of the template, such as <tool_call>, may be an added token that is not special
            if MARKUP.fullmatch(token.content) and token.content in source:
                markup.add(token.content)
                written_ids.add(number)
        spellings = special.union(markup, places)
        # longest first, because a regular expression takes the first alternative that matches
        longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._table = [*longest_first, OPEN, CLOSE]
        self._place = {spelling: k for k, spelling in enumerate(self._table)}
        self._anyone = any_of(self._table)
        # no model samples the place of a medium
        self._sampled = any_of([text for text in self._table if text in {*places, OPEN, CLOSE}])
        answer = any_of([text for text in self._table if text in {*special, *places, OPEN, CLOSE}])
        self._answer = self._sampled if spelled == "responses" else answer
        # ordinary text can produce the unknown token
        special_ids.discard(tokenizer.unk_token_id)
        self.special_ids = frozenset(special_ids)
        self._control_ids = self.special_ids | written_ids
        self.turn_ends = turn_ends(tokenizer)
        ends = {*self.turn_ends.ids, tokenizer.eos_token_id}
        self._spelled_ends = tuple(t for t, i in special_tokens(tokenizer).items() if i in ends)

    @property
    def eos(self) -> int:
        """Return the token that ends a response.

        Raises ``ModelError`` for a tokenizer without an EOS token.
        """
        eos = self.tokenizer.eos_token_id
        if eos is None:
            name = tokenizer_name(self.tokenizer)
            raise ModelError(f"the tokenizer {name} has no eos token, so no response could end")
        return eos

    @cached_property
    def start(self) -> list[int]:
        """Return the tokens that the tokenizer puts before a plain text, such as BOS."""
        # tokenizers declare these tokens in different places, so encode with and without them
        bare = self._plain_ids(["a"], add_special_tokens=False)[0]
        full = self._plain_ids(["a"], add_special_tokens=True)[0]
        for k in range(len(full)):
            if full[k : k + len(bare)] == bare:
                return full[:k]
        return []

    def escape_special_tokens(self, text: str, *, answer: bool = False) -> str:
        """Return ``text`` with spelled-out special tokens replaced by markers.

        In assistant text (``answer``), added tokens that are not special, such as ``<think>``, keep
        their function.
        """
        return self._escaped(text, self._answer if answer else self._anyone)

    def encode_answers(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of assistant texts that data gives."""
        return self.encode([self.escape_special_tokens(text, answer=True) for text in texts])

    def encode_sampled(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that a model sampled: special tokens are themselves."""
        return self.encode([self._escaped(text, self._sampled) for text in texts])

    def _escaped(self, text: str, spellings: re.Pattern[str]) -> str:
        if not self._as_text:
            return text
        return spellings.sub(lambda match: f"{OPEN}{self._place[match[0]]}{CLOSE}", text)

    def without_end(self, text: str) -> str:
        """Return the text of a response without the end tokens that it spells at its end."""
        while (stripped := text.rstrip()).endswith(self._spelled_ends):
            spelled = max(filter(stripped.endswith, self._spelled_ends), key=len)
            text = stripped.removesuffix(spelled)
        return text

    def unescape_special_tokens(self, text: str) -> str:
        """Return ``text`` with markers replaced by the spellings."""
        if not self._as_text:
            return text
        return MARKER.sub(lambda match: self._table[int(match[1])], text)

    def is_shielded(self, text: str) -> bool:
        """Return True if ``text`` contains a spelled-out special token."""
        return self._as_text and OPEN in text

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered texts, without added special tokens."""
        # each text becomes: plain text, number of a spelling, plain text, number, plain text ...
        cut = [MARKER.split(t) if self.is_shielded(t) else [t] for t in texts]
        pieces_of_all = itertools.chain.from_iterable(pieces[::2] for pieces in cut)
        # one call for all plain pieces: a fast tokenizer encodes them in parallel
        plain = self._plain_ids(list(pieces_of_all))
        ids: list[list[int]] = []
        at = 0
        for pieces in cut:
            row = plain[at]
            for k, spelling in enumerate(pieces[1::2], start=1):
                row = [*row, *self._spelled(int(spelling)), *plain[at + k]]
            at += (len(pieces) + 1) // 2
            ids.append(row)
        return ids

    def _shield_all(self, value: Any, answer: bool) -> Any:
        if isinstance(value, str):
            return self.escape_special_tokens(value, answer=answer)
        if isinstance(value, Mapping):
            # Names too: those of a tool's parameters come from the row.
            return {
                self._shield_all(k, answer): self._shield_all(v, answer) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._shield_all(v, answer) for v in value]
        return value

    def _spelled(self, place: int) -> list[int]:
        """Return a special token's spelling as plain text tokens.

        Encodes character by character if the tokenizer otherwise produces the special token.
        """
        text = self._table[place]
        # some tokenizers find the special token even so, but never in single characters
        for pieces in ([text], list(text)):
            rows = self._plain_ids(pieces, split_special_tokens=True)
            ids = list(itertools.chain.from_iterable(rows))
            if not self._control_ids & set(ids):
                return ids
        name = tokenizer_name(self.tokenizer)
        raise ModelError(f"the tokenizer {name} cannot write {text!r} as plain text")

    def _plain_ids(
        self, texts: list[str], *, add_special_tokens: bool = False, **options: object
    ) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **options,
        )["input_ids"]


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of ``tokenizer`` in messages."""
    return tokenizer.name_or_path or type(tokenizer).__name__


def any_of(spellings: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of any of ``spellings``, the first that matches."""
    return re.compile("|".join(re.escape(s) for s in spellings))
