"""Reward a response that picks the correct one of several lettered choices."""

from __future__ import annotations

import re

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import after_thinking, in_tags, last_box, reference_answer
from lightrft.rewards.sandbox.rollout_view import RolloutView


@REWARDS.register("multiple_choice", needs={"label"})
def multiple_choice(rollout: RolloutView, *, choices: str = "ABCD") -> float:
    """Return 1 if the response picks the label's letter, else 0.

    Args:
        choices: The letters in order. A label may also be an index into them, from 0.

    Raises:
        ValueError: If the label is not one of the choices.
    """
    gold = reference_answer(rollout)
    if isinstance(gold, int) and not isinstance(gold, bool):
        if not 0 <= gold < len(choices):
            raise ValueError(f"label {gold} is not a position among the choices {choices!r}")
        right: str | None = choices[gold]
    else:
        right = _only_letter(str(gold), choices)
    if right is None:
        raise ValueError(f"label {gold!r} is not one of the choices {choices!r}")
    return float(picked(rollout.text, choices) == right)


def picked(text: str, choices: str = "ABCD") -> str | None:
    """Return the letter of ``choices`` that ``text`` finally picks; ``None`` unless exactly one."""
    text = after_thinking(text)
    tagged = in_tags(text)
    text = text if tagged is None else tagged
    box = last_box(text)
    if box is not None:
        return _only_letter(box[1] or "", choices)
    whole = _only_letter(text, choices)
    if whole:
        return whole
    mark = rf"(?:\*\*|\$|\\text\{{|\\textbf\{{|\\mathrm\{{|[(\[\"'])*\s*([{re.escape(choices)}])(?![\w'])"
    said = re.compile(
        rf"(?:answer|choice|option)\b(?:\s+(?:choice|option))?\**\s*(?:is|would\s+be|must\s+be|[:=])?\s*[:=]?\s*(?:option\s+|choice\s+)?{mark}"
        rf"(?!\W*\s(?:or|and)\s+[(\[]?[{re.escape(choices)}]\b)",
        re.IGNORECASE,
    )
    found = [m.group(1) for m in said.finditer(text) if m.group(1) in choices]
    if found:
        return found[-1]
    lines = [_only_letter(line, choices) for line in text.strip().splitlines()]
    return lines[-1] if lines and len(set(lines) - {None}) == 1 else None


def _only_letter(text: str, choices: str) -> str | None:
    r"""Return the letter if ``text`` is one, e.g. ``B``, ``(B)``, ``B.``, ``**B**``, ``\text{B}``.

    ``B) text`` counts too.
    """
    letters = re.escape(choices)
    dressed = rf"(?:\*\*|\$|\\(?:text|textbf|mathrm|mathbf)\{{|[(\[\"'\s{{])*([{letters}])(?:\*\*|\$|[)\]\"'\s}}.:])*"
    alone = re.fullmatch(dressed, text.strip())
    if alone:
        return alone.group(1)
    titled = re.match(rf"(?:\*\*|[(\[])*([{letters}])(?:[)\].:])+(?:\*\*)?\s+(\S.*)$", text.strip(), re.DOTALL)
    if titled and not re.search(rf"(?:^|\s)[(\[]?[{letters}][)\].:]\s", titled.group(2)):
        return titled.group(1)
    return None
