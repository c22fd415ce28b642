"""A run leaves no model in memory: programs, notebooks and verbs of several phases train one after another in a process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.strategy.base import TrainState


def letters(rollout: Any) -> float:
    return float(len(set(rollout.text)))


PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
CALLS: dict[str, dict[str, Any]] = {
    "sft": {"data": [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]},
    "dpo": {"data": PAIRS},
    "kto": {
        "data": [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in PAIRS
            for side in ("chosen", "rejected")
        ]
    },
    "rm": {"data": PAIRS},
    "rl": {
        "data": [{"prompt": row["prompt"], "label": row["chosen"]} for row in PAIRS],
        "rewards": [letters],
        "rollout": {"prompts_per_step": 2, "group_size": 4},
        "sampling": {"max_new_tokens": 8},
    },
}


QUIET = {"run.progress": False, "run.threads": 1, "log": {"tensorboard": False}}


@pytest.mark.parametrize("verb", CALLS)
def test_models_and_optimizers_of_a_run_are_freed_at_its_end(verb: str, tmp_path: Path) -> None:
    tiny = tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    more = {} if verb == "rl" else {"batch_size": 4}
    settings = {**QUIET, **more}
    gc.collect()
    gc.disable()
    try:
        getattr(lightrft, verb)(
            model=tiny, steps=1, dir=str(tmp_path), **{**settings, **CALLS[verb]}
        )
        assert [one for one in gc.get_objects() if isinstance(one, TrainState)] == []
    finally:
        gc.enable()


def own_loop(settings: dict[str, Any]) -> None:
    """Train by the loop of a program, whose names end with the function."""
    with lightrft.Policy(**settings) as policy:
        for _ in policy:
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
            policy.sync()


def test_models_and_optimizers_of_an_own_loop_are_freed_at_its_end(tmp_path: Path) -> None:
    tiny = tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()
    given = {"model": tiny, "steps": 1, "dir": str(tmp_path), **QUIET, **CALLS["rl"]}
    gc.collect()
    gc.disable()
    try:
        own_loop(given)
        assert [one for one in gc.get_objects() if isinstance(one, TrainState)] == []
    finally:
        gc.enable()
