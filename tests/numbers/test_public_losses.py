"""The losses under LightRFT's names: slow oracles, LightRFT's own numbers, and gradients."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from lightrft import models
from lightrft.models import (
    AttentionPooling,
    DPOLoss,
    GPTLMLoss,
    HPSLoss,
    KDLoss,
    KTOLoss,
    LogExpLoss,
    LogSigmoidLoss,
    PairWiseLoss,
    PolicyLoss,
    PRMLoss,
    ValueLoss,
    VanillaKTOLoss,
)
from lightrft.utils.errors import ConfigError, DataError, ModelError
from tests.numbers import oracles_public as oracle

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])


def wave(*shape: int, seed: float) -> torch.Tensor:
    """Numbers in [-2, 2] that are the same in every version of torch."""
    count = math.prod(shape)
    values = [2 * math.sin(seed + 1.7 * i + 0.3 * i * i) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


NEW, OLD, ADV = (wave(3, 5, seed=s) for s in (1.0, 2.0, 3.0))
# Results of LightRFT 49e62cb for these inputs.
PPO, CPGD = 3.5443053619017153, 1.0624856859038754
PAIRS = tuple(wave(4, seed=s) for s in (4.0, 5.0, 6.0, 7.0))


def has_right_gradient(loss, *inputs: torch.Tensor) -> bool:
    """The gradient is that of small differences."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("name", ["ppo", "cpgd"])
def test_the_policy_loss_is_the_mean_over_rows_of_the_mean_over_tokens(name, mask):
    loss = PolicyLoss(0.2, use_cpg_loss=name == "cpgd")
    marks = (torch.ones_like(MASK) if mask is None else mask).tolist()
    expected = getattr(oracle, name)(NEW.tolist(), OLD.tolist(), ADV.tolist(), marks, 0.2)
    assert float(loss(NEW, OLD, ADV, mask)) == pytest.approx(expected, rel=1e-12)
    assert has_right_gradient(lambda x: loss(x, OLD, ADV, mask), NEW)


def test_the_policy_loss_equals_lightrfts_own_numbers():
    assert float(PolicyLoss(0.2)(NEW, OLD, ADV, MASK)) == pytest.approx(PPO, rel=1e-12)
    cpgd = PolicyLoss(0.2, use_cpg_loss=True)
    assert float(cpgd(NEW, OLD, ADV, MASK)) == pytest.approx(CPGD, rel=1e-12)


def test_only_tokens_of_the_entropy_mask_are_trained():
    entropy = wave(3, 5, seed=9.0)
    kept = models.create_high_entropy_mask(entropy, MASK, 0.4)
    loss = PolicyLoss(0.2, high_entropy_token_ratio=0.4)(NEW, OLD, ADV, MASK, kept)
    expected = oracle.ppo(NEW.tolist(), OLD.tolist(), ADV.tolist(), kept.tolist(), 0.2)
    assert float(loss) == pytest.approx(expected)
    assert not torch.equal(kept, MASK)


def test_a_ratio_of_high_entropy_tokens_without_their_mask_is_refused():
    with pytest.raises(ConfigError, match=r"high_entropy_token_ratio = 0.4 needs entropy_mask"):
        PolicyLoss(high_entropy_token_ratio=0.4)(NEW, OLD, ADV, MASK)


def test_use_dapo_is_refused_since_it_selects_nothing():
    with pytest.raises(ConfigError, match=r"use_dapo = True .* algorithm=dapo"):
        PolicyLoss(use_dapo=True)


def test_a_row_without_actions_changes_neither_the_policy_loss_nor_the_value_loss():
    empty = torch.cat([MASK, torch.zeros(1, 5, dtype=torch.long)])
    more = [torch.cat([x, torch.full((1, 5), math.nan)]) for x in (NEW, OLD, ADV)]
    for loss in (PolicyLoss(0.2), ValueLoss(0.3)):
        assert float(loss(*more, empty)) == pytest.approx(float(loss(NEW, OLD, ADV, MASK)))


