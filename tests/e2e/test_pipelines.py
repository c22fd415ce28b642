"""``lightrft iterate``: rounds of generation, selection and training, and the recipe of each pipeline, on tiny real models."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file

import lightrft
from lightrft.config.base import build, deep_merge, to_yaml
from lightrft.config.verbs import GenerateConfig, IterateConfig, SFTConfig
from lightrft.datasets import sampler
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.pipelines import iterate
from lightrft.trainer.pipelines.generate import run_generate
from lightrft.trainer.pipelines.iterate import run_iterate
from lightrft.trainer.pipelines.journal import Journal
from lightrft.trainer.pipelines.rounds import RoundPlan
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.seeding import derive_seed
from lightrft.utils.yaml_text import parse_yaml
from tests import warm
from tests.e2e.command import ROOT, assert_refused, command
from tests.unit.datasets.media_files import encoded, pixels

KILLING = Path(__file__).with_name("killing.py")
Tree = dict[str, Any]
Run = Callable[..., Tree]

# eps is above rounding, which Adam would make as large as a gradient.
TRAINING: Tree = {
    "batch_size": 2,
    "optimizer": {"lr": 1e-2, "eps": 1e-4},
    "train": {"steps": 2},
}


@pytest.fixture
def tree(model_folder: Path, data_folder: Path, tmp_path: Path) -> Tree:
    """Two rounds over ten prompts."""
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "rounds": 2,
        "samples": 3,
        "sampling": {"max_new_tokens": 6},
        "reward": {"terms": [f"{data_folder / 'rewards.py'}:varied"]},
        "select": {"keep_truncated": True},
        "log": {"tensorboard": False},
    }


@pytest.fixture
def rounds(tree: Tree, tmp_path: Path) -> Run:
    """``rounds(changes...)``: the summary of a run. ``sft``, ``dpo`` and ``kto`` get small settings."""

    def run(verb: str = "sft", **over: Any) -> Tree:
        cache = {"preference": {"reference": {"cache_dir": str(tmp_path / "cache")}}}
        small = TRAINING if verb == "sft" else deep_merge(TRAINING, cache)
        return run_iterate(build(IterateConfig, deep_merge({**tree, verb: small}, over)))

    return run


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    """The models have the same weights, bit for bit."""
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def lines(path: Path) -> list[Tree]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(path: Path) -> list[str]:
    """The questions of rows."""
    return [row["prompt"][-1]["content"] for row in lines(path)]


def config_in(folder: Path) -> Tree:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def logged(folder: Path) -> list[Tree]:
    """The metrics of a run folder, without times."""
    times = ("time/", "seconds", "tokens_per")
    rows = read_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]


def test_a_round_is_what_generate_and_sft_do_by_themselves(rounds, tree, tmp_path):
    rounds(rounds=1)
    shared = {
        name: tree[name] for name in ("run", "model", "data", "samples", "sampling", "reward")
    }
    select = {"keep": "best", "keep_truncated": True}
    rows = tmp_path / "rows.jsonl"
    run_generate(build(GenerateConfig, {**shared, "select": select, "output": str(rows)}))
    assert rows.read_bytes() == (tmp_path / "run" / "round_01" / "rows.jsonl").read_bytes()
    run = {**tree["run"], "name": "alone"}
    data = {"sources": [str(rows)], "special_tokens": "responses"}
    run_sft(build(SFTConfig, {**TRAINING, "run": run, "model": tree["model"], "data": data}))
    assert equal(tmp_path / "alone" / "model", tmp_path / "run" / "round_01" / "train" / "model")


def test_the_next_round_generates_with_the_model_of_the_round_before(rounds, tree, tmp_path):
    summary = rounds()
    first = tmp_path / "run" / "round_01" / "train" / "model"
    shared = {name: tree[name] for name in ("data", "samples", "sampling", "reward")}
    again = {
        **shared,
        "model": {"path": str(first), "dtype": "float32"},
        "run": {"seed": derive_seed(5, "round", 2)},
        "select": {"keep": "best", "keep_truncated": True},
        "output": str(tmp_path / "rows.jsonl"),
    }
    run_generate(build(GenerateConfig, again))
    second = tmp_path / "run" / "round_02"
    assert (tmp_path / "rows.jsonl").read_bytes() == (second / "rows.jsonl").read_bytes()
    assert (second / "rows.jsonl").read_bytes() != (first.parents[1] / "rows.jsonl").read_bytes()
    assert config_in(second / "train")["model"]["path"] == str(first)
    assert summary["model"] == str(second / "train" / "model")
    assert [entry["rows"] for entry in summary["rounds"]] == [10, 10]
    assert summary["steps"] == summary["steps_trained"] == 4


def test_rounds_take_the_next_prompts_and_none_twice_before_all_have_come(rounds, tmp_path):
    rounds(prompts_per_round=4, rounds=3)
    files = [tmp_path / "run" / f"round_0{k}" / "rows.jsonl" for k in (1, 2, 3)]
    taken = [question for file in files for question in asked(file)]
    assert len(taken) == 12
    assert len(set(taken[:10])) == 10


def test_rows_of_all_rounds_are_trained_on_if_asked_and_training_starts_over(
    rounds, tree, tmp_path
):
    rounds(rows="all", train_from="start")
    second = config_in(tmp_path / "run" / "round_02" / "train")
    files = [str(tmp_path / "run" / f"round_0{k}" / "rows.jsonl") for k in (1, 2)]
    assert [source["path"] for source in second["data"]["sources"]] == files
    assert second["model"]["path"] == tree["model"]["path"]


@pytest.mark.parametrize(("reference", "same"), [("previous", True), ("start", False)])
def test_the_reference_is_the_model_of_the_round_before_or_the_start_model(
    rounds, tmp_path, reference, same
):
    rounds("dpo", select={"keep": "pairs"}, reference=reference)
    first = read_rows(tmp_path / "run" / "round_02" / "train" / "metrics.jsonl")[0]
    assert (abs(first["loss"] - math.log(2)) < 1e-6) is same


def test_another_model_generates_in_every_round_if_asked(rounds, tree, teacher_folder, tmp_path):
    rounds(generator={"path": str(teacher_folder), "dtype": "float32"})
    shared = {name: tree[name] for name in ("data", "samples", "sampling", "reward")}
    again = {
        **shared,
        "model": {"path": str(teacher_folder), "dtype": "float32"},
        "run": {"seed": derive_seed(5, "round", 2)},
        "select": {"keep": "best", "keep_truncated": True},
        "output": str(tmp_path / "rows.jsonl"),
    }
    run_generate(build(GenerateConfig, again))
    second = tmp_path / "run" / "round_02"
    assert (tmp_path / "rows.jsonl").read_bytes() == (second / "rows.jsonl").read_bytes()
    first = tmp_path / "run" / "round_01" / "train" / "model"
    assert config_in(second / "train")["model"]["path"] == str(first)


def test_pictures_inside_rows_go_through_a_round_and_an_interruption(
    rounds, tree, tmp_path, monkeypatch
):
    save_tiny_media("qwen2_5_vl", tmp_path / "eye")
    pictures = [encoded(pixels(56, 56, seed)) for seed in (1, 2, 3, 4)]
    rows = [{"prompt": "What is it?", "image": {"bytes": data}} for data in pictures]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    seen = {
        "model": {"path": str(tmp_path / "eye"), "dtype": "float32"},
        "data": {"sources": [{"path": str(tmp_path / "rows.parquet")}], "media": {"fps": 1.0}},
        "rounds": 1,
    }
    # The engine reads two pictures at a time, and the run ends after the first two.
    monkeypatch.setattr(sampler, "PART", 2)
    add = Journal.add

    def failing(journal: Journal, *given: Any) -> None:
        add(journal, *given)
        if len(journal) == 2:
            raise KeyboardInterrupt

    rounds(**seen, run={"name": "whole"})
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", failing)
        with pytest.raises(KeyboardInterrupt):
            rounds(**seen)
    rounds(**seen)
    whole, run = (tmp_path / name / "round_01" for name in ("whole", "run"))
    assert equal(whole / "train" / "model", run / "train" / "model")
    (found,) = {row["prompt"][0]["content"][1]["text"] for row in lines(run / "rows.jsonl")}
    assert found == "What is it?"
    written = {row["prompt"][0]["content"][0]["image"] for row in lines(run / "rows.jsonl")}
    assert {Path(name).read_bytes() for name in written} == set(pictures)
    assert {Path(name).parent for name in written} == {run / "rows_media"}


def test_labels_train_by_kto_and_the_data_by_self_play(rounds, tmp_path):
    labelled = {"keep": "labelled", "threshold": 0.4}
    summary = rounds("kto", select=labelled, rounds=1)
    assert summary["rounds"][0]["rows"] > 10
    summary = rounds("dpo", select={"keep": "self_play"}, samples=1, rounds=1, run={"name": "spin"})
    rows = lines(tmp_path / "spin" / "round_01" / "rows.jsonl")
    answers = {f"{i}+{i}=": str(2 * i) for i in range(10)}
    for row in rows:
        assert row["chosen"][0]["content"] == answers[row["prompt"][-1]["content"]]
    assert len(rows) == summary["rounds"][0]["rows"] > 5


def test_training_encodes_prompts_as_the_generation_did(rounds, tmp_path, caplog):
    rounds(data={"template": "Work out {prompt}", "special_tokens": "control"}, rounds=1)
    data = config_in(tmp_path / "run" / "round_01" / "train")["data"]
    assert data["apply_chat_template"] == "auto" and data.get("template") is None
    assert data["special_tokens"] == "control"
    assert asked(tmp_path / "run" / "round_01" / "rows.jsonl")[0].startswith("Work out ")
    assert "other tokens" not in caplog.text


@pytest.mark.parametrize(("keep", "verb", "kind"), [
    ("best", "sft", "responses"), ("pairs", "dpo", "responses"), ("self_play", "dpo", "text"),
])  # fmt: skip
def test_sampled_special_tokens_are_trained_as_tokens_and_those_of_the_data_as_text(
    keep, verb, kind
):
    given = {"model": {"path": "m"}, "data": {"sources": [{"path": "rows.jsonl"}]}, verb: {}}
    config = build(IterateConfig, {**given, "select": {"keep": keep}})
    data = RoundPlan(config, 1).training().data
    assert data.special_tokens == kind


def test_accuracy_is_measured_before_the_first_round_and_after_each(rounds, tree, tmp_path, capsys):
    held_out = {"data": tree["data"], "sampling": {"max_new_tokens": 4}, "threshold": 0.3}
    summary = rounds(eval=held_out)
    entries = summary["rounds"]
    assert "heldout_before" in entries[0] and "heldout_before" not in entries[1]
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    measured = [entries[0]["heldout_before"], *(entry["heldout_after"] for entry in entries)]
    assert [row["eval/accuracy"] for row in rows] == measured
    assert (summary["heldout_before"], summary["heldout_after"]) == (measured[0], measured[-1])
    outcome = command(capsys, "report", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Held-out accuracy, before and after" in page


def test_each_round_shows_the_samples_of_its_generation(
    rounds, tree, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("COLUMNS", "80")
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(build(IterateConfig, {**tree, "sft": TRAINING})))
    outcome = command(capsys, "iterate", config, "log.samples=2")
    assert outcome.status == 0, outcome.err
    shown = [line[:10] for line in outcome.err.splitlines() if line[7:10] == ": '"]
    assert shown == ["round 1: '", "round 1: '", "round 2: '", "round 2: '"]
    assert outcome.err.count("\n  best ") == outcome.err.count("\n  worst ") == 4


def test_a_finished_run_does_nothing_again_and_more_rounds_continue_it(
    rounds, tmp_path, monkeypatch
):
    two = rounds()
    metrics = logged(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(iterate, "run_generate", None)
        patch.setattr(iterate, "run_sft", None)
        assert rounds() == two
    assert logged(tmp_path / "run") == metrics
    three = rounds(rounds=3)
    assert three["rounds"][:2] == two["rounds"]
    rounds(rounds=3, run={"name": "whole"})
    paths = [tmp_path / name / "round_03" / "train" / "model" for name in ("run", "whole")]
    assert equal(*paths)


def test_the_time_of_a_run_has_that_of_generation_also_when_it_is_read_again(rounds, tmp_path):
    summary = rounds(rounds=1)
    (entry,) = summary["rounds"]
    assert entry["generation_seconds"] > 0
    assert summary["seconds"] == entry["generation_seconds"] + entry["seconds"]
    assert rounds(rounds=1) == summary
    assert read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["seconds"] == summary["seconds"]


@pytest.mark.slow
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tree, tmp_path):
    training = deep_merge(TRAINING, {"checkpoint": {"every": 1}})

    def start(name: str, place: str, nth: int = 1) -> int:
        run = {**tree["run"], "name": name, "threads": 1}
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({**tree, "run": run, "sft": training}))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [KILLING, file, place, str(nth), "0", "kill", "iterate"]
        return warm.run(words, env=env).returncode

    assert start("whole", "never") == 0
    # In the second generation, between generation and training, and in the second training.
    for where, nth in (("a group of responses", 13), ("rows written", 1), ("backward", 4)):
        assert start(where, where, nth) == -signal.SIGKILL
        assert start(where, "never") == 0
        for number in ("round_01", "round_02"):
            whole, killed = tmp_path / "whole" / number, tmp_path / where / number
            assert (killed / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()
            assert equal(killed / "train" / "model", whole / "train" / "model")
            one, other = (logged(folder / "train") for folder in (whole, killed))
            assert one == other
        assert logged(tmp_path / where) == logged(tmp_path / "whole")


def test_other_settings_are_refused_by_name_once_a_run_has_begun(rounds, capsys, tree, tmp_path):
    rounds(rounds=1)

    def again(**over: Any) -> Any:
        file = tmp_path / "again.yaml"
        file.write_text(json.dumps(deep_merge({**tree, "sft": TRAINING}, over)))
        return command(capsys, "iterate", file)

    assert_refused(again(samples=4), "another config", "samples: 3 in the folder, 4 now")
    chosen = again(select={"per_prompt": 2})
    assert_refused(chosen, "selected by other settings (select.per_prompt)")
    other = again(sft={"optimizer": {"lr": 1e-3}})
    assert_refused(other, "training of an earlier round", "optimizer.lr: 0.01 in the folder")


def test_another_selection_continues_a_run_that_the_first_had_stopped(rounds, monkeypatch):
    with pytest.raises(DataError, match="leaves no row"):
        rounds(select={"keep": "correct", "threshold": 9.0}, rounds=1)
    monkeypatch.setattr("lightrft.trainer.pipelines.generate.local_policy", None)
    assert rounds(rounds=1)["finished"]


@pytest.mark.parametrize("rows", ["new", "all"])
def test_a_round_with_fewer_rows_than_a_batch_trains_on_all_of_them_at_once(
    rounds, tmp_path, caplog, rows
):
    few = {"batch_size": 15, "train": {"steps": None, "epochs": 2}}
    found = rounds(rows=rows, sft=few)
    sizes = [10, 15] if rows == "all" else [10, 10]
    folders = [tmp_path / "run" / f"round_0{k}" / "train" for k in (1, 2)]
    assert [config_in(folder)["batch_size"] for folder in folders] == sizes
    assert [entry["steps_trained"] for entry in found["rounds"]] == [2, 3 if rows == "all" else 2]
    said = [line for line in caplog.messages if "sft.batch_size = 15" in line]
    assert said[0] == (
        "round 1 has 10 rows, and sft.batch_size = 15: its optimizer steps take 10 rows each"
    )
    assert len(said) == (1 if rows == "all" else 2)
    assert rounds(rows=rows, sft=few) == found


REFUSED: list[tuple[Tree, list[str]]] = [
    (
        {"select": "pairs"},
        ["select.keep = 'pairs' makes no rows that lightrft sft", "best or corr"],
    ),
    ({"select": {"keep": "all", "keep_truncated": False}}, ["select.keep = 'all' makes no rows"]),
    ({"dpo": {}}, ["sft and dpo are given"]),
    ({"sft": {"model": "other"}}, ["sft.model changes nothing", "set model at the top"]),
    ({"sft": {"eval": {"every": 2}}}, ["sft.eval changes nothing"]),
    ({"sft": {"launch": {"processes": 2}}}, ["sft.launch changes nothing"]),
    ({"sft": {"data": {"sources": ["x.jsonl"]}}}, ["sft.data.sources changes nothing"]),
    ({"reference": "start"}, ["sft has no reference"]),
    ({"data": {"sources": []}}, ["data.sources is empty"]),
    ({"reward": {"terms": []}}, ["reward.terms is empty"]),
    ({"samples": 1}, ["samples = 1"]),
    ({"prompts_per_round": 11}, ["prompts_per_round = 11", "10 prompts"]),
    ({"sft": {"checkpoint": {"best": "eval/accuracy"}}}, ["eval.data.sources is empty"]),
    ({"sft": None, "dpo": {"reference": "x"}, "select": "pairs"}, ["dpo.reference changes noth"]),
    (
        {"sft": None, "dpo": {"preference": "simpo"}, "select": "pairs", "reference": "start"},
        ["reference = "],
    ),
    ({"generator": {"dtype": "float32"}}, ["generator.dtype changes nothing", "generator.path"]),
    (
        {
            "sft": None,
            "dpo": {},
            "select": "pairs",
            "model": {"load_in_4bit": True, "lora": {"rank": 2}},
        },
        ["reference = 'previous' with model.load_in_4bit", "reference=start"],
    ),
    (
        {
            "sft": None,
            "dpo": {},
            "select": "pairs",
            "reference": "start",
            "model": {"revision": "v2"},
        },
        ["reference = 'start' with model.revision = 'v2'"],
    ),
]


@pytest.mark.parametrize(("over", "said"), REFUSED)
def test_settings_that_cannot_work_are_refused_before_the_first_generation(
    capsys, tree, tmp_path, over, said
):
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge({**tree, "sft": TRAINING}, over)))
    assert_refused(command(capsys, "iterate", file), *said)
    assert not (tmp_path / "run" / "round_01" / "rows.jsonl").exists()


def test_a_run_folder_is_refused_as_the_model_to_train_before_the_first_generation(
    rounds, tmp_path
):
    rounds(rounds=1)
    run = tmp_path / "run" / "round_01" / "train"
    with pytest.raises(ConfigError, match=r"is a run folder or a checkpoint.*train/model"):
        rounds(model={"path": str(run)}, run={"name": "other"})
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight problems in the layout of GSM8K."""
    file = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = [{"question": f"{i}+{i}=", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# recipe, training, more settings
RECIPES = [
    ("gsm8k_rejection_sampling", "sft", ["select.threshold=0.2"]),
    ("gsm8k_raft", "sft", ["select.threshold=0.2", "rounds=2", "prompts_per_round=4"]),
    ("gsm8k_iterative_dpo", "dpo", ["rounds=2"]),
    ("gsm8k_best_of_n_distill", "sft", []),
    ("gsm8k_conditional_sft", "sft", []),
    ("gsm8k_spin", "dpo", ["rounds=2"]),
]


def test_every_recipe_of_a_pipeline_is_run_here():
    first = {path: path.read_text().partition("\n")[0] for path in ROOT.glob("recipes/*.yaml")}
    pipelines = {path.stem for path, line in first.items() if "lightrft iterate" in line}
    assert pipelines == {name for name, _, _ in RECIPES}


@pytest.mark.parametrize(("name", "verb", "more"), RECIPES)
def test_a_recipe_runs_on_a_tiny_model(
    name, verb, more, model_folder, teacher_folder, data_folder, problems, tmp_path, capsys
):
    rows = f"[{{path: {problems}, reader: gsm8k}}]"
    samples = [] if name == "gsm8k_spin" else ["samples=4"]
    generator = [f"generator={teacher_folder}"] if "distill" in name else []
    cache = [f"dpo.preference.reference.cache_dir={tmp_path}"] if verb == "dpo" else []
    outcome = command(
        capsys,
        "iterate",
        ROOT / "recipes" / f"{name}.yaml",
        f"model={model_folder}",
        f"run.dir={tmp_path}",
        "run.progress=false",
        f"data.sources={rows}",
        f"eval.data.sources={rows}",
        "eval.limit=2",
        "eval.sampling.max_new_tokens=4",
        "sampling.max_new_tokens=6",
        f"reward.terms=[{data_folder / 'rewards.py'}:varied]",
        "reward.workers=1",
        "select.keep_truncated=true",
        f"{verb}.batch_size=2",
        f"{verb}.train.steps=1",
        "log.tensorboard=false",
        *[*samples, *generator, *cache, *more],
    )
    assert outcome.status == 0, outcome.err
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    numbers = [entry["round"] for entry in summary["rounds"]]
    assert numbers == ([1, 2] if "rounds=2" in more else [1])
    assert all(entry["rows"] >= 2 for entry in summary["rounds"])
    printed = outcome.out.splitlines()
    assert "eval accuracy" in printed[0]
    assert [row.split()[0] for row in printed[1 : 1 + len(numbers)]] == [str(k) for k in numbers]
    assert not equal(Path(summary["model"]), model_folder)


def reward_of_characters(rollout: Any) -> float:
    return float(sum(map(ord, rollout.text)) % 5)


@pytest.mark.parametrize("training", [{}, {"sft": {"batch_size": 4}}, {"dpo": {"batch_size": 4}}])
def test_a_run_of_rounds_has_a_model_and_goes_on_from_python(tmp_path, training):
    keep = "pairs" if "dpo" in training else "best"
    run = lightrft.iterate(
        model=(tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()),
        data=[{"prompt": f"{k}+{k}="} for k in range(8)],
        rewards=[reward_of_characters],
        rounds=1,
        samples=8,
        sampling={"max_new_tokens": 4},
        run={"dir": str(tmp_path), "name": "run", "threads": 1, "progress": False},
        select={"keep": keep, "keep_truncated": True},
        **training,
    )
    assert run.model == tmp_path / "run" / "round_01" / "train" / "model" and run.model.is_dir()
    first = (run.model / "model.safetensors").read_bytes()
    assert run.resume(rounds=2).model == tmp_path / "run" / "round_02" / "train" / "model"
    kept = tmp_path / "run" / "round_01" / "train" / "model" / "model.safetensors"
    assert kept.read_bytes() == first
    assert len(run.generate(["1+1=", "2+2="], sampling={"max_new_tokens": 4})) == 2


@pytest.mark.parametrize("keep", ["best", "self_play", "pairs"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"special_tokens": "control"},
        {"apply_chat_template": False, "media": {"fps": 3.0}},
        {"chat_template_options": {"tone": "a"}},
    ],
)
def test_settings_of_rounds_are_read_back_from_their_file(keep, given):
    verb = "sft" if keep == "best" else "dpo"
    for training in ({}, {verb: {}}, {verb: {"data": {"special_tokens": "text"}}}):
        if verb == "dpo" and not training:
            continue
        tree = {"data": {"sources": "a.jsonl", **given}, "select": {"keep": keep}, **training}
        config = build(IterateConfig, tree)
        again = build(IterateConfig, parse_yaml(to_yaml(config)))
        assert again.training.data == config.training.data
        found = config.training.data
        for name, value in given.items():
            if name != "special_tokens":
                own = getattr(found, name)
                assert value == (own if name != "media" else own.model_dump(exclude_unset=True))
        sampled = "text" if keep == "self_play" else "responses"
        own = training.get(verb, {}).get("data", {})
        assert found.special_tokens == own.get(
            "special_tokens", given.get("special_tokens", sampled)
        )
