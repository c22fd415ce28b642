"""Programs of LightRFT's documents, with tiny models in place of hub names."""

from __future__ import annotations

import copy
from argparse import Namespace

import pytest
import torch

from lightrft.models import (
    ActorAL,
    ActorLanguage,
    ActorVL,
    CriticLanguage,
    CriticVL,
    GenerativeRewardModelVL,
    GPTLMLoss,
    HPSLoss,
    LogSigmoidLoss,
    PolicyLoss,
    ScalarRewardModelVL,
    ValueLoss,
    compute_approx_kl,
    compute_reward,
    concatenated_forward,
    create_high_entropy_mask,
    get_supported_parameters,
    get_vlm_for_sequence_regression,
)
from lightrft.strategy import get_strategy
from lightrft.trainer import (
    AdaptiveKLController,
    Experience,
    FixedKLController,
    NaiveReplayBuffer,
    get_advantage_calculator,
)
from lightrft.types import Segments
from lightrft.utils.errors import ModelError
from tests.media_helpers import rig
from tests.model_helpers import small_model

END, PAD = 3, 0


def inputs_of(model, *pieces):
    """Ids, mask and media of one prompt."""
    prompt = model.prompt("p", *pieces)
    ids = torch.tensor([prompt.token_ids])
    rows = Segments.of_prompts([prompt]).media
    names = get_supported_parameters(ActorVL.modality) & set(rows)
    media = {name: rows[name].values for name in sorted(names)}
    return ids, torch.ones_like(ids), media


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("seeing"))


SEEN = (("image", (20, 30, 3)), "what is it?")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "qwen2_5_vl", "internvl"])
def test_the_program_of_actor_vl_generates_and_scores(family, tmp_path):
    model = rig(family, tmp_path)
    actor = ActorVL(
        pretrain_or_model=str(model.path),
        use_flash_attention_2=True,
        bf16=False,
        lora_rank=16,
        lora_alpha=32,
    )
    ids, mask, media = inputs_of(model, *SEEN)
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=ids,
        attention_mask=mask,
        eos_token_id=END,
        pad_token_id=PAD,
        max_new_tokens=4,
        temperature=0.8,
        do_sample=True,
        **media,
    )
    assert attention_mask.shape == sequences.shape
    assert action_mask.shape == (1, sequences.shape[1] - ids.shape[1])
    actions = action_mask.shape[1]
    log_probs, output = actor(
        sequences, actions, attention_mask=attention_mask, return_output=True, **media
    )
    expected = output.logits[:, -actions - 1 : -1].log_softmax(-1)
    expected = expected.gather(-1, sequences[:, -actions:, None])[..., 0]
    assert torch.allclose(log_probs, expected, atol=1e-4)
    actor.gradient_checkpointing_enable()
    log_probs.sum().backward()
    trained = {name for name, p in actor.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)


def test_the_program_of_actor_al_takes_sound_by_both_names(tmp_path):
    model = rig("qwen2_audio", tmp_path)
    actor = ActorAL(str(model.path), bf16=False)
    prompt = model.prompt("p", ("audio", (7000,)), "who?")
    ids = torch.tensor([prompt.token_ids])
    clip = Segments.of_prompts([prompt]).media["input_features"].values.t()[None]
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    kwargs |= {"eos_token_id": END, "pad_token_id": PAD}
    sequences, *_ = actor.generate(input_ids=ids, audio_values=clip, **kwargs)
    assert torch.equal(actor.generate(input_ids=ids, pixel_values=clip, **kwargs)[0], sequences)
    scores = actor(sequences, 3, audio_values=clip)
    assert torch.equal(actor(sequences, 3, pixel_values=clip), scores)


@pytest.mark.parametrize("loss", [LogSigmoidLoss, HPSLoss])
def test_a_reward_model_is_trained_by_both_candidates_in_one_call(seeing, loss):
    model = ScalarRewardModelVL(str(seeing.path), bf16=False, use_flash_attention_2=False)
    first, second = inputs_of(seeing, *SEEN), inputs_of(seeing, "a longer question without images")
    images, grids = first[2]["pixel_values"], first[2]["image_grid_thw"]
    chosen, rejected = concatenated_forward(
        *(model, first[0], first[1], second[0], second[1]),
        *(images, grids, None, None),
        *(None, None, None, None),
        pad_token_id=PAD,
    )
    alone = model(first[0], first[1], images, grids), model(second[0], second[1])
    for head, score in chosen.items():
        assert torch.allclose(score, alone[0][head], atol=1e-4)
        assert torch.allclose(rejected[head], alone[1][head], atol=1e-4)
    sum(loss()(chosen[head], rejected[head]) for head in chosen).backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_generative_reward_model_learns_judgements(seeing):
    model = GenerativeRewardModelVL(str(seeing.path), use_flash_attention_2=False, bf16=False)
    ids, mask, media = inputs_of(seeing, *SEEN)
    labels = ids.clone()
    labels[:, :-4] = -100
    output = model(ids, mask, labels=labels, **media)
    loss = GPTLMLoss()(output.logits, labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(output.loss.detach()), rel=1e-4)