@pytest.mark.parametrize("eps", [None, 0.3])
def test_the_value_loss_is_half_the_larger_squared_error(eps):
    loss = ValueLoss(eps)
    expected = oracle.value(NEW.tolist(), OLD.tolist(), ADV.tolist(), MASK.tolist(), eps)
    assert float(loss(NEW, OLD, ADV, MASK)) == pytest.approx(expected, rel=1e-12)
    assert has_right_gradient(lambda x: loss(x, OLD, ADV, MASK), NEW)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_the_losses_of_pairs_of_scores_equal_their_formulas(shape):
    chosen, rejected = (x.reshape(shape) for x in PAIRS[:2])
    lists = PAIRS[0].tolist(), PAIRS[1].tolist()
    for loss in (PairWiseLoss(), LogSigmoidLoss()):
        assert float(loss(chosen, rejected)) == pytest.approx(oracle.pairwise(*lists))
        assert float(loss(chosen, rejected, 0.7)) == pytest.approx(oracle.pairwise(*lists, 0.7))
    assert float(LogExpLoss()(chosen, rejected)) == pytest.approx(oracle.pairwise(*lists))
    assert float(HPSLoss()(chosen, rejected)) == pytest.approx(oracle.hps(*lists))
    assert has_right_gradient(HPSLoss(), chosen, rejected)


