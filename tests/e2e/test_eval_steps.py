"""``lightrft eval-rm`` on responses whose steps have labels, by a process reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.process import ProcessModelConfig
from lightrft.models.loading.from_pretrained import load_tokenizer, save_model
from lightrft.models.reward.process import ProcessRewardModel
from lightrft.models.reward.process_form import Separator
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests.e2e.command import assert_refused, command

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
