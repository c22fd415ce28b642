"""Reward a response that follows the verifiable instructions of IFEval (arXiv 2311.07911)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lightrft.rewards.registry import REWARDS
from lightrft.rewards.rules.answer_extraction import after_thinking
from lightrft.rewards.rules.ifeval.checks import (
    LANGUAGE_CHECKS,
    STRUCTURE_CHECKS,
    WORD_CHECKS,
    Check,
    MissingTool,
)
from lightrft.rewards.sandbox.rollout_view import RolloutView

CHECKS: Mapping[str, Check] = {**WORD_CHECKS, **STRUCTURE_CHECKS, **LANGUAGE_CHECKS}
"""Instruction id to its check."""


@REWARDS.register("ifeval", kind="outcome")
def ifeval(
    rollout: RolloutView, *, loose: bool = False, skip_unchecked: bool = False
) -> dict[str, float]:
    """Return 1 if the response after any thinking follows all instructions of its row, else 0.

    The terms count instructions: ``instructions``, ``followed_strict`` and ``followed_loose``, and
    ``strict`` and ``loose`` are 1 if all are followed. A loose check also accepts the response
    without asterisks, without its first line, without its last line, or with several of these
    changes (arXiv 2311.07911, section 2.2). Case instructions are checked for case alone, not for
    language.

    Args:
        loose: Return the loose result.
        skip_unchecked: Judge by the other instructions where one cannot be checked, since a library
            is missing.

    Raises:
        ValueError: If the row has no instructions or an unknown one, an argument is missing, or an
            instruction cannot be checked.
    """
    columns = rollout.prompt.columns
    names = columns.get("instruction_id_list")
    options = columns.get("kwargs")
    if not _is_list(names) or not _is_list(options) or len(names) != len(options) or not names:
        raise ValueError(
            "the row needs the columns 'instruction_id_list' and 'kwargs', lists of one length; "
            "set the source's reader: ifeval"
        )
    text = after_thinking(rollout.turn)
    if text != rollout.turn:
        # Blank lines follow the thinking. A loose check would take one for the first line.
        text = text.strip()
    strict: list[bool] = []
    loosely: list[bool] = []
    missing: list[str] = []
    for name, given in zip(names, options, strict=True):
        try:
            strict.append(_follows(name, given, [text]))
            loosely.append(_follows(name, given, _variants(text)))
        except MissingTool as error:
            missing.append(f"instruction {name!r} cannot be checked: it needs {error}")
    if missing and (not skip_unchecked or not strict):
        raise ValueError(missing[0])
    return {
        "reward": float(all(loosely if loose else strict)),
        "strict": float(all(strict)),
        "loose": float(all(loosely)),
        "followed_strict": float(sum(strict)),
        "followed_loose": float(sum(loosely)),
        "instructions": float(len(strict)),
        "unchecked": float(len(missing)),
    }


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _follows(name: str, options: Mapping[str, object] | None, texts: Sequence[str]) -> bool:
    """Return whether one of ``texts`` follows an instruction. A blank text follows none."""
    check = CHECKS.get(name)
    if check is None:
        raise ValueError(f"instruction {name!r} is unknown; known: {', '.join(sorted(CHECKS))}")
    given = {key: value for key, value in (options or {}).items() if value is not None}
    try:
        return any(check(text, given) for text in texts if text.strip())
    except KeyError as error:
        raise ValueError(f"instruction {name!r} needs the argument {error} in 'kwargs'") from None


def _variants(text: str) -> list[str]:
    """Return the texts of which a loose check accepts any."""
    lines = text.split("\n")
    cut = [text]
    for kept in (lines[1:], lines[:-1], lines[1:-1]):
        cut.append("\n".join(kept).strip())
    return [*cut, *(variant.replace("*", "") for variant in cut)]
