"""Runs with others beside the policy: a teacher, a process reward model, a reference that moves, supervised data. Each goes on from
a checkpoint bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lightrft.config.base import deep_merge
from lightrft.config.verbs import RLConfig
from lightrft.models.tiny.text import PRINTABLE, tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.strategy.checkpoint import load_state
from lightrft.trainer.rl import run_rl
from lightrft.utils.errors import ConfigError

MakeConfig = Callable[..., RLConfig]
EVERY_STEP = {"every": 1, "keep": 9}


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family and another width, the same tokenizer, and a head of more rows than it has tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_tokenizer()
    tiny_model(
        "llama", seed=9, hidden_size=24, intermediate_size=32, vocab_size=len(tokenizer) + 5
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_goes_on_bit_for_bit(
    make: MakeConfig, tmp_path: Path, steps: int = 3, **over: Any
) -> None:
    """One run of ``steps`` steps, and one that ends a step earlier and is taken up again."""
    tree = deep_merge(over, {"checkpoint": EVERY_STEP})
    run_rl(make(**deep_merge(tree, {"run": {"name": "whole"}, "train": {"steps": steps}})))
    for end in (steps - 1, steps):
        run_rl(make(**deep_merge(tree, {"run": {"name": "again"}, "train": {"steps": end}})))
    whole, again = (
        tmp_path / name / "checkpoints" / f"step_{steps:06d}" for name in ("whole", "again")
    )
    files = sorted(p.relative_to(whole) for p in whole.rglob("*.safetensors"))
    assert files == sorted(p.relative_to(again) for p in again.rglob("*.safetensors"))
    for file in files:
        left, right = load_file(whole / file), load_file(again / file)
        assert left.keys() == right.keys()
        assert [k for k in left if not left[k].equal(right[k])] == [], file
    for file in sorted((tmp_path / "whole" / "rollouts").glob("*.jsonl")):
        assert file.read_text() == (tmp_path / "again" / "rollouts" / file.name).read_text()


@pytest.mark.parametrize("kind", ["sampled", "reverse_kl", "forward_kl", "jsd"])
def test_a_policy_comes_near_to_its_teacher_without_any_reward(
    rl_config, teacher_folder, tmp_path, kind
):
    config = rl_config(
        algorithm={"preset": "opd", "distill": {"kind": kind}},
        teacher={"path": str(teacher_folder)},
        reward={"terms": []},
        rollout={"prompts_per_step": 6, "group_size": 4},
        sampling={"min_new_tokens": 6},
        train={"steps": 12},
    )
    summary = run_rl(config)
    assert summary["finished"]
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    name = "policy/teacher_kl" if kind == "sampled" else "policy/divergence"
    start, end = (sum(r[name] for r in part) / 2 for part in (rows[:2], rows[-2:]))
    assert 0 < end < 0.8 * start
    assert sum(r["rollout/tokens_failed"] for r in rows) == 0


def test_distillation_goes_on_from_a_checkpoint_bit_for_bit(rl_config, teacher_folder, tmp_path):
    over = {
        "algorithm": {"preset": "opd"},
        "teacher": {"path": str(teacher_folder)},
        "reward": {"terms": []},
    }
    assert_goes_on_bit_for_bit(rl_config, tmp_path, rollout={"group_size": 1}, **over)


def test_a_teacher_beside_a_reward_changes_the_advantages_of_each_token(
    rl_config, teacher_folder, tmp_path
):
    over = {"teacher": {"path": str(teacher_folder)}, "train": {"steps": 1}}
    run_rl(rl_config(run={"name": "plain"}, train={"steps": 1}))
    run_rl(
        rl_config(
            run={"name": "taught"}, algorithm={"distill": {"kind": "sampled", "coef": 0.1}}, **over
        )
    )

    def advantages(name: str) -> list[list[float]]:
        lines = (tmp_path / name / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        return [json.loads(line)["advantages"] for line in lines]

    assert all(len(set(row)) <= 1 for row in advantages("plain"))
    assert any(len(set(row)) > 1 for row in advantages("taught"))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_reference_that_moves_is_saved_and_goes_on_bit_for_bit(rl_config, tmp_path, decay):
    kl = {"where": "loss", "coef": 0.1, "refresh_every": 2, "refresh_decay": decay}
    assert_goes_on_bit_for_bit(rl_config, tmp_path, steps=4, algorithm={"kl": kl})
    checkpoints = tmp_path / "whole" / "checkpoints"
    held = [
        "reference" in load_state(checkpoints / f"step_{n:06d}" / "trainer") for n in (1, 2, 3, 4)
    ]
    # The third step is the first that reads it after it has moved.
    assert held == [
        False,
        False,
        True,
        True,
    ]
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    # Right after a hard copy the two are one.
    assert (rows[2]["policy/kl"] == 0.0) == (decay == 0.0)
    assert rows[3]["policy/kl"] > 0


def test_a_reference_that_never_moves_is_not_saved(rl_config, tmp_path):
    run_rl(rl_config(train={"steps": 1}))
    assert "reference" not in load_state(
        tmp_path / "run" / "checkpoints" / "step_000001" / "trainer"
    )


PRIME = {
    "algorithm": {"preset": "prime", "filters": []},
    "prm": {"threshold": 0.02, "beta": 0.5, "optimizer": {"lr": 1e-2}},
    "sampling": {"min_new_tokens": 6},
}


@pytest.mark.parametrize("forward", ["single", "double"])
def test_a_process_reward_model_is_trained_saved_and_goes_on_bit_for_bit(
    rl_config, tmp_path, forward
):
    over = deep_merge(PRIME, {"prm": {"forward": forward}})
    assert_goes_on_bit_for_bit(rl_config, tmp_path, **over)
    states = [
        load_file(
            tmp_path / "whole" / "checkpoints" / f"step_{n:06d}" / "prm" / "state.safetensors"
        )
        for n in (1, 3)
    ]
    assert any(not states[0][k].equal(states[1][k]) for k in states[0] if k.startswith("weights/"))
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert all(r["prm/optimizer_steps"] == 1 for r in rows)
    assert rows[0]["prm/loss"] == pytest.approx(0.6931, abs=1e-3)  # it starts as its reference


def test_the_first_process_rewards_of_a_single_forward_are_nothing_and_those_of_a_double_one_are_not(
    rl_config, tmp_path
):
    for forward in ("single", "double"):
        over = deep_merge(PRIME, {"prm": {"forward": forward}})
        run_rl(rl_config(run={"name": forward}, train={"steps": 1}, **over))

    def even(name: str) -> list[bool]:
        lines = (tmp_path / name / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        return [
            max(row) - min(row) < 1e-4 for row in (json.loads(line)["advantages"] for line in lines)
        ]

    assert all(even("single"))
    assert not any(even("double"))


def test_a_process_reward_model_learns_to_foretell_outcomes(rl_config, tmp_path):
    over = deep_merge(PRIME, {"optimizer": {"lr": 0.0}})
    run_rl(rl_config(rollout={"prompts_per_step": 6, "group_size": 8}, train={"steps": 12}, **over))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(r["prm/loss"] for r in rows[-3:]) < 0.8 * sum(r["prm/loss"] for r in rows[:3])


def test_supervised_data_beside_the_rollouts_is_learned_and_its_place_is_saved(
    rl_config, data_folder, tmp_path
):
    ptx = {
        "coef": 1.0,
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 4,
    }
    assert_goes_on_bit_for_bit(rl_config, tmp_path, steps=4, ptx=ptx, train={"num_mini_batches": 2})
    state = load_state(tmp_path / "whole" / "checkpoints" / "step_000004" / "trainer")
    assert "ptx" in state
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert rows[-1]["ptx/nll"] < rows[0]["ptx/nll"]


def test_supervised_data_is_learned_also_where_no_answer_has_an_advantage(
    rl_config, data_folder, tmp_path
):
    zero = [{"name": "reward_scale", "options": {"scale": 0.0}}]
    over = {
        "algorithm": {"shaping": zero, "kl": {"coef": 0.0}},
        "train": {"steps": 1},
        "log": {"entropy": False},
    }
    ptx = {
        "coef": 0.5,
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "batch_size": 4,
    }
    run_rl(rl_config(run={"name": "without"}, **over))
    run_rl(rl_config(run={"name": "with"}, ptx=ptx, **over))
    without, beside = (
        read_rows(tmp_path / name / "metrics.jsonl")[0] for name in ("without", "with")
    )
    assert without["policy/optimizer_steps"] == 0
    assert beside["policy/optimizer_steps"] == 1
    assert beside["policy/loss"] == pytest.approx(0.5 * beside["ptx/nll"], rel=1e-6)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"algorithm": {"preset": "opd"}, "reward": {"terms": []}}, "set teacher.path"),
        ({"teacher": {"path": "x"}}, "teacher.path = 'x' changes nothing"),
        ({"algorithm": {"advantage": {"name": "teacher"}}}, "set algorithm.distill"),
        (
            {
                "algorithm": {"distill": {"kind": "sampled"}},
                "teacher": {"path": "x"},
                "reward": {"terms": []},
            },
            "reward.terms is empty",
        ),
        (
            {
                "algorithm": {"preset": "opd", "filters": ["zero_variance"]},
                "teacher": {"path": "x"},
                "reward": {"terms": []},
            },
            "reward.terms is empty",
        ),
        (
            {
                "algorithm": {"preset": "opd"},
                "teacher": {"path": "x"},
                "reward": {"terms": []},
                "eval": {"data": {"sources": [{"path": "x.jsonl"}]}},
            },
            "eval.data has sources but reward.terms is empty",
        ),
        (
            {"algorithm": {"kl": {"where": "none", "coef": 0.0, "refresh_every": 3}}},
            "refresh_every = 3 changes nothing",
        ),
        (
            {"algorithm": {"kl": {"refresh_every": 3}}, "model": {"lora": {"rank": 2}}},
            "model.lora=null",
        ),
        ({"prm": {"beta": 0.1}}, "prm changes nothing: advantage"),
        ({"critic": {"warmup_steps": 3}}, "critic changes nothing: advantage 'grpo' has no critic"),
        ({"algorithm": "dr_grpo", "reference": "x"}, "reference = 'x' changes nothing"),
        ({"ptx": {"coef": 0.1}}, "needs ptx.data.sources"),
        ({"ptx": {"batch_size": 3}}, "ptx.coef is 0"),
    ],
)
def test_roles_that_do_not_fit_are_refused_at_the_start(rl_config, over, said):
    with pytest.raises(ConfigError, match=said):
        run_rl(rl_config(**over))


def test_a_teacher_of_other_tokens_is_refused(rl_config, tmp_path):
    folder = tmp_path / "other"
    tokenizer = tiny_tokenizer(chars=PRINTABLE[::-1])
    tiny_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(folder)
    config = rl_config(algorithm={"preset": "opd"}, teacher={"path": str(folder)})
    with pytest.raises(ConfigError, match="its tokens must be known"):
        run_rl(config)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="differ; tokens are compared one by one"):
        run_rl(
            rl_config(
                run={"name": "two"}, algorithm={"preset": "opd"}, teacher={"path": str(folder)}
            )
        )
