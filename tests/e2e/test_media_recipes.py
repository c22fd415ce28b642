"""The recipes with pictures and clips, end to end on tiny real models: only model, data and sizes differ from what runs on a large one."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightrft.config.base import load_settings
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.rewards.registry import REWARDS
from lightrft.rewards.sandbox.rollout_view import PromptView, RolloutView
from lightrft.rewards.success import Success
from tests.e2e.command import ROOT, command

BOXED = r"<think>Two sides are equal.</think> So it is \boxed{%s}."
TAGGED = "<think>It barks.</think><answer>%s</answer>"
FORM = {
    "geo3k_grpo": BOXED,
    "mathvista_grpo": BOXED,
    "aqa_grpo": TAGGED,
    "lmm_r1_fre_text": TAGGED,
    "lmm_r1_mgt_geo": TAGGED,
}

# recipe, data source, label, a right answer, a wrong one, rewards: both, without the form, wrong in form, wrong without
GRADED = [
    ("geo3k_grpo", "geo3k", r"2 \sqrt { 3 }", r"2\sqrt{3}", "3", (1.0, 0.9, 0.1, 0.0)),
    ("mathvista_grpo", "mathvista/free_form", "1.2", "1.20", "1.3", (1.0, 0.9, 0.1, 0.0)),
    ("mathvista_grpo", "mathvista/multi_choice", "E", "E", "A", (1.0, 0.9, 0.1, 0.0)),
    ("aqa_grpo", "aqa", "B", "B", "C", (2.0, 1.0, 1.0, 0.0)),
    ("lmm_r1_fre_text", "", "$3$", "3", "4", (1.5, 1.0, 0.5, 0.0)),
    ("lmm_r1_mgt_geo", "", "$3$", "3", "4", (1.5, 1.0, 0.5, 0.0)),
]


def graded(config: RLConfig, source: str, label: str, text: str) -> tuple[float, bool]:
    """The weighted sum of the recipe's terms, and whether the response is right."""
    terms = config.reward.per_source.get(source, config.reward.terms)
    prompt = PromptView("p", [], "", label, None, source, {})
    rollout = RolloutView(prompt, [], [], [], [], "stop", 0, 0, text)
    values = {term.label: REWARDS[term.function](rollout, **term.options) for term in terms}
    total = sum(term.weight * values[term.label] for term in terms)
    outcome = Success(config.reward, config.eval.threshold).outcome(source, total, values)
    assert outcome is not None
    return total, outcome >= config.eval.threshold


@pytest.mark.parametrize(("name", "source", "label", "right", "wrong", "rewards"), GRADED)
def test_the_rewards_of_a_recipe_tell_right_from_wrong_and_see_the_form(
    name, source, label, right, wrong, rewards
):
    config = load_settings(RLConfig, [ROOT / "recipes" / f"{name}.yaml"]).settings
    form, bare = FORM[name], FORM[name].partition("</think>")[2]
    said = [form % right, bare % right, form % wrong, bare % wrong]
    found = [graded(config, source, label, text) for text in said]
    assert [total for total, _ in found] == pytest.approx(rewards)
    assert [is_right for _, is_right in found] == [True, True, False, False]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, clips, and a file of four rows in the layout that each recipe reads."""
    folder = tmp_path_factory.mktemp("media")
    rng = np.random.default_rng(0)
    rows: dict[str, list[dict[str, Any]]] = {
        "geo3k": [],
        "mathvista": [],
        "aqa": [],
        "mmau": [],
        "vermulti": [],
    }
    for k in range(4):
        Image.fromarray(rng.integers(0, 256, (32, 32 + 8 * k, 3), dtype=np.uint8)).save(
            folder / f"{k}.png"
        )
        with wave.open(str(folder / f"{k}.wav"), "wb") as clip:
            clip.setparams((1, 2, 16000, 0, "NONE", ""))
            clip.writeframes(rng.integers(-3000, 3000, 3000 + 400 * k).astype("<i2").tobytes())
        message = [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": f"{k}.png"},
                    {"type": "text", "text": "How many?"},
                ],
            }
        ]
        kind = (
            {"choices": ["0", "1"], "question_type": "multi_choice"}
            if k < 2
            else {"question_type": "free_form"}
        )
        rows["geo3k"].append(
            {"images": [f"{k}.png"], "problem": "<image>Find x.", "answer": str(k)}
        )
        rows["mathvista"].append(
            {"question": "How many?", "image": f"{k}.png", "answer": str(k), **kind}
        )
        rows["aqa"].append(
            {
                "question_text": "Who?",
                "multi_choice": ["dog", "cat"],
                "answer": k % 2,
                "audio_path": f"{k}.wav",
            }
        )
        rows["mmau"].append(
            {
                "audio_id": f"./{k}.wav",
                "question": "Who?",
                "choices": ["dog", "cat"],
                "answer": "cat",
            }
        )
        rows["vermulti"].append({"message": json.dumps(message), "answer": f"${k}$"})
    for name, made in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(made))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "reader", "held_out"),
    [
        ("geo3k_grpo", "qwen2_5_vl", "geo3k", "geo3k"),
        ("mathvista_grpo", "qwen2_5_vl", "mathvista", "mathvista"),
        ("aqa_grpo", "qwen2_audio", "aqa", "mmau"),
        ("lmm_r1_mgt_geo", "qwen2_5_vl", "vermulti", ""),
    ],
)
def test_a_recipe_takes_a_step_on_rows_of_its_layout(
    name, family, reader, held_out, folder, tmp_path, capsys
):
    save_tiny_media(family, tmp_path / "model")
    shown = (
        [f"eval.data.sources=[{{path: {folder}/{held_out}.json, reader: {held_out}}}]"]
        if held_out
        else []
    )
    outcome = command(
        capsys,
        "rl",
        ROOT / "recipes" / f"{name}.yaml",
        f"model={tmp_path / 'model'}",
        f"data.sources=[{{path: {folder}/{reader}.json, reader: {reader}}}]",
        *shown,
        f"run.dir={tmp_path}",
        "run.progress=false",
        "log.tensorboard=false",
        "reward.workers=1",
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "sampling.max_new_tokens=4",
        "eval.sampling.max_new_tokens=4",
        "train.steps=1",
        "train.num_mini_batches=1",
    )
    # A model with random weights may get no reward at all, and a run that learns nothing ends with 2.
    assert outcome.status == 0 or "nothing was trained (steps: 1)" in outcome.err, outcome.err
    answers = [
        json.loads(line)
        for line in (tmp_path / name / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 4
    files = {f.name for f in (tmp_path / name / "media").iterdir()}
    for answer in answers:
        assert len(answer["prompt"]["attachments"]) == 1
        assert set(answer["prompt"]["attachments"]) <= files
        assert set(answer["terms"]) <= {"math", "multiple_choice", "format"}
        assert not answer["failed"]
