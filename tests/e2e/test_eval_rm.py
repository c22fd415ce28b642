"""``lightrft eval-rm``: a trained tiny reward model on rows whose order is known."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightrft.config.base import build
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.config.verbs import RMConfig
from lightrft.learner.reward_model import outputs
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.processors import load_processor
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.reward_model import results
from lightrft.trainer.reward_model.run import run_reward_model
from lightrft.viewer.report import write_report
from tests.e2e.command import Outcome, assert_refused, command

Row = dict[str, Any]
GOLD = "data.columns.labels={preference: ratings}"


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers sums without an x, its rows, and rows of benchmarks."""
    folder = tmp_path_factory.mktemp("eval-rm")
    save_model(tiny_model("qwen2"), tiny_tokenizer(), folder / "start")
    pairs, rated, bench, ties = [], [], [], []
    for i in range(24):
        prompt, right, wrong = f"{i % 12}+1=", f"{i}", f"{i}x" + "1" * (i % 3)
        source = "even" if i % 2 == 0 else "odd"
        pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong, "data_source": source})
        answers = [right, wrong, f"{i}xx", "x"]
        rated.append({"prompt": prompt, "responses": answers, "ratings": [3, 1, 1, 0]})
        subset = "llmbar-natural" if i % 2 else "hep-cpp"
        bench.append({**pairs[-1], "subset": subset, "id": i})
        one = {"prompt": prompt, "rejected": [wrong, f"{i}xx", "x"]}
        if i < 4:
            many = {"chosen": [right, f" {right}"], "subset": "Ties", "id": f"tied:{i}"}
            ties += [{**one, **many}]
            ties += [{**one, "chosen": [right], "subset": "Ties", "id": f"ref:{i}"}]
        else:
            ties += [{**one, "chosen": [right], "subset": "Math", "id": f"{i}"}]
    for rows in (bench, ties):
        for row in rows:
            row.pop("data_source", None)
    tables = {"pairs": pairs, "rated": rated, "bench": bench, "bench_2": ties}
    for name, rows in tables.items():
        write(folder / f"{name}.jsonl", rows)
    tree = {
        "run": {"dir": str(folder), "name": "rm", "seed": 5, "progress": False},
        "model": {"path": str(folder / "start"), "dtype": "float32"},
        "data": {"sources": [{"path": str(folder / "pairs.jsonl")}]},
        "validation": {"sources": [{"path": str(folder / "pairs.jsonl"), "limit": 8}]},
        "reward_model": {"heads": ["preference", "other"]},
        "batch_size": 8,
        "optimizer": {"lr": 3e-3, "eps": 1e-4},
        "train": {"steps": 8},
        "log": {"tensorboard": False},
    }
    for row in pairs:
        row["other"] = "A"
    write(folder / "pairs.jsonl", pairs)
    run_reward_model(build(RMConfig, tree))
    return folder