def test_a_vision_model_becomes_a_critic_or_a_reward_model(seeing):
    ids, mask, media = inputs_of(seeing, *SEEN)
    options = {"bf16": False, "init_value_head": True}
    critic = get_vlm_for_sequence_regression(str(seeing.path), "critic", **options)
    assert isinstance(critic, CriticVL) and critic(ids, 3, mask, **media).shape == (1, 3)
    reward = get_vlm_for_sequence_regression(str(seeing.path), "reward", **options)
    score = reward(ids, mask, **media)
    padded = torch.cat([ids, torch.zeros(1, 2, dtype=torch.long)], 1)
    attended = torch.cat([mask, torch.zeros(1, 2, dtype=torch.long)], 1)
    assert score.shape == (1,)
    assert torch.allclose(reward(padded, attended, **media), score, atol=1e-5)
    with pytest.raises(ModelError, match="model_type = 'value': must be critic or reward"):
        get_vlm_for_sequence_regression(str(seeing.path), "value")


ARGS = {
    "seed": 1,
    "max_norm": 1.0,
    "micro_train_batch_size": 4,
    "train_batch_size": 8,
    "actor_learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "critic_pretrain": True,
    "lr_warmup_ratio": 0.0,
    "n_samples_per_prompt": 4,
    "advantages_norm": False,
    "advantage_clip": 0.0,
    "dynamic_sampling": False,
}


@pytest.mark.parametrize("estimator", ["group_norm", "gae"])
def test_a_loop_of_ppo_over_these_names_raises_its_reward(estimator):
    """Sample, score, compute advantages, fill the buffer, train: LightRFT's loop, on 2 prompts."""
    args = Namespace(**ARGS)
    strategy = get_strategy(args)
    with strategy.init_model_context():
        actor = ActorLanguage(small_model("qwen2"))
        reference = copy.deepcopy(actor)
        critic = CriticLanguage(small_model("qwen2"), init_value_head=True)
    (actor, optimizer, schedule), (critic, critic_optimizer, critic_schedule), _, reference = (
        strategy.prepare_models_and_optimizers(actor, critic, None, reference, args, 40)
    )
    calculator = get_advantage_calculator(estimator, args)
    controller = AdaptiveKLController(0.01, 6.0, 1000)
    buffer = NaiveReplayBuffer(sample_batch_size=4)
    policy_loss, value_loss = PolicyLoss(0.2, high_entropy_token_ratio=0.9), ValueLoss(0.5)
    prompts = torch.tensor([[40, 41, 42], [50, 51, 52]]).repeat_interleave(4, 0)
    history = []
    for _ in range(12):
        sequences, attention, actions = actor.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=5,
            eos_token_id=END,
            pad_token_id=PAD,
        )
        width = actions.shape[1]
        with torch.no_grad():
            old = actor(sequences, width, attention)
            base = reference(sequences, width, attention)
            values = critic(sequences, width, attention)
        responses = sequences[:, -width:]
        # The reward counts even tokens.
        rewards = ((responses % 2 == 0) & (actions > 0)).float().mean(1)
        history.append(float(rewards.mean()))
        halves = [
            Experience(
                *(sequences[part], old[part], base[part], values[part], None, None),
                *(attention[part], actions[part].bool(), {"reward": rewards[part]}),
                action_entropy=-old[part],
            )
            for part in (slice(0, 4), slice(4, 8))
        ]
        halves, parts = calculator.preprocess_rewards(rewards, halves, 5)
        for one, reward in zip(halves, parts, strict=True):
            kl = compute_approx_kl(one.action_log_probs, one.base_action_log_probs, one.action_mask)
            tokens = compute_reward(reward, controller.value, kl, one.action_mask)
            one.advantages, one.returns, _ = calculator.compute(one, tokens, 1.0, {"lambd": 0.95})
            one.info["kl"] = kl.sum(1)
            buffer.append(one)
        if estimator == "gae":
            buffer.normalize("advantages", strategy)
        for batch in strategy.setup_dataloader(buffer, 4, collate_fn=buffer.collate_fn):
            width = batch.action_mask.shape[1]
            new = actor(batch.sequences, width, batch.attention_mask)
            kept = create_high_entropy_mask(batch.action_entropy, batch.action_mask, 0.9)
            loss = policy_loss(
                new, batch.action_log_probs, batch.advantages, batch.action_mask, kept
            )
            strategy.backward(loss, actor, optimizer, name="actor")
            strategy.optimizer_step(optimizer, actor, schedule, name="actor")
            now = critic(batch.sequences, width, batch.attention_mask)
            error = value_loss(now, batch.values, batch.returns, batch.action_mask)
            strategy.backward(error, critic, critic_optimizer, name="critic")
            strategy.optimizer_step(critic_optimizer, critic, critic_schedule, name="critic")
            controller.update(
                strategy.all_reduce(batch.info["kl"].mean().item()), len(batch.sequences)
            )
        buffer.clear()
    assert sum(history[-3:]) > sum(history[:3]) + 0.5
    assert controller.value != 0.01 and FixedKLController(0.01).value == 0.01
