"""``dpo``, ``kto``, ``distill`` and ``rm`` on rows with images, video and audio, and with adapters: a few steps of tiny real models."""

from __future__ import annotations

import json
import math
import wave
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DistillVerbConfig, DPOConfig, KTOConfig, PRMVerbConfig, RMConfig
from lightrft.datasets.preference.preference_dataset import PreferenceExample
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.models.actor import Actor
from lightrft.models.families import FAMILIES
from lightrft.models.tiny import save_tiny_media
from lightrft.observability.trackers import read_rows
from lightrft.trainer.distill.run import run_distill
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.process_model.run import run_process_model
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.types import Batch
from tests.e2e.command import command
from tests.e2e.test_media import picture, sound

EVERYTHING = "qwen2_5_omni_thinker"
Row = dict[str, Any]
Run = Callable[..., list[Row]]
VERBS: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "dpo": (DPOConfig, run_preference),
    "kto": (KTOConfig, run_preference),
    "distill": (DistillVerbConfig, run_distill),
    "rm": (RMConfig, run_reward_model),
    "prm": (PRMVerbConfig, run_process_model),
}
POLICIES = ("dpo", "kto", "distill")
ADAPTERS = {"lora": {"rank": 4}, "dora": {"rank": 4, "dora": True}}


def clip(path: Path, seed: int) -> str:
    """Four frames as a moving picture."""
    frames = np.random.default_rng(seed).integers(0, 256, (4, 16, 24, 3), dtype=np.uint8)
    first, *rest = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=500, lossless=True)
    return path.name


def samples(file: Path) -> np.ndarray:
    with wave.open(str(file)) as opened:
        frames = opened.readframes(opened.getnframes())
    return np.frombuffer(frames, dtype=np.int16).astype(np.float32) / 32768


def media_of(kind: str, folder: Path, i: int) -> Row:
    """The columns of a row with something of ``kind``."""
    if kind == "image":
        return {"images": [picture(folder / f"{i}.png", i, (12 + 8 * i, 20))]}
    if kind == "video":
        return {"videos": [clip(folder / f"{i}.webp", i)]}
    if kind == "audio":
        return {"audios": [sound(folder / f"{i}.wav", i, 3000 + 2000 * i)]}
    return {}


def write_rows(folder: Path, kinds: list[str]) -> None:
    """Write the rows of every verb: two with each of ``kinds``, one of whose responses is right."""
    pairs, labelled, answered, steps = [], [], [], []
    for kind in kinds:
        for i in range(2):
            asked = {"prompt": f"{kind} {i}?", **media_of(kind, folder, i)}
            pairs.append({**asked, "chosen": f"{kind[0]}{i}", "rejected": "none at all"})
            answer = f"{kind[0]}{i}" if i else "none at all"
            labelled.append({**asked, "completion": answer, "label": bool(i)})
            answered.append({**asked, "response": f"{kind[0]}{i}"})
            taken = [f"{kind[0]}{i}", "none at all"]
            steps.append({**asked, "completions": taken, "labels": [True, False]})
    for verb, rows in zip(VERBS, (pairs, labelled, answered, pairs, steps), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{verb}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads all kinds, a teacher of its family, and rows with each kind and with text alone."""
    folder = tmp_path_factory.mktemp("everything")
    save_tiny_media(EVERYTHING, folder / "model", hidden_size=32)
    save_tiny_media(EVERYTHING, folder / "teacher", hidden_size=32, seed=3)
    write_rows(folder, ["image", "video", "audio", "text"])
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Rows of text, next to links to a model and to a teacher."""
    from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("plain")
    (folder / "model").symlink_to(model_folder)
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 48, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    tiny_model("qwen2", seed=7, **sizes).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    write_rows(folder, ["text", "more"])
    return folder


@pytest.fixture
def train(tmp_path: Path) -> Run:
    """``train(verb, folder, changes...)``: the metrics of a run whose steps take all rows in ``folder``."""

    def run(verb: str, folder: Path, *changes: Row) -> list[Row]:
        tree: Row = {
            "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "data": {"sources": [{"path": str(folder / f"{verb}.jsonl")}]},
            "batch_size": len((folder / f"{verb}.jsonl").read_text().splitlines()),
            "optimizer": {"lr": 1e-3 if verb == "prm" else 1e-2},
            "train": {"steps": 2},
            "log": {"tensorboard": False},
        }
        if verb == "distill":
            tree["teacher"] = {"path": str(folder / "teacher")}
        if verb == "dpo":
            tree["preference"] = {"reference": {"cache_dir": str(tmp_path / "cache")}}
        for change in changes:
            tree = deep_merge(tree, change)
        config_class, function = VERBS[verb]
        config = build(config_class, tree)
        function(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


def steady(row: Row) -> Row:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "seconds", "tokens_per"))}


def assert_resumes(train: Run, verb: str, folder: Path, whole: list[Row], *changes: Row) -> None:
    """One step and one more have the metrics of the two steps ``whole``, bit for bit."""
    halves = {"run": {"name": "halves"}}
    train(verb, folder, *changes, halves, {"train": {"steps": 1}})
    again = train(verb, folder, *changes, halves)
    assert [steady(row) for row in again] == [steady(row) for row in whole]


