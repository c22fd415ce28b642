"""``lightrft dpo`` and ``kto`` on responses that each step samples: whole runs on tiny real models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.parity import rows_of_pictures
from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import DPOConfig, KTOConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.preference import online
from lightrft.trainer.preference.run import run_preference
from lightrft.utils.errors import RewardError
from tests.e2e.command import assert_refused, command
from tests.e2e.finished import assert_a_kill_changes_nothing, steady, weights

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Run = Callable[..., list[Row]]
LORA = {"model": {"lora": {"rank": 4}}}
LENGTH = 6


@pytest.fixture
def tree(model_folder: Path, data_folder: Path, tmp_path: Path) -> Row:
    """Three steps of four of ten prompts with three responses each."""
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "online": {"group_size": 3},
        "sampling": {"max_new_tokens": LENGTH},
        "reward": {"terms": [f"{data_folder / 'rewards.py'}:varied"]},
        "batch_size": 4,
        # eps is above rounding, which Adam would make as large as a gradient.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "train": {"steps": 3},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def train(tree: Row) -> Run:
    """``train(changes..., verb=...)``: the rows of a run."""

    def run(*changes: Row, verb: str = "dpo", **over: Any) -> list[Row]:
        full = tree
        for change in (*changes, over):
            full = deep_merge(full, change)
        config = build(KTOConfig if verb == "kto" else DPOConfig, full)
        run_preference(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


def responses(folder: Path, step: int) -> list[Row]:
    file = folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def groups(rollouts: list[Row]) -> list[list[Row]]:
    """The groups of a step, in their order. A prompt may come twice, in two rounds."""
    found: list[list[Row]] = []
    for rollout in rollouts:
        if rollout["sample"] == 0:
            found.append([])
        found[-1].append(rollout)
    return found


def written(rollout: Row) -> str:
    """The response as a row gives it, to whose end the data set adds the end token."""
    text = tiny_tokenizer().decode(rollout["token_ids"], skip_special_tokens=False)
    assert isinstance(text, str)
    return text.removesuffix(tiny_tokenizer().eos_token)


def row_of(group: list[Row], kind: str) -> Row:
    """A group of compared responses as a row of given ones."""
    prompt = group[0]["prompt"]["text"]
    if kind == "ranked":
        compared = [r for r in group if r["rank"] is not None]
        completions = [{"rank": r["rank"], "completion": written(r)} for r in compared]
        return {"prompt": prompt, "completions": completions}
    chosen, rejected = sorted((r for r in group if r["rank"] is not None), key=lambda r: r["rank"])
    margin = chosen["reward"] - rejected["reward"]
    row = {"prompt": prompt, "chosen": written(chosen), "rejected": written(rejected)}
    return {**row, "margin": margin}


@pytest.mark.parametrize(
    ("loss", "kind"), [("sigmoid", "pair"), ("odpo", "pair"), ("plackett_luce", "ranked")]
)
def test_an_online_step_is_the_step_on_a_file_of_the_pairs_that_it_sampled(
    train, tree, tmp_path, loss, kind
):
    """Bit for bit, in the loss, the gradient and the weights."""
    ordered = {"data": {"shuffle": False, "apply_chat_template": False}, "train": {"steps": 1}}
    # Text cannot spell the unknown token: such a response is not scored, and in no pair.
    reward = tmp_path / "known.py"
    unknown = tiny_tokenizer().unk_token_id
    reward.write_text(
        f"def known(rollout):\n    assert {unknown} not in rollout.token_ids\n"
        "    return sum(rollout.token_ids) % 7 / 7\n"
    )
    how = {"preference": {"losses": [loss], "reference": {"source": "step"}}, "batch_size": 10}
    terms = {"reward": {"terms": [f"{reward}:known"]}}
    (found,) = train(ordered, how, terms, run={"name": "online"})
    sampled = groups(responses(tmp_path / "online", 1))
    rows = [row_of(group, kind) for group in sampled if any(r["rank"] is not None for r in group)]
    assert len(rows) == 10
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = {name: value for name, value in tree.items() if name not in ("online", "sampling")}
    # The limit cuts the end token off responses that were cut when they were sampled.
    limit = {"max_tokens": len("1+1=") + LENGTH}
    read = {"overlong_prompts": "truncate", "special_tokens": "control"}
    more = {"reward": {"terms": []}, "data": {"sources": [{"path": str(file)}], **read}, **limit}
    full = given
    for change in (ordered, how, more, {"run": {"name": "given"}}):
        full = deep_merge(full, change)
    run_preference(build(DPOConfig, full))
    (expected,) = read_rows(tmp_path / "given" / "metrics.jsonl")
    same = [name for name in expected if name.startswith(("preference/", "policy/", "loss"))]
    assert "loss" in same and "policy/grad_norm" in same
    assert {k: found[k] for k in same} == {k: expected[k] for k in same}
    one, other = weights(tmp_path / "online"), weights(tmp_path / "given")
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("verb", "how"),
    [
        ("dpo", {}),
        ("dpo", {"preference": {"losses": ["ipo"]}, "online": {"pairs": "all"}}),
        ("dpo", {"preference": {"preset": "lipo"}}),
        ("kto", {"online": {"threshold": 0.5}}),
    ],
    ids=["best_worst", "all", "ranked", "labelled"],
)
def test_the_reward_of_what_the_policy_samples_rises(train, tmp_path, verb, how):
    file = tmp_path / "low.py"
    file.write_text(
        "def low(rollout):\n"
        "    return sum(token < 50 for token in rollout.token_ids) / len(rollout.token_ids)\n"
    )
    rows = train(
        how,
        verb=verb,
        reward={"terms": [f"{file}:low"]},
        online={"group_size": 4},
        train={"steps": 10},
        optimizer={"lr": 1e-2},
        log={"rollouts_every": 0},
    )
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_the_first_loss_is_that_of_a_policy_that_is_its_reference(train):
    for name, how in {"step": {}, "adapters": LORA}.items():
        first = train(how, run={"name": name}, train={"steps": 1})[0]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["preference/accuracy"] == 0.5


def test_the_pair_is_the_best_and_the_worst_response_and_each_token_is_counted_once(
    train, data_folder, tmp_path
):
    fails = {"reward": {"terms": [f"{data_folder / 'rewards.py'}:sometimes_fails"]}}
    rows = train(fails, online={"group_size": 4})
    reasons = set()
    for row in rows:
        total = sum(row[f"rollout/tokens_{name}"] for name in ("trained", "filtered", "failed"))
        assert row["rollout/tokens_sampled"] == total
        assert row["preference/tokens"] == row["rollout/tokens_trained"]
        assert row["preference/responses"] == 2 * row["rollout/groups"]
        reasons |= {name for name in row if name.startswith("rollout/dropped/")}
    assert sum(row["rollout/tokens_failed"] for row in rows) > 0
    assert "rollout/dropped/zero_variance" in reasons
    compared = 0
    for step in (1, 2, 3):
        for group in groups(responses(tmp_path / "run", step)):
            pair = {r["rank"]: r for r in group if r["rank"] is not None}
            scored = [r["reward"] for r in group if not r["failed"]]
            if pair:
                assert pair[0]["reward"] == max(scored) > min(scored) == pair[1]["reward"]
                compared += 1
            else:
                assert len(set(scored)) < 2
    assert compared == sum(row["rollout/groups"] for row in rows)


def test_groups_without_a_difference_are_replaced_by_other_prompts(train, tmp_path):
    file = tmp_path / "seldom.py"
    file.write_text("def seldom(rollout):\n    return float(sum(rollout.token_ids) % 3 == 0)\n")
    seldom = {"reward": {"terms": [f"{file}:seldom"]}}
    rows = train(seldom, online={"group_size": 2, "max_rounds": 20})
    assert all(row["rollout/groups"] == 4 for row in rows)
    assert all(row["rollout/rounds"] > 1 for row in rows)
    once = train(seldom, run={"name": "once"}, online={"group_size": 2, "max_rounds": 1})
    assert all(row["rollout/rounds"] == 1 for row in once)
    assert any(0 < row["rollout/groups"] < 4 for row in once)
    # The loss is a mean over the pairs that there are.
    assert once[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_steps_without_a_pair_move_nothing_and_many_in_a_row_end_the_run(
    train, tmp_path, monkeypatch
):
    monkeypatch.setattr(online, "MOST_IDLE_STEPS", 3)
    file = tmp_path / "same.py"
    file.write_text("def same(rollout):\n    return 0.25\n")
    how = {"reward": {"terms": [f"{file}:same"]}, "online": {"max_rounds": 1}}
    with pytest.raises(RewardError) as raised:
        train(how, train={"steps": 9}, checkpoint={"every": 1})
    for part in ("3 steps in a row", "4 zero_variance", "0.25 to 0.25", "same", "step 2"):
        assert part in str(raised.value)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["preference/responses"] == row["rollout/tokens_trained"] == 0
        assert "policy/optimizer_steps" not in row
        assert row["rollout/steps_not_trained"] == row["step"]
    states = [
        load_file(tmp_path / "run" / "checkpoints" / f"step_00000{k}" / "policy" / name)
        for k in (1, 2)
        for name in ["state.safetensors"]
    ]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    # The streak is part of the checkpoint: it does not start again.
    with pytest.raises(RewardError, match="3 steps in a row"):
        train(how, train={"steps": 9}, checkpoint={"every": 1})


def test_kto_leaves_out_a_single_prompt_which_has_no_mismatched_response(train, tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        "def one(rollout):\n    return rollout.sample * rollout.prompt.text.count('1')\n"
    )
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "1="}\n{"prompt": "2="}\n')
    how = {"reward": {"terms": [f"{file}:one"]}, "online": {"max_rounds": 1}, "batch_size": 2}
    data = {"sources": [{"path": str(prompts)}]}
    for row in train(how, verb="kto", data=data, train={"steps": 2}):
        assert row["rollout/dropped/one_prompt"] == row["rollout/dropped/zero_variance"] == 1
        assert row["rollout/tokens_sampled"] == row["rollout/tokens_filtered"]
        assert row["rollout/groups"] == row["rollout/tokens_trained"] == 0
        assert "policy/optimizer_steps" not in row


def test_a_response_that_was_cut_loses_the_penalty(train, tmp_path):
    train(run={"name": "plain"}, train={"steps": 1})
    (row,) = train(run={"name": "less"}, online={"missing_eos_penalty": 0.5}, train={"steps": 1})
    plain, less = (responses(tmp_path / name, 1) for name in ("plain", "less"))
    cut = [r["finish_reason"] == "length" for r in plain]
    assert any(cut) and not all(cut)
    for one, other, was_cut in zip(plain, less, cut, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert other["reward"] == one["reward"] - 0.5 * was_cut
        assert other["terms"]["missing_eos"] == float(was_cut)
    assert row["reward/missing_eos"] == pytest.approx(sum(cut) / len(cut))


def test_a_moving_reference_follows_the_policy(train):
    moving = {"preference": {"reference": {"refresh_every": 1}}}
    # The reference is the policy before each step.
    for row in train(moving):
        assert row["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_weights_of_the_last_step_sample_and_the_version_says_so(train, tmp_path):
    train(optimizer={"lr": 1e-2})
    for step in (1, 2, 3):
        versions = {v for r in responses(tmp_path / "run", step) for v in r["versions"]}
        assert versions == {step - 1}


def test_micro_batches_change_nothing(train, tmp_path):
    whole = train(run={"name": "whole"})
    split = train(run={"name": "split"}, train={"max_tokens_per_micro_batch": 20})
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in split], abs=1e-6)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_two_steps_and_two_more_are_four_bit_for_bit(train, tmp_path, verb):
    # A running shift and a moving reference are carried from step to step.
    own = {"preset": "bco"} if verb == "kto" else {"losses": ["bco_pair"]}
    how = {"preference": {**own, "reference": {"refresh_every": 1, "refresh_decay": 0.5}}}
    whole = train(how, verb=verb, run={"name": "whole"}, train={"steps": 4})
    train(how, verb=verb, run={"name": "halves"}, train={"steps": 2})
    halves = train(how, verb=verb, run={"name": "halves"}, train={"steps": 4})
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_held_out_pairs_are_measured_between_the_steps(train, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "x"} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = train(validation={"sources": [{"path": str(file)}]}, eval={"every": 1})
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert found[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[-1]["eval/loss"] != found[0]["eval/loss"]


def test_prompts_with_pictures_are_sampled_and_compared(train, tmp_path, data_folder):
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    rows = [*rows_of_pictures(tmp_path), *({"prompt": f"{i}+{i}="} for i in range(2))]
    file = tmp_path / "pictures.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "model": {"path": str(tmp_path / "reader")},
        "data": {"sources": [{"path": str(file)}]},
        "train": {"steps": 1},
    }
    (row,) = train(over)
    assert row["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert row["preference/responses"] == 8
    assert row["policy/grad_norm"] > 0


def test_the_loss_of_each_data_source_is_reported_for_sampled_pairs(train, tree, tmp_path):
    path = tree["data"]["sources"][0]["path"]
    parts = [{"path": path, "name": "few", "limit": 3}, {"path": path, "name": "many"}]
    # The first loss is that of equal models, for any pair.
    rows = train(data={"sources": parts}, batch_size=10, train={"steps": 2})
    pairs = [r for r in responses(tmp_path / "run", 2) if r["rank"] == 0]
    names = [r["prompt"]["data_source"] for r in pairs]
    total = sum(rows[1][f"preference/{name}/loss/sigmoid"] for name in names)
    assert total / len(names) == pytest.approx(rows[1]["preference/loss/sigmoid"], abs=1e-5)
    assert {name.split("/")[1] for name in rows[1] if name.endswith("loss/sigmoid")} >= {*names}
    assert set(names) == {"few", "many"}


REFUSED: list[tuple[str, Row, list[str]]] = [
    ("dpo", {"reward": {"terms": []}}, ["reward.terms is empty", "reward.terms=[math]"]),
    ("dpo", {"sampling": {"temperature": 0}}, ["sampling.temperature = 0", "the same"]),
    ("dpo", {"online": {"group_size": 1}}, ["online.group_size = 1", "2 or more"]),
    ("kto", {"online": {"group_size": 1}}, ["online.group_size = 1", "online.threshold"]),
    (
        "dpo",
        {"preference": {"reference": {"source": "cached"}}},
        ["preference.reference.source = cached", "each step samples new responses"],
    ),
    ("dpo", {"preference": {"preset": "tpo"}}, ["a gold response"]),
    ("dpo", {"preference": {"preset": "mdpo"}}, ["corrupted media"]),
    ("dpo", {"online": {"threshold": 0.5}}, ["online.threshold = 0.5 changes nothing"]),
    ("kto", {"online": {"pairs": "all"}}, ["online.pairs = all changes nothing"]),
    (
        "dpo",
        {"online": {"pairs": "all"}, "preference": {"sampo": True}},
        ["online.pairs = all", "online.pairs=best_worst"],
    ),
    (
        "dpo",
        {"online": {"pairs": "all"}, "preference": {"preset": "odpo"}},
        ["online.pairs = all", "one margin for each better response"],
    ),
    ("dpo", {"max_tokens": 64}, ["max_tokens changes nothing", "given responses"]),
    ("dpo", {"data": {"columns": {"chosen": "a"}}}, ["data.columns.chosen changes nothing"]),
    (
        "dpo",
        {"online": {"group_size": 0, "pairs": "all"}},
        ["online.pairs = all changes nothing", "online.group_size=2"],
    ),
    (
        "dpo",
        {"online": {"group_size": 0}, "reward": {"terms": []}},
        ["sampling.max_new_tokens = 6 changes nothing", "online.group_size=2"],
    ),
    ("dpo", {"batch_size": 64}, ["batch_size = 64", "10 prompts"]),
    ("dpo", {"sampling": {"max_new_tokens": 4000}}, ["max_position_embeddings"]),
    ("dpo", {"num_generations": 2}, ["num_generations is online.group_size here"]),
    ("dpo", {"missing_eos_penalty": 1}, ["missing_eos_penalty is online.missing_eos_penalty"]),
    ("dpo", {"max_new_tokens": 9}, ["max_new_tokens is sampling.max_new_tokens here"]),
]


@pytest.mark.parametrize(("verb", "over", "parts"), REFUSED)
def test_settings_that_cannot_work_are_refused(capsys, tree, tmp_path, verb, over, parts):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, over)))
    assert_refused(command(capsys, verb, str(file)), *parts)


def test_the_command_reports_and_the_doctor_and_explain_know_it(
    capsys, tree, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "online.yaml"
    file.write_text(json.dumps(tree))
    examined = command(capsys, "doctor", str(file), "strategy.device=cpu")
    assert examined.status == 0, examined.out
    for part in ("10 prompts of 10 rows", "longest response 6 tokens", "generation", "reward"):
        assert part in examined.out, examined.out
    explained = command(capsys, "explain", str(file)).out
    for part in ("2402.04792", "online.group_size", "highest reward", "sampled from", "lowest"):
        assert part in explained, explained
    ranked = command(capsys, "explain", str(file), "preference=lipo").out
    assert "rank them by reward" in ranked and "online.pairs" not in ranked
    outcome = command(capsys, "dpo", str(file))
    assert outcome.status == 0, outcome.err
    assert "dpo 3/3" in outcome.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Implicit rewards" in page
    assert "Groups and preferences" in page
    assert "<td>rank 0</td>" in page and "<td>rank 1</td>" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "nth"),
    [
        pytest.param("an answer", 20, marks=pytest.mark.thorough),
        ("generation", 10),
        pytest.param("backward", 2, marks=pytest.mark.thorough),
        ("checkpoint writing", 2),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path, where, nth):
    how = {
        "checkpoint": {"every": 1},
        "run": {"threads": 1},
        "preference": {"reference": {"refresh_every": 1, "refresh_decay": 0.5}},
    }
    how = deep_merge(tree, how)
    assert_a_kill_changes_nothing(how, "dpo", where, nth, tmp_path)
