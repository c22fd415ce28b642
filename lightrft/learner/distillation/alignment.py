"""Encode responses for a teacher with another tokenizer, and align the tokens of both.

Two tokens are aligned where both end after the same characters of the response. There both models
have read the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightrft.datasets.chat_encoder import ChatEncoder

UNDECODABLE = "\ufffd"
"""Character that stands for bytes that are no text, such as a part of a character."""
NOWHERE = -1
"""End of a token inside a character, or of a token whose text is unknown."""


class Translation(NamedTuple):
    """A response in the tokens of a teacher.

    Attributes:
        tokens: The teacher's tokens, at least one.
        aligned: True where a token of the student ends at the same place, one per token.
        student_aligned: The same for each token of the student.
    """

    tokens: list[int]
    aligned: list[bool]
    student_aligned: list[bool]


def translate(
    response: Sequence[int], student: ChatEncoder, teacher: ChatEncoder, room: int | None
) -> Translation:
    """Return ``response`` in the teacher's tokens.

    The text is read up to the first special token. Tokens after it are not aligned, unless it is
    the last one, which ends the response for both models.

    Args:
        response: Tokens of the student.
        student: Encoder of the student's tokenizer.
        teacher: Encoder of the teacher's tokenizer.
        room: Largest number of the teacher's tokens. ``None`` for no bound.
    """
    spoken = _before_special(response, student)
    said = _decoded(student.tokenizer, spoken)
    text = said.partition(UNDECODABLE)[0]
    theirs: list[int] = []
    if text:
        # A special token that the text spells must not act as one.
        (theirs,) = teacher.encode_answers([text])
    ends = token_ends(student.tokenizer, spoken, said)
    their_ends = token_ends(teacher.tokenizer, theirs, text)
    fits = True
    if room is not None and len(theirs) >= room:
        fits = False
        kept = max(0, room - 1)
        theirs, their_ends = theirs[:kept], their_ends[:kept]
    own_flags, their_flags = common_ends(ends, their_ends)
    closed = fits and len(response) == len(spoken) + 1 and _complete(ends, their_ends, said)
    rest = len(response) - len(spoken)
    own_flags += [closed] * rest
    # No model reads the last token, so any token serves where the tokenizer ends no response.
    end = teacher.tokenizer.eos_token_id
    closing = 0 if end is None else int(end)
    return Translation([*theirs, closing], [*their_flags, closed], own_flags)


def token_ends(tokenizer: Any, tokens: Sequence[int], text: str) -> list[int]:
    """Return the number of characters of ``text`` up to the end of each token, or ``NOWHERE``.

    Args:
        tokenizer: The tokenizer of ``tokens``.
        tokens: Tokens of ``text``. Sampled ones need not be those that the tokenizer would choose.
        text: The text.
    """
    if not tokens:
        return []
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] == list(tokens):
            return _ends_of_offsets(encoded["offset_mapping"])
    return _ends_by_decoding(tokenizer, tokens, text)


def common_ends(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Return masks of the tokens of both sides that end at a common place.

    Both masks have the same number of True entries, in the same order of places. Of several tokens
    that end at one place, the last one counts.

    Args:
        ours: Ends of the tokens of one side, from ``token_ends``.
        theirs: Ends of the tokens of the other side.
    """
    own_places = {end: k for k, end in enumerate(ours) if end > 0}
    their_places = {end: k for k, end in enumerate(theirs) if end > 0}
    own_flags, their_flags = [False] * len(ours), [False] * len(theirs)
    for end in own_places.keys() & their_places.keys():
        own_flags[own_places[end]] = True
        their_flags[their_places[end]] = True
    return own_flags, their_flags


def _before_special(response: Sequence[int], encoder: ChatEncoder) -> list[int]:
    """Return the tokens before the first special or unknown one."""
    unknown = encoder.tokenizer.unk_token_id
    spoken: list[int] = []
    for token in response:
        if token in encoder.special_ids or token == unknown:
            break
        spoken.append(token)
    return spoken


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _ends_of_offsets(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the end of each token. A token that the next one overlaps ends inside a character."""
    ends: list[int] = []
    for k, (_, end) in enumerate(offsets):
        overlaps = k + 1 < len(offsets) and offsets[k + 1][0] < end
        ends.append(NOWHERE if overlaps else end)
    return ends


def _ends_by_decoding(tokenizer: Any, tokens: Sequence[int], text: str) -> list[int]:
    """Return the end of each token, from the text that each one adds to the tokens before it."""
    ends: list[int] = []
    # Tokens up to ``read`` are the first ``length`` characters. Those from ``first`` on are decoded
    # again, since a token may have another text at the start. All of them would take n^2 time.
    first, read, length = 0, 0, 0
    known = ""
    for count in range(1, len(tokens) + 1):
        begun = _decoded(tokenizer, tokens[first:count])
        added = begun[len(known) :]
        is_next = begun.startswith(known) and text.startswith(added, length)
        if not is_next or begun.endswith(UNDECODABLE):
            ends.append(NOWHERE)
            continue
        length += len(added)
        ends.append(length)
        first, read = read, count
        known = _decoded(tokenizer, tokens[first:read])
    return ends


def _complete(ours: Sequence[int], theirs: Sequence[int], said: str) -> bool:
    """Return True if both sides end with the whole text."""
    return all(not ends or ends[-1] == len(said) for ends in (ours, theirs)) and (
        bool(ours) == bool(theirs)
    )
