"""A reward for the countdown game.

The prompt gives some numbers and a target. The policy writes an expression that uses each number at
most once and equals the target, between <answer> and </answer>. A row of data:

    {"prompt": "Reach 24 with 3, 8, 4, 2. Write <answer>your expression</answer>.",
     "label": 24, "numbers": [3, 8, 4, 2]}

The config names this function and its options:

    reward:
      terms:
        - function: examples/custom_reward.py:reward
          weight: 1.0
          options: {form: 0.1}
        - {function: length, weight: 0.2, options: {limit: 512, buffer: 128}}
      workers: 2        # processes that score while the engine still generates
      timeout: 5        # seconds per call; a call that takes longer fails its own response
      memory_mb: 512

Rules for a reward function:

* It is called as ``function(rollout, **options)``. ``rollout`` has the response (``text``,
  ``token_ids``, ``finish_reason``) and the prompt (``prompt.label``, ``.reference``, ``.text``,
  ``.data_source``, and ``.columns`` with every other column of the row).
* It returns a number, or named terms. The term "reward" counts, and the others are logged. Without
  "reward", the sum counts.
* It may be ``async def``, to wait for a server. If its first parameter is called ``rollouts``, it
  gets a list of rollouts and returns a list.
* It runs in a worker process, so it may raise, hang or crash. The response then counts as failed
  and is not trained on.
* A function called ``warm_up`` in the same file runs once per process, before the first time limit
  starts. Load slow things there.

Grade the response, not the prompt, and never ``eval`` it.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import would load torch in every worker
    from lightrft.types import Rollout

OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reward(rollout: Rollout, *, form: float = 0.1) -> dict[str, float]:
    """Return 1 for a legal expression that reaches the target, and ``form`` for one that does not.

    Anything else gives 0.
    """
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
    """Return the exact value of an expression of integers and + - * /.

    Counts the integers in ``used``. Raises ``ValueError`` for any other expression.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left, used), evaluate(node.right, used))
    raise ValueError(f"{ast.unparse(node)} is not allowed")
