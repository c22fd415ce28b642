"""Build batches and groups that break careless functions, small ones first for readable errors."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lightrft.types import Batch, Prompt, Rollout, Segments
from lightrft.utils.lazy_imports import Tensor, torch

CORNERS: list[tuple[list[list[bool]], list[int]]] = [
    ([[False, False], [False]], [0, 0]),
    ([[], []], [0, 1]),
    ([[True]], [0]),
    ([[True, False, True], [True], [], [False]], [0, 0, 0, 0]),
    ([[True, True], [True], [True, True, True]], [2, 0, 2]),
]
"""The sampled mask and the group of each response.

In order: nothing sampled, no token at all, one token, one group of all responses, groups out of
order.
"""


def batches() -> list[tuple[str, Batch]]:
    """Return every test batch, with all columns filled in, and its name and shape."""
    holes = plain_batch(
        [[True, False, True], [True, True], [], [False], [True], [True] * 6], [2, 0, 2, 1, 2, 0]
    )
    equal = plain_batch([[True, True], [True], [True, True, True]], [0, 0, 0], [0.1, 0.1, 0.1])
    named = [(f"corner {i}", plain_batch(*corner)) for i, corner in enumerate(CORNERS)]
    named += [("equal rewards", equal), ("holes", holes), ("empty batch", plain_batch([], []))]
    return [(f"{name} ({shown(batch)})", filled(batch)) for name, batch in named]


def plain_batch(
    mask: Sequence[Sequence[bool]], prompt_of: Sequence[int], rewards: Sequence[float] | None = None
) -> Batch:
    """Build a batch with fixed, unequal numbers in every column filled in before advantages.

    All numbers are float64.

    Args:
        mask: Sampled mask of each response.
        prompt_of: Group label of each response.
        rewards: One per response. ``None`` alternates 0 and 1.
    """
    # fixed: a violation must show the same numbers in every run
    rng = random.Random(0)
    columns = ("logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs", "values")
    rows = {name: [-rng.uniform(0.1, 2) for row in mask for _ in row] for name in columns}
    count = len(mask)
    return Batch(
        Segments.of([[p] for p in range(len(set(prompt_of)))]),
        Segments.of([list(range(len(row))) for row in mask]),
        torch.tensor(dense(prompt_of), dtype=torch.long),
        sampled=torch.tensor([m for row in mask for m in row], dtype=torch.bool),
        sample=torch.arange(count),
        rewards=double(rewards or [float(i % 2) for i in range(count)]),
        final_values=double([0.5 * i for i in range(count)]),
        version=torch.zeros(count, dtype=torch.long),
        truncated=torch.tensor([i % 2 == 0 for i in range(count)], dtype=torch.bool),
        **{name: double(row) for name, row in rows.items()},
    )


def dense(labels: Sequence[int]) -> list[int]:
    """Renumber the groups to 0..P-1 in the order of their labels."""
    names = sorted(set(labels))
    return [names.index(x) for x in labels]


def double(numbers: Sequence[float]) -> Tensor:
    """Return ``numbers`` as a float64 tensor."""
    return torch.tensor(list(numbers), dtype=torch.float64)


def filled(batch: Batch) -> Batch:
    """Fill in the remaining columns, with advantages of both signs and 0."""
    n = torch.arange(batch.tokens)
    signs = double([-1.5, 0.5, 0.0, 2.0])
    return batch.replace(
        advantages=torch.where(batch.mask, signs[n % 4], 0.0),
        returns=n.double() / 4,
        entropy=(n * 7 % 5).double() / 4,
        energy=(n * 3 % 7).double() / 8,
        steps=n // 2,
        states=n // 2 % 3,
        process_rewards=torch.sin(n.double() + 1),
        baselines=batch.prompt_of.double() / 2,
    )


def there(column: Tensor | None) -> Tensor:
    """Return a column that the test batches have.

    Raises:
        ValueError: If the column is not filled in.
    """
    if column is None:
        raise ValueError("the column is not filled in")
    return column


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Cast every floating-point column of ``batch`` to ``dtype``."""
    columns = {**batch.columns("token"), **batch.columns("sample")}
    cast = {
        name: column.to(dtype) for name, column in columns.items() if column.is_floating_point()
    }
    return batch.replace(**cast)


def extremes() -> Iterator[tuple[str, Batch]]:
    """Yield batches whose policy is 20 nats above or below the old policy and the reference."""
    for name, batch in batches():
        # 40 nats from the reference: the largest log-ratio that is not clamped
        for gap in (20.0, -20.0):
            old = there(batch.old_logprobs)
            far = (old + gap, old - gap)
            yield (
                f"{name}, {gap:+g}",
                batch.replace(behavior_logprobs=far[0], logprobs=far[0], ref_logprobs=far[1]),
            )


def group_parts(batch: Batch) -> list[Tensor]:
    """Return the row indices of each prompt."""
    return [(batch.prompt_of == p).nonzero()[:, 0] for p in batch.prompt_of.unique()]


def whole_part(batch: Batch) -> list[Tensor]:
    """Return all row indices as one part."""
    return [torch.arange(len(batch))]


def row_parts(batch: Batch) -> list[Tensor]:
    """Return each row index as one part."""
    return [torch.tensor([i]) for i in range(len(batch))]


def renumbered(batch: Batch) -> Batch:
    """Return the batch with its prompts in reverse order and the groups relabeled."""
    count = len(batch.prompts)
    return Batch(
        batch.prompts.select(torch.arange(count - 1, -1, -1)),
        batch.responses,
        count - 1 - batch.prompt_of,
        **batch.columns("token"),
        **batch.columns("sample"),
    )


def spoiled(batch: Batch) -> Batch:
    """Replace the numbers at tokens that were not sampled."""
    names = (
        "old_logprobs",
        "ref_logprobs",
        "behavior_logprobs",
        "values",
        "logprobs",
        "entropy",
        "process_rewards",
        "energy",
    )
    columns = batch.columns("token")
    spoiled_columns = {}
    for i, name in enumerate(names):
        # finite and unlike any number of the batch, and another one for each column
        spoiled_columns[name] = torch.where(batch.mask, columns[name], -3.7 - i)
    return batch.replace(**spoiled_columns)


def groups() -> list[list[Rollout]]:
    """Return groups of one and several responses with equal and unequal rewards.

    Some responses have no tokens.
    """
    rewards = [[1.0], [0.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.25], [-3.0, 7.0]]
    return [[rollout(reward, length) for length, reward in enumerate(row)] for row in rewards]


def rollout(reward: float, length: int, prompt: str = "a") -> Rollout:
    """Build a response of ``length`` sampled tokens.

    Args:
        reward: Its reward.
        length: Number of tokens; also its seed.
        prompt: Id of its prompt.
    """
    return Rollout(
        prompt=Prompt(prompt, [1, 2]),
        token_ids=[3] * length,
        sampled=[True] * length,
        logprobs=[-20.0] * length,
        versions=[0] * length,
        finish_reason="stop",
        seed=length,
        reward=reward,
    )


def shown(batch: Batch) -> str:
    """Format the layout of a batch in one line.

    A sampled token is ``1``, another token ``0``.
    """
    marks = "".join(str(int(m)) for m in batch.mask.tolist())
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    rows = [marks[a : a + n] or "-" for a, n in zip(starts, batch.lengths.tolist(), strict=True)]
    answers = " ".join(rows) or "none"
    rewards = [] if batch.rewards is None else [round(r, 3) for r in batch.rewards.tolist()]
    return f"responses {answers}, prompts {batch.prompt_of.tolist()}, rewards {rewards}"
