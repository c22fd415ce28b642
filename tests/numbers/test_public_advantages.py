"""Advantages, controllers and buffers under LightRFT's names: slow oracles, and LightRFT's own numbers."""

from __future__ import annotations

import math
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from lightrft.trainer.advantage_calculator import (
    get_advantage_calculator,
    normalize_advantages_cross_batch,
)
from lightrft.trainer.replay_buffer_utils import (
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)

from lightrft.trainer import (
    AdaptiveKLController,
    Experience,
    ExperienceVL,
    FixedKLController,
    NaiveReplayBuffer,
    NaiveReplayBufferVL,
    make_experience_batch,
)
from lightrft.utils.errors import ConfigError, DataError
from tests.numbers import oracles_public as oracle

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0])
MASK = torch.ones(2, 4, dtype=torch.bool)
MASK[1, 2:] = False
TOKEN_REWARDS = torch.tensor([[0.1, -0.2, 0.3, 1.0], [0.5, -1.0, 0.0, 0.0]])
VALUES = torch.tensor([[0.2, 0.1, -0.3, 0.4], [1.0, -0.5, 9.0, 9.0]])


def options(**changed: object) -> SimpleNamespace:
    start = {
        "n_samples_per_prompt": 4,
        "advantages_norm": False,
        "advantage_clip": 0.0,
        "dynamic_sampling": False,
        "micro_train_batch_size": 2,
    }
    return SimpleNamespace(**{**start, **changed})


def experience(**changed: object) -> SimpleNamespace:
    start = {"action_mask": MASK.clone(), "values": VALUES, "info": {}}
    return SimpleNamespace(**{**start, **changed})


@pytest.mark.parametrize("name", ["rloo", "reinforce_baseline", "group_norm", "grpo"])
def test_a_baseline_of_the_group_equals_its_formula(name):
    calculator = get_advantage_calculator(name, options())
    same, parts = calculator.preprocess_rewards(REWARDS, [experience()] * 4, 8)
    assert [len(part) for part in parts] == [2, 2, 2, 2] and len(same) == 4
    expected = oracle.group_baseline(REWARDS.tolist(), 4, name)
    assert torch.cat(parts).tolist() == pytest.approx(expected, abs=1e-6)


def test_discounted_returns_are_sums_from_each_action_on():
    calculator = get_advantage_calculator("reinforce", options())
    advantages, returns, info = calculator.compute(experience(), TOKEN_REWARDS, 0.9, {})
    expected = oracle.discounted(TOKEN_REWARDS.tolist(), MASK.tolist(), 0.9)
    assert torch.allclose(returns, torch.tensor(expected))
    assert torch.equal(advantages, returns) and info == {}
    rows = [TOKEN_REWARDS[0], TOKEN_REWARDS[1, :2]]
    packed, _, _ = calculator.compute(experience(action_mask=None), rows, 0.9, {})
    assert torch.allclose(torch.cat(packed), returns[MASK])


def test_gamma_comes_from_generation_where_it_is_not_given():
    calculator = get_advantage_calculator("reinforce", options())
    given = calculator.compute(experience(), TOKEN_REWARDS, 0.5, {})
    read = calculator.compute(experience(), TOKEN_REWARDS, None, {"gamma": 0.5})
    assert torch.equal(given[0], read[0])
    plain = calculator.compute(experience(), TOKEN_REWARDS, None, {})
    assert torch.equal(plain[0], calculator.compute(experience(), TOKEN_REWARDS, 1.0, {})[0])


