"""Every leaf of the tree that ``lightrft rl`` reads is set to another legal value, and something is then different."""

from __future__ import annotations

import copy
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from lightrft.config.base import Settings, build, deep_merge
from lightrft.config.model import LoRAConfig, ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig, RewardModelConfig
from lightrft.config.verbs import RLConfig
from lightrft.models.actor import Actor
from lightrft.models.loading.adapter_folder import BASE_FILE
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.models.tiny.text_families import family_model
from tests.model_helpers import unproved_model
from tests.reward_trials import try_each_reward_once
from tests.settings.flips import FLIPS, INERT, ROWS
from tests.settings.probes import PROBES, refusal
from tests.unit.datasets.media_files import picture, sound

BASE: dict[str, Any] = {
    "run": {"dir": "{tmp}/runs", "name": "run"},
    "model": {"path": "{root}/policy", "dtype": "float32"},
    "data": {"sources": [{"path": ROWS}]},
    "rollout": {"prompts_per_step": 2, "group_size": 2},
    "sampling": {"max_new_tokens": 5},
    "reward": {
        "terms": ["{root}/reward.py:digits"],
        "per_source": {"sums": [{"function": "{root}/reward.py:digits", "options": {}}]},
    },
    "algorithm": {"preset": "grpo"},
    "optimizer": {"lr": 0.01},
    "train": {"steps": 1},
    "log": {"tensorboard": False},
}
FILES = {
    "reward.py": """
import signal

def digits(rollout, modulus=7):
    return sum(rollout.token_ids) % modulus / modulus

def half(rollout):
    return 0.5

def length(rollout):
    return float(len(rollout.text))

def slow(rollout):
    # Longer than a short deadline, which is over soon.
    if rollout.sample == 0 and 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 60:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            pass
    return digits(rollout)

def large(rollout):
    if rollout.sample == 0:
        return float(len(bytearray(200 * 2**20)) > 0)
    return digits(rollout)
""",
    "rows.py": """
def source(count=6):
    return [{"prompt": f"{i}*2=", "label": str(2 * i), "response": str(2 * i)} for i in range(count)]

def reader(row, sign="+"):
    return {**row, "prompt": f"{row['prompt']}{sign}"}
""",
}


