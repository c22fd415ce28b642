"""Summarize a run from its own folder, so that resumed and uninterrupted runs read the same."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lightrft.observability.run_directory import EvalSample
from lightrft.observability.run_health import is_not_trained
from lightrft.observability.trackers import Summary, read_rows
from lightrft.rewards.success import Success

SHOWN, GALLERY = 5, 40
COUNTED = ("sampled", "trained", "filtered", "failed")
Answers = dict[str, EvalSample]
"""The response to show for each eval prompt, by prompt id."""


ACCURACY_OF = {"rm": "eval/pair_accuracy", "prm": "eval/step_accuracy"}
"""The accuracy of a verb whose model generates no responses to evaluate."""


def headline(path: Path, phase: str) -> dict[str, float]:
    """Return eval accuracy, the number of steps that trained, and token counts of ``phase``.

    They are read from ``metrics.jsonl``. ``heldout_before`` is the evaluation at step 0 and
    ``heldout_after`` the last one after a step. ``pair_accuracy`` is the last one of held-out
    preferences. Each is present only if it was made.
    ``tokens_waiting`` were carried over to a step that never came.
    """
    found: dict[str, float] = {}
    accuracy: dict[int, float] = {}
    tokens: Counter[str] = Counter()
    trained = 0
    for row in read_rows(path / "metrics.jsonl"):
        if row.get("phase") != phase:
            continue
        name = ACCURACY_OF.get(phase, "eval/accuracy")
        if name in row:
            accuracy[row["step"]] = row[name]
        if "eval/pair_accuracy" in row:
            found["pair_accuracy"] = row["eval/pair_accuracy"]
        # ``is False``: rows without the metrics, such as an evaluation, give None.
        trained += is_not_trained(row) is False
        for kind in (*COUNTED, "carried_out", "carried_in"):
            name = f"rollout/tokens_{kind}"
            if name in row:
                tokens[kind] += row[name]
    if accuracy:
        found["heldout_best"] = max(accuracy.values())
        if 0 in accuracy:
            found["heldout_before"] = accuracy[0]
        last = max(accuracy)
        if last:
            found["heldout_after"] = accuracy[last]
    found["steps_trained"] = trained
    for kind in COUNTED:
        if kind in tokens:
            found[f"tokens_{kind}"] = int(tokens[kind])
    waiting = int(tokens["carried_out"] - tokens["carried_in"])
    if waiting:
        found["tokens_waiting"] = waiting
    return found


def finished_summary(path: Path) -> Summary | None:
    """Return ``summary.json`` of the run folder ``path`` if the run is complete, else None."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # damaged: the run resumes from its own checkpoint
        return None
    return summary if summary.get("finished") else None


def samples(path: Path, success: Success) -> tuple[list[EvalSample], list[EvalSample]]:
    """Return responses to the same eval prompts at the first and at the last evaluation.

    Responses that became correct come first. With a single evaluation, one of the two lists is
    empty. Prompts with attachments give a larger gallery, sampled evenly over the eval set.

    Args:
        path: run folder.
        success: the rule for right responses.
    """
    files = sorted((path / "rollouts").glob("eval_*.jsonl"))
    if not files:
        return [], []
    before, after = (_first_answers(files[i], success) for i in (0, -1))
    shared = [k for k in before if k in after]
    if any(before[k]["attachments"] for k in shared):
        count = min(GALLERY, len(shared))
        picked = [shared[i * len(shared) // count] for i in range(count)]
    else:
        # Wrong answers that became right come first. The sort is stable, so the rest keeps the
        # order of the eval set.
        shared.sort(key=lambda k: (bool(before[k]["correct"]), not after[k]["correct"]))
        picked = _spread(shared, after)
    first, last = [before[k] for k in picked], [after[k] for k in picked]
    if len(files) > 1:
        return first, last
    # A single evaluation was made either before the first step or after the last one.
    step = int(files[0].stem.rpartition("_")[2])
    return (first, []) if step == 0 else ([], last)


def _spread(keys: Sequence[str], after: Answers) -> list[str]:
    """Return mostly changed responses, but include one that is still wrong if there is any."""
    wrong = [k for k in keys if not after[k]["correct"]][:1]
    return [k for k in keys if k not in wrong][: SHOWN - len(wrong)] + wrong


def question(prompt: str, attached: bool = False) -> str:
    """Return the part of a prompt to show: the last user message in ChatML, else the full prompt.

    With ``attached``, special tokens are removed, because attachments are displayed themselves.
    """
    asked = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.S)
    shown = asked[-1] if asked else prompt
    return re.sub(r"<\|\w+\|>", "", shown).strip() if attached else shown


def _first_answers(file: Path, success: Success) -> Answers:
    answers: Answers = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = row["prompt"]
        source = prompt["data_source"]
        value = success.outcome(source, row["reward"], row["terms"])
        is_right = not row["failed"] and value is not None and value >= success.threshold
        answer: EvalSample = {
            "prompt": question(prompt["text"], bool(prompt["attachments"])),
            "attachments": prompt["attachments"],
            "text": row["text"],
            "label": str(prompt["label"]),
            "correct": is_right if success.judges(source) else None,
        }
        # With eval.samples above 1, only the first response to a prompt is shown.
        answers.setdefault(prompt["id"], answer)
    return answers
