"""Arithmetic problems with worked solutions, generated from a seed.

A row has ``12+34*2=?`` with its steps and ``#### 80``. The split of a problem is a hash of the
problem itself. Train and eval problems are therefore disjoint for all seeds and counts.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightrft.utils.errors import ConfigError, DataError

TRIES = 2000
"""Number of rejected problems in a row after which the search stops."""

Difficulty = Literal["easy", "medium", "hard"]
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_SLIPS = (-10, -2, -1, 1, 2, 10)
"""Amounts by which the result of a wrong step is off."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """The kind of the problems.

    Args:
        operands: smallest and largest operand.
        operations: smallest and largest number of operations.
        operators: the operators to choose from.
        factors: smallest and largest operand next to a ``*``.
    """

    operands: tuple[int, int]
    operations: tuple[int, int]
    operators: str
    factors: tuple[int, int] = (2, 9)


DIFFICULTIES: dict[Difficulty, Knobs] = {
    "easy": Knobs(operands=(0, 9), operations=(1, 1), operators="+-"),
    "medium": Knobs(operands=(0, 20), operations=(1, 2), operators="+-"),
    "hard": Knobs(operands=(1, 99), operations=(2, 3), operators="+-*"),
}


def rows(
    count: int = 1000,
    seed: int = 0,
    split: str = "train",
    difficulty: Difficulty = "medium",
    *,
    operands: Sequence[int] | None = None,
    factors: Sequence[int] = (2, 9),
    operations: int | Sequence[int] | None = None,
    operators: str | None = None,
    largest: int | None = None,
    negative: bool = False,
    steps: bool | float = True,
    mistakes: float = 0.0,
    heldout: float = 0.2,
    distinct: bool = True,
    question: str = "{problem}=?",
) -> Iterator[dict[str, object]]:
    """Yield ``count`` rows of ``split``.

    Args:
        count: number of rows.
        seed: seed of the problems.
        split: ``train``. Any other name means the eval problems.
        difficulty: preset of ``operands``, ``operations`` and ``operators``.
        operands: smallest and largest operand. None means the preset.
        factors: smallest and largest operand next to a ``*``.
        operations: number of operations, or its minimum and maximum. None means the preset.
        operators: the characters to choose from, among ``+-*``. None means the preset.
        largest: largest absolute value of any number in the solution. None means no limit.
        negative: if False, no intermediate result is negative.
        steps: if True, the response has a line for each operation. A number is the fraction of rows
            that have these lines.
        mistakes: fraction of responses with one wrong step and its consequences. Such a teacher
            leaves something to learn. Labels are always correct.
        heldout: fraction of all problems that belong to the eval set.
        distinct: if True, no problem occurs twice.
        question: text of a prompt, with ``{problem}`` as in ``12+34``, or ``{spaced}`` as in ``12 +
            34``.

    Raises:
        ConfigError: an argument is out of range, or the question names no problem.
        DataError: there are fewer than ``count`` distinct problems.
    """
    if difficulty not in DIFFICULTIES:
        raise ConfigError(
            f"arithmetic: difficulty {difficulty!r} is not one of {', '.join(DIFFICULTIES)}"
        )
    preset = DIFFICULTIES[difficulty]
    operands = preset.operands if operands is None else operands
    operations = preset.operations if operations is None else operations
    knobs = Knobs(
        _range("operands", operands),
        _range("operations", operations, least=1),
        preset.operators if operators is None else operators,
        _range("factors", factors),
    )
    if not knobs.operators or set(knobs.operators) - set(_OPERATIONS):
        raise ConfigError(f"arithmetic: operators {operators!r} must be some of + - *")
    if not 0 <= steps <= 1:
        raise ConfigError(f"arithmetic: steps {steps} must be true, false or a share within [0, 1]")
    if not 0 < heldout < 1 or not 0 <= mistakes <= 1:
        problem = f"arithmetic: heldout {heldout} must lie inside (0, 1)"
        raise ConfigError(f"{problem}, mistakes {mistakes} within [0, 1]")
    if "{problem}" not in question and "{spaced}" not in question:
        raise ConfigError(
            f"arithmetic: question {question!r} has neither {{problem}} nor {{spaced}}"
        )
    made = _rows(count, seed, split, knobs, largest, negative, steps, mistakes, heldout, distinct)
    return ({"prompt": _asked(question, problem), **row} for problem, row in made)


def pairs(count: int = 1000, seed: int = 0, **options: Any) -> Iterator[dict[str, object]]:
    """Yield rows of a right and a wrong solution: ``chosen`` and ``rejected``.

    Half of the wrong solutions guess a wrong result. The others have a mistake in the last step.

    Args:
        count: number of rows.
        seed: seed of the problems and of the mistakes.
        options: further options of ``rows``.
    """
    chance = random.Random(f"pairs {seed}")
    options["steps"] = True
    for row in rows(count, seed, **options):
        wrong = int(str(row["label"])) + chance.choice(_SLIPS)
        *before, last, _ = str(row["response"]).split("\n")
        worked = [*before, f"{last.partition('=')[0]}={wrong}"]
        lines = worked if chance.random() < 0.5 else []
        rejected = "\n".join([*lines, f"#### {wrong}"])
        pair = {"prompt": row["prompt"], "chosen": row["response"], "rejected": rejected}
        yield {**pair, "id": row["id"], "data_source": row["data_source"]}


def _rows(
    count: int,
    seed: int,
    split: str,
    knobs: Knobs,
    largest: int | None,
    negative: bool,
    steps: float,
    mistakes: float,
    heldout: float,
    distinct: bool,
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield problems and the rest of their rows."""
    chance = random.Random(f"arithmetic {seed} {split}")
    seen: set[str] = set()
    rejected = made = 0
    while made < count:
        if rejected > TRIES:
            raise DataError(
                f"arithmetic: only {made} of {count} {split} problems found with operands "
                f"{knobs.operands}, operations "
                f"{knobs.operations}, operators {knobs.operators!r}, largest {largest}; "
                "ask for fewer or widen these"
            )
        numbers, signs = _draw(chance, knobs)
        problem = _join(numbers, signs)
        working = work(numbers, signs)
        reached = [c for _, _, _, c in working]
        of_other_split = is_heldout(problem, heldout) == (split == "train")
        repeated = distinct and problem in seen
        below_zero = not negative and min(reached) < 0
        too_large = largest is not None and max(map(abs, reached + numbers)) > largest
        if of_other_split or repeated or below_zero or too_large:
            rejected += 1
            continue
        rejected = 0
        made += 1
        seen.add(problem)
        slip = None
        # The order of the calls of ``chance`` is part of the data: a seed must keep its rows.
        if chance.random() < mistakes:
            slip = (chance.randrange(len(working)), chance.choice(_SLIPS))
        yield problem, _row(problem, numbers, signs, chance.random() < steps, slip)


