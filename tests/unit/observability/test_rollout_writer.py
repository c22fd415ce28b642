import errno
import json
import threading
import time

import pytest
import torch

from lightrft.observability import rollout_writer
from lightrft.observability.rollout_writer import RolloutWriter
from lightrft.types import Attachment, Prompt, Ragged, Rollout
from lightrft.utils.atomic_files import write_atomic
from lightrft.utils.errors import ResourceError


def rollouts(step, count=3):
    prompt = Prompt(
        id=f"p{step}",
        token_ids=[1, 2],
        text="2+3=",
        label="5",
        data_source="sums",
        columns={"level": 1},
    )
    return [
        Rollout(
            prompt=prompt,
            token_ids=[5, 6, 7],
            sampled=[True, True, False],
            logprobs=[-0.1, -1e-300, 0.0],
            versions=[3, 3, 4],
            finish_reason="stop",
            seed=2**62 + i,
            sample=i,
            text='5 "quoted"\n\u2028',
            reward=0.1 + 0.2,
            terms={"math": 1.0},
        )
        for i in range(count)
    ]


def read(path):
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


def test_a_row_holds_everything_exactly(tmp_path):
    writer = RolloutWriter(tmp_path)
    writer.write(tmp_path / "a.jsonl", rollouts(1), {"advantages": [[0.1, -0.5, 0.0]] * 3})
    writer.close()
    row = read(tmp_path / "a.jsonl")[1]
    assert row["prompt"]["text"] == "2+3="
    assert row["prompt"]["columns"] == {"level": 1}
    assert (row["token_ids"], row["sampled"], row["versions"]) == (
        [5, 6, 7],
        [True, True, False],
        [3, 3, 4],
    )
    assert row["logprobs"] == [-0.1, -1e-300, 0.0]
    assert row["seed"] == 2**62 + 1
    assert row["reward"] == 0.1 + 0.2
    assert row["advantages"] == [0.1, -0.5, 0.0]
    assert row["text"] == '5 "quoted"\n\u2028'


def test_numbers_that_json_lacks_become_null(tmp_path):
    bad = rollouts(1, 1)
    bad[0].reward = float("nan")
    writer = RolloutWriter(tmp_path)
    writer.write(tmp_path / "a.jsonl", bad, {})
    writer.close()
    assert read(tmp_path / "a.jsonl")[0]["reward"] is None


def test_everything_is_there_after_close(tmp_path):
    writer = RolloutWriter(tmp_path, depth=2)
    for step in range(20):
        writer.write(tmp_path / f"{step}.jsonl", rollouts(step), {})
    writer.close()
    assert [read(tmp_path / f"{s}.jsonl")[0]["prompt"]["id"] for s in range(20)] == [
        f"p{s}" for s in range(20)
    ]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_queue_is_bounded_and_the_caller_waits(tmp_path, monkeypatch):
    gate, real = threading.Event(), rollout_writer._write_file

    def slow(job):
        gate.wait()
        real(job)

    monkeypatch.setattr(rollout_writer, "_write_file", slow)
    writer = RolloutWriter(tmp_path, depth=2)
    accepted = []

    def produce():
        for step in range(5):
            writer.write(tmp_path / f"{step}.jsonl", rollouts(step), {})
            accepted.append(step)

    producer = threading.Thread(target=produce)
    producer.start()
    deadline = time.monotonic() + 300
    while len(accepted) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    producer.join(timeout=0.2)  # the time that a third would have
    assert producer.is_alive()
    assert accepted == [0, 1]
    gate.set()
    producer.join(timeout=300)
    writer.close()
    assert len(list(tmp_path.glob("*.jsonl"))) == 5