def leaves(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key, through lists and tables too, with its type."""
    for name, field in cls.model_fields.items():
        below = list(dict.fromkeys(branches(field.annotation)))
        for branch in below:
            yield from leaves(branch, f"{prefix}{name}.")
        if not below:
            yield f"{prefix}{name}", field.annotation


def branches(kind: Any) -> Iterator[type[Settings]]:
    if isinstance(kind, type) and issubclass(kind, Settings):
        yield kind
    for inner in typing.get_args(kind):
        yield from branches(inner)


def has_one_value(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal and len(typing.get_args(kind)) == 1


KEYS = [key for key, kind in leaves(RLConfig) if not has_one_value(kind)]
WHOLE_RUNS = ("run", "run_again", "go_on", "command", "asked_of_the_hub")
"""Probes that train: each takes seconds, and together they take a tenth of all tests."""


def case_of(key: str) -> Any:
    """Return the parameter of a test of the setting ``key``, marked slow where its probe trains."""
    return pytest.param(key, marks=pytest.mark.slow if FLIPS[key].probe in WHOLE_RUNS else ())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a third tokenizer, rows of several kinds, rewards."""
    folder = tmp_path_factory.mktemp("root")
    tokenizer, backwards = (
        tiny_tokenizer(),
        tiny_tokenizer(chars="\n" + "".join(chr(c) for c in range(126, 31, -1))),
    )
    for tokens in (tokenizer, backwards):
        tokens.chat_template = tokens.chat_template.replace(
            "{{ m['content'] }}", "{{ m['content'] }}{{ '!' if shout else '' }}"
        )
        tokens.chat_template = "{{ tools | tojson if tools else '' }}" + tokens.chat_template
    for seed, name in enumerate(("policy", "second")):
        model = tiny_model(
            "qwen2", seed=seed + 1, hidden_size=32, intermediate_size=64, vocab_size=len(tokenizer)
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    adapters = ModelConfig(path=str(folder / "policy"), lora=LoRAConfig(rank=2))
    save_model(Actor.load(adapters), None, folder / "adapters", merge=False)
    (folder / "adapters" / BASE_FILE).unlink()
    heads = RewardModelConfig(heads=[{"name": "good"}, {"name": "short"}])  # type: ignore[arg-type]
    for seed, name in enumerate(("judge", "strict")):
        model = tiny_model("qwen2", seed=3, hidden_size=32, vocab_size=len(tokenizer))
        RewardModel(model, ModelConfig(), heads, seed=seed).save(tokenizer, folder / name)
    step_model = tiny_model("qwen2", seed=3, hidden_size=32, vocab_size=len(tokenizer))
    separator = Separator("#", tuple(tokenizer.encode("#", add_special_tokens=False)))
    process = ProcessRewardModel(
        step_model, ModelConfig(), ProcessModelConfig(), separator=separator
    )
    process.save(tokenizer, folder / "steps")
    unproved_model().save_pretrained(folder / "unproved")
    family_model("qwen3_moe").save_pretrained(folder / "experts")
    tiny_tokenizer().save_pretrained(folder / "experts")
    family_model("gpt2", vocab_size=len(tiny_tokenizer())).save_pretrained(folder / "dropout")
    tiny_tokenizer().save_pretrained(folder / "dropout")
    backwards.save_pretrained(folder / "backwards")
    save_tiny_media("qwen2_5_vl", folder / "reader")
    rows = [
        {
            "prompt": f"{i}+{i}=",
            "response": str(2 * i),
            "label": str(2 * i),
            "data_source": "sums" if i % 2 else "odd",
            "question": f"Twice {i}?",
            "solution": f"is {2 * i}",
            "reference": f"{i}",
            "kind": "x",
            "key": f"k{i}",
            "gear": [{"name": f"f{i}"}],
            "level": i + 1,
            "form": {"regex": "[0-9]{2}"},
            "id": f"i{i}",
        }
        for i in range(8)
    ]
    rows.append({**rows[0], "prompt": "1+1+1+1+1+1=", "id": "long"})
    write(folder / "rows.jsonl", rows)
    write(folder / "marked.jsonl", [{"prompt": "<|im_start|>1+1=", "label": "2", "response": "2"}])
    write(
        folder / "other.jsonl",
        [{"prompt": f"{i}-1=", "label": str(i - 1), "response": str(i - 1)} for i in range(8)],
    )
    pairs = [
        {
            "prompt": f"{i}+1=",
            "chosen": f"{i + 1}",
            "rejected": "x",
            "notes": "<answer>A</answer>",
        }
        for i in range(8)
    ]
    write(folder / "pairs.jsonl", pairs)
    rated = [{"prompt": f"{i}+1=", "response": "2", "rating": 2, "label": 0.5} for i in range(8)]
    write(folder / "rated.jsonl", rated)
    (folder / "own.jinja").write_text("{{ prompt }}{{ responses }}", encoding="utf-8")
    (folder / "split").mkdir()
    write(folder / "split" / "train.jsonl", rows[:4])
    write(folder / "split" / "test.jsonl", rows[4:])
    write(folder / "broken.jsonl", [*rows, {"prompt": None}])
    talk = [
        {"role": r, "content": c} for r, c in zip(("user", "assistant") * 2, "abcd", strict=True)
    ]
    write(folder / "talks.jsonl", [{"messages": talk}])
    begun = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is"}]
    write(folder / "begun.jsonl", [{"messages": begun, "response": " 2"}])
    told = {
        "prompt": "1+1=",
        "label": "2",
        "response": "2",
        "advice": "Be kind.",
        "past": [["a", "b"]],
    }
    write(folder / "told.jsonl", [told])
    save_tiny_media("qwen2_audio", folder / "listener")
    write_media(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def write_media(folder: Path) -> None:
    """Pictures, also under the same names in another folder, clips, sounds, and rows that name two of each kind."""
    for k, name in enumerate("abcd"):
        picture(folder / f"{name}.png", 20, 24 + 8 * k, seed=k)
        picture(folder / "split" / f"{name}.png", 20, 24 + 8 * k, seed=k + 9)
        sound(folder / f"{name}.wav", seconds=0.3 + k / 10, rate=8000)
        shades = [Image.new("RGB", (16, 16 + 8 * k), (40 * t, k, 0)) for t in range(5)]
        shades[0].save(
            folder / f"{name}.gif", save_all=True, append_images=shades[1:], duration=400
        )
    kinds = {
        "pictures": ("image", "png"),
        "clips": ("video", "gif"),
        "sounds": ("audio", "wav"),
        "links": ("image", "png"),
    }
    for source, (column, suffix) in kinds.items():
        start = "https://media.test/" if source == "links" else ""
        named = [
            {column: f"{start}{one}.{suffix}", "other": f"{start}{two}.{suffix}"}
            for one, two in ("ac", "bd")
        ]
        write(
            folder / f"{source}.jsonl",
            [{"prompt": "what?", "response": "this", **row} for row in named],
        )


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of ``tree`` with ``value`` at ``key``; of a list the first, of a table of rewards its own source."""
    tree = copy.deepcopy(tree)
    *parts, leaf = key.split(".")
    place: Any = tree
    for part in parts:
        place = place.setdefault(part, {})
        place = place["sums"] if part == "per_source" else place
        if isinstance(place, list):
            if not isinstance(place[0], dict):
                place[0] = {("path" if part == "sources" else "function"): place[0]}
            place = place[0]
    place[leaf] = value
    return tree


def tree_of(key: str) -> dict[str, Any]:
    """What both sides of the comparison share."""
    branch = FLIPS[key].context.get("algorithm", {})
    base = {**BASE, "algorithm": {}} if "preset" in branch else BASE
    return deep_merge(base, FLIPS[key].context)


@pytest.fixture(autouse=True)
def _rewards_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    try_each_reward_once(monkeypatch)


seen_before: dict[str, Any] = {}


def seen(probe: str, tree: dict[str, Any], root: Path, factory: pytest.TempPathFactory) -> Any:
    """What ``probe`` says of ``tree``; asked once."""
    text = json.dumps(tree).replace("{root}", str(root))
    if f"{probe} {text}" not in seen_before:
        seen_before[f"{probe} {text}"] = refusal(
            PROBES[probe], json.loads(text), factory.mktemp("probe")
        )
    return seen_before[f"{probe} {text}"]


def was_refused(found: Any) -> bool:
    return isinstance(found, tuple) and found[0] == "refused"


def test_every_setting_has_a_flip_and_every_flip_a_setting() -> None:
    assert sorted(set(KEYS) ^ {*FLIPS, *INERT}) == []
    assert sorted(set(FLIPS) & set(INERT)) == []


def test_a_setting_that_its_branch_does_not_read_acts_in_another() -> None:
    assert [key for key, other in INERT.items() if other not in FLIPS] == []


def test_no_setting_has_a_single_value() -> None:
    assert sorted(key for key, kind in leaves(RLConfig) if has_one_value(kind)) == []


@pytest.mark.parametrize("probe", sorted(set(PROBES) - {"asked_of_datasets"}))
def test_a_probe_repeats_itself(
    probe: str, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Else every setting would seem to act."""
    key = next(key for key, flip in FLIPS.items() if flip.probe == probe)
    tree = json.loads(json.dumps(tree_of(key)).replace("{root}", str(root)))
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    first, second = (refusal(PROBES[probe], tree, folder) for folder in folders)
    assert json.dumps(first, default=str).replace(str(folders[0]), "") == json.dumps(
        second, default=str
    ).replace(str(folders[1]), "")


@pytest.mark.parametrize("key", [case_of(key) for key in KEYS if key in FLIPS])
def test_another_value_is_seen(
    key: str, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flip, base = FLIPS[key], tree_of(key)
    before = seen(flip.probe, base, root, tmp_path_factory)
    after = seen(flip.probe, put(base, key, flip.value), root, tmp_path_factory)
    assert before != after
    assert flip.refused or not was_refused(before), before
    assert flip.refused or not was_refused(after), after


def test_the_base_is_legal(root: Path) -> None:
    assert (
        build(
            RLConfig,
            json.loads(json.dumps(BASE).replace("{root}", str(root)).replace("{tmp}", "x")),
        ).train.steps
        == 1
    )
