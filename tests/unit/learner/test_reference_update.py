"""A reference that follows the policy."""

from __future__ import annotations

import pytest
import torch

from lightrft.config.algorithm import KLConfig
from lightrft.config.strategy import StrategyConfig
from lightrft.learner.reference_update import MovingReference
from lightrft.models.actor import Actor
from lightrft.models.tiny.text import tiny_model
from lightrft.strategy.single import SingleStrategy, shapes_of
from lightrft.utils.errors import CheckpointError, ConfigError
from tests.model_helpers import rounding

STRATEGY = SingleStrategy(StrategyConfig(device="cpu"))


def actor(seed: int, dtype: torch.dtype = torch.float32, **sizes: int) -> Actor:
    return Actor(
        tiny_model(
            "qwen2", seed=seed, dtype=dtype, **{"hidden_size": 16, "intermediate_size": 16, **sizes}
        )
    )


def follower(seed: int, policy: Actor, **kl: float) -> MovingReference:
    config = KLConfig.model_validate({"where": "loss", "coef": 0.1, "refresh_every": 1, **kl})
    return MovingReference.of(
        actor(seed, policy.base.dtype).requires_grad_(False), shapes_of(policy), STRATEGY, config
    )


def test_a_hard_copy_is_the_policy_bit_for_bit_and_no_second_name_of_it() -> None:
    policy = actor(1)
    reference = follower(2, policy)
    reference.update_from(policy.named_parameters(), 0.0)
    for (name, a), (_, b) in zip(
        reference.model.named_parameters(), policy.named_parameters(), strict=True
    ):
        assert a.equal(b), name
        assert a.data_ptr() != b.data_ptr()


def test_a_moving_average_is_decay_times_itself_plus_the_rest_of_the_policy() -> None:
    policy = actor(1)
    reference = follower(2, policy, refresh_decay=0.75)
    start = {n: p.clone() for n, p in reference.model.named_parameters()}
    reference.update_from(policy.named_parameters(), 0.75)
    reference.update_from(policy.named_parameters(), 0.75)
    for name, p in policy.named_parameters():
        expected = 0.75**2 * start[name].double() + (1 - 0.75**2) * p.double()
        found = dict(reference.model.named_parameters())[name].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding(4) * float(p.abs().max()))


def test_a_moving_average_of_half_precision_weights_does_not_stand_still() -> None:
    policy = actor(1, torch.bfloat16)
    reference = follower(2, policy, refresh_decay=0.999)
    start = {n: p.float() for n, p in reference.model.named_parameters()}
    for _ in range(500):
        reference.update_from(policy.named_parameters(), 0.999)
    weight = "model.lm_head.weight"
    moved = dict(reference.model.named_parameters())[weight].float()
    expected = (
        0.999**500 * start[weight]
        + (1 - 0.999**500) * dict(policy.named_parameters())[weight].float()
    )
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_its_state_is_empty_until_it_moves_and_then_brings_another_to_the_same_bits(
    dtype: torch.dtype, decay: float
) -> None:
    policy = actor(1, dtype)
    reference = follower(2, policy, refresh_decay=decay)
    assert reference.state_dict() == {}
    reference.update_from(policy.named_parameters(), decay)
    saved = {k: v.clone() for k, v in reference.state_dict().items()}
    other = follower(3, policy, refresh_decay=decay)
    other.load_state_dict(saved)
    for one in (reference, other):
        one.update_from(actor(4, dtype).named_parameters(), decay)
    for (name, a), (_, b) in zip(
        reference.model.named_parameters(), other.model.named_parameters(), strict=True
    ):
        assert a.equal(b), name
    assert {k: v.tolist() for k, v in reference.state_dict().items()} == {
        k: v.tolist() for k, v in other.state_dict().items()
    }


def test_a_reference_of_another_shape_is_refused_with_the_way_out() -> None:
    config = KLConfig(where="loss", coef=0.1, refresh_every=2)
    with pytest.raises(ConfigError, match=r"refresh_every = 2: .*set algorithm.kl.refresh_every=0"):
        MovingReference.of(actor(1, intermediate_size=24), shapes_of(actor(1)), STRATEGY, config)


def test_weights_of_another_reference_are_refused() -> None:
    with pytest.raises(CheckpointError, match="another reference"):
        follower(2, actor(1)).load_state_dict({"a": torch.zeros(1)})
