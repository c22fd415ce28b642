"""A reward of your own: the countdown game.

The policy is given some numbers and a target, and must write an expression that uses each number at most once and equals the
target, between <answer> and </answer>. A data row looks like

    {"prompt": "Reach 24 with 3, 8, 4, 2. Write <answer>your expression</answer>.", "label": 24, "numbers": [3, 8, 4, 2]}

and the run's YAML names this function, with its options:

    reward:
      terms:
        - function: examples/custom_reward.py:reward
          weight: 1.0
          options: {form: 0.1}
        - {function: length, weight: 0.2, options: {limit: 512, buffer: 128}}
      workers: 2        # processes that score while the engine is still drawing answers
      timeout: 5       # seconds for one call; one that takes longer fails its own sample, never the run
      memory_mb: 512

What a reward function may rely on:

* It is called as ``function(rollout, **options)``. ``rollout`` has the answer (``text``, ``token_ids``, ``finish_reason``, ...)
  and the task (``rollout.prompt.label``, ``.reference``, ``.text``, ``.data_source``, and ``.columns`` with every other column).
* It returns a number, or named terms: then "reward" is the one that counts and the others are logged
  (without "reward", their sum counts).
* It may be ``async def``, to wait for a server, and its first parameter may be called ``rollouts``: then it gets a list of
  them and returns a list.
* It runs in a process of its own, so it may raise, hang or crash: that sample is counted as failed and never trained on.
* A function called ``warm_up`` in the same file runs once in each process before the clock starts: load what is slow there.

Grade what the model wrote, never the prompt with it, and never ``eval`` it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it for real would load torch in every worker
    from lightrft.types import Rollout

OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reward(rollout: Rollout, *, form: float = 0.1) -> dict[str, float]:
    """1 for an expression that reaches the target; ``form`` for one that is legal and does not; 0 for anything else."""
    answers = re.findall(r"<answer>(.*?)</answer>", rollout.text, re.DOTALL)
    used: Counter[int] = Counter()
    try:
        value = (
            evaluate(ast.parse(answers[-1].strip(), mode="eval").body, used) if answers else None
        )
    except (SyntaxError, ValueError, ZeroDivisionError):
        value = None
    legal = value is not None and used <= Counter(rollout.prompt.columns["numbers"])
    solved = legal and value == Fraction(rollout.prompt.label)
    return {"reward": 1.0 if solved else form * legal, "legal": legal, "solved": solved}


def evaluate(node: ast.expr, used: Counter[int]) -> Fraction:
    """The exact value of an expression of integers and + - * /; counts the integers in ``used``. Raises ``ValueError``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left, used), evaluate(node.right, used))
    raise ValueError(f"{ast.unparse(node)} is not allowed")
