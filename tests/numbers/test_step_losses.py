"""Losses of steps against the formulas of their papers, as loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lightrft.algorithms.process_reward.losses import STEP_LOSSES, LabelledSteps
from lightrft.algorithms.process_reward.objective import check_process_model, step_terms
from lightrft.algorithms.reward_model.objective import reward_loss
from lightrft.config.base import build
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.utils.errors import ConfigError

ROWS = [[1, 1, 0], [1, 1, 1, 1], [0, 0], [1], [0], [0, 1, 0, 1]]


def steps_of(seed: int, soft: bool = False, size: float = 2.0) -> LabelledSteps:
    """The steps of ``ROWS`` with drawn logits, which are leaves, and weights."""
    draw = torch.Generator().manual_seed(seed)
    rows = [row for row, labels in enumerate(ROWS) for _ in labels]
    count = len(rows)
    logits = torch.randn(count, generator=draw, dtype=torch.float64) * size
    logits.requires_grad_()
    labels = torch.tensor([float(y) for labels in ROWS for y in labels], dtype=torch.float64)
    if soft:
        labels = torch.rand(count, generator=draw, dtype=torch.float64)
    weights = torch.rand(len(ROWS), generator=draw, dtype=torch.float64) + 0.5
    return LabelledSteps(logits, logits.sigmoid(), labels, torch.tensor(rows), weights)


def plain_pqm(logits: list[float], labels: list[float], margin: float) -> float:
    """The practical loss of arXiv 2410.11287 for one response, with Q = 0 of the question."""
    wrong = [math.exp(z + margin) for z, y in zip(logits, labels) if y < 0.5]
    right = [z for z, y in zip(logits, labels) if y >= 0.5]
    losses = []
    if wrong:
        losses.append(-math.log(1 / (1 + sum(wrong))))
    for t, z in enumerate(right):
        earlier = 1 + sum(math.exp(q) for q in right[:t])
        losses.append(-math.log(math.exp(z) / (math.exp(z) + earlier + sum(wrong))))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("margin", [0.0, 4.0])
def test_pqm_is_the_ranking_of_its_paper(soft, margin):
    steps = steps_of(1, soft)
    found = STEP_LOSSES["pqm"](steps, margin=margin)
    for row in range(len(ROWS)):
        own = steps.response_of == row
        expected = plain_pqm(steps.logits[own].tolist(), steps.labels[own].tolist(), margin)
        assert found[row].item() == pytest.approx(expected, abs=1e-9)


def test_the_gradient_of_pqm_is_the_slope_of_its_values():
    steps = steps_of(2)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        found = LabelledSteps(logits, logits.sigmoid(), steps.labels, steps.response_of)
        return STEP_LOSSES["pqm"](found)

    assert torch.autograd.gradcheck(loss, (steps.logits,))


def test_pqm_of_far_logits_is_finite():
    steps = steps_of(3, size=500.0)
    found = STEP_LOSSES["pqm"](steps)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert steps.logits.grad is not None
    assert torch.isfinite(steps.logits.grad).all()


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_and_squared_error_are_the_formulas(soft):
    steps = steps_of(4, soft)
    for name in ("cross_entropy", "mse"):
        found = STEP_LOSSES[name](steps).tolist()
        for k, (z, y) in enumerate(zip(steps.logits.tolist(), steps.labels.tolist())):
            r = 1 / (1 + math.exp(-z))
            plain = {
                "cross_entropy": -y * math.log(r) - (1 - y) * math.log(1 - r),
                "mse": (r - y) ** 2,
            }
            assert found[k] == pytest.approx(plain[name], abs=1e-9)


def test_cross_entropy_is_that_of_two_classes():
    steps = steps_of(5)
    classes = torch.randn(len(steps.labels), 2, dtype=torch.float64)
    logits = classes[:, 1] - classes[:, 0]
    found = LabelledSteps(logits, logits.sigmoid(), steps.labels, steps.response_of)
    expected = torch.nn.functional.cross_entropy(classes, steps.labels.long(), reduction="none")
    assert torch.allclose(STEP_LOSSES["cross_entropy"](found), expected, rtol=0, atol=1e-12)


def test_parts_of_a_batch_sum_to_the_whole_and_weights_count():
    settings = build(ProcessModelConfig, {"losses": ["cross_entropy", "pqm"]})
    steps = steps_of(6)
    assert steps.weights is not None
    whole = step_terms(steps, settings)
    totals = [float(term.units.sum()) for term in whole]
    weights = steps.weights[steps.response_of]
    assert totals == pytest.approx([float(weights.sum()), float(steps.weights.sum())])
    found = torch.zeros((), dtype=torch.float64)
    for rows in ([0, 1], [2], [3, 4, 5]):
        own = torch.isin(steps.response_of, torch.tensor(rows))
        part = LabelledSteps(
            steps.logits[own],
            steps.scores[own],
            steps.labels[own],
            steps.response_of[own] - rows[0],
            steps.weights[rows],
        )
        found = found + reward_loss(step_terms(part, settings), totals)
    assert found.item() == pytest.approx(reward_loss(whole).item(), abs=1e-12)


def test_no_steps_have_no_losses():
    nothing = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    empty = LabelledSteps(nothing, nothing, nothing, torch.zeros(0, dtype=torch.long))
    for name in STEP_LOSSES:
        assert STEP_LOSSES[name](empty).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"losses": ["pqn"]}, "pqm"),
        ({"losses": ["pqm", "pqm"]}, "twice"),
        ({"losses": [{"name": "pqm", "options": {"margin": -1}}]}, "0 or more"),
        ({"losses": [{"name": "pqm", "options": {"zeta": 1}}]}, "zeta"),
        ({"head": "regression"}, "fits a probability"),
        ({"losses": ["pqm"], "last_step_only": True}, "only one is left"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        check_process_model(build(ProcessModelConfig, settings))


def test_the_last_response_may_have_one_step_and_a_label_of_one_half_is_right():
    logits = torch.tensor([0.3, -1.0, 0.7, 0.2], dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    steps = LabelledSteps(logits, logits.sigmoid(), labels, torch.tensor([0, 0, 1, 2]))
    expected = [
        plain_pqm([0.3, -1.0], [1.0, 0.0], 4.0),
        plain_pqm([0.7], [1.0], 4.0),
        plain_pqm([0.2], [1.0], 4.0),
    ]
    assert STEP_LOSSES["pqm"](steps).tolist() == pytest.approx(expected, rel=1e-12)


def test_a_term_is_each_loss_times_its_share_and_a_response_counts_once_by_default():
    settings = build(ProcessModelConfig, {"losses": ["mse", {"name": "pqm", "weight": 0.5}]})
    steps = steps_of(3)
    assert steps.weights is not None
    of_steps, of_responses = step_terms(steps, settings)
    shares = steps.weights[steps.response_of]
    assert torch.equal(of_steps.units, shares)
    assert torch.equal(of_steps.losses, STEP_LOSSES["mse"](steps) * shares)
    assert torch.equal(of_responses.losses, STEP_LOSSES["pqm"](steps) * steps.weights)
    assert (of_steps.weight, of_responses.weight) == (1.0, 0.5)
    alike = replace(steps, weights=None)
    for term, count in zip(step_terms(alike, settings), (len(steps.logits), len(ROWS))):
        assert term.units.tolist() == [1.0] * count
    assert reward_loss(step_terms(alike, settings)).item() == pytest.approx(
        STEP_LOSSES["mse"](steps).mean().item() + 0.5 * STEP_LOSSES["pqm"](steps).mean().item()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"losses": ["pqm"]},
        {"losses": [{"name": "pqm", "options": {"margin": 0}}]},
        {"losses": [{"name": "pqm", "options": {"margin": 0.5}}]},
        {"losses": ["pqm"], "head": "regression"},
        {"losses": ["mse"], "head": "regression"},
        {"losses": ["cross_entropy"], "last_step_only": True},
        {"losses": ["cross_entropy", "mse", "pqm"]},
        {"losses": ["pqm", {"name": "pqm", "options": {"margin": 1.0}}]},
    ],
)
def test_settings_that_make_sense_are_accepted(settings):
    check_process_model(build(ProcessModelConfig, settings))


def test_the_smallest_problem_is_named_alone_and_all_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        check_process_model(build(ProcessModelConfig, {"losses": ["pqm"], "last_step_only": True}))
    assert len(str(error.value).splitlines()) == 1
    tree = {"losses": ["cross_entropy", "cross_entropy", "pqm"], "head": "regression"}
    with pytest.raises(ConfigError) as error:
        check_process_model(build(ProcessModelConfig, {**tree, "last_step_only": True}))
    assert len(str(error.value).splitlines()) == 4
    file = tmp_path / "own.py"
    file.write_text("def loss(steps):\n    return steps.logits\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"kind of .*own.py:loss.*step, response"):
        check_process_model(build(ProcessModelConfig, {"losses": [f"{file}:loss"]}))
    other = tmp_path / "other.py"
    other.write_text(file.read_text() + "loss.kind = 'step'\n", encoding="utf-8")
    check_process_model(build(ProcessModelConfig, {"losses": [f"{other}:loss"]}))
