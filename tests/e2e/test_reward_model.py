"""``lightrft rm``: whole runs of reward models on a tiny real model, and their use as rewards."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import ExportConfig, RLConfig, RMConfig
from lightrft.models.actor import Actor
from lightrft.models.merging.stored_model import open_model
from lightrft.models.reward.reward_model import RewardModel
from lightrft.observability.trackers import read_rows
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import run_export
from lightrft.types import Batch, Segments
from lightrft.utils.errors import ConfigError, DataError, ModelError
from tests.e2e.finished import assert_a_kill_changes_nothing, steady, weights

MARGIN = {"name": "bradley_terry", "options": {"margin": True}}
KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Run = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums with a right and a wrong answer, rankings of three, and ratings of one."""
    folder = tmp_path_factory.mktemp("preferences")
    pairs, ranked, rated = [], [], []
    for i in range(24):
        prompt, right, wrong = f"{i % 12}+1=", f"{i}", f"{i}x" + "1" * (i % 3)
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        answers = enumerate((right, wrong, "x"))
        completions = [{"rank": rank, "completion": text} for rank, text in answers]
        ranked.append({"prompt": prompt, "completions": completions})
        rated.append({"prompt": prompt, "response": "ab"[i % 2] * 3, "helpfulness": i % 2 * 4})
    for name, rows in {"pairs": pairs, "ranked": ranked, "rated": rated}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def tree(model_folder: Path, files: Path, tmp_path: Path) -> Row:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(files / "pairs.jsonl")}]},
        "batch_size": 8,
        # eps is above rounding, which Adam would make as large as a gradient.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "train": {"steps": 3},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def rm(tree: Row) -> Run:
    """``rm(changes...)``: the rows of a run over pairs."""

    def run(*changes: Row, **over: Any) -> list[Row]:
        full = tree
        for change in (*changes, over):
            full = deep_merge(full, change)
        config = build(RMConfig, full)
        run_reward_model(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


def test_a_run_learns_the_order_of_held_out_pairs_and_leaves_a_model_that_scores(
    rm, tmp_path, files
):
    held = {"sources": [{"path": str(files / "pairs.jsonl"), "limit": 12}], "shuffle": False}
    rows = rm(validation=held, train={"steps": 12}, eval={"every": 6}, optimizer={"lr": 1e-2})
    assert [row["step"] for row in rows] == [0, *range(1, 13)]
    first = rows[1]
    # before training, scores differ little
    assert first["loss"] == pytest.approx(math.log(2), abs=0.1)
    assert rows[-1]["eval/pair_accuracy"] == 1 > rows[0]["eval/pair_accuracy"]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["eval/pair_accuracy_low"] < 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_before"] == rows[0]["eval/pair_accuracy"]
    assert summary["heldout_after"] == summary["pair_accuracy"] == 1
    assert RewardModel.open(tmp_path / "run" / "model").score_names == ["preference"]


def test_micro_batches_change_nothing_even_where_they_cut_groups(rm, tmp_path, files):
    ranked = {"data": {"sources": [{"path": str(files / "ranked.jsonl")}]}}
    head = {"name": "preference", "kind": "mlp", "logit_scale": True}
    how = {"reward_model": {"heads": [head], "losses": ["bradley_terry", "plackett_luce"]}}
    whole = rm(ranked, how, run={"name": "whole"})
    found = {"whole": weights(tmp_path / "whole")}
    for name, most in {"groups": 40, "cut": 8}.items():
        parts = rm(ranked, how, run={"name": name}, train={"max_tokens_per_micro_batch": most})
        assert [r["loss"] for r in parts] == pytest.approx([r["loss"] for r in whole], rel=3e-6)
        found[name] = weights(tmp_path / name)
    for one, other in itertools.combinations(found.values(), 2):
        assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


def test_a_stopped_run_goes_on_with_the_same_numbers(rm, tmp_path):
    whole = rm(run={"name": "whole"})
    rm(run={"name": "halves"}, train={"steps": 2})
    halves = rm(run={"name": "halves"})
    assert [steady(r) for r in halves] == [steady(r) for r in whole]
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_adapters_that_cannot_be_added_are_written_with_the_heads_and_give_the_same_scores(
    rm, tmp_path, files, monkeypatch
):
    lora = {"model": {"lora": {"rank": 4}}, "optimizer": {"lr": 1e-2}}
    rm(lora)
    monkeypatch.setattr("lightrft.trainer.reward_model.base.can_merge", lambda model: False)
    rm(lora, run={"name": "apart"})
    apart = tmp_path / "apart" / "model"
    assert (apart / "adapter_config.json").is_file() and not (apart / "config.json").exists()
    row = Batch(Segments.of([[5, 6, 7]]), Segments.of([[8, 9]]), torch.tensor([0]))
    both = [RewardModel.open(tmp_path / name / "model") for name in ("run", "apart")]
    one, other = (model.score(row)["preference"].scores.detach() for model in both)
    assert torch.allclose(one, other, rtol=0, atol=1e-5)
    assert float(other[0]) != 0


@pytest.mark.parametrize("where", ["backward", "checkpoint publishing"])
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, files, tmp_path, where):
    often = {
        "checkpoint": {"every": 1},
        "run": {"threads": 1},
        "validation": {"sources": [{"path": str(files / "pairs.jsonl"), "limit": 4}]},
        "eval": {"every": 2},
        "reward_model": {"normalize": "scale"},
    }
    assert_a_kill_changes_nothing(deep_merge(tree, often), "rm", where, 2, tmp_path)


