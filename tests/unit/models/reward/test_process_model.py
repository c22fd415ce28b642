"""Scores of steps against plain forward passes of transformers, in every layout and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from lightrft.algorithms.process_reward.losses import LabelledSteps
from lightrft.algorithms.process_reward.objective import step_terms
from lightrft.algorithms.reward_model.objective import reward_loss
from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.process import ProcessRewardModel, separator_places
from lightrft.models.reward.process_form import Separator
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ModelError
from tests.model_helpers import Float64, small_model
from tests.unit.models.reward.scoring import LAYOUTS, far, rows_of

HEADS = ("classes", "mlp", "linear", "regression", "tokens")
END = Separator("<end>", (7, 8))


def process_of(head: str, **fields: Any) -> ProcessRewardModel:
    """A model in evaluation mode, whose head has large weights, so that differences show."""
    model = small_model("qwen2", torch.float64)
    settings = build(ProcessModelConfig, {"head": head, **fields})
    reward = ProcessRewardModel(model, None, settings, separator=END, verdicts=(9, 10), seed=1)
    with torch.no_grad():
        for name, parameter in reward.named_parameters():
            if not name.startswith("model."):
                parameter.mul_(20 if parameter.abs().max() < 0.2 else 1)
    return reward.eval()


def step_batch() -> Batch:
    """Three groups. Separators at the end, in the middle, twice in a row, and nowhere."""
    rows = [[3, 7, 8, 4, 5, 7, 8], [7, 8, 7, 8, 2], [1, 2, 3], [8, 7, 8], [], [5, 7]]
    prompts = Segments.of([[3, 4, 5, 6], [1], [7]])
    return Batch(prompts, Segments.of(rows), torch.tensor([0, 0, 1, 2, 2, 1]))


PLACES = [2, 6, 8, 10, 17]
STEPS = [2, 2, 0, 1, 0, 0]


def plain_logits(reward: ProcessRewardModel, batch: Batch) -> torch.Tensor:
    """The log-odds of each step: each row alone through the model's own forward, by loops."""
    reward.use_attention("padded")
    base: Any = reward.base
    found = []
    for tokens, start in rows_of(batch):
        if not len(tokens):
            continue
        out = base(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        for t in range(start + 1, len(tokens)):
            if tokens[t - 1 : t + 1].tolist() != [7, 8]:
                continue
            if reward.step_head is None:
                found.append(out.logits[0, t, 9] - out.logits[0, t, 10])
                continue
            outputs = reward.step_head.layers(out.hidden_states[-1][0, t])
            found.append(outputs[-1] - (outputs[0] if len(outputs) == 2 else 0))
    return torch.stack(found)


@pytest.mark.parametrize("head", HEADS)
def test_scores_equal_a_plain_forward_and_head_in_every_layout(head):
    reward, batch = process_of(head), step_batch()
    with Float64(), torch.no_grad():
        logits = plain_logits(reward, batch)
        expected = logits if head == "regression" else logits.sigmoid()
        for layout in LAYOUTS:
            reward.layout = layout
            found = reward.score_steps(batch)
            assert far(found.scores, expected) < 1e-9, layout
            assert far(found.logits, logits) < 1e-9, layout
            assert found.places.tolist() == PLACES
            assert found.steps.tolist() == STEPS


def test_a_separator_across_two_responses_ends_no_step():
    batch = Batch(Segments.of([[1]]), Segments.of([[5, 7], [8, 2]]), torch.tensor([0, 0]))
    assert not len(separator_places(batch, (7, 8)))


def test_the_column_of_ends_replaces_the_search_for_separators():
    reward, batch = process_of("classes"), step_batch()
    ends = torch.zeros(batch.tokens, dtype=torch.bool)
    ends[[0, 11]] = True
    found = reward.score_steps(batch.replace(step_ends=ends))
    assert found.places.tolist() == [0, 11]
    assert found.steps.tolist() == [1, 1, 0, 0, 0, 0]


def test_a_batch_without_steps_has_no_scores_and_zero_gradients():
    reward = process_of("mlp").train()
    batch = Batch(Segments.of([[1]]), Segments.of([[2, 3]]), torch.tensor([0]))
    found = reward.score_steps(batch)
    found.scores.sum().backward()
    assert len(found.scores) == 0
    assert reward.step_head is not None
    assert all(p.grad is not None and not p.grad.any() for p in reward.step_head.parameters())


def test_gradients_agree_in_every_layout():
    reward, batch = process_of("mlp").train(), step_batch()
    found = []
    with Float64():
        for layout in LAYOUTS:
            reward.layout = layout
            reward.zero_grad()
            reward.score_steps(batch).logits.square().sum().backward()
            found.append([p.grad.clone() for p in reward.parameters() if p.grad is not None])
    for other in found[1:]:
        gaps = [far(a, b) for a, b in zip(found[0], other, strict=True) if b.abs().max() > 1e-12]
        assert max(gaps) < 1e-7


@pytest.mark.parametrize("head", HEADS)
def test_a_saved_model_scores_equally(head, tmp_path):
    reward, batch = process_of(head), step_batch()
    reward.save(tiny_tokenizer(), tmp_path)
    again = ProcessRewardModel.open(tmp_path)
    assert again.separator == END
    assert again.settings == reward.settings
    assert torch.equal(again.score_steps(batch).scores, reward.score_steps(batch).scores)


def test_a_process_reward_model_is_no_policy(tmp_path):
    process_of("classes").save(tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match="is a reward model: its heads score responses"):
        Actor.load(ModelConfig(path=str(tmp_path)))


def test_a_damaged_file_is_refused(tmp_path):
    process_of("classes").save(tiny_tokenizer(), tmp_path)
    (tmp_path / "step_head.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="copy both again"):
        ProcessRewardModel.open(tmp_path)


def with_head(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A language model in ``folder`` whose file also holds ``tensors``."""
    save_model(small_model("qwen2", torch.float64), tiny_tokenizer(), folder)
    own = load_file(folder / "model.safetensors")
    save_file({**own, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_layout_of_qwen_math_prm_is_read(tmp_path):
    reward = process_of("mlp")
    assert reward.step_head is not None
    head = reward.step_head.state_dict()
    with_head(tmp_path, {name.replace("layers", "score"): t for name, t in head.items()})
    again = ProcessRewardModel.open(tmp_path, separator=END)
    assert again.settings.head == "mlp"
    assert torch.equal(
        again.score_steps(step_batch()).scores, reward.score_steps(step_batch()).scores
    )


def test_a_published_folder_without_a_separator_asks_for_one(tmp_path):
    with_head(tmp_path, {"v_head.summary.weight": torch.zeros(1, 64, dtype=torch.float64)})
    with pytest.raises(ModelError, match="does not name the separator"):
        ProcessRewardModel.open(tmp_path).score_steps(step_batch())


def classifier(folder: Path) -> Any:
    """transformers' own classifier of tokens, which TRL's PRMTrainer trains, written to ``folder``."""
    config = small_model("qwen2", tie_word_embeddings=False).config
    config.num_labels = 2
    config.classifier_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForTokenClassification.from_config(config, dtype=torch.float64)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def test_a_token_classifier_of_transformers_is_read(tmp_path):
    model, batch = classifier(tmp_path).eval(), step_batch()
    reward = ProcessRewardModel.open(tmp_path, separator=END)
    expected = []
    with Float64(), torch.no_grad():
        for tokens, start in rows_of(batch):
            chances = model(input_ids=tokens[None]).logits[0].softmax(-1)[:, 1]
            for t in range(start + 1, len(tokens)):
                if tokens[t - 1 : t + 1].tolist() == [7, 8]:
                    expected.append(chances[t])
        found = reward.score_steps(batch).scores
    assert far(found, torch.stack(expected)) < 1e-9


def test_loss_and_gradients_are_those_of_a_token_classifier(tmp_path):
    """The loss of TRL's PRMTrainer: transformers' own, over one padded batch with labels of -100."""
    model, batch = classifier(tmp_path), step_batch()
    reward = ProcessRewardModel.open(tmp_path, separator=END)
    labels = iter([1, 0, 0, 1, 1])
    rows = [tokens for tokens, _ in rows_of(batch)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    targets, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (tokens, start) in enumerate(rows_of(batch)):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        for t in range(start + 1, len(tokens)):
            if tokens[t - 1 : t + 1].tolist() == [7, 8]:
                targets[row, t] = next(labels)
    with Float64():
        expected = model(input_ids=ids, attention_mask=mask, labels=targets).loss
        expected.backward()
        found = reward.score_steps(batch)
        steps = LabelledSteps(
            found.logits,
            found.scores,
            torch.tensor([1.0, 0, 0, 1, 1], dtype=torch.float64),
            torch.tensor([0, 0, 1, 1, 2]),
        )
        loss = reward_loss(step_terms(steps, reward.settings))
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in reward.base.named_parameters() if p.grad is not None}
    assert reward.step_head is not None
    own |= {f"score.{n}": p.grad for n, p in reward.step_head.layers.named_parameters()}
    assert own.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert max(float((own[n] - theirs[n]).abs().max()) for n in own) < 1e-7 * largest


def test_a_head_of_another_kind_is_refused(tmp_path):
    process_of("mlp").save(tiny_tokenizer(), tmp_path)
    with pytest.raises(ModelError, match="holds a head of kind 'mlp'"):
        ProcessRewardModel.load(
            ModelConfig(path=str(tmp_path)), build(ProcessModelConfig, {"head": "linear"})
        )
