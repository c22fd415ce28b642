"""How often the host waits for the device. A GPU stands still meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.engine import EngineConfig
from lightrft.config.strategy import SamplingConfig
from lightrft.config.verbs import RLConfig
from lightrft.engines import native
from lightrft.learner import forward_passes, policy_update, process_reward
from lightrft.models.decoding.kv_decoder import KVDecoder
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.trainer import phases, rl_step
from lightrft.trainer.rl import run_rl
from lightrft.types import Prompt, Request
from tests.device.counting_device import Counts, counted
from tests.device.inside.test_equality import varied
from tests.e2e.conftest import data_folder, model_folder, rl_tree  # noqa: F401
from tests.model_helpers import small_model

PER_OPTIMIZER_STEP = 1
"""The norm of the gradient, which decides whether the step is taken."""
PER_COLUMN = 1
"""A column of log-probs or values is copied to the host once, for all micro-batches together."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> Iterator[list[Counts]]:
    """Collect the counts of every call of ``home.name``."""
    real, calls = getattr(home, name), []

    def counting(*arguments: Any, **options: Any) -> Any:
        with counted() as counts:
            result = real(*arguments, **options)
        calls.append(counts)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(home, name, counting)
        yield calls


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_p": 0.9, "top_k": 20, "min_new_tokens": 3},
        {"temperature": 0.0},
        {"repetition_penalty": 1.2, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_decoded_token_batch_costs_one_wait(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, family: str, sampling: dict[str, Any]
) -> None:
    model = small_model(family).to(device)
    engine = native.NativeEngine(KVDecoder(model), tiny_tokenizer(), EngineConfig(max_num_seqs=5))
    prompts = [Prompt(str(i), list(range(10, 14 + i))) for i in range(4)]
    requests = [
        Request(prompt, seed=7 * i + s, sample=s)
        for i, prompt in enumerate(prompts)
        for s in range(3)
    ]
    with watched(monkeypatch, native.GenerationBatch, "_advance") as calls:
        done = list(engine.generate(requests, SamplingConfig(max_new_tokens=8, **sampling)))
    assert len(done) == 12
    assert len(calls) > 8  # rows come and go
    assert [call.places for call in calls if call.waits > 1] == []


def places(counts: Counts) -> list[tuple[str, str]]:
    """Where the host waited, but for the one wait of transformers' own mask in a call in the padded layout: it reads the positions
    for packed samples."""
    return [place for place in counts.places if "masking_utils.py" not in place[1]]


ROLES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}}},
    "ppo": {"algorithm": {"preset": "ppo"}},
    "dapo": {"algorithm": {"preset": "dapo", "entropy": {"coef": 0.01}}},
    "padded": {"model": {"layout": "padded"}},
    "packed": {"model": {"layout": "packed"}},
    "activations offloaded": {"strategy": {"offload_activations": True}},
    "prime": {"algorithm": {"preset": "prime"}},
}


@pytest.mark.parametrize("role", ROLES)
def test_waits_do_not_grow_with_micro_batches(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    role: str,
) -> None:
    """One optimizer step of every trained model, in micro-batches of one row each."""
    tree = deep_merge(varied(rl_tree), {"train": {"steps": 1, "max_tokens_per_micro_batch": 1}})
    config = build(RLConfig, deep_merge(tree, ROLES[role]))
    homes = (
        (policy_update, "optimizer_step"),
        (process_reward, "optimizer_step"),
        (phases, "map_micro_batches"),
        (forward_passes, "map_micro_batches"),
    )
    with ExitStack() as stack:
        first, second, third, fourth = (
            stack.enter_context(watched(monkeypatch, *home)) for home in homes
        )
        run_rl(config)
    steps, columns = first + second, third + fourth
    assert steps
    assert [places(step) for step in steps if len(places(step)) > PER_OPTIMIZER_STEP] == []
    assert [places(column) for column in columns if len(places(column)) > PER_COLUMN] == []


PHASES, FINGERPRINT = 8, 1
"""Each timed phase of learning ends when its work is done, and the engine's weights are read once for their checksums."""


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_a_step_of_learning_waits_a_stated_number_of_times(
    rl_tree: dict[str, Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
) -> None:
    """The second step: on the first the layout is checked."""
    found = []
    for tokens in (1, 100_000):
        more = {
            "run": {"name": str(tokens)},
            "train": {"steps": 2, "max_tokens_per_micro_batch": tokens},
            "algorithm": {"preset": preset},
        }
        with watched(monkeypatch, rl_step, "learn") as calls:
            run_rl(build(RLConfig, deep_merge(varied(rl_tree), more)))
        found.append(calls[1].places)
    # Columns: log-probs of the policy; with PPO, also those of the reference, values, and values after the last token.
    trained, columns = {"grpo": (1, 1), "ppo": (2, 4)}[preset]
    assert len(found[0]) == len(found[1])
    assert (
        len(found[0]) <= PHASES + FINGERPRINT + PER_OPTIMIZER_STEP * trained + PER_COLUMN * columns
    )
