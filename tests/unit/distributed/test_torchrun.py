"""What the launcher says of processes that failed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrft.distributed.error_report import ERROR_FILE, SPEAKER, report_error
from lightrft.distributed.torchrun import Forced, cause
from lightrft.utils.errors import RESUMES, ConfigError, RankError


def failure(
    exitcode: int, error: BaseException | None, folder: Path, timestamp: int = 0
) -> SimpleNamespace:
    """One that torch's launcher has found, of a process that has told of ``error``."""
    data = ""
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ERROR_FILE, str(folder / "error.json"))
            report_error(error)
        data = json.loads((folder / "error.json").read_text())
    return SimpleNamespace(
        exitcode=exitcode,
        error_file_data=data,
        timestamp=timestamp,
        signal_name=lambda: f"SIG{-exitcode}",
        pid=7 if exitcode == -9 else 1,
    )


def test_a_mistake_of_the_users_is_said_as_it_is_where_all_ranks_found_it_and_with_its_rank_else(
    tmp_path,
):
    same = failure(2, ConfigError("no such thing"), tmp_path)
    assert cause({0: same, 1: same}) == ("no such thing", 2)
    assert cause({0: failure(2, RankError("rank 1: x"), tmp_path), 1: same}) == (
        "rank 1: no such thing",
        2,
    )


def test_what_a_rank_says_of_another_counts_only_where_that_one_says_nothing(tmp_path):
    late = failure(
        2, RankError("rank 1 (process 7 on here) sends no heartbeat"), tmp_path, timestamp=1
    )
    bug = failure(1, ZeroDivisionError("oh"), tmp_path, timestamp=2)
    assert cause({0: late, 2: bug})[0].startswith("rank 2 failed with ZeroDivisionError: oh")
    assert cause({0: late, 1: failure(-15, None, tmp_path)}) == (
        "rank 1 (process 7 on here) sends no heartbeat",
        2,
    )
    killed_by_the_launcher = {0: late, 1: failure(-9, None, tmp_path)}
    assert cause(killed_by_the_launcher, {7})[0].startswith("rank 1 (process 7")


def test_a_killed_rank_is_named_with_the_signal_and_the_way_on(tmp_path):
    found, status = cause({0: failure(2, RankError("x"), tmp_path), 3: failure(-9, None, tmp_path)})
    assert status == 1
    assert found == (f"rank 3 was killed by SIG9, as happens when memory runs out. {RESUMES}")


def test_what_the_launcher_kills_itself_is_known_from_its_log():
    forced = Forced()
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    log.warning("Sending process %s closing signal %s", 11, "SIGTERM")
    log.warning(
        "Unable to shutdown process %s via %s, forcefully exiting via %s", 12, "SIGTERM", "SIGKILL"
    )
    assert forced.pids == {12}


def test_a_rank_that_ends_without_a_word_is_named(tmp_path):
    assert cause({1: failure(3, None, tmp_path)})[0].startswith(
        "rank 1 ended with status 3; see what it said above"
    )


def test_an_error_is_left_for_the_launcher_and_said_by_one_of_the_two(tmp_path, monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    assert not report_error(ConfigError("x"))
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.delenv(SPEAKER, raising=False)
    # Torchrun itself: what it prints last is hard to find.
    assert not report_error(ConfigError("x"))
    monkeypatch.setenv(SPEAKER, "1")
    assert report_error(ConfigError("x"))
    assert not report_error(ZeroDivisionError("a traceback is shown beside"))
    assert (
        "ZeroDivisionError"
        in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    )
