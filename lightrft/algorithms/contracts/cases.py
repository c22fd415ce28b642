"""Batches and groups that break careless functions: small ones first, so that what breaks can be read."""

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
"""Which tokens were sampled, and the group of each answer: nothing sampled anywhere, no token at all, one token alone, one group of
all, groups out of order."""


def batches() -> list[tuple[str, Batch]]:
    """Each batch, with every column filled in, behind its name and shape."""
    holes = plain_batch([[True, False, True], [True, True], [], [False], [True], [True] * 6], [2, 0, 2, 1, 2, 0])
    equal = plain_batch([[True, True], [True], [True, True, True]], [0, 0, 0], [0.1, 0.1, 0.1])
    named = [(f"corner {i}", plain_batch(*corner)) for i, corner in enumerate(CORNERS)]
    named += [("equal rewards", equal), ("holes", holes), ("empty batch", empty_batch())]
    return [(f"{name} ({shown(batch)})", filled(batch)) for name, batch in named]


def plain_batch(mask: Sequence[Sequence[bool]], prompt_of: Sequence[int], rewards: Sequence[float] | None = None) -> Batch:
    """Fixed, unequal numbers in float64 in every column that a step fills in before its advantages."""
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


def empty_batch() -> Batch:
    """No prompt and no answer."""
    return plain_batch([], [])


def dense(labels: Sequence[int]) -> list[int]:
    """The same groups named 0..P-1, in the order of their names and not of their first members."""
    names = sorted(set(labels))
    return [names.index(x) for x in labels]


def double(numbers: Sequence[float]) -> Tensor:
    """As float64."""
    return torch.tensor(list(numbers), dtype=torch.float64)


def filled(batch: Batch) -> Batch:
    """Advantages of both signs and of 0, returns, entropies, process rewards, and rewards of greedy answers."""
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
    """A column that these batches have."""
    if column is None:
        raise ValueError("the column is not filled in")
    return column


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Every number of ``batch`` in ``dtype``."""
    columns = {k: v for axis in ("token", "sample") for k, v in batch.columns(axis).items() if v.is_floating_point()}
    return batch.replace(**{k: v.to(dtype) for k, v in columns.items()})


def extremes() -> Iterator[tuple[str, Batch]]:
    """Policies 20 nats away from the old one and from the reference, either way."""
    for name, batch in batches():
        for gap in (20.0, -20.0):
            old = there(batch.old_logprobs)
            far = (old + gap, old - gap)
            yield f"{name}, {gap:+g}", batch.replace(behavior_logprobs=far[0], logprobs=far[0], ref_logprobs=far[1])


def group_parts(batch: Batch) -> list[Tensor]:
    """The rows of each prompt."""
    return [(batch.prompt_of == p).nonzero()[:, 0] for p in batch.prompt_of.unique()]


def whole_part(batch: Batch) -> list[Tensor]:
    """All answers together."""
    return [torch.arange(len(batch))]


def row_parts(batch: Batch) -> list[Tensor]:
    """Every answer alone."""
    return [torch.tensor([i]) for i in range(len(batch))]


def reversed_order(batch: Batch) -> Tensor:
    """The last answer first."""
    return torch.arange(len(batch) - 1, -1, -1)


def renumbered(batch: Batch) -> Batch:
    """The same groups under other names: the prompts in reverse."""
    count = len(batch.prompts)
    return Batch(
        batch.prompts.select(torch.arange(count - 1, -1, -1)),
        batch.responses,
        count - 1 - batch.prompt_of,
        **batch.columns("token"),
        **batch.columns("sample"),
    )


def spoiled(batch: Batch) -> Batch:
    """Other numbers at the tokens that were not sampled."""
    names = ("old_logprobs", "ref_logprobs", "behavior_logprobs", "values", "logprobs", "entropy", "process_rewards", "energy")
    columns = batch.columns("token")
    return batch.replace(**{k: torch.where(batch.mask, columns[k], -3.7 - i) for i, k in enumerate(names)})


def groups() -> list[list[Rollout]]:
    """No answer, one, several; equal and unequal rewards; an answer without tokens."""
    rewards = [[], [1.0], [0.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.25], [-3.0, 7.0]]
    return [[rollout(reward, length) for length, reward in enumerate(row)] for row in rewards]


def rollout(reward: float, length: int, prompt: str = "a") -> Rollout:
    """An answer of ``length`` sampled tokens."""
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
    """The shape of a batch in one line: ``1`` a token that was sampled, ``0`` one that was not."""
    marks = "".join(str(int(m)) for m in batch.mask.tolist())
    starts = (batch.lengths.cumsum(0) - batch.lengths).tolist()
    rows = [marks[a : a + n] or "-" for a, n in zip(starts, batch.lengths.tolist(), strict=True)]
    rewards = [round(r, 3) for r in batch.rewards.tolist()] if batch.rewards is not None else []
    return f"answers {' '.join(rows) or 'none'}, prompts {batch.prompt_of.tolist()}, rewards {rewards}"
