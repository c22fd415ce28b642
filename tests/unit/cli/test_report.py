"""``lightrft report``, and the report that every run leaves."""

from __future__ import annotations

from lightrft.api import progress
from lightrft.cli.main import main
from lightrft.config.base import Settings
from lightrft.config.run import RunConfig
from lightrft.observability.run_directory import RunDirectory
from lightrft.utils.errors import DataError
from lightrft.viewer import report


class Config(Settings):
    name: str = "x"


def run_in(folder):
    run = RunDirectory.open(folder, Config(), resume="auto", overwrite=False)
    run.log({"step": 1, "phase": "rl", "reward/mean": 0.25})
    run.close()


def test_a_run_is_named_by_its_folder_or_by_its_name_under_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        run_in(tmp_path / "runs" / name)
    assert main(["report", "one", "runs/two"]) == 0
    *pages, last = capsys.readouterr().out.splitlines()
    assert pages == ["runs/one/report.html", "runs/two/report.html"]
    assert last == "each page is of one run; lightrft compare one runs/two"
    assert "Not finished" in (tmp_path / "runs" / "one" / "report.html").read_text()


def test_a_run_that_does_not_exist_is_refused_with_the_nearest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_in(tmp_path / "runs" / "first")
    assert main(["report", "frist"]) == 2
    assert "there is no run folder frist; did you mean runs/first?" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", "empty"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


def test_a_run_ends_with_its_report_before_the_commands_to_type_next(tmp_path, capsys):
    run_in(tmp_path / "x")
    summary = {"finished": True, "steps": 1, "seconds": 1.0, "next": ["lightrft chat model=m"]}
    assert progress.finish(RunConfig(name="x", dir=str(tmp_path)), summary) == 0
    lines = capsys.readouterr().out.splitlines()
    place = lines.index(f"report: {tmp_path}/x/report.html")
    assert lines[place - 1].startswith("finished at step 1") and lines[place + 1].startswith("  ")
    assert (tmp_path / "x" / "report.html").is_file()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path, capsys, monkeypatch):
    def refuse(folder, extract):
        raise DataError("the file is malformed")

    monkeypatch.setattr(report, "write_report", refuse)
    assert (
        progress.finish(
            RunConfig(name="x", dir=str(tmp_path)), {"finished": True, "steps": 1, "seconds": 1.0}
        )
        == 0
    )
    assert (
        f"report: not written (the file is malformed); lightrft report {tmp_path}/x tries again"
        in capsys.readouterr().out
    )
