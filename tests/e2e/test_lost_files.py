"""Files and folders of a run that are removed, made read-only or too small while it runs: a message, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge, to_yaml
from lightrft.config.verbs import RLConfig
from lightrft.observability.trackers import read_rows
from lightrft.trainer.run_session import RunSession
from lightrft.utils.atomic_files import disk_problem
from tests.e2e.command import Outcome, command

Run = Callable[..., Outcome]


def assert_ended(outcome: Outcome, *said: str) -> None:
    """The run ended with status 2, and its last line is a message in which every one of ``said`` occurs."""
    assert outcome.status == 2, outcome
    assert "Traceback" not in outcome.err, outcome.err
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("lightrft rl: ") and all(s in last for s in said), outcome.err


@pytest.fixture
def run(capsys, monkeypatch, rl_tree, tmp_path) -> Run:
    """``lightrft rl`` of three steps, with ``deed(run folder)`` done after the first."""

    def start(deed: Callable[[Path], Any] = lambda folder: None, **over: Any) -> Outcome:
        tree = deep_merge(
            rl_tree,
            {"train": {"steps": 3}, "checkpoint": {"every": 2}, "log": {"tensorboard": True}},
        )
        file = tmp_path / "run.yaml"
        file.write_text(to_yaml(build(RLConfig, deep_merge(tree, over))))
        with monkeypatch.context() as patch:
            record = RunSession.record

            def recorded(self: RunSession, step: int, *given: Any, **more: Any) -> dict[str, Any]:
                row = record(self, step, *given, **more)
                if step == 1:
                    deed(self.path)
                return row

            patch.setattr(RunSession, "record", recorded)
            return command(capsys, "rl", file)

    return start


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_metrics_that_are_removed_are_written_again(run, tmp_path):
    outcome = run(lambda folder: (folder / "metrics.jsonl").unlink())
    assert (
        outcome.status == 0
        and "metrics.jsonl was removed during the run: its 1 rows are written again" in outcome.err
    )
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def remove_folder(folder: Path) -> None:
    for _ in range(5):
        # the run may write a file into it at this moment
        with suppress(OSError):
            shutil.rmtree(folder)
            return


@pytest.mark.parametrize(
    "name", ["rollouts", "tensorboard", "checkpoints", "log.txt", "config.yaml"]
)
def test_a_part_of_the_folder_that_is_removed_ends_in_a_message_or_not_at_all(run, tmp_path, name):
    def remove(folder: Path) -> None:
        if not (folder / name).is_dir():
            (folder / name).unlink(missing_ok=True)
            return
        remove_folder(folder / name)

    outcome = run(remove)
    assert "Traceback" not in outcome.err
    if outcome.status:
        assert_ended(outcome, str(tmp_path / "run"))
    else:
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]


def test_a_run_whose_folder_is_removed_says_so_and_does_not_make_another(run, tmp_path):
    assert_ended(run(remove_folder), str(tmp_path / "run"), "No such file or directory")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["checkpoints", "rollouts"])
def test_a_folder_that_became_a_file_is_named(run, tmp_path, name):
    def replace(folder: Path) -> None:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
        (folder / name).write_text("")

    assert_ended(run(replace), str(tmp_path / "run" / name))


def test_a_folder_that_became_read_only_is_named_and_the_same_command_resumes(run, tmp_path):
    def freeze(folder: Path) -> None:
        if os.geteuid():
            folder.chmod(0o555)
        else:  # what root may do, a flag of the file system forbids
            frozen.append(
                subprocess.run(
                    ["chattr", "+i", folder], capture_output=True, check=False
                ).returncode
                == 0
            )

    frozen: list[bool] = []
    try:
        outcome = run(freeze)
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "run"], capture_output=True, check=False)
        (tmp_path / "run").chmod(0o755)
    if frozen == [False]:
        pytest.skip("this file system cannot forbid root to write")
    assert_ended(outcome, str(tmp_path / "run"), "not permitted" if frozen else "Permission denied")
    assert run().status == 0
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EROFS, "x"), OSError(errno.EIO, "x"), RuntimeError("I/O error (os error 30)")],
)
def test_an_error_of_the_disk_is_known_by_its_number_whatever_class_it_has(error, tmp_path):
    assert disk_problem(error) in (os.strerror(errno.EROFS), os.strerror(errno.EIO))
    assert disk_problem(
        PermissionError(errno.EACCES, "x", str(tmp_path / "run" / "file")), tmp_path / "run"
    ).startswith("Permission")
    assert disk_problem(PermissionError(errno.EACCES, "x", "/elsewhere"), tmp_path) == ""
    assert (
        disk_problem(ConnectionError(errno.ECONNRESET, "x"), tmp_path)
        == disk_problem(ValueError("x"), tmp_path)
        == ""
    )


@pytest.mark.parametrize("size", ["16k", "64k", "256k", "700k"])
def test_a_disk_that_is_too_small_at_any_moment_ends_in_one_message(run, small_disk, size):
    subprocess.run(["mount", "-o", f"remount,size={size}", small_disk], check=True)
    outcome = run(run={"dir": str(small_disk)})
    assert_ended(outcome)
    assert "full" in outcome.err or "No space left" in outcome.err, outcome.err
