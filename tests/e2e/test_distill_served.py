"""``lightrft distill`` with a teacher behind a server, which answers as vLLM's ``/completions`` does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import DistillVerbConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.trainer.distill.run import run_distill
from lightrft.workers import served_teacher
from tests.e2e.command import assert_refused, command


class Server(ThreadingHTTPServer):
    """A server of a tiny model. ``failures`` requests are answered by ``status`` first."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.failures, self.status = 0, 503
        self.cut, self.bare, self.beyond = 0, False, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            fails = self.server.failures > 0
            self.server.failures -= fails
            answer = {} if fails else self.answered(body)
        data = json.dumps(answer).encode()
        self.send_response(self.server.status if fails else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answered(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.server.bare:  # what a server without the extension answers
            return {"choices": [{"text": "4", "logprobs": None}]}
        ids = torch.tensor([body["prompt"]])
        with torch.no_grad():
            rows = self.server.model(ids).logits[0].double().log_softmax(-1)
        found: list[Any] = [None]
        for row, token in zip(rows[:-1], body["prompt"][1:], strict=True):
            best = row.topk(body["prompt_logprobs"] - self.server.cut).indices.tolist()
            kept = {t: float(row[t]) for t in (*best, token)}
            if self.server.beyond:
                kept[self.server.beyond] = 0.0
            found.append({str(t): {"logprob": x, "rank": 1} for t, x in kept.items()})
        return {"choices": [{"text": "4", "prompt_logprobs": found}]}

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_tokenizer()
    tiny_model("llama", seed=9, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def server(teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(served_teacher, "WAITS", (0.0, 0.0))
    server = Server(tiny_model("llama", seed=9, vocab_size=len(tiny_tokenizer())).eval())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tree(model_folder: Path, data_folder: Path, teacher_folder: Path, tmp_path: Path) -> dict:
    return {
        "run": {"dir": str(tmp_path), "name": "run", "seed": 5},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "teacher": {"path": str(teacher_folder)},
        "data": {"sources": [{"path": str(data_folder / "train.jsonl")}]},
        "distill": {"top_k": 6},
        "batch_size": 4,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 3},
        "log": {"tensorboard": False},
    }


def rows_of(tree: dict[str, Any], **over: Any) -> list[dict[str, Any]]:
    config = build(DistillVerbConfig, deep_merge(tree, over))
    run_distill(config)
    return read_rows(Path(config.run.dir) / config.run.name / "metrics.jsonl")


@pytest.mark.parametrize(
    "how",
    [
        {"kind": "forward_kl"},
        {"kind": "jsd", "on_policy": 1.0},
        {"kind": "reverse_kl", "tail": "renormalised", "temperature": 2.0},
    ],
    ids=lambda how: how["kind"],
)
def test_a_served_teacher_gives_the_numbers_of_a_local_one(tree, server, how):
    sampling = {"sampling": {"max_new_tokens": 4}} if "on_policy" in how else {}
    local = rows_of(tree, distill=how, run={"name": "local"}, **sampling)
    served = {"url": server.url, "served_name": "big"}
    remote = rows_of(tree, distill=how, teacher=served, run={"name": "remote"}, **sampling)
    for name in ("loss", "distill/divergence", "distill/tokens"):
        assert [r[name] for r in remote] == pytest.approx([r[name] for r in local], rel=1e-4)
    assert len(server.asked) == 12 and {body["model"] for body in server.asked} == {"big"}
    assert {body["prompt_logprobs"] for body in server.asked} == {6}


def test_a_server_that_is_away_for_a_moment_is_asked_again(tree, server):
    server.failures = 2
    rows = rows_of(tree, teacher={"url": server.url, "max_in_flight": 1}, train={"steps": 1})
    assert len(rows) == 1 and len(server.asked) == 6


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ({"bare": True}, ["no prompt_logprobs", "vLLM"]),
        ({"cut": 3}, ["distill.top_k = 6", "--max-logprobs"]),
        ({"beyond": 10**6}, ["the token 1000000", "tokenizer of the student"]),
        ({"failures": 99}, ["did not answer 3 times", "status 503"]),
        ({"failures": 99, "status": 404}, ["status 404"]),
    ],
)
def test_a_server_that_cannot_teach_ends_the_run(capsys, tree, server, tmp_path, way, parts):
    for name, value in way.items():
        setattr(server, name, value)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, {"teacher": {"url": server.url}})))
    assert_refused(command(capsys, "distill", str(file)), "teacher.url", *parts)


@pytest.mark.parametrize(
    ("over", "parts"),
    [
        ({"distill": {"top_k": None}}, ["teacher.url", "set distill.top_k"]),
        ({"distill": {"temperature": 2.0}}, ["distill.temperature = 2.0", "renormalised"]),
        ({"teacher": {"dtype": "float32"}}, ["teacher.dtype", "teacher.url"]),
        ({"teacher": {"path": ""}}, ["teacher.path is empty", "tokenizer"]),
    ],
)
def test_settings_that_a_served_teacher_cannot_meet_are_refused(
    capsys, tree, tmp_path, over, parts
):
    whole = deep_merge(tree, {"teacher": {"url": "http://127.0.0.1:1/v1"}})
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(whole, over)))
    assert_refused(command(capsys, "distill", str(file)), *parts)


def test_a_student_that_reads_media_needs_a_teacher_that_the_run_loads(capsys, tree, tmp_path):
    reader = tmp_path / "reader"
    save_tiny_media("qwen2_5_vl", reader, hidden_size=32)
    over = {
        "model": {"path": str(reader)},
        "teacher": {"path": str(reader), "url": "http://127.0.0.1:1/v1"},
    }
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(deep_merge(tree, over)))
    assert_refused(command(capsys, "distill", str(file)), "teacher.url", "reads media")