@pytest.mark.parametrize("verb", VERBS)
def test_rows_with_every_kind_of_media_lower_the_loss_and_resume_bit_for_bit(
    train, everything, verb
):
    rows = train(verb, everything)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert_resumes(train, verb, everything, rows)


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("verb", VERBS)
def test_adapters_alone_are_trained_and_resume_bit_for_bit(train, plain, tmp_path, verb, adapters):
    lora = {"model": {"lora": ADAPTERS[adapters]}}
    rows = train(verb, plain, lora)
    assert rows[1]["loss"] < rows[0]["loss"]
    role = "reward_model" if verb in ("rm", "prm") else "policy"
    state = load_file(tmp_path / f"run/checkpoints/step_000002/{role}/state.safetensors")
    trained = {name for name in state if name.startswith("weights/")}
    heads = {name for name in trained if "head" in name}
    assert bool(heads) == (verb in ("rm", "prm"))
    trained -= heads
    assert trained and all("lora_" in name for name in trained)
    assert any("magnitude" in name for name in trained) == (adapters == "dora")
    start = load_file(plain / "model" / "model.safetensors")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name in start if not start[name].equal(merged[name])}
    assert changed and all(name.endswith("proj.weight") for name in changed)
    assert_resumes(train, verb, plain, rows, lora)


@pytest.mark.parametrize("verb", VERBS)
def test_adapters_learn_from_rows_with_every_kind_of_media(train, everything, verb):
    rows = train(verb, everything, {"model": {"lora": {"rank": 4}}})
    assert rows[1]["loss"] < rows[0]["loss"]


def test_adapters_that_cannot_be_added_are_written_alone_and_merged_later(
    train, plain, tmp_path, monkeypatch, capsys
):
    lora = {"model": {"lora": {"rank": 4}}}
    train("dpo", plain, lora)
    monkeypatch.setattr("lightrft.trainer.policy_run.can_merge", lambda model: False)
    train("dpo", plain, lora, {"run": {"name": "apart"}})
    apart = tmp_path / "apart" / "model"
    assert (apart / "adapter_config.json").is_file() and not (apart / "config.json").exists()
    outcome = command(capsys, "merge", apart, f"output={tmp_path / 'merged'}")
    assert outcome.status == 0, outcome.err
    found = load_file(tmp_path / "merged" / "model.safetensors")
    expected = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.quant
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("verb", POLICIES)
def test_weights_in_four_bits_train_adapters_that_resume_and_merge(
    train, plain, tmp_path, capsys, verb
):
    four_bits = {"model": {"lora": {"rank": 4}, "load_in_4bit": True}}
    rows = train(verb, plain, four_bits)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()
    assert_resumes(train, verb, plain, rows, four_bits)
    merged = [tmp_path / name for name in ("model", "of_run")]
    for source, output in zip((tmp_path / "run" / "model", tmp_path / "run"), merged):
        outcome = command(capsys, "merge", source, f"output={output}")
        assert outcome.status == 0, outcome.err
    one, other = (load_file(folder / "model.safetensors") for folder in merged)
    start = load_file(plain / "model" / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], start[name]) for name in one)
    exported = tmp_path / "exported"
    outcome = command(capsys, "export", tmp_path / "run", f"output={exported}")
    assert outcome.status == 0, outcome.err
    folder = str(tmp_path / "run" / "model")
    trained = Actor.load(ModelConfig(path=folder, dtype="float32", load_in_4bit=True))
    trained.use_attention("padded")
    whole = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits for model in (whole, trained.base))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "family"),
    [("image", "qwen2_5_vl"), ("video", "qwen2_5_vl"), ("audio", "qwen2_audio")],
)
def test_a_response_has_the_log_probs_of_a_plain_forward_of_transformers(
    train, tmp_path, monkeypatch, kind, family
):
    save_tiny_media(family, tmp_path / "model", hidden_size=32)
    write_rows(tmp_path, [kind])
    one = {"data": {"sources": [{"path": str(tmp_path / "dpo.jsonl"), "limit": 1}]}}
    batches: list[Batch] = []

    def kept(examples: Sequence[PreferenceExample]) -> Batch:
        batches.append(preference_to_batch(examples))
        return batches[-1]

    monkeypatch.setattr("lightrft.trainer.preference.run.preference_to_batch", kept)
    (row,) = train("dpo", tmp_path, one, {"batch_size": 1, "train": {"steps": 1}})
    (batch,) = batches
    loader = getattr(transformers, FAMILIES[family].loader)
    model = loader.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    prompt = batch.prompts.tokens
    chosen = batch.responses.select(torch.tensor([0])).tokens
    ids = torch.cat([prompt, chosen])[None]
    media: Row = {"attention_mask": torch.ones_like(ids)}
    if kind == "audio":
        made = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "model")(
            samples(tmp_path / "0.wav"),
            sampling_rate=16_000,
            return_attention_mask=True,
            return_tensors="pt",
        )
        media["input_features"] = made["input_features"]
        media["feature_attention_mask"] = made["attention_mask"]
    else:
        media |= {name: ragged.values for name, ragged in batch.prompts.media.items()}
        types = {model.config.image_token_id: 1, model.config.video_token_id: 2}
        media["mm_token_type_ids"] = torch.tensor([[types.get(int(i), 0) for i in ids[0]]])
        assert media["mm_token_type_ids"].any()
    with torch.no_grad():
        logits = model(input_ids=ids, **media).logits[0]
    own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, chosen[:, None])
    assert row["preference/logprobs_chosen"] == pytest.approx(float(own.sum()), abs=1e-4)
