"""What is said when a run ends."""

from lightrft.cli.show import closing_lines
from lightrft.config import RunConfig

SUMMARY = {"finished": True, "steps": 3, "seconds": 2.4, "next": ["lightrft chat model=m"]}


def test_the_last_lines_are_commands_that_can_be_typed(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert closing_lines(RunConfig(), SUMMARY) == [
        "finished at step 3 after 2 s; everything is in runs/run",
        "  lightrft chat model=m",
    ]


def test_where_the_environment_is_not_active_its_activation_comes_first(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.prefix", ".venv")
    assert closing_lines(RunConfig(), SUMMARY)[-2:] == ["  source .venv/bin/activate", "  lightrft chat model=m"]


def test_a_run_that_was_stopped_says_how_it_goes_on() -> None:
    lines = closing_lines(
        RunConfig(), {"finished": False, "steps": 1, "seconds": 1.0, "heldout_before": 0.25, "heldout_after": 0.5}
    )
    assert lines[0] == "held-out accuracy 25.0% -> 50.0%"
    assert lines[1].startswith("stopped; the same command goes on at step 1")
