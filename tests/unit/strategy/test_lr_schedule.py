"""The share of the learning rate at hand-checked steps."""

from __future__ import annotations

import pytest

from lightrft.config.strategy import OptimizerConfig
from lightrft.strategy.base import lr_factor


@pytest.mark.parametrize(
    ("schedule", "steps", "ratio", "floor", "expected"),
    [
        # 6 steps
        ("constant", 0, 0.0, 0.1, [1, 1, 1, 1, 1, 1]),
        ("constant", 2, 0.0, 0.1, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", 2, 0.0, 0.2, [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4]),  # 1 - 0.8 k / 4
        ("linear", 0, 0.0, 0.0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", 3, 0.0, 0.0, [1 / 4, 2 / 4, 3 / 4, 1, 0.75, 0.25]),  # (1 + cos pi k/3) / 2
        ("cosine", 0, 0.5, 0.5, [1 / 4, 2 / 4, 3 / 4, 1, 0.875, 0.625]),
        ("linear", 0, 0.3, 1.0, [1 / 3, 2 / 3, 1, 1, 1, 1]),  # 1.8 steps are 2
        ("linear", 99, 0.0, 0.0, [k / 100 for k in range(1, 7)]),
    ],
)
def test_the_share_at_every_step(
    schedule: str, steps: int, ratio: float, floor: float, expected: list[float]
) -> None:
    config = OptimizerConfig(
        schedule=schedule, warmup_steps=steps, warmup_ratio=ratio, min_lr_ratio=floor
    )
    assert [lr_factor(k, 6, config) for k in range(6)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_reached_at_the_end_and_kept(schedule: str) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_ratio=0.1, min_lr_ratio=0.25)  # type: ignore[arg-type]
    assert [lr_factor(k, 40, config) for k in (40, 41, 400)] == pytest.approx([0.25] * 3)


@pytest.mark.parametrize(
    ("share", "total", "steps"),
    [(0.07, 100, 7), (0.29, 100, 29), (0.1, 30, 3), (0.1, 31, 4), (0.0, 9, 0)],
)
def test_a_share_is_rounded_up_to_whole_steps_and_counted_exactly(
    share: float, total: int, steps: int
) -> None:
    config = OptimizerConfig(schedule="constant", warmup_ratio=share)
    assert sum(lr_factor(k, total, config) < 1 for k in range(total)) == steps


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_no_step_is_wasted_at_a_rate_of_zero(schedule: str) -> None:
    for warmup in ({}, {"warmup_ratio": 0.5}, {"warmup_steps": 3}):
        config = OptimizerConfig(schedule=schedule, **warmup, min_lr_ratio=0.0)  # type: ignore[arg-type]
        assert all(lr_factor(k, 8, config) > 0 for k in range(8))


def test_a_number_and_a_share_of_warm_up_steps_are_refused_together() -> None:
    with pytest.raises(
        ValueError, match=r"warmup_steps = 3 and warmup_ratio = 0\.1 set the same thing"
    ):
        OptimizerConfig(warmup_steps=3, warmup_ratio=0.1)