@pytest.fixture
def evaluate(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """``evaluate(sources, settings...)``: the outcome of the command."""

    def run(sources: str, *words: str, name: str = "eval") -> Outcome:
        return command(
            capsys,
            "eval-rm",
            str(world / "rm"),
            f"data.sources={sources}",
            f"run.dir={tmp_path}",
            f"run.name={name}",
            "run.progress=false",
            "model.dtype=float32",
            *words,
        )

    return run


def test_pairs_have_an_accuracy_with_an_interval_and_a_report(world, evaluate, tmp_path):
    found = evaluate(str(world / "pairs.jsonl"))
    assert found.status == 0, found
    metrics = json.loads(found.out)
    rows = lines(tmp_path / "eval" / "results.jsonl")[1:]
    right = [row["scores"]["preference"][0] > row["scores"]["preference"][1] for row in rows]
    assert metrics["eval/pair_accuracy"] == pytest.approx(sum(right) / 24)
    assert metrics["eval/pair_accuracy_low"] < metrics["eval/pair_accuracy"]
    odd = [ok for ok, row in zip(right, rows, strict=True) if row["source"] == "odd"]
    assert metrics["eval/odd/pair_accuracy"] == pytest.approx(sum(odd) / 12)
    assert rows[3]["prompt"] == "3+1="
    assert rows[3]["responses"] == ["3", "3x"]
    assert "agreement of preference and other" in found.err
    page = (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")
    assert "Calibration" in page


def test_a_stopped_evaluation_resumes_after_the_last_row_and_gives_the_same(
    world, evaluate, tmp_path, monkeypatch
):
    rows = str(world / "pairs.jsonl")
    whole = evaluate(rows, "batch_size=5", name="whole")
    assert whole.status == 0, whole
    scored: list[int] = []
    inner = results.texts_of

    def texts_of(dataset: Any, index: int) -> Row:
        if index == 12 and 12 not in scored:
            scored.append(index)
            raise KeyboardInterrupt
        scored.append(index)
        return inner(dataset, index)

    monkeypatch.setattr("lightrft.trainer.reward_model.evaluate.texts_of", texts_of)
    assert evaluate(rows, "batch_size=5", name="cut").status == 130
    file = tmp_path / "cut" / "results.jsonl"
    file.write_bytes(file.read_bytes() + b'{"index": 12, "sc')
    again = evaluate(rows, "batch_size=5", name="cut")
    assert again.status == 0, again
    # the batch in which it stopped is scored again
    assert (scored.count(3), scored.count(11)) == (1, 2)
    assert lines(file)[1:] == lines(tmp_path / "whole" / "results.jsonl")[1:]
    assert again.out == whole.out


def test_other_rows_in_the_same_file_are_scored_from_the_start(world, evaluate, tmp_path):
    rows = write(tmp_path / "rows.jsonl", lines(world / "pairs.jsonl")[:6])
    assert evaluate(str(rows)).status == 0
    write(rows, lines(world / "pairs.jsonl")[6:12])
    assert evaluate(str(rows)).status == 0
    assert lines(tmp_path / "eval" / "results.jsonl")[1]["prompt"] == "6+1="


def test_ratings_of_several_responses_give_a_best_of_n_curve(world, evaluate, tmp_path):
    found = evaluate(str(world / "rated.jsonl"), GOLD)
    assert found.status == 0, found
    metrics = json.loads(found.out)
    rows = lines(tmp_path / "eval" / "results.jsonl")[1:]
    # the best of one is the mean rating, and the best of all the rating of the highest score
    assert metrics["eval/best_of/1"] == pytest.approx(5 / 4)
    last = [max(zip(r["scores"]["preference"], r["labels"]["preference"]))[1] for r in rows]
    assert metrics["eval/best_of/4"] == pytest.approx(sum(last) / len(last))
    assert metrics["eval/best_of/4/oracle"] == 3
    fewer = json.loads(evaluate(str(world / "rated.jsonl"), GOLD, "best_of=3").out)
    assert fewer["eval/best_of/3"] == metrics["eval/best_of/3"]
    assert "eval/best_of/4" not in fewer
    more = evaluate(str(world / "rated.jsonl"), GOLD, "best_of=5")
    assert "eval/best_of/1" not in json.loads(more.out)
    assert "best_of = 5: no prompt has so many rated responses" in more.err
    assert "The most are 4" in more.err


def test_pairs_have_a_curve_of_two_points_where_it_is_asked_for(world, evaluate, tmp_path):
    plain = json.loads(evaluate(str(world / "pairs.jsonl")).out)
    assert not any(name.startswith("eval/best_of") for name in plain)
    asked = json.loads(evaluate(str(world / "pairs.jsonl"), "best_of=2").out)
    assert asked["eval/best_of/2"] == asked["eval/pair_accuracy"] > asked["eval/best_of/1"] == 0.5
    report = json.loads((tmp_path / "eval" / results.REPORT).read_text())
    assert len(report["best_of_n"]) == 2


def test_benchmarks_have_their_own_scores(world, evaluate, tmp_path):
    first = f"{{path: {world / 'bench.jsonl'}, reader: reward_bench}}"
    second = f"{{path: {world / 'bench_2.jsonl'}, reader: reward_bench_2}}"
    found = evaluate(f"[{first}, {second}]")
    assert found.status == 0, found
    metrics = json.loads(found.out)
    rows = lines(tmp_path / "eval" / "results.jsonl")[1:]
    right: dict[str, list[bool]] = {}
    for row in rows:
        scores = row["scores"]["preference"]
        right.setdefault(row["source"], []).append(scores[0] > max(scores[1:]))
    share = {source: sum(found) / len(found) for source, found in right.items()}
    hard, code = share["reward_bench/llmbar-natural"], share["reward_bench/hep-cpp"]
    assert metrics["eval/reward_bench/Chat Hard"] == pytest.approx(hard)
    assert metrics["eval/reward_bench/score"] == pytest.approx((hard + code) / 2)
    assert metrics["eval/reward_bench_2/Math"] == pytest.approx(share["reward_bench_2/Math"])
    both = metrics["eval/reward_bench_2/Math"] + metrics["eval/reward_bench_2/Ties"]
    assert metrics["eval/reward_bench_2/score"] == pytest.approx(both / 2)


def test_two_evaluations_are_compared_as_paired_samples(world, evaluate, tmp_path, capsys):
    rows = str(world / "pairs.jsonl")
    assert evaluate(rows, name="one").status == 0
    assert evaluate(rows, "head=other", name="two").status == 0
    output = tmp_path / "compare.json"
    folders = [str(tmp_path / name) for name in ("one", "two")]
    found = command(capsys, "compare", *folders, f"output={output}")
    assert found.status == 0, found
    said = json.loads(output.read_text(encoding="utf-8"))["accuracy"]["all"]
    accuracies = []
    for name in ("one", "two"):
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        accuracies.append(summary["eval/pair_accuracy"])
    assert [said[side]["mean"] for side in ("baseline", "candidate")] == accuracies
    (tmp_path / "two" / "summary.json").unlink()
    assert_refused(command(capsys, "compare", *folders, f"output={output}"), "did not finish")


def test_bad_rows_and_settings_are_refused_or_counted(world, evaluate, tmp_path):
    rows = lines(world / "pairs.jsonl")[:4]
    equal = {**rows[0], "rejected": rows[0]["chosen"]}
    tie = {"prompt": "1+1=", "responses": ["a", "b"], "preference": [1, 1]}
    mixed = str(write(tmp_path / "mixed.jsonl", [*rows, equal, tie]))
    assert_refused(evaluate(mixed), "chosen is equal to rejected")
    found = evaluate(mixed, "data.bad_rows=skip")
    assert found.status == 0, found
    metrics = json.loads(found.out)
    assert metrics["eval/prompts"] == 5
    assert metrics["eval/prompts_without_pairs"] == 1
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text(encoding="utf-8"))
    assert summary["rows"]["malformed"] == 1
    only = str(write(tmp_path / "ties.jsonl", [tie]))
    assert_refused(evaluate(only, name="ties"), "no prompt has two responses with different")
    assert_refused(evaluate(mixed, "head=othr", name="head"), "did you mean 'other'")
    assert_refused(evaluate("[]", name="none"), "data.sources is empty")


def test_worst_limits_the_pairs_of_the_report_to_the_most_wrong(world, evaluate, tmp_path):
    turned = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
        for row in lines(world / "pairs.jsonl")
    ]
    rows = str(write(tmp_path / "turned.jsonl", turned))

    def shown(count: int) -> list[Row]:
        found = evaluate(rows, f"worst={count}", name=f"worst{count}")
        assert found.status == 0, found
        page = tmp_path / f"worst{count}" / "reward_scores.json"
        return json.loads(page.read_text(encoding="utf-8"))["worst"]

    everything = shown(24)
    assert len(everything) > 3
    assert shown(3) == everything[:3]
    assert shown(0) == []


