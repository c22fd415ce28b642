"""``lightrft eval-rm`` on responses whose steps have labels, by a process reward model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import ProcessModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.loading.save_model import save_model
from lightrft.models.processors import load_processor
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.process_model.results import step_texts
from tests.e2e.command import Outcome, assert_refused, command

Row = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps")
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    separator = Separator("#", tuple(tokenizer.encode("#", add_special_tokens=False)))
    ProcessRewardModel(
        model, ModelConfig(), ProcessModelConfig(head="linear"), separator=separator, seed=3
    ).save(tokenizer, path / "prm")
    save_model(model, tokenizer, path / "plain")
    for name, count in (("gsm8k", 9), ("math", 6)):
        rows = [
            {"problem": f"{i}+1=", "steps": ["so", f"it is {i}", "x" * i + "."], "label": i % 4 - 1}
            for i in range(count)
        ]
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def predicted(folder: Path, row: Row, threshold: float) -> int:
    """The first step that one plain pass per response finds wrong, or -1."""
    tokenizer = load_tokenizer(ModelConfig(path=str(folder / "prm")))
    model = ProcessRewardModel.open(folder / "prm", dtype=torch.float32)
    assert model.step_head is not None
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["problem"]}], add_generation_prompt=True, return_dict=False
    )
    text = ""
    for k, step in enumerate(row["steps"]):
        text += step + "#"
        ids = [*asked, *tokenizer.encode(text, add_special_tokens=False)]
        states = model.base(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        if float(model.step_head(states[0, -1:]).sigmoid().detach()) < threshold:
            return k
    return -1


def test_process_bench_is_measured_by_subset_and_on_average(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(folder / "gsm8k.jsonl"), str(folder / "math.jsonl")]
    sources = ", ".join(f"{{path: '{f}', name: {Path(f).stem}}}" for f in files)
    # Near the scores of this model, so that some steps are found wrong.
    threshold = 0.5
    words = (
        str(folder / "prm"),
        f"steps.sources=[{sources}]",
        f"run.dir={tmp_path}",
        f"threshold={threshold}",
        "batch_size=4",
    )
    found = command(capsys, "eval-rm", *words)
    assert found.status == 0, found.err
    metrics = json.loads(found.out)
    scores = []
    for file in files:
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        hits: dict[bool, list[bool]] = {True: [], False: []}
        for row in rows:
            hits[row["label"] < 0].append(predicted(folder, row, threshold) == row["label"])
        right, wrong = (sum(hits[kind]) / len(hits[kind]) for kind in (True, False))
        f1 = 2 * right * wrong / (right + wrong) if right + wrong else 0.0
        assert metrics[f"eval/{Path(file).stem}/process_bench_f1"] == pytest.approx(f1, abs=1e-9)
        scores.append(f1)
    assert metrics["eval/process_bench/average"] == pytest.approx(sum(scores) / 2, abs=1e-9)
    summary = json.loads((tmp_path / "eval-rm" / "summary.json").read_text())
    assert summary["heldout_after"] == metrics["eval/step_accuracy"]
    assert summary["rows"]["examples"] == 15


def test_another_threshold_and_smaller_parts_change_what_they_should(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, *words: str) -> dict[str, float]:
        own = (f"run.dir={tmp_path}", f"run.name={name}", "run.progress=false")
        data = f"steps.sources={folder / 'gsm8k.jsonl'}"
        return json.loads(command(capsys, "eval-rm", str(folder / "prm"), data, *own, *words).out)

    whole = run("whole")
    parts = run("parts", "batch_size=2", "max_tokens_per_micro_batch=8")
    assert parts == pytest.approx(whole, abs=1e-6)
    assert run("strict", "threshold=0.999")["eval/process_bench_right"] == 0.0
    assert run("loose", "threshold=0.001")["eval/process_bench_wrong"] == 0.0


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (
            "prm",
            ["data.sources={folder}/gsm8k.jsonl"],
            "is a process reward model, which scores steps; set steps.sources",
        ),
        ("prm", ["steps.shuffle=true"], "steps changes nothing"),
        ("prm", ["threshold=0.2"], "threshold changes nothing"),
        (
            "prm",
            ["steps.sources={folder}/gsm8k.jsonl", "data.sources={folder}/gsm8k.jsonl"],
            "data.sources and steps.sources are both set",
        ),
        ("plain", ["steps.sources={folder}/gsm8k.jsonl"], "holds no process reward model"),
        (
            "prm",
            ["steps.sources={folder}/gsm8k.jsonl", "best_of=4", "head=preference"],
            "best_of, head: read for scores of whole responses, and steps.sources is set",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    words: list[str],
    said: str,
) -> None:
    given = [word.format(folder=folder) for word in words]
    found = command(capsys, "eval-rm", str(folder / model), *given, f"run.dir={tmp_path}")
    assert_refused(found, said)


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_stopped_evaluation_resumes_after_its_last_batch_and_gives_the_same(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(name: str, *words: str) -> Outcome:
        own = (f"run.dir={tmp_path}", f"run.name={name}", "run.progress=false", "batch_size=4")
        data = f"steps.sources=[{folder / 'gsm8k.jsonl'}, {folder / 'math.jsonl'}]"
        return command(capsys, "eval-rm", str(folder / "prm"), data, *own, *words)

    whole = run("whole")
    assert whole.status == 0, whole
    written: list[int] = []

    def texts(dataset: Any, index: int) -> Row:
        written.append(index)
        if index == 10 and written.count(10) == 1:
            raise KeyboardInterrupt
        return step_texts(dataset, index)

    monkeypatch.setattr("lightrft.trainer.process_model.evaluate.step_texts", texts)
    assert run("cut").status == 130
    file = tmp_path / "cut" / "results.jsonl"
    file.write_bytes(file.read_bytes() + b'{"index": 10, "sc')
    again = run("cut", "worst=3", "max_tokens_per_micro_batch=9999")
    assert again.status == 0, again
    # the batch in which it stopped is scored again
    assert (written.count(7), written.count(8), written.count(9)) == (1, 2, 2)
    assert lines(file)[1:] == lines(tmp_path / "whole" / "results.jsonl")[1:]
    assert again.out == whole.out
    shown = json.loads((tmp_path / "cut" / "reward_scores.json").read_text(encoding="utf-8"))
    assert len(shown["worst"]) == 3
    written.clear()
    (folder / "math.jsonl").write_bytes((folder / "math.jsonl").read_bytes() + b"\n")
    assert run("cut").status == 0
    assert written == []


def test_other_rows_or_another_model_are_scored_from_the_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    model = tmp_path / "prm"
    shutil.copytree(folder / "prm", model)

    def first() -> Row:
        words = (f"steps.sources={rows}", f"run.dir={tmp_path}", "run.progress=false")
        found = command(capsys, "eval-rm", str(model), *words)
        assert found.status == 0, found
        return lines(tmp_path / "eval-rm" / "results.jsonl")[1]

    given = lines(folder / "gsm8k.jsonl")
    rows.write_text("\n".join(map(json.dumps, given[:4])), encoding="utf-8")
    before = first()
    assert before["steps"] == ["so", "it is 0", "."]
    rows.write_text("\n".join(map(json.dumps, given[4:8])), encoding="utf-8")
    assert first()["steps"][1] == "it is 4"
    # the same steps with another label
    rows.write_text("\n".join(map(json.dumps, [{**given[4], "label": 2}])), encoding="utf-8")
    assert first()["labels"] == [1.0, 1.0, 0.0]
    scores = first()["scores"]
    head = load_file(model / "step_head.safetensors")
    save_file({name: -tensor for name, tensor in head.items()}, model / "step_head.safetensors")
    assert first()["scores"] == pytest.approx([1 - score for score in scores], abs=1e-6)


def test_the_report_shows_scores_calibration_subsets_and_the_worst_responses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"steps.sources=[{folder / 'gsm8k.jsonl'}, {folder / 'math.jsonl'}]"
    words = (data, f"run.dir={tmp_path}", "run.progress=false", "worst=4")
    found = command(capsys, "eval-rm", str(folder / "prm"), *words)
    assert found.status == 0, found
    assert "gsm8k/response_accuracy" in found.err
    metrics = json.loads(found.out)
    shown = json.loads((tmp_path / "eval-rm" / "reward_scores.json").read_text(encoding="utf-8"))
    rows = lines(tmp_path / "eval-rm" / "results.jsonl")[1:]
    labelled = [
        (score, label)
        for row in rows
        for score, label in zip(row["scores"], row["labels"])
        if label is not None
    ]
    assert shown["steps"] == len(labelled)
    assert shown["responses"] == 15
    for side, is_right in (("right", True), ("wrong", False)):
        spread = shown["distribution"]
        mean = sum(c * share for c, share in zip(spread["centers"], spread[side]))
        own = [score for score, label in labelled if (label >= 0.5) == is_right]
        assert mean == pytest.approx(sum(own) / len(own), abs=0.02)
    subsets = {one["name"]: one for one in shown["subsets"]}
    assert subsets["math"]["f1"]["f1"] == metrics["eval/math/process_bench_f1"]
    assert subsets["math"]["mean"] == metrics["eval/math/response_accuracy"]
    worst = shown["worst"]
    errors = []
    for one in worst:
        step = one["steps"][one["worst"]]
        assert step["wrong"]
        errors.append(abs(step["score"] - step["label"]))
    assert len(worst) == 4
    assert errors == sorted(errors, reverse=True)
    page = (tmp_path / "eval-rm" / "report.html").read_text(encoding="utf-8")
    for text in ("Scores of steps", "Calibration", "First wrong step found", "judged worst"):
        assert text in page
    assert page.count('<tr class="wrong">') >= 4
    assert "Held-out step accuracy" in page


def test_two_evaluations_of_steps_are_compared_as_paired_samples(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, accuracies = [], []
    for name, threshold in (("one", 0.5), ("two", 0.999)):
        own = (f"run.dir={tmp_path}", f"run.name={name}", f"threshold={threshold}")
        data = f"steps.sources={folder / 'gsm8k.jsonl'}"
        found = command(capsys, "eval-rm", str(folder / "prm"), data, *own, "run.progress=false")
        assert found.status == 0, found
        folders.append(str(tmp_path / name))
        accuracies.append(json.loads(found.out)["eval/response_accuracy"])
    output = tmp_path / "compare.json"
    found = command(capsys, "compare", *folders, f"output={output}")
    assert found.status == 0, found
    said = json.loads(output.read_text(encoding="utf-8"))["accuracy"]["all"]
    assert [said[side]["mean"] for side in ("baseline", "candidate")] == accuracies
    (tmp_path / "two" / "summary.json").unlink()
    assert_refused(command(capsys, "compare", *folders, f"output={output}"), "did not finish")


def test_badly_judged_responses_show_their_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "start")
    config = ModelConfig(path=str(tmp_path / "start"), dtype="float32")
    tokenizer = load_tokenizer(config)
    separator = Separator("\n", tuple(tokenizer.encode("\n", add_special_tokens=False)))
    settings = ProcessModelConfig(head="linear")
    model = ProcessRewardModel.load(config, settings, separator=separator, seed=1)
    model.save(tokenizer, tmp_path / "model", load_processor(config, tokenizer))
    rows = []
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        given = {"prompt": "<image> what?", "images": [str(tmp_path / f"{i}.png")]}
        rows.append({**given, "completions": ["a", "b"], "labels": [True, False]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = (f"steps.sources={tmp_path / 'rows.jsonl'}", f"run.dir={tmp_path}")
    found = command(capsys, "eval-rm", str(tmp_path / "model"), *words, "run.progress=false")
    assert found.status == 0, found
    shown = json.loads((tmp_path / "eval-rm" / "reward_scores.json").read_text(encoding="utf-8"))
    assert shown["worst"]
    assert shown["worst"][0]["prompt"] == "what?"
    page = (tmp_path / "eval-rm" / "report.html").read_text(encoding="utf-8")
    assert page.count('<img src="data:image/png') == len(shown["worst"])
