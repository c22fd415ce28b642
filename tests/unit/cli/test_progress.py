"""What is said when a run ends."""

import json
from pathlib import Path

import pytest

from lightrft.api.progress import closing_lines
from lightrft.api.start import check_trained, exit_status, started
from lightrft.config.base import build
from lightrft.config.run import RunConfig
from lightrft.config.verbs import RLConfig
from lightrft.utils.errors import NothingTrained

SUMMARY = {"finished": True, "steps": 3, "seconds": 2.4, "next": ["lightrft chat model=m"]}


def test_the_last_lines_are_commands_that_can_be_typed(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert closing_lines(RunConfig(), SUMMARY) == [
        "finished at step 3 after 2 s; everything is in runs/run",
        "  lightrft chat model=m",
    ]


def test_where_the_environment_is_not_active_its_activation_comes_first(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.prefix", str(Path.cwd() / ".venv"))
    assert closing_lines(RunConfig(), SUMMARY)[-2:] == [
        "  source .venv/bin/activate",
        "  lightrft chat model=m",
    ]


def test_an_environment_of_another_folder_is_named_whole(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "my env"))
    monkeypatch.chdir(tmp_path / ".." / "..")
    assert closing_lines(RunConfig(), SUMMARY)[-2].startswith("  source '")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    line = closing_lines(RunConfig(), SUMMARY)[-2]
    assert line == f"  source '{tmp_path}/my env/bin/activate'"


def test_a_run_that_was_stopped_says_how_it_goes_on() -> None:
    lines = closing_lines(
        RunConfig(),
        {
            "finished": False,
            "steps": 1,
            "seconds": 1.0,
            "heldout_before": 0.25,
            "heldout_after": 0.5,
        },
    )
    assert lines[0] == "eval accuracy 25.0% -> 50.0%"
    assert lines[1].startswith("stopped; the same command resumes at step 1")


def test_a_run_that_would_overwrite_itself_says_which_command_resumes_it() -> None:
    stopped = {"finished": False, "steps": 2, "seconds": 1.0, "saved_step": 2}
    [line] = closing_lines(RunConfig(overwrite=True), stopped)
    assert line.startswith("stopped; the same command without run.overwrite=true resumes at step 2")


def test_a_run_that_was_stopped_before_its_first_step_promises_nothing() -> None:
    stopped = {"finished": False, "steps": 0, "seconds": 1.0, "saved_step": None}
    [line] = closing_lines(RunConfig(), stopped)
    assert line == "stopped before the first step; the same command starts over"


@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("", 0)])
def test_a_run_that_a_signal_stopped_ends_with_the_status_of_that_signal(
    monkeypatch, signal, status
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert exit_status({**SUMMARY, "stopped_by": signal} if signal else SUMMARY) == status


def test_the_launcher_of_ranks_gives_the_status_that_they_may_not(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**SUMMARY, "stopped_by": "SIGTERM"}))
    config = build(RLConfig, {"run": {"dir": str(tmp_path)}, "launch": {"processes": 2}})
    for of_ranks, status in ((0, 143), (2, 2)):
        monkeypatch.setattr(
            "lightrft.api.start.run_processes", lambda *_, of_ranks=of_ranks: of_ranks
        )
        assert started("rl", [], config) == status
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_status({"stopped_by": "SIGTERM"}) == 0


@pytest.mark.parametrize(
    ("saved", "said"), [(None, "there is no checkpoint"), (4, "the checkpoint is of step 4")]
)
def test_the_last_lines_state_the_work_that_a_kill_would_have_lost(saved, said) -> None:
    lines = closing_lines(
        RunConfig(),
        {**SUMMARY, "saved_step": saved, "most_unsaved_steps": 1, "most_unsaved_seconds": 61.7},
    )
    assert lines[1] == f"{said}; a kill would have lost at most 1 step (62 s)"


@pytest.mark.parametrize(
    ("measured", "line"),
    [
        ({"heldout_before": 0.25}, "eval accuracy before training 25.0%"),
        ({"heldout_after": 0.5}, "eval accuracy after training 50.0%"),
    ],
)
def test_an_accuracy_that_was_not_measured_is_not_given(measured, line) -> None:
    assert closing_lines(RunConfig(), {**SUMMARY, **measured})[0] == line


def test_a_run_that_ended_without_a_step_that_learned_is_an_error() -> None:
    with pytest.raises(NothingTrained, match="steps: 3"):
        check_trained({**SUMMARY, "steps_trained": 0})
    check_trained({**SUMMARY, "steps_trained": 1})
    check_trained({**SUMMARY, "steps": 0, "steps_trained": 0})
    check_trained({**SUMMARY, "finished": False, "steps_trained": 0})
