"""Rows with pictures, clips and sounds beside rows of text: through the same verbs, killed and gone on with bit for bit."""

from __future__ import annotations

import io
import json
import signal
import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.diagnostics.replay import replay
from lightrft.engines.native import NativeEngine
from lightrft.models.actor import Actor
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.multimodal.merge_inputs import media_token_ids
from lightrft.models.multimodal.towers import Tower
from lightrft.models.processors import load_processor
from lightrft.models.sampled_distribution import distribution_of
from lightrft.models.tiny import save_tiny_media
from lightrft.rollout.serialization import load_batch
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from tests.e2e.command import assert_refused, command
from tests.e2e.test_resume import assert_same_end, start

PICTURES, EVERYTHING = "qwen2_5_vl", "qwen2_5_omni_thinker"


def picture(path: Path, seed: int, size: tuple[int, int]) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def sound(path: Path, seed: int, samples: int) -> str:
    values = np.random.default_rng(seed).normal(0, 3000, samples).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(values.tobytes())
    return path.name


@pytest.fixture(scope="module", params=[PICTURES, EVERYTHING])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def root(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ``family``, and rows with and without what it reads."""
    folder = tmp_path_factory.mktemp(family)
    save_tiny_media(family, folder / "model", hidden_size=32)
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}+{i}=", "label": str(2 * i), "response": str(2 * i)} for i in range(4)
    ]
    for i in range(4):
        name = picture(folder / f"p{i}.png", i, (12 + 8 * i, 20))
        rows.append(
            {
                "prompt": "which?",
                "images": [name],
                "label": "1",
                "response": "1 of them",
                "level": i,
            }
        )
    if family == EVERYTHING:
        for i in range(2):
            rows.append(
                {
                    "prompt": "who?",
                    "audios": [sound(folder / f"s{i}.wav", i, 3000 + 2000 * i)],
                    "label": "1",
                    "response": "1",
                }
            )
    both = [
        {"type": "image", "image": "p0.png"},
        {"type": "text", "text": "and"},
        {"type": "image", "image": "p1.png"},
    ]
    rows.append(
        {
            "messages": [{"role": "user", "content": both}, {"role": "assistant", "content": "11"}],
            "label": "1",
        }
    )
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held.jsonl").write_text(
        json.dumps({"prompt": "held?", "images": ["p2.png"], "label": "1"}) + "\n"
    )
    (folder / "rewards.py").write_text(
        "def ones(rollout):\n    assert not any(isinstance(v, bytes) for v in "
        "rollout.prompt.columns.values()), 'raw media'\n    assert not "
        "set(rollout.prompt.columns) & {'images', 'audios'} and not hasattr(rollout.prompt, "
        "'media')\n    return sum(rollout.token_ids) % 7 / 7\n"
    )
    return folder


@pytest.fixture
def tree(root: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {"sources": [{"path": str(root / "train.jsonl")}]},
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "sampling": {"max_new_tokens": 5},
        "reward": {"terms": [f"{root / 'rewards.py'}:ones"]},
        "algorithm": {"preset": "grpo"},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 4},
        "log": {"tensorboard": False},
    }


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_on_rows_with_and_without_media_trains_and_keeps_what_people_see_of_them(
    tree, root, tmp_path, family
):
    held = {
        "eval": {"data": {"sources": [str(root / "held.jsonl")]}, "sampling": {"max_new_tokens": 4}}
    }
    summary = run_rl(build(RLConfig, deep_merge(tree, held)))
    assert summary["finished"] and summary["tokens_trained"] > 0
    assert not summary.get("tokens_failed")
    drawn = [
        row
        for file in sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
        for row in lines(file)
    ]
    kept = {p.name for p in (tmp_path / "run" / "media").iterdir()}
    named = [set(row["prompt"]["attachments"]) for row in drawn]
    assert set().union(*named) <= kept and kept
    assert any(not names for names in named) and any(len(names) == 2 for names in named)
    assert all("media" not in row["prompt"] for row in drawn)
    shown = json.loads((tmp_path / "run" / "samples.json").read_text())["before"][0]
    assert len(shown["attachments"]) == 1 and shown["attachments"][0] in kept


def test_what_a_run_exports_loads_with_its_processors_and_says_what_the_run_said(
    tree, root, tmp_path
):
    run_rl(build(RLConfig, deep_merge(tree, {"train": {"steps": 1}, "log": {"batches_every": 1}})))
    config = ModelConfig(path=str(tmp_path / "run" / "model"), dtype="float32")
    tokenizer = load_tokenizer(config)
    before, after = (
        load_processor(ModelConfig(path=str(root / "model")), tokenizer),
        load_processor(config, tokenizer),
    )
    assert before is not None and after is not None
    assert set(before.parts) == set(after.parts)
    batch = load_batch(tmp_path / "run" / "batches" / "step_000001")
    assert batch.prompts.media
    with torch.no_grad():
        actor = Actor.load(ModelConfig(path=str(root / "model"), dtype="float32"))
        # Sampling bans what the model reads as media.
        banned = media_token_ids(actor.base.config, actor.family)
        drawn_from = distribution_of(SamplingConfig(), (), banned)
        start = actor.score(batch, temperature=drawn_from).logprobs
        after_it = Actor.load(config).score(batch, temperature=drawn_from).logprobs
        moved = after_it - batch.behavior_logprobs
    assert (start - batch.behavior_logprobs).abs().max() < 1e-5
    assert moved.abs().max() > 1e-3


def test_a_kept_batch_with_media_replays_to_the_bit(tree, tmp_path):
    run_rl(build(RLConfig, deep_merge(tree, {"train": {"steps": 1}, "log": {"batches_every": 1}})))
    kept = load_batch(tmp_path / "run" / "batches" / "step_000001")
    again = replay(tmp_path / "run", 1).batch
    assert again.advantages.equal(kept.advantages)
    assert {k: r.values.shape for k, r in again.prompts.media.items()} == {
        k: r.values.shape for k, r in kept.prompts.media.items()
    }


@pytest.mark.slow
def test_a_killed_run_with_media_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path):
    rollout = {"oversample": 1.5, "carry_over": True}
    tree = deep_merge(
        tree,
        {
            "checkpoint": {"every": 1, "keep": 10},
            "train": {"num_mini_batches": 2},
            "rollout": rollout,
        },
    )
    tree = deep_merge(
        tree,
        {
            "algorithm": {"old_logprobs": "rollout"},
            "optimizer": {"lr_of": {"tower": 1e-3, "projector": 5e-3}},
        },
    )
    whole = start(tree, "whole", "never", 0, tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = start(tree, "killed", "update", 5, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = start(tree, "killed", "never", 0, tmp_path)
    assert again.returncode == 0, again.stderr
    assert_same_end(tmp_path / "whole", tmp_path / "killed", 4)
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / name / "media").iterdir()}
        for name in ("whole", "killed")
    ]
    assert files[0] == files[1]


def test_fine_tuning_on_rows_with_and_without_media_lowers_the_loss_and_goes_on_bit_for_bit(
    tree, root, tmp_path
):
    tree = {
        k: v for k, v in tree.items() if k not in ("rollout", "sampling", "algorithm", "reward")
    }
    tree = deep_merge(tree, {"batch_size": 4, "train": {"steps": 8}, "checkpoint": {"every": 4}})
    run_sft(build(SFTConfig, tree))
    losses = [row["loss"] for row in lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses[-1] < losses[0] / 2
    half = deep_merge(tree, {"run": {"name": "half"}, "train": {"steps": 4}})
    run_sft(build(SFTConfig, half))
    run_sft(build(SFTConfig, deep_merge(half, {"train": {"steps": 8}})))
    assert [row["loss"] for row in lines(tmp_path / "half" / "metrics.jsonl")] == losses


class Calls:
    """How many rows each tower read, call by call, in generation and with and without gradient."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.drawing = False
        features, generate = Tower.features, NativeEngine.generate

        def counted(tower: Tower, model: Any, inputs: dict[str, Any]) -> Any:
            where = (
                "generation" if self.drawing else "update" if torch.is_grad_enabled() else "scoring"
            )
            self.seen.append((where, tower.kind, len(inputs[tower.inputs[1]])))
            return features(tower, model, inputs)

        def drawn(*values: Any, **options: Any) -> Any:
            self.drawing = True
            try:
                yield from generate(*values, **options)
            finally:
                self.drawing = False

        patch.setattr(Tower, "features", counted)
        patch.setattr(NativeEngine, "generate", drawn)


def test_with_eight_answers_a_prompt_a_tower_sees_each_picture_once_in_generation_and_once_in_each_pass(
    tree, root, tmp_path, monkeypatch
):
    """Passes: old log-probs, the reference and the update; the checks of the layout and of the engine's log-probs are left out."""
    calls = Calls(monkeypatch)
    pictures = [
        json.dumps({"prompt": "which?", "images": [f"p{i}.png"], "label": "1"}) for i in range(3)
    ]
    (root / "three.jsonl").write_text("\n".join(pictures) + "\n")
    kl = {"where": "loss", "estimator": "k3", "coef": 0.1}
    once = {
        "model": {"check_layout": False},
        "engine": {"check_logprobs": False},
        "data": {"sources": [str(root / "three.jsonl")]},
        "rollout": {"prompts_per_step": 3, "group_size": 8},
        "algorithm": {"preset": "grpo", "kl": kl, "shaping": [], "filters": []},
        "train": {"steps": 1, "num_mini_batches": 1, "ppo_epochs": 2},
    }
    tree["data"] = {}
    run_rl(build(RLConfig, deep_merge(tree, once)))
    assert Counter(calls.seen) == Counter(
        # Two updates, a pass each.
        {
            ("generation", "image", 3): 1,
            ("scoring", "image", 3): 2,
            ("update", "image", 3): 2,
        }
    )


def test_rows_of_text_need_no_tower(tree, root, monkeypatch):
    calls = Calls(monkeypatch)
    (root / "text.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}=", "label": "1"}) + "\n" for i in range(4))
    )
    tree["data"] = {"sources": [str(root / "text.jsonl")]}
    run_rl(build(RLConfig, deep_merge(tree, {"train": {"steps": 1}})))
    assert calls.seen == []


