"""Two candidates and which of them is better: the form that every set of preferences is read into.

A row becomes a question for a judge. The prompt is an instruction with both candidates, called A and B, and the label is the
letter of the better one, C for a tie. Which candidate is A depends on the content of the pair alone: it is the same in every
run, and tells nothing about the label. Columns beside the usual ones:

* ``request``: what both candidates were made from;
* ``chosen`` and ``rejected``: the candidates as parts of a message, null for a tie;
* ``shown``: positions in the row of A and B;
* a letter for each thing that was compared, ``preference`` first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrft.datasets.row_tables import Row

Instruction = str | Mapping[str, str]
"""One text, or one by task; ``{prompt}`` stands for the request and ``{criteria}`` for what to judge by."""

Winner = int | None
"""0 or 1, None for a tie."""

KINDS = {"text-to-image": "image", "text-to-video": "video", "text-to-audio": "audio", "image-to-video": "video"}
"""Task to what the candidates are."""

NOUNS = {"image": "pictures", "video": "videos", "audio": "clips"}


def judged(
    row: Row,
    *,
    source: str,
    task: str,
    request: str,
    candidates: Sequence[Any],
    heads: Mapping[str, Winner],
    ties: bool = False,
    given: Any = None,
    criteria: str = "",
    task_instruction: Instruction | None = None,
    root: str = "",
) -> dict[str, Any]:
    """``row`` as a question for a judge.

    ``heads`` says who won each comparison; its first entry gives the label. ``ties`` offers C. ``given`` is the picture that
    both started from. ``root`` is the folder of paths that have none. Raises ``ValueError`` for a task without an instruction.
    """
    kind = KINDS[task]
    order = first_shown(source, request, candidates)
    order = (order, 1 - order)
    parts = [{"type": kind, kind: placed(c, root)} for c in candidates]
    content = [_text(_instruction(task, task_instruction, request, criteria))]
    if given is not None:
        content += [_text("\n\nThey start from:\n"), {"type": "image", "image": placed(given, root)}]
    for letter, k in zip("AB", order):
        content += [_text(f"\n\n{letter}:\n"), parts[k]]
    content.append(_text("\n\n" + _question(NOUNS[kind], ties)))
    letters = {head: "C" if winner is None else "AB"[order.index(winner)] for head, winner in heads.items()}
    best = next(iter(heads.values()))
    return {
        **row,
        "prompt": [{"role": "user", "content": content}],
        "response": f"<answer>{next(iter(letters.values()))}</answer>",
        "label": next(iter(letters.values())),
        "data_source": source,
        "request": request,
        "chosen": None if best is None else parts[best],
        "rejected": None if best is None else parts[1 - best],
        "shown": list(order),
        **letters,
    }


def first_shown(source: str, request: str, candidates: Sequence[Any]) -> int:
    """Which of two candidates is A: half of all pairs either way, whatever the order in which the row names them."""
    marks = [_mark(c) for c in candidates]
    drawn = hashlib.sha256("\0".join([source, request, *sorted(marks)]).encode()).digest()[0] & 1
    return drawn ^ (marks[0] > marks[1])


def better(first: float, second: float) -> Winner:
    """The one with the higher score."""
    return None if first == second else int(second > first)


def placed(media: Any, root: str) -> Any:
    """``media``, a path without a folder of its own put below ``root``."""
    if not root or not isinstance(media, str) or media.startswith(("/", "data:")) or "://" in media:
        return media
    return f"{root.rstrip('/')}/{media.removeprefix('./')}"


class Made(Sequence[Row]):
    """Rows that are made when they are asked for, each from one of ``keys``."""

    def __init__(self, keys: Sequence[Any], make: Callable[[Any], Row]) -> None:
        self._keys = keys
        self._make = make

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, i: Any) -> Any:
        return self._make(self._keys[i])


def _mark(candidate: Any) -> str:
    """What tells candidates apart and costs no decoding: a path, the bytes of a file, or the size of what is decoded already."""
    if isinstance(candidate, str):
        return candidate
    if isinstance(candidate, bytes):
        return hashlib.sha256(candidate).hexdigest()
    if isinstance(candidate, Mapping):
        return "\0".join(_mark(candidate[k]) for k in ("bytes", "path") if candidate.get(k) is not None)
    return f"{type(candidate).__name__} {getattr(candidate, 'size', '')}"


def _instruction(task: str, chosen: Instruction | None, request: str, criteria: str) -> str:
    if isinstance(chosen, Mapping):
        if task not in chosen:
            raise ValueError(f"task_instruction has no entry {task!r}; it has: {', '.join(chosen)}")
        chosen = chosen[task]
    if chosen is None:
        by = "{criteria}" if criteria else "how well each follows the request, and how good it is in itself"
        chosen = f"Two {NOUNS[KINDS[task]]} were made for this request:\n{{prompt}}\n\nCompare them by {by}."
    fields = {"prompt": request, "criteria": criteria}
    return re.sub(r"\{(prompt|criteria)\}", lambda found: fields[found[1]], chosen)


def _question(noun: str, ties: bool) -> str:
    tie = ", or <answer>C</answer> if they are equally good" if ties else ""
    return f"Which of the two {noun} is better? End with <answer>A</answer> or <answer>B</answer>{tie}."


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