def test_a_failed_write_surfaces_and_nothing_is_lost(tmp_path, monkeypatch):
    full, real = [True], rollout_writer.json_line

    def failing(*args):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(rollout_writer, "json_line", failing)
    writer = RolloutWriter(tmp_path)
    writer.write(tmp_path / "0.jsonl", rollouts(0), {})
    with pytest.raises(ResourceError, match=r"disk is full.*0\.jsonl"):
        writer.flush()
    with pytest.raises(ResourceError, match=r"2 batches"):
        try:  # the second batch is queued whether the retried first fails during this call or the next
            writer.write(tmp_path / "1.jsonl", rollouts(1), {})
        finally:
            writer.close()
    with pytest.raises(ResourceError, match=r"2 batches"):
        writer.close()
    assert not list(tmp_path.iterdir())
    full[0] = False
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]


def test_a_row_that_cannot_be_written_is_an_error_not_a_gap(tmp_path):
    odd = rollouts(0)
    odd[2].prompt.columns = {"handle": object()}
    writer = RolloutWriter(tmp_path)
    writer.write(tmp_path / "0.jsonl", odd, {})
    with pytest.raises(RuntimeError, match="object"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_columns_must_fit(tmp_path):
    with pytest.raises(ValueError, match="advantages"):
        RolloutWriter(tmp_path).write(tmp_path / "a.jsonl", rollouts(1), {"advantages": [[0.0]]})


def pictured(step, name="ab12.png", data=b"\x89PNG"):
    some = rollouts(step)
    for rollout in some:
        rollout.prompt.media = {"pixels": Ragged(torch.ones(4, 3), torch.tensor([4]))}
        rollout.prompt.attachments = (Attachment(name, data),)
        rollout.prompt.columns = {"raw": b"1234567", "inner": [{"bytes": b"12"}]}
    return some


def test_what_is_attached_is_written_once_by_name_and_lines_hold_the_name_and_no_bytes(
    tmp_path, monkeypatch
):
    written = []
    monkeypatch.setattr(
        rollout_writer,
        "write_atomic",
        lambda path, data: (written.append(path.name), write_atomic(path, data)),
    )
    folder = tmp_path / "rollouts"
    folder.mkdir()
    writer = RolloutWriter(folder)
    for step in (1, 2):
        some = pictured(step)
        writer.write(
            folder / f"{step}.jsonl", some, {}, [a for r in some for a in r.prompt.attachments]
        )
    writer.close()
    assert written == ["ab12.png"]
    assert [p.name for p in (tmp_path / "media").iterdir()] == ["ab12.png"]
    assert (tmp_path / "media" / "ab12.png").read_bytes() == b"\x89PNG"
    prompt = read(folder / "2.jsonl")[0]["prompt"]
    assert prompt["attachments"] == ["ab12.png"]
    assert prompt["columns"] == {"raw": "<7 B>", "inner": [{"bytes": "<2 B>"}]}
    assert "media" not in prompt


def test_numbers_that_json_lacks_do_not_bring_bytes_or_media_into_a_line(tmp_path):
    (tmp_path / "rollouts").mkdir()
    some = pictured(1)
    some[0].reward = float("nan")
    writer = RolloutWriter(tmp_path / "rollouts")
    writer.write(tmp_path / "rollouts" / "a.jsonl", some, {})
    writer.close()
    first, second, _ = read(tmp_path / "rollouts" / "a.jsonl")
    assert first["reward"] is None
    assert first["prompt"] == second["prompt"]
    assert not (tmp_path / "media").exists()


def test_lines_whose_attachments_could_not_be_written_wait_with_them(tmp_path, monkeypatch):
    (tmp_path / "rollouts").mkdir()
    writer = RolloutWriter(tmp_path / "rollouts")

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    some = pictured(1)
    with monkeypatch.context() as patch:
        patch.setattr(rollout_writer, "write_atomic", full)
        writer.write(tmp_path / "rollouts" / "a.jsonl", some, {}, some[0].prompt.attachments)
        with pytest.raises(ResourceError, match="disk is full"):
            writer.flush()
    assert not (tmp_path / "rollouts" / "a.jsonl").exists()
    writer.close()
    assert (tmp_path / "rollouts" / "a.jsonl").exists()
    assert (tmp_path / "media" / "ab12.png").exists()