def test_gae_equals_its_recursion_with_and_without_padding():
    calculator = get_advantage_calculator("gae", options())
    advantages, returns, _ = calculator.compute(experience(), TOKEN_REWARDS, 0.9, {"lambd": 0.8})
    expected = oracle.gae(TOKEN_REWARDS.tolist(), VALUES.tolist(), MASK.tolist(), 0.9, 0.8)
    assert torch.allclose(advantages, torch.tensor(expected))
    assert torch.allclose(returns[MASK], advantages[MASK] + VALUES[MASK])
    rows = [[x[0], x[1, :2]] for x in (VALUES, TOKEN_REWARDS)]
    packed, _, _ = calculator.get_advantages_and_returns(*rows, None, 0.9, 0.8)
    assert torch.allclose(torch.cat(packed), advantages[MASK])
    with pytest.raises(ConfigError, match="generate_kwargs has no lambd"):
        calculator.compute(experience(), TOKEN_REWARDS, 0.9, {})


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_advantages_are_standardized_over_actions_and_then_clipped(name):
    calculator = get_advantage_calculator(name, options(advantages_norm=True, advantage_clip=0.7))
    plain = get_advantage_calculator(name, options())
    kwargs = {"lambd": 0.8}
    advantages, returns, info = calculator.compute(experience(), TOKEN_REWARDS, 0.9, kwargs)
    before, same, _ = plain.compute(experience(), TOKEN_REWARDS, 0.9, kwargs)
    kept = before[MASK].tolist()
    mean = oracle.mean(kept)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in kept) / (len(kept) - 1))
    standard = [(x - mean) / deviation for x in kept]
    expected = [min(max(x, -0.7), 0.7) for x in standard]
    assert advantages[MASK].tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(returns, same) and torch.all(advantages[~MASK] == 0)
    share = sum(abs(x) > 0.7 for x in standard) / len(standard)
    assert share > 0 and info["advantage_clip_frac"].tolist() == pytest.approx([share] * 2)


def test_the_baseline_of_reinforce_takes_no_discount_and_says_so():
    calculator = get_advantage_calculator("reinforce_baseline", options())
    with pytest.warns(UserWarning, match="gamma = 0.9 changes nothing"):
        advantages, _, _ = calculator.compute(experience(), TOKEN_REWARDS, 0.9, {})
    expected = oracle.discounted(TOKEN_REWARDS.tolist(), MASK.tolist(), 1.0)
    assert torch.allclose(advantages, torch.tensor(expected))


def test_dynamic_sampling_masks_groups_that_are_all_right_or_all_wrong():
    calculator = get_advantage_calculator("grpo", options(dynamic_sampling=True))
    experiences = [experience() for _ in range(4)]
    calculator.preprocess_rewards(REWARDS, experiences, 8)
    assert [bool(x.action_mask.any()) for x in experiences] == [True, True, False, False]


@pytest.mark.parametrize("reward", [[1.0, 3.0], [[1.0, 0.0], [1.0, 2.0]]])
def test_cpgd_standardizes_the_outcome_rewards_of_the_experience(reward):
    calculator = get_advantage_calculator("cpgd", options())
    one = experience(info={"reward": torch.tensor(reward)})
    advantages, returns, _ = calculator.compute(one, TOKEN_REWARDS, None, {})
    expected = torch.tensor([[-1.0], [1.0]]) * MASK
    assert torch.allclose(advantages, expected, atol=1e-5) and torch.equal(advantages, returns)


def test_groups_that_do_not_fit_or_have_one_response_are_refused():
    for size in (1, 3):
        calculator = get_advantage_calculator("rloo", options(n_samples_per_prompt=size))
        with pytest.raises(ConfigError, match=rf"n_samples_per_prompt = {size} with 8 rewards"):
            calculator.preprocess_rewards(REWARDS, [experience()] * 4, 8)


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"advantage_estimator = 'gspo'.*reinforce, gae"):
        get_advantage_calculator("gspo", options())


@pytest.mark.parametrize("centred", [False, True])
def test_advantages_are_whitened_over_all_experiences(centred):
    parts = [experience(advantages=TOKEN_REWARDS * k) for k in (1.0, 2.0)]
    kept = torch.cat([x.advantages[MASK] for x in parts])
    args = SimpleNamespace(no_advantage_std_norm=centred)
    normalize_advantages_cross_batch(parts, "gae", args)
    expected = kept - kept.mean()
    expected = expected if centred else expected / expected.square().mean().sqrt()
    assert torch.allclose(torch.cat([x.advantages[MASK] for x in parts]), expected, atol=1e-6)
    untouched = experience(advantages=TOKEN_REWARDS)
    normalize_advantages_cross_batch([untouched], "group_norm", args)
    assert untouched.advantages is TOKEN_REWARDS