def test_a_prompt_with_a_response_beyond_max_tokens_is_left_out_and_counted(
    world, evaluate, tmp_path
):
    given = lines(world / "pairs.jsonl")[:4]
    rows = str(write(tmp_path / "rows.jsonl", [*given, {**given[0], "rejected": "1" * 60}]))

    def overlong(limit: int) -> int:
        found = evaluate(rows, f"max_tokens={limit}", name=f"tokens{limit}")
        assert found.status == 0, found
        summary = tmp_path / f"tokens{limit}" / "summary.json"
        return json.loads(summary.read_text(encoding="utf-8"))["rows"]["overlong"]

    assert overlong(200) == 0
    assert overlong(50) == 1


def test_max_tokens_per_micro_batch_splits_the_forward_pass_and_changes_no_score(
    world, evaluate, tmp_path, monkeypatch
):
    passed: list[int] = []
    inner = outputs.local_micro_batches

    def micro_batches(*args: Any) -> Any:
        for part in inner(*args):
            passed.append(1)
            yield part

    monkeypatch.setattr(outputs, "local_micro_batches", micro_batches)
    scores, passes = [], []
    for limit in (16384, 64):
        passed.clear()
        words = (f"max_tokens_per_micro_batch={limit}", "batch_size=24")
        found = evaluate(str(world / "pairs.jsonl"), *words, name=f"micro{limit}")
        assert found.status == 0, found
        passes.append(len(passed))
        rows = lines(tmp_path / f"micro{limit}" / "results.jsonl")[1:]
        scores.append([score for row in rows for score in row["scores"]["preference"]])
    assert passes[0] == 1
    assert passes[1] > 3
    assert scores[1] == pytest.approx(scores[0], abs=1e-5)