def test_a_margin_that_a_loss_of_pairs_does_not_read_is_reported():
    for loss in (LogExpLoss(), HPSLoss()):
        with pytest.warns(UserWarning, match=rf"margin is no part of {type(loss).__name__}"):
            with_margin = loss(PAIRS[0], PAIRS[1], 0.5)
        assert torch.equal(with_margin, loss(PAIRS[0], PAIRS[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(PAIRS[0], PAIRS[1], 0.0)


def test_the_log_exp_loss_of_a_large_difference_is_finite():
    assert float(LogExpLoss()(torch.tensor([-500.0]), torch.tensor([500.0]))) == 1000.0


def test_the_dpo_loss_equals_dpo_cdpo_and_ipo():
    lists = [x.tolist() for x in PAIRS]
    for smooth in (0.0, 0.1):
        loss, good, bad = DPOLoss(0.3, smooth)(*PAIRS)
        assert float(loss) == pytest.approx(oracle.dpo(*lists, 0.3, smooth))
    assert torch.allclose(good, 0.3 * (PAIRS[0] - PAIRS[2]))
    assert torch.allclose(bad, 0.3 * (PAIRS[1] - PAIRS[3]))
    loss = DPOLoss(0.3, ipo=True)
    assert float(loss(*PAIRS)[0]) == pytest.approx(oracle.ipo(*lists, 0.3))
    assert has_right_gradient(lambda a, b: loss(a, b, *PAIRS[2:])[0], *PAIRS[:2])


def test_label_smoothing_of_ipo_is_refused():
    with pytest.raises(ConfigError, match=r"label_smoothing = 0.1 changes nothing with ipo"):
        DPOLoss(0.3, label_smoothing=0.1, ipo=True)


def test_vanilla_kto_takes_the_kl_of_the_other_kind_and_no_gradient_through_it():
    good, bad = PAIRS[0] - PAIRS[2], PAIRS[1] - PAIRS[3]
    chosen = PAIRS[0].clone().requires_grad_()
    loss, rewards, _ = VanillaKTOLoss(0.3)(chosen, *PAIRS[1:])
    kls = float(bad.mean()), float(good.mean())
    expected = oracle.kto(good.tolist(), bad.tolist(), *kls, 0.3, (1, 1))
    assert float(loss) == pytest.approx(expected)
    assert torch.allclose(rewards, 0.3 * good)
    loss.backward()
    s = torch.sigmoid(0.3 * (good - max(0.0, kls[0])))
    assert torch.allclose(chosen.grad, -0.3 * s * (1 - s) / 8)


def test_kto_weighs_both_kinds_around_the_kl_of_mismatched_pairs():
    extra = wave(6, seed=11.0), wave(6, seed=12.0)
    loss, good, bad, kl = KTOLoss(0.3, 1.0, 0.7, 1, "cpu")(
        PAIRS[0], PAIRS[1], extra[0], PAIRS[2], PAIRS[3], extra[1]
    )
    gap = float((extra[0] - extra[1]).mean())
    ratios = [(PAIRS[0] - PAIRS[2]).tolist(), (PAIRS[1] - PAIRS[3]).tolist()]
    assert float(loss) == pytest.approx(oracle.kto(*ratios, gap, gap, 0.3, (1, 0.7)))
    assert float(kl) == pytest.approx(max(0.0, gap))
    assert good.shape == bad.shape == (4,)


def test_kto_of_a_batch_with_one_kind_has_empty_rewards_of_the_other():
    none = PAIRS[0][:0]
    loss, good, bad, _ = KTOLoss(0.3, 1.0, 1.0, 1, "cpu")(
        PAIRS[0], none, PAIRS[0], PAIRS[2], none, PAIRS[2]
    )
    assert loss.isfinite() and good.shape == (4,) and bad.shape == (0,)


def test_kto_of_more_ranks_than_the_process_group_has_is_refused():
    with pytest.raises(ConfigError, match=r"world_size = 4, and the process group has 1"):
        KTOLoss(0.3, 1.0, 1.0, 4, "cpu")


LOGITS, TEACHER = wave(2, 4, 6, seed=20.0), wave(2, 4, 6, seed=21.0)
LABELS = torch.tensor([[-100, 2, 5, 0], [1, -100, -100, 3]])


def test_the_language_model_loss_predicts_the_next_token():
    expected = oracle.next_token(LOGITS.tolist(), LABELS.tolist())
    assert float(GPTLMLoss()(LOGITS, LABELS)) == pytest.approx(expected)
    assert has_right_gradient(lambda x: GPTLMLoss()(x, LABELS), LOGITS)
    assert float(GPTLMLoss()(LOGITS, torch.full_like(LABELS, -100))) == 0.0
    assert GPTLMLoss()(LOGITS.bfloat16(), LABELS).dtype == torch.bfloat16


def test_distillation_is_the_cross_entropy_of_the_student_under_the_teacher():
    expected = oracle.distilled(LOGITS.tolist(), TEACHER.tolist(), LABELS.tolist())
    assert float(KDLoss()(LOGITS, TEACHER, LABELS)) == pytest.approx(expected, rel=1e-6)
    assert float(KDLoss()(LOGITS, TEACHER, torch.full_like(LABELS, -100))) == 0.0


def test_distillation_leaves_out_tokens_that_the_student_cannot_say():
    cut = LOGITS.clone()
    cut[..., 4] = -math.inf
    loss = KDLoss()(cut, TEACHER, LABELS)
    assert loss.isfinite() and float(loss) != float(KDLoss()(LOGITS, TEACHER, LABELS))


STEPS = torch.tensor([[7, 1, 7, 0], [1, 7, 7, 2]])


def test_the_process_reward_loss_reads_logits_at_placeholders():
    labels = torch.tensor([[3, -100, 5, -100], [0, 5, -100, 0]])
    at = [(0, 0, 3), (0, 2, 5), (1, 1, 5)]
    whole = [-oracle.log_softmax(LOGITS[i][t].tolist())[y] for i, t, y in at]
    loss, accuracy = PRMLoss(7)(STEPS, LOGITS, labels, return_acc=True)
    assert float(loss) == pytest.approx(oracle.mean(whole))
    hits = [int(LOGITS[i][t].argmax()) == y for i, t, y in at]
    assert float(accuracy) == pytest.approx(sum(hits) / 3)
    # In this order, one replacement after the other would make every label the first token.
    order = [5, 3]
    some = [
        -oracle.log_softmax([float(LOGITS[i][t][r]) for r in order])[order.index(y)]
        for i, t, y in at
    ]
    assert float(PRMLoss(7, order)(STEPS, LOGITS, labels)) == pytest.approx(oracle.mean(some))


def test_reward_tokens_with_ids_below_their_number_keep_their_labels_apart():
    labels = torch.tensor([[1, -100, 0, -100], [0, 1, -100, 0]])
    at = [(0, 0, 1), (0, 2, 0), (1, 1, 1)]
    order = [1, 0]
    some = [
        -oracle.log_softmax([float(LOGITS[i][t][r]) for r in order])[order.index(y)]
        for i, t, y in at
    ]
    assert float(PRMLoss(7, order)(STEPS, LOGITS, labels)) == pytest.approx(oracle.mean(some))


def test_soft_labels_are_probabilities_of_the_first_reward_token():
    labels = torch.tensor([[0.25, 0.0, 1.0, 0.0], [0.0, 0.5, -100.0, 0.0]])
    at = [(0, 0, 0.25), (0, 2, 1.0), (1, 1, 0.5)]
    losses = []
    for i, t, p in at:
        good, bad = oracle.log_softmax(LOGITS[i][t][[3, 5]].tolist())
        losses.append(-p * good - (1 - p) * bad)
    loss = PRMLoss(7, [3, 5])
    assert float(loss(STEPS, LOGITS, labels)) == pytest.approx(oracle.mean(losses))
    assert has_right_gradient(lambda x: loss(STEPS, x, labels), LOGITS)
    with pytest.raises(ConfigError, match="need two tokens"):
        PRMLoss(7)(STEPS, LOGITS, labels)


def test_a_label_that_is_no_reward_token_is_refused():
    with pytest.raises(DataError, match=r"labels \[2\] are not among reward_token_ids = \[3, 5\]"):
        PRMLoss(7, [3, 5])(STEPS, LOGITS, torch.full_like(STEPS, 2))


def test_a_batch_without_labelled_steps_has_the_loss_0_and_a_gradient():
    logits = LOGITS.clone().requires_grad_()
    loss, accuracy = PRMLoss(7)(STEPS, logits, torch.full_like(STEPS, -100), return_acc=True)
    loss.backward()
    assert float(loss) == 0.0 == float(accuracy) and torch.equal(logits.grad, logits.grad * 0)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_pooling_is_the_attention_of_one_query(bias):
    pool = AttentionPooling(8, 2, position_bias=bias, position_bias_scale=2.0).double()
    states = wave(2, 3, 8, seed=30.0)
    weights = [x.tolist() for x in (pool.query, pool.k.weight, pool.v.weight)]
    for row, result in zip(states, pool(states), strict=True):
        expected = oracle.pooled(row.tolist(), *weights, 2, 2.0 if bias else 0.0)
        assert result.tolist() == pytest.approx(expected, rel=1e-6)
    assert sorted(pool.state_dict()) == ["k.weight", "query", "v.weight"]
    assert "k.bias" in AttentionPooling(8, qkv_bias=True).state_dict()


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ModelError, match="num_heads = 4 does not divide hidden_size = 10"):
        AttentionPooling(10)


def test_every_loss_is_the_same_class_in_lightrfts_module():
    from lightrft.models import loss

    assert all(getattr(loss, name) is getattr(models, name) for name in loss.__all__)
    assert len(loss.__all__) == 12


def test_log_probs_keep_the_dtype_of_half_precision_logits():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        logits, labels = LOGITS.to(dtype), LABELS.clamp(min=0)
        found = models.log_probs_from_logits(logits, labels)
        expected = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, atol=4 * torch.finfo(dtype).eps)
