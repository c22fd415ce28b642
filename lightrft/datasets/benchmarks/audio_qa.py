"""Questions about a clip, with choices: AVQA as R1-AQA trains on it (arXiv 2503.11197), and MMAU (arXiv 2410.19168)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightrft.datasets.benchmarks.multiple_choice import letter_of, lettered, shown
from lightrft.datasets.benchmarks.preference_pairs import placed
from lightrft.datasets.row_readers import READERS


@READERS.register("aqa")
def aqa(row: Mapping[str, Any], *, root: str = "") -> dict[str, Any]:
    """``{id, question_text, multi_choice, answer: position, audio_path}``, or the layout that LightRFT makes of it.

    The label is a letter, in LightRFT's layout (``{prompt: messages, audio_path, reference, label}``) the answer's text: its own
    ``label`` names a rule. ``root`` is the folder of paths that have none.
    """
    if "question_text" not in row:
        named = {"prompt": [_message(m, root) for m in row["prompt"]], "label": row["reference"]}
        return {**row, **named, "data_source": "aqa"}
    choices = lettered(row["multi_choice"])
    made = _question("aqa", row["question_text"], choices, row["answer"], placed(row["audio_path"], root))
    return {**row, **made}


@READERS.register("mmau")
def mmau(row: Mapping[str, Any], *, root: str = "") -> dict[str, Any]:
    """``{id, audio_id, question, choices, answer: text}``; ``root`` as for ``aqa``."""
    choices = lettered(row["choices"])
    return {**row, **_question("mmau", row["question"], choices, row["answer"], placed(row["audio_id"], root))}


def _question(source: str, question: str, choices: Mapping[str, str], answer: Any, clip: Any) -> dict[str, Any]:
    letter = letter_of(choices, answer)
    named = {"audios": [clip], "prompt": question + shown(choices), "label": letter, "reference": choices[letter]}
    return {**named, "data_source": source}


def _message(message: Mapping[str, Any], root: str) -> dict[str, Any]:
    """With ``audio_url`` under the name that parts have here."""
    content = message["content"]
    if not isinstance(content, str):
        content = [
            {"type": "audio", "audio": placed(p["audio_url"], root)} if p.get("audio_url") is not None else p for p in content
        ]
    return {**message, "content": content}
