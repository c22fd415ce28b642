"""Helpers for questions with lettered choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lettered(choices: Any) -> dict[str, str]:
    """Return ``choices`` by letter. A list gets its letters in order.

    Raises ``ValueError`` if there are more choices than letters.
    """
    if isinstance(choices, Mapping):
        return {str(letter): str(text) for letter, text in choices.items() if text is not None}
    if len(choices) > len(LETTERS):
        raise ValueError(f"{len(choices)} choices; at most {len(LETTERS)} have a letter")
    return {letter: str(text) for letter, text in zip(LETTERS, choices)}


def shown(choices: Mapping[str, str]) -> str:
    """Return the choices as text, one per line after an empty line."""
    return "\n" + "".join(f"\n{letter}. {text}" for letter, text in choices.items())


def with_choices(prompt: Any, choices: Mapping[str, str]) -> Any:
    """Return a prompt (text or turns) with the choices under its question.

    A prompt that already shows all choices is returned unchanged.
    """
    turns: Sequence[Any] = (
        [
            {
                "from": "user",
                "value": prompt,
            }
        ]
        if isinstance(prompt, str)
        else prompt
    )
    last = dict(turns[-1])
    key = "value" if "value" in last else "content"
    if all(text in last[key] for text in choices.values()):
        return prompt
    last[key] = last[key].rstrip() + shown(choices)
    return [*turns[:-1], last]


def letter_of(choices: Mapping[str, str], answer: Any) -> str:
    """Return the letter of ``answer``: a position from 0, the text of a choice, or a letter.

    Raises ``ValueError`` if it is none of them.
    """
    letters = list(choices)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    text = str(answer).strip()
    found = [letter for letter, choice in choices.items() if choice.strip() == text]
    if not found and text not in choices:
        raise ValueError(f"the answer {answer!r} is none of the choices {', '.join(map(repr, choices.values()))}")
    return found[0] if found else text