def test_a_run_of_rm_shows_the_scores_of_its_held_out_rows(world):
    shown = json.loads((world / "rm" / "reward_scores.json").read_text(encoding="utf-8"))
    assert shown["head"] == "preference"
    assert shown["pairs"] == 8
    assert "Distribution of scores" in write_report(world / "rm").read_text(encoding="utf-8")


def picture(path: Path, seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path.with_suffix(".png"))
    return str(path.with_suffix(".png"))


def sound(path: Path, seed: int) -> str:
    samples = np.random.default_rng(seed).integers(-9000, 9000, 1600, dtype=np.int16)
    with wave.open(str(path.with_suffix(".wav")), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return str(path.with_suffix(".wav"))


@pytest.mark.parametrize(
    ("family", "kind", "make", "element"),
    [
        ("qwen2_5_vl", "image", picture, '<img src="data:image/png'),
        ("qwen2_audio", "audio", sound, '<audio controls preload="metadata" src="data:audio/wav'),
    ],
)
def test_bad_pairs_show_their_media(tmp_path, capsys, family, kind, make, element):
    save_tiny_media(family, tmp_path / "start")
    config = ModelConfig(path=str(tmp_path / "start"), dtype="float32")
    model = RewardModel.load(config, RewardModelConfig(), seed=1)
    tokenizer = load_tokenizer(config)
    model.save(tokenizer, tmp_path / "model", load_processor(config, tokenizer))
    rows = []
    for i in range(6):
        # one of two answers is better half of the time, so some pairs are in wrong order
        better, worse = ("yes", "no no") if i % 2 else ("no no", "yes")
        given = {"prompt": f"<{kind}> what?", f"{kind}s": [make(tmp_path / f"{i}", i)]}
        rows.append({**given, "chosen": better, "rejected": worse})
    words = (f"data.sources={write(tmp_path / 'rows.jsonl', rows)}", f"run.dir={tmp_path}")
    found = command(capsys, "eval-rm", str(tmp_path / "model"), *words, "run.progress=false")
    assert found.status == 0, found
    shown = json.loads((tmp_path / "eval-rm" / "reward_scores.json").read_text(encoding="utf-8"))
    assert shown["worst"]
    page = (tmp_path / "eval-rm" / "report.html").read_text(encoding="utf-8")
    assert page.count(element) == len(shown["worst"])
    # media of rows in the right order are not written
    assert len(list((tmp_path / "eval-rm" / "media").iterdir())) == len(shown["worst"])