def test_ratings_are_learned_by_heads_of_their_own(rm, files):
    data = {"sources": [{"path": str(files / "rated.jsonl")}]}
    heads = [{"name": "helpfulness", "kind": "ordinal", "size": 5}]
    losses = [{"name": "ordinal"}]
    rows = rm(
        data=data,
        reward_model={"heads": heads, "losses": losses},
        train={"steps": 10},
        optimizer={"lr": 1e-2},
    )
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]


def test_margins_are_read_and_a_row_without_one_is_refused_at_the_start(rm, tmp_path, files):
    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    margins = tmp_path / "margins.jsonl"
    margins.write_text("".join(json.dumps({**row, "margin": 2.0}) + "\n" for row in rows))
    of_pairs = {"reward_model": {"losses": [MARGIN]}, "train": {"steps": 1}}
    (row,) = rm(of_pairs, data={"sources": [{"path": str(margins)}]})
    # before training, scores differ little
    assert row["loss"] == pytest.approx(math.log(1 + math.exp(2)), abs=0.1)
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 1: the row has no margin"):
        rm(of_pairs, run={"name": "without"})


def test_a_gate_learns_the_preference_of_rows_and_heads_learn_columns_of_their_names(
    rm, tmp_path, files
):
    text = (files / "pairs.jsonl").read_text()
    pairs = [json.loads(line) for line in text.splitlines()]
    labels = {"chosen_short": 1, "rejected_short": 0, "chosen_right": 3, "rejected_right": 1}
    rated = files / "gated.jsonl"
    rated.write_text("".join(json.dumps({**pair, **labels}) + "\n" for pair in pairs))
    losses = ["mse", {"name": "bradley_terry", "head": "mixture"}]
    rows = rm(
        data={"sources": [{"path": str(rated)}]},
        validation={"sources": [{"path": str(rated), "limit": 12}]},
        reward_model={"heads": ["short", "right"], "gate": True, "losses": losses},
        train={"steps": 8},
        optimizer={"lr": 1e-2},
    )
    for key in ("mixture/loss/bradley_terry", "short/loss/mse", "right/loss/mse"):
        assert rows[-1][f"reward_model/{key}"] < rows[1][f"reward_model/{key}"]
    # the metrics without a name are of the reward
    assert rows[-1]["eval/pair_accuracy"] == 1
    assert "eval/mixture/pair_accuracy" not in rows[-1]
    model = RewardModel.open(tmp_path / "run" / "model")
    assert model.reward_name == "mixture"


def test_scores_of_the_saved_model_are_normalised_over_the_held_out_rows(rm, tmp_path, files):
    held = {"sources": [{"path": str(files / "pairs.jsonl"), "limit": 4}], "shuffle": False}
    rm(validation=held, reward_model={"normalize": "scale"})
    model = RewardModel.open(tmp_path / "run" / "model")
    assert float(model.score_mean) != 0
    assert float(model.score_std) != 1


def test_signs_are_not_trained_on_from_a_model_that_normalises_its_scores(rm, tmp_path):
    rm(reward_model={"normalize": "scale"}, train={"steps": 1})
    start = {"model": {"path": str(tmp_path / "run" / "model")}, "run": {"name": "on"}}
    signs = {"reward_model": {"losses": ["bradley_terry", "cost_sign"]}}
    with pytest.raises(ConfigError, match=r"normalises its scores, .*normalize=none, or leave"):
        rm(start, signs)
    rm(start)


def test_a_policy_learns_from_the_scores_of_a_reward_model(rm, rl_tree, tmp_path, files):
    rm(train={"steps": 12}, optimizer={"lr": 1e-2})
    reward = {"terms": [], "models": [{"path": str(tmp_path / "run" / "model"), "weight": 2.0}]}
    config = build(RLConfig, deep_merge(rl_tree, {"reward": reward, "run": {"name": "rl"}}))
    run_rl(config)
    rows = read_rows(Path(config.run.dir) / "rl" / "metrics.jsonl")
    for row in rows:
        if "reward/mean" in row:
            assert row["reward/mean"] == pytest.approx(2 * row["reward/preference"], rel=1e-6)


def test_a_reward_model_is_no_policy_and_its_run_has_none(rm, tmp_path):
    rm(train={"steps": 1})
    with pytest.raises(ConfigError, match=r"a run of a reward model.*reward\.models"):
        run_export(build(ExportConfig, {"path": str(tmp_path / "run")}))
    with pytest.raises(ModelError, match="is a reward model: its heads cannot be merged"):
        open_model(str(tmp_path / "run" / "model"))
    with pytest.raises(ModelError, match="is a reward model: its heads score responses"):
        Actor.load(ModelConfig(path=str(tmp_path / "run" / "model")))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"eval": {"every": 2}}, "eval.every = 2 changes nothing"),
        ({"log": {"rollouts_every": 2}}, "log.rollouts_every changes nothing"),
        ({"reward_model": {"losses": ["cross_entropy"]}}, "cross_entropy"),
        ({"checkpoint": {"best": "eval/loss"}}, "less is better"),
        ({"data": {"columns": {"labels": {"nothing": "x"}}}}, "no head 'nothing'"),
        (
            {
                "model": {"load_in_4bit": True, "lora": {"rank": 2}},
                "reward_model": {"layer": 1},
            },
            "load_in_4bit = true with reward_model.layer = 1",
        ),
        (
            {"reward_model": {"heads": ["preference", "safety"], "losses": [MARGIN]}},
            "margins of head 'safety'",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(rm, over, said):
    with pytest.raises(ConfigError, match=said):
        rm(over)