def test_the_adaptive_controller_moves_by_at_most_a_fifth():
    controller, fixed = AdaptiveKLController(0.1, 6.0, 100), FixedKLController(0.1)
    expected = 0.1
    for kl in (1.0, 7.0, 30.0, 5.9):
        controller.update(kl, 16)
        fixed.update(kl, 16)
        expected *= 1 + min(max(kl / 6.0 - 1, -0.2), 0.2) * 16 / 100
    assert controller.value == pytest.approx(expected) and fixed.value == 0.1
    controller.value = 0.5
    assert controller.value == 0.5


def batch(kind: type = Experience, **changed: object):
    """Four samples: the first one padded on the left, the second one on the right."""
    attention = torch.ones(4, 9, dtype=torch.long)
    attention[0, :2] = 0
    attention[1, 7:] = 0
    actions = torch.ones(4, 5, dtype=torch.bool)
    actions[1, 3:] = False
    row = torch.arange(20.0).reshape(4, 5)
    columns = ("action_log_probs", "base_action_log_probs", "values", "returns", "advantages")
    start = {
        "sequences": torch.arange(36).reshape(4, 9),
        **{name: row + 100 * k for k, name in enumerate(columns)},
        "attention_mask": attention,
        "action_mask": actions,
        "info": {"reward": torch.arange(4.0), "label": list("abcd")},
    }
    return kind(**{**start, **changed})


def test_a_buffer_keeps_samples_without_padding_and_pads_batches_on_the_left():
    buffer = NaiveReplayBuffer(2)
    buffer.append(batch())
    assert [len(item.sequences) for item in buffer] == [7, 7, 9, 9]
    assert buffer[0].sequences.tolist() == list(range(2, 9))
    assert buffer[1].advantages.tolist() == [405.0, 406.0, 407.0]
    assert buffer[3].info == {"reward": 3.0, "label": "d"}
    joined = buffer.collate_fn([buffer[1], buffer[2]])
    assert joined.sequences.tolist() == [[0, 0, *range(9, 16)], list(range(18, 27))]
    assert joined.advantages[0].tolist() == [0.0, 0.0, 405.0, 406.0, 407.0]
    assert joined.info["reward"].tolist() == [1.0, 2.0] and joined.info["label"] == ["b", "c"]
    random.seed(0)
    assert len(buffer.sample().sequences) == 2
    buffer.clear()
    assert len(buffer) == 0


def test_a_buffer_with_a_limit_drops_the_oldest_samples():
    buffer = NaiveReplayBuffer(1, limit=3)
    buffer.append(batch())
    assert [item.info["label"] for item in buffer] == ["b", "c", "d"]
    with pytest.raises(ConfigError, match="sample_batch_size = 9, and the buffer has 3"):
        bigger = NaiveReplayBuffer(9)
        bigger.items = buffer.items
        bigger.sample()


def test_packed_samples_stay_lists_of_rows():
    rows = [torch.arange(n) for n in (3, 5)]
    one = batch(
        **{name: [r.float() for r in rows] for name in ("values", "returns", "advantages")},
        sequences=rows,
        action_log_probs=rows,
        base_action_log_probs=None,
        attention_mask=None,
        action_mask=None,
        info={},
    )
    buffer = NaiveReplayBuffer(2, packing_samples=True)
    buffer.append(one)
    joined = buffer.collate_fn(list(buffer))
    assert [len(row) for row in joined.sequences] == [3, 5] and joined.action_mask is None


def test_media_follow_their_samples_through_a_buffer():
    grids = torch.tensor([[1, 2, 4], [1, 2, 2], [1, 2, 2]])
    patches = torch.arange(16.0)[:, None]
    counts = {"image_num": torch.tensor([2, 0, 1, 0])}
    buffer = NaiveReplayBufferVL(2)
    buffer.append(batch(ExperienceVL, pixel_values=patches, image_grid_thws=grids, info=counts))
    assert buffer[0].pixel_values.shape == (12, 1) and buffer[1].pixel_values is None
    joined = make_experience_batch([buffer[2], buffer[0]])
    assert joined.pixel_values[:, 0].tolist() == [*range(12, 16), *range(12)]
    assert joined.image_grid_thws.tolist() == grids[[2, 0, 1]].tolist()
    assert joined.info["image_num"].tolist() == [1, 2]
    again = split_experience_batch(joined)
    assert torch.equal(again[1].pixel_values, buffer[0].pixel_values)


