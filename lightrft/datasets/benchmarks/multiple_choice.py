"""Helpers for questions with lettered choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightrft.datasets.row_tables import Row

Turn = Mapping[str, str]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def format_choices(choices: Mapping[object, object] | Sequence[object]) -> dict[str, str]:
    """Return ``choices`` by letter. A list gets its letters in order.

    Raises ``ValueError`` if there are more choices than letters.
    """
    if isinstance(choices, Mapping):
        # parquet stores one struct for all rows, with null for the letters that a row does not use
        return {str(letter): str(text) for letter, text in choices.items() if text is not None}
    if len(choices) > len(LETTERS):
        raise ValueError(f"{len(choices)} choices; at most {len(LETTERS)} have a letter")
    return dict(zip(LETTERS, map(str, choices)))


def shown(choices: Mapping[str, str]) -> str:
    """Return the choices as text, one per line after an empty line."""
    lines = [f"\n{letter}. {text}" for letter, text in choices.items()]
    return "\n" + "".join(lines)


def with_choices(prompt: str | Sequence[Turn], choices: Mapping[str, str]) -> str | list[Turn]:
    """Return a prompt (text or turns) with the choices under its question.

    A prompt that already shows all choices is returned unchanged.
    """
    turns = [{"from": "user", "value": prompt}] if isinstance(prompt, str) else list(prompt)
    last = dict(turns[-1])
    key = "value" if "value" in last else "content"
    question = last[key]
    if all(text in question for text in choices.values()):
        return prompt if isinstance(prompt, str) else turns
    last[key] = question.rstrip() + shown(choices)
    return [*turns[:-1], last]


def letter_of(choices: Mapping[str, str], answer: object) -> str:
    """Return the letter of ``answer``: a position from 0, the text of a choice, or a letter.

    Raises ``ValueError`` if it is none of them.
    """
    letters = list(choices)
    # bool is a subclass of int, but True is not the second choice
    is_position = isinstance(answer, int) and not isinstance(answer, bool)
    if is_position and 0 <= answer < len(letters):
        return letters[answer]
    text = str(answer).strip()
    # the text of a choice comes before a letter: a choice may itself be the text "A"
    for letter, choice in choices.items():
        if choice.strip() == text:
            return letter
    if text not in choices:
        listed = ", ".join(map(repr, choices.values()))
        raise ValueError(f"the answer {answer!r} is none of the choices {listed}")
    return text


def choice_row(
    row: Row,
    question: str,
    options: Mapping[object, object] | Sequence[object],
    answer: object,
    source: str,
    **media: list[object],
) -> Row:
    """Return ``row`` with a prompt that shows its choices, and a letter as the label.

    Args:
        row: the row.
        question: the question without its choices.
        options: the choices in order, or by letter.
        answer: position, text or letter of the right choice.
        source: name of the data source.
        **media: media columns.
    """
    choices = format_choices(options)
    letter = letter_of(choices, answer)
    named = {
        **media,
        "prompt": f"{question}{shown(choices)}",
        "label": letter,
        "response": letter,
        "reference": choices[letter],
        "data_source": source,
    }
    return {**row, **named}
