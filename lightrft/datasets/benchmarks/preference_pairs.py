"""The common form of all preference datasets: two candidates and the better one.

A row becomes a question for a judge. The prompt is an instruction with both candidates, called A
and B. The label is the letter of the better candidate, or C for a tie. The order of the candidates
depends only on the content of the pair. It is the same in every run and carries no information
about the label. Further columns:

* ``request``: the request that both candidates were made for.
* ``chosen`` and ``rejected``: the candidates as message parts, null for a tie.
* ``shown``: positions in the row of A and B.
* one letter for each comparison, ``preference`` first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightrft.datasets.row_tables import READERS, Row

K = TypeVar("K")

Instruction = str | Mapping[str, str]
"""One instruction for all tasks, or one by task.

``{prompt}`` stands for the request and ``{criteria}`` for the criteria.
"""

Winner = int | None
"""The position of the better candidate, 0 or 1, or None for a tie."""

KINDS = {
    "text-to-image": "image",
    "text-to-video": "video",
    "text-to-audio": "audio",
    "image-to-video": "video",
}
"""The media kind of the candidates of each task."""

NOUNS = {"image": "pictures", "video": "videos", "audio": "clips"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two candidates, and the better one in each comparison.

    Args:
        request: the request that both candidates were made for.
        candidates: the two candidates as paths, bytes or decoded media.
        heads: winner of each comparison by name. The first one gives the label.
        given: the image that both candidates start from. None if there is none.
        criteria: the criteria of the comparison. Empty for general criteria.
        id: name of the pair. Empty if the row has its own, or none.
    """

    request: str
    candidates: Sequence[object]
    heads: Mapping[str, Winner]
    given: object = None
    criteria: str = ""
    id: str = ""


def pair_reader(
    source: str, task: str, *, ties: bool = False
) -> Callable[[Callable[[Row], Pair]], Callable[..., Row]]:
    """Return the decorator that makes a reader of a function that reads a pair.

    Args:
        source: name of the reader and of the data source.
        task: a key of ``KINDS``.
        ties: if True, the question offers C for a tie.
    """

    def add(read: Callable[[Row], Pair]) -> Callable[..., Row]:
        def reader(row: Row, *, task_instruction: Instruction | None = None, root: str = "") -> Row:
            return judged(row, read(row), source, task, ties, task_instruction, root)

        # By its place, a reader can be pickled.
        for name in ("__module__", "__qualname__", "__doc__"):
            setattr(reader, name, getattr(read, name))
        return READERS.register(source)(reader)

    return add


def judged(
    row: Row,
    pair: Pair,
    source: str,
    task: str,
    ties: bool = False,
    task_instruction: Instruction | None = None,
    root: str = "",
) -> Row:
    """Return ``row`` as a question for a judge.

    Args:
        row: the row. Its columns are kept.
        pair: the two candidates.
        source: name of the data source.
        task: a key of ``KINDS``.
        ties: if True, the question offers C for a tie.
        task_instruction: the instruction. None means the built-in instruction.
        root: folder of relative paths.

    Raises:
        ValueError: ``task_instruction`` has no entry for ``task``.
    """
    kind = KINDS[task]
    first = first_shown(source, pair.request, pair.candidates)
    order = (first, 1 - first)
    parts = [{"type": kind, kind: placed(c, root)} for c in pair.candidates]
    content = [_text(_instruction(task, task_instruction, pair.request, pair.criteria))]
    if pair.given is not None:
        start = {"type": "image", "image": placed(pair.given, root)}
        content += [_text("\n\nThey start from:\n"), start]
    for letter, k in zip("AB", order):
        content += [_text(f"\n\n{letter}:\n"), parts[k]]
    ends = "End with <answer>A</answer> or <answer>B</answer>"
    if ties:
        ends = f"{ends}, or <answer>C</answer> if they are equally good"
    content.append(_text(f"\n\nWhich of the two {NOUNS[kind]} is better? {ends}."))
    letters = {}
    for head, winner in pair.heads.items():
        letters[head] = "C" if winner is None else "AB"[order.index(winner)]
    label = next(iter(letters.values()))
    best = next(iter(pair.heads.values()))
    chosen, rejected = (None, None) if best is None else (parts[best], parts[1 - best])
    return {
        **row,
        "prompt": [{"role": "user", "content": content}],
        "response": f"<answer>{label}</answer>",
        "label": label,
        "data_source": source,
        "request": pair.request,
        "chosen": chosen,
        "rejected": rejected,
        "shown": list(order),
        **letters,
        **({"id": pair.id} if pair.id else {}),
    }


def first_shown(source: str, request: str, candidates: Sequence[object]) -> int:
    """Return the position of the candidate that is shown as A.

    Each order is used for half of all pairs. The choice does not depend on the order in the row.

    Args:
        source: name of the data source.
        request: the request that both candidates were made for.
        candidates: the two candidates.
    """
    marks = [_mark(c) for c in candidates]
    drawn = hashlib.sha256("\0".join([source, request, *sorted(marks)]).encode()).digest()[0] & 1
    # swapping the candidates of the row swaps this bit too, so the same candidate stays A
    return drawn ^ (marks[0] > marks[1])


def better(first: float, second: float) -> Winner:
    """Return the position of the higher score, or None for equal scores."""
    return None if first == second else int(second > first)


def placed(media: object, root: str) -> object:
    """Return ``media``, with a relative path placed below ``root``."""
    if not root or not isinstance(media, str):
        return media
    is_absolute = media.startswith(("/", "data:")) or "://" in media
    return media if is_absolute else f"{root.rstrip('/')}/{media.removeprefix('./')}"


class PairBuilder(Generic[K]):
    """Rows that are built on access, each from one of ``keys``."""

    def __init__(self, keys: Sequence[K], make: Callable[[K], Row]) -> None:
        self._keys = keys
        self._make = make

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, i: int) -> Row:
        return self._make(self._keys[i])


def _mark(candidate: object) -> str:
    """Return a text that identifies a candidate without decoding it.

    It is a path, a hash of the bytes of a file, or the size of a decoded medium.
    """
    if isinstance(candidate, str):
        return candidate
    if isinstance(candidate, bytes):
        return hashlib.sha256(candidate).hexdigest()
    if isinstance(candidate, Mapping):
        held = [candidate[key] for key in ("bytes", "path") if candidate.get(key) is not None]
        return "\0".join(map(_mark, held))
    return f"{type(candidate).__name__} {getattr(candidate, 'size', '')}"


def _instruction(task: str, chosen: Instruction | None, request: str, criteria: str) -> str:
    if isinstance(chosen, Mapping):
        if task not in chosen:
            raise ValueError(f"task_instruction has no entry {task!r}; it has: {', '.join(chosen)}")
        chosen = chosen[task]
    if chosen is None:
        by = "how well each follows the request, and how good it is in itself"
        if criteria:
            by = "{criteria}"
        chosen = (
            f"Two {NOUNS[KINDS[task]]} were made for this request:\n{{prompt}}\n\nCompare them "
            f"by {by}."
        )
    # Not ``str.format``: requests and instructions may have other braces.
    fields = {"prompt": request, "criteria": criteria}
    return re.sub(r"\{(prompt|criteria)\}", lambda found: fields[found[1]], chosen)


def _text(text: str) -> Row:
    return {"type": "text", "text": text}
