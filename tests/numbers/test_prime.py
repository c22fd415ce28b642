"""PRIME and PPO-ptx equal the slow loops: the loss of the process reward model, its rewards, the advantages, the mixed-in loss."""

from __future__ import annotations

import pytest
import torch

from lightrft.algorithms.advantages import ADVANTAGES
from lightrft.algorithms.reward_shaping import token_rewards
from lightrft.config.algorithm import AdvantageConfig
from lightrft.learner.process_reward import outcome_losses
from tests.numbers import oracles_advantages, oracles_losses
from tests.numbers.compare import assert_equal, every_case, gradient, rows_for
from tests.numbers.oracles import Case
from tests.numbers.scalars import gradients, number
from tests.numbers.strategies import batch_of, plain_case, tensor_of


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@every_case(examples=60)
def test_prime_is_leave_one_out_of_outcomes_and_of_process_rewards(
    gamma: float, case: Case, seed: int
) -> None:
    (process,) = rows_for(case, seed)
    batch = batch_of(case).replace(process_rewards=tensor_of(process))
    settings = AdvantageConfig(name="prime", gamma=gamma)
    found, returns = ADVANTAGES["prime"](batch, token_rewards(batch, "k1", 0.0), settings)
    assert_equal(found, oracles_advantages.prime(case, case.rewards, process, gamma))
    assert returns is found


@every_case(examples=60)
def test_the_released_form_of_prime_takes_off_the_mean_of_the_whole_group(
    case: Case, seed: int
) -> None:
    (process,) = rows_for(case, seed)
    batch = batch_of(case).replace(process_rewards=tensor_of(process))
    options = {"outcome_coef": 0.5, "process_coef": 2.0}
    found, _ = ADVANTAGES["prime_released"](
        batch, token_rewards(batch, "k1", 0.0), AdvantageConfig(), **options
    )
    assert_equal(found, oracles_advantages.prime_released(case, case.rewards, process, 0.5, 2.0))


@every_case(examples=60)
def test_the_process_model_learns_the_cross_entropy_of_outcomes(case: Case, seed: int) -> None:
    slow = case.with_leaves("logprobs")
    expected = oracles_losses.implicit_prm_loss(slow, 0.4, [float(r >= 0.5) for r in case.rewards])
    leaf = tensor_of(case.logprobs).requires_grad_()
    losses, right = outcome_losses(leaf, batch_of(case), 0.4, 0.5)
    judged = [bool(case.sampled(i)) for i in range(len(case))]
    total = losses.sum() / max(1, sum(judged))
    assert total.item() == pytest.approx(number(expected), rel=1e-9, abs=1e-9)
    assert_equal(gradient(total, leaf), gradients(expected, slow.logprobs))
    assert right.dtype == torch.bool
    assert not (right & ~torch.tensor(judged, dtype=torch.bool)).any()
    assert losses[~torch.tensor(judged, dtype=torch.bool)].tolist() == [0.0] * (
        len(case) - sum(judged)
    )


def test_a_small_case_by_hand() -> None:
    """Two answers, of two and one tokens; outcomes 1 and 0; process rewards 0.5, 0.25 and -0.5.

    The first is held against -0.5, the other against (0.5 + 0.25) / 2 = 0.375; outcomes give 1 and -1.
    """
    case = plain_case([[True, True], [True]], [0, 0], [1.0, 0.0])
    batch = batch_of(case).replace(
        process_rewards=torch.tensor([0.5, 0.25, -0.5], dtype=torch.float64)
    )
    found, _ = ADVANTAGES["prime"](
        batch, token_rewards(batch, "k1", 0.0), AdvantageConfig(gamma=1.0)
    )
    assert found.tolist() == pytest.approx([1.0 + 0.75 + 1.0, 0.75 + 1.0, -0.875 - 1.0])
