"""Mathematics test sets as JSON lists of ``{"prompt": [{"from", "value"}], "final_answer", "choices"?}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrft.datasets.readers import READERS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _reader(name: str) -> Callable[..., Mapping[str, Any]]:
    def read(row: Mapping[str, Any]) -> dict[str, Any]:
        prompt, label = row["prompt"], row["final_answer"]
        if row.get("choices"):
            choices = _lettered(row["choices"])
            prompt = _with_choices(prompt, choices)
            label = next((letter for letter, text in choices.items() if text == label), label)
        return {**row, "prompt": prompt, "label": label, "data_source": name}

    return READERS.register(name)(read)


def _lettered(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(letter): str(text) for letter, text in choices.items() if text is not None}
    if len(choices) > len(LETTERS):
        raise ValueError(f"{len(choices)} choices; at most {len(LETTERS)} have a letter")
    return {letter: str(text) for letter, text in zip(LETTERS, choices)}


def _with_choices(prompt: Any, choices: Mapping[str, str]) -> Any:
    """The choices under the question, one a line, unless the question shows them already."""
    turns: Sequence[Any] = [{"from": "user", "value": prompt}] if isinstance(prompt, str) else prompt
    last = dict(turns[-1])
    key = "value" if "value" in last else "content"
    if all(text in last[key] for text in choices.values()):
        return prompt
    last[key] = last[key].rstrip() + "\n" + "".join(f"\n{letter}. {text}" for letter, text in choices.items())
    return [*turns[:-1], last]


math500 = _reader("math500")
aime2024 = _reader("aime2024")
aime2025 = _reader("aime2025")
gpqa = _reader("gpqa")
gpqa_diamond = _reader("gpqa_diamond")