def test_eval_and_generate_answer_rows_with_media_and_name_what_is_attached(
    tree, root, tmp_path, capsys
):
    model = root / "model"
    words = [f"model={model}", f"reward.terms=[{root / 'rewards.py'}:ones]", f"run.dir={tmp_path}"]
    outcome = command(
        capsys,
        "eval",
        *words,
        f"eval.data.sources=[{root / 'train.jsonl'}]",
        "eval.sampling.max_new_tokens=4",
    )
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["eval/failed"] == 0
    answered = lines(tmp_path / "eval" / "rollouts" / "eval_000000.jsonl")
    assert {n for row in answered for n in row["prompt"]["attachments"]} == {
        p.name for p in (tmp_path / "eval" / "media").iterdir()
    }
    output = tmp_path / "answers.jsonl"
    outcome = command(
        capsys,
        "generate",
        *words,
        f"data.sources=[{root / 'train.jsonl'}]",
        f"output={output}",
        "sampling.max_new_tokens=4",
    )
    assert outcome.status == 0, outcome.err
    said = {row["id"]: row.get("attachments", []) for row in lines(output)}
    assert said == {row["prompt"]["id"]: row["prompt"]["attachments"] for row in answered}


@pytest.fixture
def chat(capsys, monkeypatch, root):
    def run(typed: str, *words: str):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        options = ["sampling.max_new_tokens=5", "sampling.temperature=0", *words]
        return command(capsys, "chat", f"model={root / 'model'}", *options)

    return run


