"""Prompts by pass rate: what is drawn, what is learned from it, and that it goes on as if it had not been stopped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightrft.config.rollout import CurriculumConfig
from lightrft.rollout.curriculum import CURRICULA, Curriculum
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import CheckpointError, ConfigError
from lightrft.utils.state_io import load_state, save_state

IDS = [f"p{i}" for i in range(10)]


def curriculum(
    name: str = "priority", seed: int = 3, ids: list[str] = IDS, **more: Any
) -> Curriculum:
    return Curriculum(CurriculumConfig(name=name, **more), ids, seed)


def answers(place: int, *rewards: float) -> list[Rollout]:
    return [
        Rollout(Prompt(f"p{place}", [1]), [2], [True], [-1.0], [0], "stop", i, i, reward=r)
        for i, r in enumerate(rewards)
    ]


def test_priority_weighs_by_what_can_be_learned_and_never_forgets() -> None:
    weights = CURRICULA["priority"](np.array([0.0, 0.5, 1.0, np.nan]), 0.0, floor=0.05)
    np.testing.assert_allclose(weights, [0.05, 0.3, 0.05, 0.3], atol=1e-12)


def test_failures_weigh_by_how_often_a_prompt_fails() -> None:
    weights = CURRICULA["failures"](np.array([0.0, 0.25, 1.0, np.nan]), 0.0, floor=0.1)
    np.testing.assert_allclose(weights, [1.1, 0.85, 0.1, 1.1], atol=1e-12)


def test_the_mark_of_easy_to_hard_moves_with_the_epochs() -> None:
    rates = np.array([0.8, 0.5, 0.2, np.nan])
    best = [
        int(np.argmax(CURRICULA["easy_to_hard"](rates[:3], epoch, epochs=4.0)))
        for epoch in (0.0, 2.0, 4.0, 9.0)
    ]
    assert best == [0, 1, 2, 2]
    middle = CURRICULA["easy_to_hard"](rates, 2.0, epochs=4.0, width=0.3, floor=0.5)
    np.testing.assert_allclose(
        middle, [1.5 - (1 - np.exp(-0.5)), 1.5, 1.5 - (1 - np.exp(-0.5)), 1.5], atol=1e-12
    )


@pytest.mark.parametrize("name", list(CURRICULA))
def test_weights_are_finite_and_not_negative_and_go_by_prompt(name: str) -> None:
    options = {"epochs": 2.0} if name == "easy_to_hard" else {}
    rates = np.array([np.nan, 0.0, 0.3, 1.0, 0.3])
    about = CURRICULA.about(name)
    assert about.formula
    assert about.latex
    for epoch in (0.0, 0.7, 50.0):
        weights = CURRICULA[name](rates, epoch, **options)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        np.testing.assert_array_equal(CURRICULA[name](rates[::-1], epoch, **options), weights[::-1])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("priority", {"floor": -1.0}, "options.floor is -1.0"),
        ("easy_to_hard", {"epochs": 0.0}, "options.epochs is 0.0"),
        ("easy_to_hard", {"epochs": 1.0, "width": -1.0}, "options.width is -1.0"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    name: str, options: dict[str, float], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        CURRICULA[name](np.array([0.5]), 0.0, **options)


def test_no_prompt_comes_twice_in_a_step_while_others_are_left() -> None:
    drawing = curriculum()
    step = drawing.next(4) + drawing.next(6)
    assert sorted(step) == list(range(10))
    assert Counter(drawing.next(25)).most_common()[0][1] <= 3
    drawing.observe([])
    assert drawing.epoch == 3.5


def test_prompts_come_as_often_as_they_weigh() -> None:
    drawing = curriculum(options={"floor": 0.0}, ids=IDS[:4])
    drawing.observe([answers(0, 1, 1), answers(1, 0, 1), answers(2, 0, 0), answers(3, 1, 1, 1, 0)])
    counts: Counter[int] = Counter()
    for _ in range(4000):
        counts.update(drawing.next(1))
        drawing.observe([])
    assert (counts[0], counts[2]) == (0, 0)  # of weight 0
    assert counts[1] / counts[3] == pytest.approx(0.25 / (0.75 * 0.25), rel=0.1)


def test_pass_rates_run_by_their_momentum() -> None:
    drawing = curriculum(momentum=0.75, threshold=0.5)
    known = drawing.observe([answers(2, 0.4, 0.5, 0.6, 1.0), []])
    assert drawing.rates[2] == 0.75
    assert known == {"seen": 0.1, "epoch": 0.0, "pass_rate": 0.75}
    drawing.observe([answers(2, 0.0), answers(2, 1.0)])
    assert drawing.rates[2] == 0.75 * (0.75 * 0.75) + 0.25
    assert np.isnan(np.delete(drawing.rates, 2)).all()


def test_a_curriculum_that_was_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def steps(drawing: Curriculum, first: int, last: int) -> list[list[int]]:
        drawn = []
        for step in range(first, last):
            places = drawing.next(3) + drawing.next(1)
            drawing.observe(
                [answers(p, *(float((p * step + i) % 3 == 0) for i in range(3))) for p in places]
            )
            drawn.append(places)
        return drawn

    whole, half, again = curriculum(), curriculum(), curriculum()
    want = steps(whole, 0, 12)
    begun = steps(half, 0, 5)
    save_state(tmp_path / "state", half.state_dict())
    half.next(2)  # what was drawn after it was saved is drawn again
    again.load_state_dict(load_state(tmp_path / "state"))
    assert begun + steps(again, 5, 12) == want
    np.testing.assert_array_equal(again.rates, whole.rates)
    assert again.epoch == whole.epoch
    half.load_state_dict(load_state(tmp_path / "state"))
    assert begun + steps(half, 5, 12) == want
    assert steps(curriculum(seed=4), 0, 12) != want


def test_pass_rates_of_other_prompts_are_refused() -> None:
    state = curriculum().state_dict()
    with pytest.raises(CheckpointError, match="pass rates are of other prompts"):
        curriculum(ids=IDS[::-1]).load_state_dict(state)


def negative(rates: np.ndarray, epoch: float) -> np.ndarray:
    """Weights that are none."""
    return rates - 1


def test_a_function_of_the_user_s_own_is_held_to_what_weights_are() -> None:
    with pytest.raises(ConfigError, match="must give 10 finite weights"):
        curriculum(f"{__file__}:negative").next(1)
