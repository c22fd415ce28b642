"""The simulator of ``benchmarks/scaling.py`` against limits that can be written down, and its formulas against slow sums."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling_costs as costs
from benchmarks import scaling_lengths as lengths_of
from benchmarks.scaling_costs import H100, MODELS, Decode
from benchmarks.scaling_sim import (
    Answer,
    Outcome,
    Plan,
    ahead,
    each_ahead,
    partial,
    streaming,
    synchronous,
)

DECODE = Decode.of(MODELS["7b"], H100)
UNEVEN = lengths_of.drawn_lognormal(
    np.random.default_rng(1), 24, 4, median=300, sigma=0.9, cap=3000
)
MODES: dict[str, Callable[[Plan, np.ndarray], Outcome]] = {
    "synchronous": synchronous,
    "one step off": lambda plan, lengths: ahead(plan, lengths, 1),
    "two steps off": lambda plan, lengths: ahead(plan, lengths, 2),
    "each engine on its own": lambda plan, lengths: each_ahead(plan, lengths, 2),
    "partial": lambda plan, lengths: partial(plan, lengths, 1.5),
    "streaming": lambda plan, lengths: streaming(plan, lengths, 2),
}


def plan_of(
    train: Callable[[Sequence[Answer]], float] = lambda answers: 0.5, **changes: object
) -> Plan:
    plan = Plan(
        DECODE,
        read=1e-5,
        slots=16,
        engines=4,
        train=train,
        groups=8,
        steps=6,
        prompt=100,
        sync=0.25,
    )
    return replace(plan, **changes)  # ty: ignore[invalid-argument-type]


@given(
    st.integers(1, 300),
    st.integers(0, 200_000),
    st.integers(0, 400),
    st.sampled_from(["1.5b", "7b", "405b"]),
)
def test_many_steps_take_as_long_as_each_of_them(
    rows: int, context: int, steps: int, size: str
) -> None:
    decode = Decode.of(MODELS[size], H100, 16 if size == "405b" else 1)
    slow = sum(decode.seconds(rows, context + rows * i) for i in range(steps))
    assert decode.span(rows, context, steps) == pytest.approx(slow, rel=1e-9)


def test_one_answer_is_drawn_at_the_speed_of_memory_and_many_at_that_of_arithmetic() -> None:
    model = MODELS["7b"]
    assert DECODE.seconds(1, 0) == pytest.approx(model.parameters * 2 / (3.35e12 * 0.7))
    assert DECODE.seconds(10_000, 0) == pytest.approx(
        10_000 * 2 * model.parameters / (989e12 * 0.4)
    )


@pytest.mark.parametrize("context", [0, 500, 1500])
def test_rows_to_arithmetic_are_where_the_two_lines_meet(context: int) -> None:
    rows = costs.enough_rows(MODELS["7b"], H100, context)
    compute = (DECODE.flops_row + DECODE.flops_token * context) * rows
    assert compute == pytest.approx(DECODE.weights + DECODE.cache_token * context * rows)


def test_beyond_some_context_no_number_of_rows_is_bound_by_arithmetic() -> None:
    limit = costs.longest_bound_by_arithmetic(MODELS["7b"], H100)
    assert math.isfinite(costs.enough_rows(MODELS["7b"], H100, 0.99 * limit))
    assert costs.enough_rows(MODELS["7b"], H100, 1.01 * limit) == math.inf


@pytest.mark.parametrize("shared", [True, False])
def test_equal_lengths_give_exactly_the_roofline(shared: bool) -> None:
    plan = plan_of(shared=shared, prompt=0)
    out = synchronous(plan, np.full((8, 4), 200))
    generation = DECODE.span(8, 0, 200)  # 32 answers on 4 engines
    assert out.ends == pytest.approx([(n + 1) * (0.25 + generation + 0.5) for n in range(6)])
    assert out.idle == pytest.approx([0.0] * 6)
    assert out.tails == pytest.approx([0.0] * 6)


def test_a_prompt_is_read_once_for_the_answers_of_its_group_on_an_engine() -> None:
    out = synchronous(plan_of(shared=False, sync=0.0), np.full((8, 4), 200))
    assert out.step_seconds() == pytest.approx(2 * 100 * 1e-5 + DECODE.span(8, 800, 200) + 0.5)


def test_more_answers_than_slots_are_drawn_one_after_another() -> None:
    out = synchronous(plan_of(slots=4, prompt=0, sync=0.0), np.full((8, 4), 200))
    assert out.step_seconds() == pytest.approx(2 * DECODE.span(4, 0, 200) + 0.5)


@pytest.mark.parametrize("speed", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("mode", [ahead, each_ahead])
def test_staleness_hides_the_shorter_of_drawing_and_training(
    mode: Callable[..., Outcome], staleness: int, speed: float
) -> None:
    generation = DECODE.span(8, 0, 200)
    plan = plan_of(lambda answers: speed * generation, prompt=0, sync=0.0, steps=12, shared=False)
    lengths = np.full((8, 4), 200)
    hidden = synchronous(plan, lengths).step_seconds(4) - mode(
        plan, lengths, staleness
    ).step_seconds(4)
    assert hidden == pytest.approx(min(generation, speed * generation))


def test_no_staleness_is_synchronous() -> None:
    plan = plan_of()
    assert ahead(plan, UNEVEN, 0) == synchronous(plan, UNEVEN)
    dealt = replace(plan, shared=False)
    assert each_ahead(dealt, UNEVEN, 0).ends == pytest.approx(synchronous(dealt, UNEVEN).ends)
    assert set(streaming(plan, UNEVEN, 0).lags) == {0}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_batch_n_is_drawn_by_version_n_less_the_staleness(staleness: int) -> None:
    lags = ahead(plan_of(), UNEVEN, staleness).lags
    assert lags == [min(n, staleness) for n in range(6) for _ in range(32)]


@pytest.mark.parametrize("mode", MODES)
def test_every_token_drawn_is_trained_or_left(mode: str) -> None:
    out = MODES[mode](plan_of(), UNEVEN)
    assert out.decoded == out.trained + out.left
    assert len(out.lags) == 6 * 32
    assert out.ends == sorted(out.ends)


@pytest.mark.parametrize("mode", MODES)
def test_no_engine_is_busier_than_there_is_time(mode: str) -> None:
    out = MODES[mode](plan_of(), UNEVEN)
    assert 0 < out.generating <= 4 * out.ends[-1] + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_the_same_lengths_give_the_same_run(mode: str) -> None:
    assert MODES[mode](plan_of(), UNEVEN) == MODES[mode](plan_of(), UNEVEN)


def test_a_long_tail_idles_engines_and_going_on_alone_or_later_wins_time_back() -> None:
    plan = plan_of(shared=False, steps=12, sync=0.0)
    assert np.mean(synchronous(plan, UNEVEN).idle) > 0.2
    waited = ahead(plan, UNEVEN, 2).step_seconds(4)
    assert each_ahead(plan, UNEVEN, 2).step_seconds(4) < waited
    assert partial(plan, UNEVEN, 1.5).step_seconds(4) < synchronous(plan, UNEVEN).step_seconds(4)


def test_interrupted_answers_are_read_again() -> None:
    out = streaming(plan_of(), UNEVEN, 2)
    assert out.read_again > 0
    assert synchronous(plan_of(), UNEVEN).read_again == 0


def test_training_waits_for_weights_when_a_rank_has_too_few_tokens() -> None:
    model, ranks = MODELS["7b"], 64
    enough = costs.hiding_tokens(model, H100, ranks)
    passes = costs.Passes(scored=1, checkpointing=False)
    assert costs.train(model, H100, ranks, 4 * enough * ranks, 0, passes=passes)[
        "exposed"
    ] == pytest.approx(0, abs=1e-9)
    assert costs.train(model, H100, ranks, 0.5 * enough * ranks, 0, passes=passes)["exposed"] > 0


def test_a_gather_moves_all_but_a_ranks_own_part() -> None:
    model, no_hops = MODELS["7b"], replace(H100, hop=0.0)
    assert costs.gathered(model, no_hops, 1) == 0
    assert costs.gathered(model, no_hops, 8) == pytest.approx(7 / 8 * model.parameters * 2 / 450e9)
    assert costs.gathered(model, no_hops, 64) == pytest.approx(
        63 / 64 * model.parameters * 2 / 400e9
    )


def test_the_file_of_lengths_is_what_the_data_have() -> None:
    assert (
        json.loads(lengths_of.FILE.read_text(encoding="utf-8"))["count of each length"]
        == lengths_of.counted()
    )
    assert len(lengths_of.measured()) == 7473