def test_patches_that_do_not_fit_their_grids_are_refused():
    with pytest.raises(DataError, match="pixel_values has 3 patches, and image_grid_thws counts 4"):
        split_experience_batch(
            batch(
                ExperienceVL,
                pixel_values=torch.ones(3, 1),
                image_grid_thws=torch.tensor([[1, 1, 1]] * 4),
            )
        )
    with pytest.raises(DataError, match=r"image_grid_thws has 1 rows for 4 samples.*image_num"):
        split_experience_batch(batch(ExperienceVL, image_grid_thws=torch.ones(1, 3).long()))


class OneRank:
    """The sums of one process."""

    @staticmethod
    def all_reduce(data, op):
        assert op == "sum"
        return data


def test_advantages_of_a_buffer_are_normalized_over_actions():
    buffer = NaiveReplayBuffer(2)
    buffer.append(batch())
    kept = torch.cat([item.advantages for item in buffer])
    buffer.normalize("advantages", OneRank())
    expected = (kept - kept.mean()) / kept.std(correction=0)
    assert torch.allclose(torch.cat([item.advantages for item in buffer]), expected)
    with pytest.raises(ConfigError, match="attribute = 'returns'"):
        buffer.normalize("returns", OneRank())


def test_a_masked_action_between_others_is_not_cut():
    one = batch()
    one.action_mask[2] = torch.tensor([True, False, True, True, False])
    items = remove_padding_in_sequences(split_experience_batch(one))
    assert items[2].action_mask.tolist() == [True, False, True, True]
    assert len(items[2].sequences) == 8


def test_a_sample_without_actions_is_refused():
    one = batch()
    one.action_mask[2] = False
    with pytest.raises(DataError, match="a sample has no action"):
        NaiveReplayBuffer(1).append(one)


def test_only_some_samples_with_a_field_are_refused():
    items = split_experience_batch(batch())
    items[0].values = None
    with pytest.raises(DataError, match="1 of 4 samples have no values"):
        make_experience_batch(items)
    with pytest.raises(DataError, match="at least one sample"):
        make_experience_batch([])


def test_rows_are_padded_with_zeros_on_one_side():
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert zero_pad_sequences(rows).tolist() == [[1, 2], [0, 3]]
    assert zero_pad_sequences(rows, "right").tolist() == [[1, 2], [3, 0]]
    with pytest.raises(DataError, match="side = 'up'"):
        zero_pad_sequences(rows, "up")


def test_a_batch_moves_as_a_whole_and_can_be_pickled():
    moved = batch().to_device("meta")
    assert moved.sequences.device.type == moved.info["reward"].device.type == "meta"
    again = pickle.loads(pickle.dumps(batch()))
    assert torch.equal(again.sequences, batch().sequences)


def test_patches_without_grids_belong_to_samples_by_the_number_of_their_pictures():
    from lightrft.trainer import ExperienceVL, NaiveReplayBufferVL

    rows, pixels = torch.ones(3, 4), torch.arange(3.0)[:, None]
    fields = ("action_log_probs", "returns", "advantages", "action_mask", "attention_mask")
    own = dict.fromkeys(fields, rows)

    def batch(**info):
        return ExperienceVL(rows.long(), pixel_values=pixels, info=info, **own)

    buffer = NaiveReplayBufferVL(3)
    buffer.append(batch(image_num=[2, 0, 1]))
    first, none, last = buffer.items
    assert first.pixel_values.tolist() == [[0], [1]] and last.pixel_values.tolist() == [[2]]
    assert none.pixel_values is None
    joined = buffer.collate_fn([last, none, first])
    assert joined.pixel_values.tolist() == [[2], [0], [1]]
    assert joined.info["image_num"].tolist() == [1, 0, 2]
    buffer.append(batch())
    assert [len(item.pixel_values) for item in buffer.items[3:]] == [1, 1, 1]
    with pytest.raises(DataError, match=r"pixel_values has 3 rows for 3 samples; .*'image_num'"):
        buffer.append(batch(image_num=[2, 0, 0]))