def _asked(question: str, problem: str) -> str:
    spaced = re.sub(r"([-+*])", r" \1 ", problem)
    return question.replace("{problem}", problem).replace("{spaced}", spaced)


def is_heldout(problem: str, share: float) -> bool:
    """Return True if ``problem`` belongs to the eval set, a fraction ``share`` of all problems."""
    # Not ``hash``, which differs from process to process.
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def work(
    numbers: Sequence[int], signs: Sequence[str], slip: tuple[int, int] | None = None
) -> list[tuple[int, str, int, int]]:
    """Return the steps ``(a, sign, b, result)`` of a solution, in the order of precedence.

    Args:
        numbers: the operands.
        signs: the operators between them.
        slip: ``(step, amount)`` adds ``amount`` to the result of one step. None means no mistake.
    """
    numbers = list(numbers)
    signs = list(signs)
    done: list[tuple[int, str, int, int]] = []
    while signs:
        # products first, then from left to right
        k = signs.index("*") if "*" in signs else 0
        a, sign, b = numbers[k], signs[k], numbers[k + 1]
        result = _OPERATIONS[sign](a, b)
        if slip is not None and slip[0] == len(done):
            result += slip[1]
        done.append((a, sign, b, result))
        numbers[k : k + 2] = [result]
        del signs[k]
    return done


def _row(
    problem: str, numbers: list[int], signs: list[str], steps: bool, slip: tuple[int, int] | None
) -> dict[str, object]:
    written = work(numbers, signs, slip)
    lines = [f"{a}{sign}{b}={c}" for a, sign, b, c in written] if steps else []
    digest = hashlib.blake2b(problem.encode(), digest_size=6).hexdigest()
    return {
        "response": "\n".join([*lines, f"#### {written[-1][3]}"]),
        "label": str(work(numbers, signs)[-1][3]),
        "data_source": "arithmetic",
        "id": f"arithmetic-{digest}",
        "operations": len(signs),
    }


def _draw(chance: random.Random, knobs: Knobs) -> tuple[list[int], list[str]]:
    count = chance.randint(*knobs.operations)
    signs = [chance.choice(knobs.operators) for _ in range(count)]
    numbers = []
    for k in range(len(signs) + 1):
        # a factor of a product comes from a smaller range
        adjacent = signs[max(0, k - 1) : k + 1]
        limits = knobs.factors if "*" in adjacent else knobs.operands
        numbers.append(chance.randint(*limits))
    return numbers, signs


def _join(numbers: Sequence[int], signs: Sequence[str]) -> str:
    return str(numbers[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, numbers[1:]))


def _range(name: str, value: int | Sequence[int], least: int = 0) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not least <= pair[0] <= pair[1]:
        problem = f"arithmetic: {name} {value!r} must be two numbers"
        raise ConfigError(f"{problem}, smallest and largest, from {least} up")
    return pair[0], pair[1]
