"""``lightrft eval-rm``: a trained tiny reward model on rows whose order is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.verbs import RMConfig
from lightrft.models.loading.from_pretrained import save_model
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.reward_model.run import run_reward_model
from tests.e2e.command import Outcome, command

Row = dict[str, Any]


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