def test_a_picture_in_a_chat_goes_with_the_next_message_and_stays_in_the_conversation(chat, root):
    told = chat(f"/image {root / 'p0.png'}\nwhich?\nsure?\n")
    assert told.status == 0 and not told.err
    assert told.out.count("\n") == 2
    assert (
        chat("which?\n", f"attach=[{root / 'p0.png'}]").out.splitlines()[0]
        == told.out.splitlines()[0]
    )
    others = [
        chat(f"/image {root / name}\nwhich?\n").out for name in ("p1.png", "p2.png", "p3.png")
    ]
    assert {told.out.splitlines()[0]} != {out.strip() for out in (*others, chat("which?\n").out)}


def test_a_chat_forgets_what_is_attached_where_asked(chat, root):
    assert chat(f"/image {root / 'p0.png'}\n/clear\nwhich?\n").out == chat("which?\n").out


def test_a_file_that_is_not_there_is_told_and_the_chat_goes_on(chat):
    outcome = chat("/image nowhere.png\nwhich?\n")
    assert "nowhere.png" in outcome.err
    assert outcome.out == chat("which?\n").out
    assert_refused(chat("which?\n", "attach=[nowhere.png]"), "nowhere.png")


def test_a_kind_that_the_model_does_not_read_is_told(
    chat, root, family, capsys, monkeypatch, model_folder
):
    name = sound(root / "extra.wav", 7, 3000)
    if family == PICTURES:
        assert "this model reads image, video" in chat(f"/audio {root / name}\n").err
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n"))
    picture = root / "p0.png"
    assert_refused(
        command(capsys, "chat", f"model={model_folder}", f"attach=[{picture}]"),
        "p0.png",
        "reads text alone",
    )
    assert "of kind unknown" in chat("x\n", f"attach=[{root / 'train.jsonl'}]").err


def test_a_line_that_only_begins_with_a_slash_is_a_message(chat):
    assert chat("/tmp is what?\n").out.count("\n") == 1
