"""The oracles of supervised training and distillation against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from mpmath import mp, mpf

from tests.numbers import oracles_distillation as distillation
from tests.numbers import oracles_losses
from tests.numbers.distributions import reverse_kl_gradient, softmax
from tests.numbers.exact import evaluate, gradient
from tests.numbers.test_oracles_by_hand import close

PEAKED = [math.log(3), 0.0]
"""Logits of 3/4 and 1/4."""

UNIFORM = [0.0, 0.0]


def two_rows(seed: int, size: int = 5) -> tuple[list[float], list[float]]:
    rng = random.Random(seed)
    return [rng.uniform(-4, 4) for _ in range(size)], [rng.uniform(-4, 4) for _ in range(size)]


def divergence_of(student: list[float], teacher: list[float], kind: str, beta: float) -> float:
    return evaluate(lambda s, t: distillation.of_logits(s, t, kind, beta), [student, teacher])


def test_divergences_of_two_coins() -> None:
    forward = divergence_of(UNIFORM, PEAKED, "forward_kl", 0.5)
    assert close(forward, 0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert close(divergence_of(UNIFORM, PEAKED, "reverse_kl", 0.5), math.log(4 / 3) / 2)
    # m = 1/4 teacher + 3/4 student = 9/16, 7/16.
    teacher = 0.75 * math.log(12 / 9) + 0.25 * math.log(4 / 7)
    student = 0.5 * math.log(8 / 9) + 0.5 * math.log(8 / 7)
    found = divergence_of(UNIFORM, PEAKED, "jsd", 0.25)
    assert close(found, 0.25 * teacher + 0.75 * student)


def test_the_default_jsd_is_the_symmetric_one() -> None:
    found = [
        evaluate(lambda s, t: distillation.of_logits(s, t, "jsd"), rows)
        for rows in ([UNIFORM, PEAKED], [PEAKED, UNIFORM])
    ]
    assert close(found[0], found[1])
    p, q = [0.5, 0.5], [0.75, 0.25]
    assert close(evaluate(lambda: distillation.divergence(p, q, "jsd"), []), found[0])


@pytest.mark.parametrize("seed", range(5))
def test_divergences_agree_with_the_oracles_of_reinforcement_learning(seed: int) -> None:
    student, teacher = two_rows(seed)
    for kind, expected in {
        "forward_kl": oracles_losses.forward_kl(student, teacher),
        "reverse_kl": oracles_losses.reverse_kl(student, teacher),
        "jsd": oracles_losses.jsd(student, teacher, 0.3),
    }.items():
        assert divergence_of(student, teacher, kind, 0.3) == pytest.approx(expected, abs=1e-12)


def test_the_ends_of_the_generalised_jsd() -> None:
    p, q = [0.5, 0.5], [0.75, 0.25]
    for beta in (0, 1):
        assert float(distillation.divergence(p, q, "jsd", beta)) == 0.0
    forward = evaluate(lambda: distillation.gkd(p, q, 0), [])
    reverse = evaluate(lambda: distillation.gkd(p, q, 1), [])
    assert close(forward, 0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert close(reverse, math.log(4 / 3) / 2)
    small = mpf("1e-20")
    near = evaluate(lambda: distillation.gkd(p, q, small) / small, [])
    assert close(near, forward)
    near = evaluate(lambda: distillation.gkd(p, q, 1 - small) / small, [])
    assert close(near, reverse)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("seed", range(3))
def test_the_tail_bucket_never_adds_divergence(kind: str, seed: int) -> None:
    student, teacher = two_rows(seed)
    values = [
        evaluate(lambda s, t, k=k: distillation.top_k_divergence(s, t, k, kind), [student, teacher])
        for k in range(1, 6)
    ]
    assert values == sorted(values)
    full = divergence_of(student, teacher, kind, 0.5)
    assert close(values[-1], full)
    assert values[0] >= 0


def test_three_ways_to_treat_what_the_teacher_left_out() -> None:
    # Student 1/3 each. Teacher 1/2, 1/3, 1/6; the two most probable are kept.
    student, teacher = [0.0, 0.0, 0.0], [math.log(2), math.log(3), 0.0]

    def of(tail: str) -> float:
        return evaluate(
            lambda s, t: distillation.top_k_divergence(s, t, 2, "forward_kl", tail=tail),
            [student, teacher],
        )

    partial = math.log(1.5) / 2 + math.log(1) / 3
    assert close(of("bucket"), partial + math.log(0.5) / 6)
    assert close(of("renormalised"), 0.6 * math.log(1.2) + 0.4 * math.log(0.8))
    assert close(of("partial"), partial)


def test_top_tokens_of_equal_logits_are_the_first() -> None:
    assert distillation.top_tokens([0.0, 1.0, 1.0, 1.0], 2) == [1, 2]


def test_a_teacher_has_no_gradient() -> None:
    for tail in ("bucket", "renormalised", "partial"):
        _, found = gradient(
            lambda s, t, tail=tail: distillation.top_k_divergence(s, t, 1, "jsd", 0.3, tail),
            [[0.3, 0.1, -1.0], [1.0, 0.0, 0.5]],
        )
        assert found == [0.0, 0.0, 0.0]
    assert gradient(lambda s, t: distillation.of_logits(s, t, "jsd"), [PEAKED, UNIFORM])[1] == [
        0,
        0,
    ]
    assert gradient(lambda s, t: distillation.uld([s], [t]), [PEAKED, UNIFORM])[1] == [0, 0]


def test_the_expected_gradient_of_the_sampled_token_is_that_of_the_reverse_kl() -> None:
    student, teacher = two_rows(3, 4)
    total = [0.0] * 4
    for token, probability in enumerate(softmax(student)):

        def loss(logits: list, token: int = token) -> object:
            row = distillation.log_softmax(logits)
            fixed = distillation.log_softmax(teacher)
            return distillation.sampled_reverse_kl_loss(row[token], fixed[token])

        (slopes,) = gradient(loss, [student])
        total = [a + probability * b for a, b in zip(total, slopes, strict=True)]
    assert total == pytest.approx(reverse_kl_gradient(student, teacher), abs=1e-12)


def test_the_sampled_estimate_has_the_reverse_kl_as_its_mean() -> None:
    logs = [[math.log(0.75), math.log(0.25)], [math.log(0.5)] * 2]
    terms = [float(distillation.sampled_reverse_kl(a, b)) for a, b in zip(*logs, strict=True)]
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert close(0.75 * terms[0] + 0.25 * terms[1], expected)


# Another tokenizer


def test_uld_compares_sorted_probabilities() -> None:
    # 3/4, 1/4 and 1/2, 1/4, 1/4: differences 1/4, 0, 1/4.
    assert float(distillation.sorted_distance([0.25, 0.75], [0.25, 0.5, 0.25])) == 0.5
    assert float(distillation.sorted_distance([0.25, 0.75], [0.75, 0.25, 0.0])) == 0.0
    # The second position of the longer response is left out.
    found = evaluate(lambda: distillation.uld([PEAKED], [UNIFORM, PEAKED]), [])
    assert close(found, 0.5)
    found = evaluate(lambda: distillation.uld([PEAKED, PEAKED], [UNIFORM, PEAKED]), [])
    assert close(found, 0.25)


def test_the_gradient_of_uld_raises_sorted_probabilities_towards_the_teachers() -> None:
    (found,) = gradient(lambda s: distillation.uld([s], [UNIFORM]), [PEAKED])
    # d (2 p - 1) = 2 p (1 - p).
    assert close(found, [0.375, -0.375])
    assert gradient(lambda s: distillation.uld([s], [UNIFORM]), [UNIFORM]) == [[0.0, 0.0]]


def test_groups_end_where_both_tokenizers_split_the_text() -> None:
    # "ab", "c", "def" and "a", "bc", "de", "f".
    groups = distillation.aligned_groups([2, 3, 6], [1, 3, 5, 6])
    assert groups == [([0, 1], [0, 1]), ([2], [2, 3])]
    assert distillation.aligned_groups([1, 2], [1]) == [([0], [0]), ([1], [])]


def test_a_group_multiplies_by_the_probabilities_of_its_other_tokens() -> None:
    rows = [[0.5, 0.5], [0.25, 0.75], [0.125, 0.875]]
    tokens = [0, 1, 0]
    assert [float(x) for x in distillation.merged(rows, tokens, [0, 1], "observed")] == [0.375] * 2
    bayesian = [float(x) for x in distillation.merged(rows, tokens, [0, 1], "bayesian")]
    assert bayesian == [0.125, 0.375]
    longer = [float(x) for x in distillation.merged(rows, tokens, [0, 1, 2], "bayesian")]
    assert longer == [0.125 * 0.375, 0.875 * 0.375]
    assert [float(x) for x in distillation.merged(rows, tokens, [2], "observed")] == [0.125, 0.875]


# Supervised fine-tuning


def test_sft_is_a_mean_over_tokens_or_over_examples() -> None:
    rows = [[-1.0, -2.0, -3.0], [-6.0]]
    assert float(distillation.sft_loss(rows)) == 3.0
    assert float(distillation.sft_loss_by_example(rows)) == 4.0


def test_weights_of_tokens_and_examples() -> None:
    rows, tokens = [[-1.0, -2.0, -3.0], [-6.0]], [[0.0, 1.0, 1.0], [1.0]]
    # 2 (2 + 3) + 6 over 2 * 2 + 1, and 2 * 2.5 + 6 over 3.
    assert close(float(distillation.sft_loss(rows, tokens, [2.0, 1.0])), 16 / 5)
    assert close(float(distillation.sft_loss_by_example(rows, tokens, [2.0, 1.0])), 11 / 3)
    found = gradient(lambda r: distillation.sft_loss(r, tokens, [2.0, 1.0]), [rows])
    assert close(found[0][0], [0.0, -0.4, -0.4])
    assert close(found[0][1], [-0.2])


def test_probabilities_sum_to_one() -> None:
    with mp.workdps(50):
        assert abs(sum(distillation.probabilities(two_rows(1)[0])) - 1) < mpf("1e-45")
