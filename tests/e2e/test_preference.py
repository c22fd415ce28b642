"""``lightrft dpo`` and ``lightrft kto``: whole runs of preference learning on tiny real models."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import DPOConfig, KTOConfig
from lightrft.datasets import sampler
from lightrft.datasets.row_tables import MalformedRow
from lightrft.learner import reference_cache
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.observer import NullObserver
from lightrft.observability.trackers import read_rows
from lightrft.trainer.preference.run import run_preference
from tests.e2e.command import assert_refused, command
from tests.e2e.finished import assert_a_kill_changes_nothing, assert_same_run, steady, weights

KILLING = Path(__file__).with_name("killing.py")
ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Run = Callable[..., list[Row]]
LORA = {"model": {"lora": {"rank": 4}}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pairs, twelve labelled responses, and six rankings of three."""
    folder = tmp_path_factory.mktemp("preferences")
    pairs, labelled, ranked = [], [], []
    for i in range(12):
        prompt, right, wrong = f"{i}+{i}=", str(2 * i), str(2 * i + 1) + "1" * (i % 3)
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
        is_right = i % 2 == 0
        answer = right if is_right else wrong
        labelled.append({"prompt": prompt, "completion": answer, "label": is_right})
        completions = [
            {"rank": k, "completion": text} for k, text in enumerate((right, wrong, "x"))
        ]
        ranked.append({"prompt": prompt, "completions": completions})
    for name, rows in {"pairs": pairs, "labelled": labelled, "ranked": ranked[:6]}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def tree(model_folder: Path, files: Path, tmp_path: Path) -> Row:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(files / "pairs.jsonl")}]},
        "preference": {"reference": {"cache_dir": str(tmp_path / "cache")}},
        "batch_size": 4,
        # eps is above rounding, which Adam would make as large as a gradient.
        "optimizer": {"lr": 1e-3, "eps": 1e-4},
        "train": {"steps": 3},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def dpo(tree: Row, files: Path) -> Run:
    """``dpo(changes...)``: the rows of a run over pairs."""

    def run(*changes: Row, observer: NullObserver | None = None, **over: Any) -> list[Row]:
        full = tree
        for change in (*changes, over):
            full = deep_merge(full, change)
        config = build(DPOConfig, full)
        run_preference(config, observer)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


@pytest.fixture
def kto(tree: Row, files: Path) -> Run:
    """``kto(changes...)``: the rows of a run over labelled responses."""
    labelled = {"data": {"sources": [{"path": str(files / "labelled.jsonl")}]}}

    def run(*changes: Row, **over: Any) -> list[Row]:
        full = deep_merge(tree, labelled)
        for change in (*changes, over):
            full = deep_merge(full, change)
        config = build(KTOConfig, full)
        run_preference(config)
        return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")

    return run


