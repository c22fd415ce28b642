"""The learning rate against the slow one, at every step."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightrft.config.strategy import OptimizerConfig
from lightrft.strategy.base import lr_factor
from tests.numbers import distributions as dist

SHARES = st.integers(0, 99).map(lambda n: n / 100)


@settings(deadline=None)
@given(
    st.integers(1, 120),
    st.sampled_from(["constant", "linear", "cosine"]),
    SHARES | st.integers(1, 40).map(float),
    SHARES,
)
@example(100, "linear", 0.07, 0.1)  # 0.07 * 100 is 7.000000000000001 in binary
@example(100, "cosine", 0.29, 0.1)
@example(1, "cosine", 0.0, 0.0)
@example(10, "linear", 10.0, 0.0)
@example(10, "linear", 40.0, 0.0)
def test_the_rate_of_every_step(total: int, schedule: str, warmup: float, floor: float) -> None:
    """W warm-up steps rise evenly to the full rate of the step after them: a ramp of W + 1 whose top is the first step of the fall."""
    given = {"warmup_ratio": warmup} if warmup < 1 else {"warmup_steps": int(warmup)}
    config = OptimizerConfig(schedule=schedule, **given, min_lr_ratio=floor)  # type: ignore[arg-type]
    ramp = dist.warmup_steps(warmup, total)
    for step in range(total + 2 if ramp < total else total):
        if step < ramp:
            expected = dist.learning_rate(step, total, 1.0, "constant", float(ramp + 1), floor)
        else:
            expected = dist.learning_rate(step, total, 1.0, schedule, float(ramp), floor)
        assert lr_factor(step, total, config) == pytest.approx(expected, abs=1e-12)
