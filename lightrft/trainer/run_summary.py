"""What a run came to, read back from its own folder, so that a resumed run sums up like one that was never stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrft.observability.run_health import is_not_trained
from lightrft.observability.trackers import read_rows

SHOWN, GALLERY = 5, 40


def headline(path: Path, phase: str) -> dict[str, Any]:
    """Held-out accuracy, steps that learned something and the account of tokens, over the rows of ``phase`` in ``metrics.jsonl``.

    ``heldout_before`` is of an evaluation at step 0, ``heldout_after`` of the last one after a step: each only if there was one. Tokens
    are ``waiting`` that were carried over to a step that never came."""
    rows = [r for r in read_rows(path / "metrics.jsonl") if r.get("phase") == phase]
    found: dict[str, Any] = {}
    accuracy = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r}
    if accuracy:
        found["heldout_best"] = max(accuracy.values())
        if 0 in accuracy:
            found["heldout_before"] = accuracy[0]
        if last := max(accuracy):
            found["heldout_after"] = accuracy[last]
    found["steps_trained"] = sum(is_not_trained(row) is False for row in rows)
    for kind in ("sampled", "trained", "filtered", "failed"):
        if any(f"rollout/{kind}" in r for r in rows):
            found[f"tokens_{kind}"] = int(sum(r.get(f"rollout/{kind}", 0) for r in rows))
    waiting = int(sum(r.get("rollout/carried_out", 0) - r.get("rollout/carried_in", 0) for r in rows))
    if waiting:
        found["tokens_waiting"] = waiting
    return found


def samples(path: Path, threshold: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Answers to the same held-out prompts at the first and at the last evaluation; those that changed to right come first.

    After a single evaluation one of the two is empty: there is no before, or no after.

    Prompts with attachments are seen at a glance: of those there are more, evenly over all."""
    files = sorted((path / "rollouts").glob("eval_*.jsonl"))
    if not files:
        return [], []
    before, after = _first_answers(files[0], threshold), _first_answers(files[-1], threshold)
    shared = [k for k in before if k in after]
    if any(before[k]["attachments"] for k in shared):
        picked = [shared[i * len(shared) // GALLERY] for i in range(GALLERY)] if len(shared) > GALLERY else shared
    else:
        shared.sort(key=lambda k: (before[k]["correct"], not after[k]["correct"]))
        picked = _spread(shared, before, after)
    sides = [before[k] for k in picked], [after[k] for k in picked]
    if len(files) > 1:
        return sides
    return (sides[0], []) if _step_of(files[0]) == 0 else ([], sides[1])


def _step_of(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


def _spread(keys: Sequence[str], before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Mostly changes, but never only the flattering ones: one prompt that is still wrong, where there is any."""
    wrong = [k for k in keys if not after[k]["correct"]][:1]
    return [k for k in keys if k not in wrong][: SHOWN - len(wrong)] + wrong


def question(prompt: str, attached: bool = False) -> str:
    """What a reader wants to see of a prompt: the last message of the user where it is written in ChatML, else all of it; without
    special tokens where something is ``attached``, which is seen as it is."""
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.S)
    shown = asked[-1] if asked else prompt
    return re.sub(r"<\|\w+\|>", "", shown).strip() if attached else shown


def _first_answers(file: Path, threshold: float) -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"]
        reward = row["reward"]
        correct = not row["failed"] and reward is not None and reward >= threshold
        answers.setdefault(
            prompt["id"],
            {
                "prompt": question(prompt["text"], bool(prompt["attachments"])),
                "attachments": prompt["attachments"],
                "text": row["text"],
                "label": str(prompt["label"]),
                "correct": correct,
            },
        )
    return answers
