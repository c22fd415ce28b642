"""Small ragged batches for property tests, with every awkward shape in them.

Hypothesis draws the structure (lengths, groups, masks, which kind of number where), so that shrinking is about structure; the
numbers come from a generator with a drawn seed, which keeps a case cheap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from lightrft.algorithms.contracts.cases import CORNERS, dense, plain_batch
from lightrft.types import Batch, Segments
from tests.numbers.oracles import Case
from tests.numbers.scalars import Rows, number

MASKS = ("all", "none", "holes", "trailing")
GAPS = ("none", "near", "far")
REWARDS = ("equal", "binary", "real")
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def cases(
    draw: st.DrawFn, max_responses: int = 6, max_length: int = 6, max_gap: float = 20.0
) -> Case:
    """A global batch. Rows of length 0 and 1, rows without a sampled token, holes in the middle, groups of unequal size in any
    order (also of one), equal rewards, log-ratios from exactly 0 up to +-``max_gap``."""
    n = draw(st.integers(1, max_responses))
    rng = random.Random(draw(SEEDS))
    lengths = draw(st.lists(st.integers(0, max_length), min_size=n, max_size=n))
    masks = draw(st.lists(st.sampled_from(MASKS), min_size=n, max_size=n))
    gaps = draw(st.lists(st.sampled_from(GAPS), min_size=n, max_size=n))
    prompt_of = dense(draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
    logprobs = [[-rng.uniform(0.01, max_gap) for _ in range(k)] for k in lengths]
    return Case(
        lengths=lengths,
        prompt_of=prompt_of,
        mask=[mask_of(kind, k, rng) for kind, k in zip(masks, lengths, strict=True)],
        logprobs=logprobs,
        old=beside(logprobs, gaps, max_gap, rng),
        behavior=beside(logprobs, gaps, max_gap, rng),
        ref=beside(logprobs, gaps, max_gap, rng),
        values=[[rng.uniform(-2, 2) for _ in range(k)] for k in lengths],
        rewards=rewards_of(draw(st.sampled_from(REWARDS)), n, rng),
        truncated=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        final_values=[rng.uniform(-2, 2) for _ in range(n)],
    )


@st.composite
def cases_with_scores(draw: st.DrawFn, **limits: Any) -> tuple[Case, list[float]]:
    """A case and one advantage per response ``[B]``, some of them 0."""
    case = draw(cases(**limits))
    rng = random.Random(draw(SEEDS))
    return case, [rng.choice([0.0, 1.0, 1.0]) * rng.uniform(-3, 3) for _ in range(len(case))]


@st.composite
def cases_with_rows(draw: st.DrawFn, count: int = 1, **limits: Any) -> tuple[Case, list[Rows]]:
    """A case and ``count`` ragged lists of numbers in [-3, 3]: advantages, token rewards, old values, targets, losses."""
    case = draw(cases(**limits))
    rng = random.Random(draw(SEEDS))
    return case, [random_rows(case, rng) for _ in range(count)]


@st.composite
def logits(
    draw: st.DrawFn, min_size: int = 2, max_size: int = 8, bound: float = 8.0, ties: bool = True
) -> list[float]:
    """A vector of logits, often with equal ones among them unless ``ties`` is False."""
    n = draw(st.integers(min_size, max_size))
    rng = random.Random(draw(SEEDS))
    coarse = ties and draw(st.booleans())
    return [float(rng.randint(-2, 2)) if coarse else rng.uniform(-bound, bound) for _ in range(n)]


def partitions(n: int) -> st.SearchStrategy[list[list[int]]]:
    """Ways to deal responses 0..n-1 into non-empty micro-batches, in any order."""

    def deal(drawn: tuple[list[int], list[int]]) -> list[list[int]]:
        order, bins = drawn
        return [
            part
            for part in ([i for i, b in zip(order, bins, strict=True) if b == k] for k in range(n))
            if part
        ]

    return st.tuples(
        st.permutations(range(n)), st.lists(st.integers(0, n - 1), min_size=n, max_size=n)
    ).map(deal)


def random_rows(case: Case, rng: random.Random) -> Rows:
    return [[rng.uniform(-3, 3) for _ in range(k)] for k in case.lengths]


def mask_of(kind: str, length: int, rng: random.Random) -> list[bool]:
    make: dict[str, Callable[[int], bool]] = {
        "all": lambda t: True,
        "none": lambda t: False,
        "holes": lambda t: rng.random() < 0.6,
        "trailing": lambda t: t < length - 1,
    }
    return [make[kind](t) for t in range(length)]


def beside(logprobs: Rows, gaps: Sequence[str], max_gap: float, rng: random.Random) -> Rows:
    """Other log-probs of the same tokens; every row keeps to one kind of distance."""
    width = {"none": 0.0, "near": 0.5, "far": max_gap}
    return [
        [x + rng.uniform(-width[gap], width[gap]) for x in row]
        for row, gap in zip(logprobs, gaps, strict=True)
    ]


def rewards_of(kind: str, n: int, rng: random.Random) -> list[float]:
    if kind == "equal":
        return [rng.choice([0.0, 1.0, 0.1])] * n
    return [float(rng.randint(0, 1)) if kind == "binary" else rng.uniform(-2, 2) for _ in range(n)]


def corner_cases() -> list[Case]:
    """Whole batches that random ones seldom are."""
    return [plain_case(*corner) for corner in CORNERS]


def plain_case(
    mask: list[list[bool]], prompt_of: list[int], rewards: list[float] | None = None
) -> Case:
    """A case with fixed, unequal numbers in every column."""
    batch = plain_batch(mask, prompt_of, rewards)
    rows = {name: ragged(column, batch) for name, column in batch.columns("token").items()}
    per_answer = {name: column.tolist() for name, column in batch.columns("sample").items()}
    return Case(
        lengths=batch.lengths.tolist(),
        prompt_of=batch.prompt_of.tolist(),
        mask=rows["sampled"],
        logprobs=rows["logprobs"],
        old=rows["old_logprobs"],
        behavior=rows["behavior_logprobs"],
        ref=rows["ref_logprobs"],
        values=rows["values"],
        rewards=per_answer["rewards"],
        truncated=per_answer["truncated"],
        final_values=per_answer["final_values"],
    )


def ragged(column: torch.Tensor, batch: Batch) -> list[list[Any]]:
    """A token column ``[N]`` as one list per response."""
    return [part.tolist() for part in column.split(batch.lengths.tolist())]


def tensor_of(rows: Rows) -> torch.Tensor:
    """Ragged rows as one flat float64 ``[N]``."""
    return torch.tensor([number(x) for row in rows for x in row], dtype=torch.float64)


def batch_of(case: Case) -> Batch:
    """The case as the package's ``Batch`` in float64: every prompt is one token, response tokens are numbered."""
    prompts = Segments.of([[p] for p in range(max(case.prompt_of) + 1)])
    responses = Segments.of([list(range(k)) for k in case.lengths])
    return Batch(
        prompts,
        responses,
        torch.tensor(case.prompt_of),
        sampled=torch.tensor([m for row in case.mask for m in row], dtype=torch.bool),
        behavior_logprobs=tensor_of(case.behavior),
        old_logprobs=tensor_of(case.old),
        ref_logprobs=tensor_of(case.ref),
        values=tensor_of(case.values),
        sample=torch.arange(len(case)),
        rewards=torch.tensor(case.rewards, dtype=torch.float64),
        final_values=torch.tensor(case.final_values, dtype=torch.float64),
        version=torch.zeros(len(case), dtype=torch.long),
        truncated=torch.tensor(case.truncated, dtype=torch.bool),
    )