class Titles(NullObserver):
    """The phases that a run has begun."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, title: str, total: int, done: int) -> None:
        self.seen.append(title)


def test_a_run_leaves_a_whole_folder_and_a_model_that_loads(dpo, tmp_path):
    rows = dpo()
    assert [row["step"] for row in rows] == [1, 2, 3]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "model"} <= names
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verb"] == "dpo"
    assert summary["steps_trained"] == 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("source", ["cached", "step"])
def test_the_first_loss_is_that_of_a_policy_that_is_its_reference(dpo, source):
    first = dpo(preference={"reference": {"source": source}})[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["preference/margin"] == pytest.approx(0, abs=1e-6)
    assert first["preference/accuracy"] == 0.5


@pytest.mark.parametrize(
    ("family", "source", "dropout"),
    [
        ("gpt2", "cached", False),
        ("gpt2", "step", True),
        ("opt", "step", True),
        ("mixtral", "cached", True),
    ],
)
def test_a_random_forward_starts_at_the_loss_of_a_policy_that_is_its_reference(
    dpo, random_folder, family, source, dropout
):
    model = {"path": str(random_folder(family)), "dropout": dropout}
    reference = {"reference": {"source": source}}
    first = dpo(model=model, preference=reference, train={"steps": 1})[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["preference/margin"] == pytest.approx(0, abs=1e-6)
    assert first["policy/grad_norm"] > 0


@pytest.mark.parametrize("verb", ["dpo", "kto"])
@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral"])
def test_a_run_with_a_random_forward_resumes_bit_for_bit(
    request, random_folder, tmp_path, verb, family
):
    run, model = request.getfixturevalue(verb), {"path": str(random_folder(family))}
    noisy = {"model": {**model, "dropout": True}, "optimizer": {"schedule": "constant"}}
    run(noisy, run={"name": "whole"})
    run(noisy, run={"name": "parts"}, train={"steps": 1})
    torch.rand(7)  # Another process has used its generators in another way.
    run(noisy, run={"name": "parts"})
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    run(noisy, run={"name": "still"}, model={"dropout": False})
    whole, still = weights(tmp_path / "whole"), weights(tmp_path / "still")
    assert not all(torch.equal(whole[name], still[name]) for name in whole)


@pytest.mark.parametrize("dropout", [False, True])
def test_labelled_responses_start_at_the_loss_of_a_policy_that_is_its_reference(
    kto, random_folder, dropout
):
    model = {"path": str(random_folder("gpt2")), "dropout": dropout}
    first = kto(model=model, train={"steps": 1})[0]
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)
    assert first["policy/grad_norm"] > 0


def test_log_probs_kept_on_disk_and_computed_in_each_step_give_the_same_run(dpo, tmp_path):
    cached = dpo(run={"name": "cached"}, preference={"reference": {"source": "cached"}})
    step = dpo(run={"name": "step"}, preference={"reference": {"source": "step"}})
    for one, other in zip(cached, step, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["preference/reward_chosen"] == pytest.approx(
            other["preference/reward_chosen"], abs=1e-5
        )
    kept, computed = weights(tmp_path / "cached"), weights(tmp_path / "step")
    assert all(torch.allclose(kept[k], computed[k], rtol=0, atol=1e-5) for k in kept)
    assert cached[-1]["loss"] < cached[0]["loss"]


def test_adapters_are_turned_off_for_the_reference_and_no_model_is_loaded_for_it(dpo):
    rows = dpo(LORA)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[-1]["preference/margin"] > 0
    step = dpo(LORA, run={"name": "step"}, preference={"reference": {"source": "step"}})
    assert [r["loss"] for r in step] == pytest.approx([r["loss"] for r in rows], abs=1e-6)


def test_another_run_reads_the_log_probs_that_the_first_one_kept(dpo, tmp_path):
    first, second = Titles(), Titles()
    one = dpo(observer=first, run={"name": "one"})
    other = dpo(observer=second, run={"name": "other"})
    assert "reference log-probs" in first.seen
    assert "reference log-probs" not in second.seen
    assert [steady(r) for r in one] == [steady(r) for r in other]
    # Another loss reads the same log-probs.
    third = Titles()
    dpo(observer=third, run={"name": "third"}, preference={"losses": ["ipo"]})
    assert "reference log-probs" not in third.seen


@pytest.mark.parametrize("what", ["rows", "template", "weights", "settings", "version"])
def test_log_probs_of_other_rows_another_template_or_another_model_are_computed_anew(
    dpo, tmp_path, files, model_folder, monkeypatch, what
):
    with monkeypatch.context() as patch:
        if what == "version":
            # The key of the versions whose log-probs were noisy, of a model with dropout.
            patch.setattr(reference_cache, "FORMAT", "1")
        dpo(run={"name": "first"})
    changes: dict[str, Row] = {
        "rows": {"data": {"sources": [{"path": str(files / "pairs.jsonl"), "limit": 11}]}},
        "template": {"data": {"template": "{prompt}?"}},
        "weights": {"model": {"path": str(tmp_path / "second")}},
        "settings": {"model": {"path": str(tmp_path / "third")}},
        "version": {},
    }
    # The weights of the first model with other positions.
    shutil.copytree(model_folder, tmp_path / "third")
    file = tmp_path / "third" / "config.json"
    settings = json.loads(file.read_text())
    settings["rope_parameters"]["rope_theta"] = 77.0
    file.write_text(json.dumps(settings))
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    tiny_model("qwen2", seed=2, **sizes).save_pretrained(tmp_path / "second")
    tokenizer.save_pretrained(tmp_path / "second")
    titles = Titles()
    rows = dpo(changes[what], observer=titles, run={"name": "other"})
    assert "reference log-probs" in titles.seen
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_damaged_entry_is_reported_and_computed_again(dpo, tmp_path, caplog):
    whole = dpo(run={"name": "whole"})
    (entry,) = (tmp_path / "cache").glob("*.arrow")
    entry.write_bytes(entry.read_bytes()[:-40])
    again = dpo(run={"name": "again"})
    assert "is damaged and is built again" in caplog.text
    assert [steady(r) for r in again] == [steady(r) for r in whole]


def test_rows_that_cannot_be_read_for_now_leave_no_entry_without_their_log_probs(
    dpo, tmp_path, caplog, monkeypatch
):
    """Such as a picture by URL, which the next run can read."""
    how: Row = {"data": {"bad_rows": "skip"}, "batch_size": 12}
    agreed = sampler.agreed

    def torn(fetched: Any, ranks: Any) -> Any:
        return [MalformedRow("no answer from the host"), *agreed(fetched[1:], ranks)]

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "agreed", torn)
        rows = dpo(how, run={"name": "torn"})
    assert rows[0]["preference/nonfinite_tokens"] > 0
    assert "1 rows could not be read" in caplog.text
    assert not list((tmp_path / "cache").glob("*.arrow"))
    again = dpo(how, run={"name": "again"})
    assert all(row["preference/nonfinite_tokens"] == 0 for row in again)
    assert list((tmp_path / "cache").glob("*.arrow"))


def test_another_reference_model_changes_the_loss(dpo, tmp_path):
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(tokenizer)}
    tiny_model("qwen2", seed=2, **sizes).save_pretrained(tmp_path / "second")
    tokenizer.save_pretrained(tmp_path / "second")
    losses = []
    for source in ("cached", "step"):
        first = dpo(
            run={"name": source},
            reference=str(tmp_path / "second"),
            preference={"reference": {"source": source}},
        )[0]
        assert abs(first["loss"] - math.log(2)) > 1e-3
        losses.append(first["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a_moving_reference_follows_the_policy_and_survives_a_resume(dpo, tmp_path):
    moving = {"preference": {"reference": {"refresh_every": 1, "refresh_decay": 0.0}}}
    rows = dpo(moving, run={"name": "whole"})
    # The reference is the policy before each step.
    for row in rows:
        assert row["loss"] == pytest.approx(math.log(2), abs=1e-6)
    dpo(moving, run={"name": "halves"}, train={"steps": 2})
    halves = dpo(moving, run={"name": "halves"})
    assert [steady(r) for r in halves] == [steady(r) for r in rows]


def test_micro_batches_change_nothing(dpo, tmp_path):
    for preset in ("dpo", "aot"):
        whole = dpo(run={"name": f"{preset} whole"}, preference={"preset": preset})
        split = dpo(
            run={"name": f"{preset} split"},
            preference={"preset": preset},
            train={"max_tokens_per_micro_batch": 20},
        )
        assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in split], abs=1e-6)
        one, other = (weights(tmp_path / f"{preset} {name}") for name in ("whole", "split"))
        assert all(torch.allclose(one[k], other[k], rtol=0, atol=1e-5) for k in one)


def test_labelled_responses_are_trained_by_kto_and_bco(kto):
    rows = kto()
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert "preference/mismatched_kl" in rows[0]
    bco = kto(run={"name": "bco"}, preference="bco")
    assert bco[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_gold_responses_are_read_from_the_rows(dpo, files, tmp_path):
    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    gold = tmp_path / "gold.jsonl"
    gold.write_text("".join(json.dumps({**r, "reference": r["chosen"] + "."}) + "\n" for r in rows))
    found = dpo(data={"sources": [{"path": str(gold)}]}, preference={"preset": "tpo"})
    assert found[0]["preference/loss/sft_gold"] > 0
    assert found[-1]["loss"] < found[0]["loss"]


def test_rankings_are_trained_by_the_losses_of_rankings(dpo, files):
    data = {"sources": [{"path": str(files / "ranked.jsonl")}]}
    rows = dpo(data=data, preference={"losses": ["plackett_luce"]})
    # ln 3!, of three responses with equal scores
    assert rows[0]["loss"] == pytest.approx(math.log(6), abs=1e-6)
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("name", ["pairs", "labelled", "ranked"])
def test_each_data_source_has_its_own_loss(dpo, kto, files, tmp_path, name):
    """The loss of one source is that of a run on its rows alone, and all of them make the loss."""
    lines = (files / f"{name}.jsonl").read_text().splitlines(keepends=True)
    parts = {"few": lines[:2], "many": lines[2:6]}
    sources = []
    for source, rows in parts.items():
        path = tmp_path / f"{source}.jsonl"
        path.write_text("".join(rows))
        sources.append({"path": str(path), "name": source})
    run = kto if name == "labelled" else dpo
    losses = {"pairs": ["sigmoid", "hinge"], "labelled": ["bco"], "ranked": ["plackett_luce"]}[name]
    how: Row = {"preference": {"losses": losses, "beta": 0.5}, "train": {"steps": 1}}
    how["reference"] = str(tmp_path / "other")
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", seed=2, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(
        tmp_path / "other"
    )
    tokenizer.save_pretrained(tmp_path / "other")
    (both,) = run(**how, data={"sources": sources}, batch_size=6, run={"name": "both"})
    for loss in losses:
        shares = [2 * both[f"preference/few/loss/{loss}"], 4 * both[f"preference/many/loss/{loss}"]]
        assert sum(shares) / 6 == pytest.approx(both[f"preference/loss/{loss}"], rel=1e-6)
        assert shares[0] / 2 != pytest.approx(shares[1] / 4, rel=1e-3)
    assert ("preference/few/accuracy" in both) == (name == "pairs")
    # Losses of labelled responses compare with the rewards of the whole batch.
    if name != "labelled":
        (few,) = run(**how, data={"sources": sources[:1]}, batch_size=2, run={"name": "few"})
        assert not any(key.startswith("preference/few/") for key in few)
        for loss in losses:
            alone = few[f"preference/loss/{loss}"]
            assert both[f"preference/few/loss/{loss}"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
def test_the_order_of_what_is_repeated_is_learned(dpo, files):
    held = {"sources": [{"path": str(files / "pairs.jsonl")}]}
    rows = dpo(
        validation=held, train={"steps": 40}, optimizer={"lr": 3e-3, "eps": 1e-8}, batch_size=12
    )
    before, after = rows[0], rows[-1]
    assert before["step"] == 0
    assert before["eval/pair_accuracy"] == 0.5
    assert before["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert after["eval/pair_accuracy"] == 1.0
    assert after["eval/margin"] > 1
    assert after["eval/loss"] < 0.4


def test_held_out_labels_are_measured_by_the_order_of_all_their_pairs(kto, files):
    held = {"sources": [{"path": str(files / "labelled.jsonl")}]}
    rows = kto(validation=held, eval={"every": 1})
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["eval/pair_accuracy"] == 0.5
    assert rows[-1]["eval/pair_accuracy"] > 0.5
    assert rows[-1]["eval/margin"] > 0


def test_weights_of_held_out_rows_count_in_their_loss_as_in_training(dpo, files, tmp_path):
    """A batch is all rows, and the evaluation has the weights of the next step."""
    file = tmp_path / "weighted.jsonl"
    rows = [json.loads(line) for line in (files / "pairs.jsonl").read_text().splitlines()]
    for k, row in enumerate(rows):
        row["example_weight"] = 1.0 + 5 * (k % 3)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = {"sources": [{"path": str(file)}]}
    over: Row = {"data": both, "validation": both, "eval": {"every": 1}, "optimizer": {"lr": 1e-2}}
    found = dpo(over, batch_size=12, run={"name": "whole"})
    for before, step in itertools.pairwise(found):
        assert before["eval/loss"] == pytest.approx(step["loss"], rel=1e-6)
    assert found[1]["eval/loss"] < found[0]["eval/loss"]


def test_the_best_checkpoint_by_the_held_out_rows_is_exported(dpo, files, tmp_path):
    held = {"sources": [{"path": str(files / "pairs.jsonl")}]}
    dpo(validation=held, eval={"every": 1}, checkpoint={"best": "-eval/loss", "every": 1})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["model_step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "preset", "where", "family"),
    [
        ("dpo", "dpo", "backward", None),
        ("dpo", "dpo", "checkpoint manifest", None),
        # Running numbers are part of a checkpoint.
        ("dpo", "beta_dpo", "update", None),
        ("kto", "kto", "backward", None),
        ("kto", "bco", "after checkpoint", None),
        ("dpo", "dpo", "update", "mixtral"),
        ("kto", "kto", "update", "opt"),
    ],
)
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(
    tree, tmp_path, files, random_folder, verb, preset, where, family
):
    if family is not None:
        tree["model"] |= {"path": str(random_folder(family)), "dropout": True}
    rows = files / ("pairs.jsonl" if verb == "dpo" else "labelled.jsonl")
    tree = deep_merge(
        tree,
        {
            "checkpoint": {"every": 1},
            "run": {"threads": 1},
            "preference": {"preset": preset},
            "data": {"sources": [{"path": str(rows)}]},
        },
    )
    assert_a_kill_changes_nothing(tree, verb, where, 2, tmp_path)


REFUSED: list[tuple[str, Row, list[str]]] = [
    ("dpo", {"data": {"sources": []}}, ["data.sources is empty"]),
    ("dpo", {"preference": {"losses": ["kto"]}}, ["labelled", "run lightrft kto"]),
    ("kto", {"preference": {"losses": ["sigmoid"]}}, ["pair", "run lightrft dpo"]),
    ("kto", {"batch_size": 1}, ["batch_size = 1", "2 or more"]),
    (
        "kto",
        {"preference": {"reference": {"source": "cached"}}},
        ["preference.reference.source = cached", "mismatched pairs"],
    ),
    (
        "dpo",
        {"preference": {"reference": {"source": "adapters_off"}}},
        ["adapters_off", "no adapters"],
    ),
    ("dpo", {"preference": {"losses": ["odpo"]}}, ["has no margin"]),
    ("dpo", {"reference": "x", "preference": {"preset": "simpo"}}, ["reference = 'x'"]),
    ("dpo", {"train": {"ppo_epochs": 2}}, ["train.ppo_epochs"]),
    ("dpo", {"log": {"batches_every": 2}}, ["log.batches_every changes nothing"]),
    ("dpo", {"reward": {"terms": ["math"]}}, ["reward changes nothing"]),
    ("dpo", {"eval": {"every": 2}}, ["eval.every = 2 changes nothing"]),
    ("dpo", {"checkpoint": {"best": "eval/pair_accuracy"}}, ["needs validation.sources"]),
    ("dpo", {"batch_size": 64}, ["batch_size = 64", "12 examples"]),
    ("dpo", {"loss_type": "ipo"}, ["loss_type is preference.losses here"]),
    ("dpo", {"beta": 0.2}, ["beta is preference.beta here"]),
    ("dpo", {"preference": {"preset": "dop"}}, ["unknown preset 'dop'", "did you mean 'dpop'"]),
]


@pytest.mark.parametrize(("verb", "over", "parts"), REFUSED)
def test_settings_that_cannot_work_are_refused(capsys, tree, tmp_path, files, verb, over, parts):
    if verb == "kto":
        labelled = {"data": {"sources": [{"path": str(files / "labelled.jsonl")}]}}
        tree = deep_merge(tree, labelled)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, over)))
    assert_refused(command(capsys, verb, str(file)), *parts)


def test_the_command_reports_and_the_doctor_examines(capsys, tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "dpo.yaml"
    file.write_text(json.dumps(tree))
    examined = command(capsys, "doctor", str(file), "strategy.device=cpu")
    assert examined.status == 0, examined.out
    assert "12 examples of 12 rows" in examined.out
    outcome = command(capsys, "dpo", str(file))
    assert outcome.status == 0, outcome.err
    assert "dpo 3/3 · loss" in outcome.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Implicit rewards" in page
    assert "Pair accuracy" in page


def test_presets_configs_and_other_verbs_are_explained(capsys):
    assert "2305.18290" in command(capsys, "explain", "dpo").out
    by_labels = command(capsys, "explain", "kto").out
    assert "mean over responses of kto" in by_labels
    mixed = command(capsys, "explain", "preference=mpo", "preference.beta=0.3").out
    assert "0.8 sigmoid + 0.2 bco_pair + sft" in mixed
    assert "preference.beta" in mixed and "command line" in mixed
    assert r"\begin{align*}" in command(capsys, "explain", "ipo", "--latex").out
    assert "L = -sum_t logp_t / N" in command(capsys, "explain", "explain.verb=sft").out
