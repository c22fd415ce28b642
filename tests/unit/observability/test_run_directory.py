import json
import logging
import subprocess
import sys
from typing import ClassVar

import pytest
import yaml

from lightrft.config.base import Settings, load_settings
from lightrft.config.run import LogConfig
from lightrft.observability.run_directory import RunDirectory
from lightrft.utils.errors import ConfigError, DataError, ResourceError


class Inner(Settings):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


class Config(Settings):
    steps: int = 10
    note: str | None = None
    optimizer: Inner = Inner()


def enter(path, config=None, **options):
    return RunDirectory.open(
        path, config or Config(), **{"resume": "auto", "overwrite": False, **options}
    )


def leave_a_row(path, config=None, **options):
    """A run that has begun."""
    with enter(path, config, **options) as folder:
        folder.log({"step": 1, "loss": 0.5})


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_the_saved_config_loads_back_equal(tmp_path):
    config = Config(steps=3, optimizer=Inner(lr=1e-7))
    with enter(tmp_path / "a", config) as folder:
        assert folder.fresh
    assert load_settings(Config, [tmp_path / "a/config.yaml"]).settings == config


def test_resuming_an_equal_config_goes_on(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1, "loss": 0.5})
    with enter(tmp_path / "a") as folder:
        assert not folder.fresh
        assert folder.checkpoint is None
        folder.log({"step": 2, "loss": 0.4})
    assert [r["step"] for r in rows(tmp_path / "a")] == [1, 2]


def test_another_config_is_refused_and_the_differing_keys_are_listed(tmp_path):
    leave_a_row(tmp_path / "a")
    with pytest.raises(ConfigError) as error:
        enter(tmp_path / "a", Config(steps=11, optimizer=Inner(betas=(0.9, 0.99))))
    text = str(error.value)
    assert "steps: 10 in the folder, 11 now" in text
    assert "optimizer.betas" in text
    assert "optimizer.lr" not in text
    assert "run.overwrite=true" in text
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["steps"] == 10


def test_settings_that_may_differ_may_differ(tmp_path):
    leave_a_row(tmp_path / "a")
    enter(
        tmp_path / "a", Config(steps=11, optimizer=Inner(lr=1)), ignore=("steps", "optimizer")
    ).close()
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["steps"] == 11


def test_a_run_that_failed_before_its_first_step_may_be_mended(tmp_path):
    enter(tmp_path / "a").close()
    with enter(tmp_path / "a", Config(steps=11), resume="never") as folder:
        assert folder.fresh
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["steps"] == 11


@pytest.mark.parametrize(
    "left", ["checkpoints/step_000001", "rollouts/eval_000000.jsonl", "summary.json"]
)
def test_a_run_that_has_left_anything_has_begun(tmp_path, left):
    enter(tmp_path / "a").close()
    (tmp_path / "a" / left).parent.mkdir(exist_ok=True)
    if left.startswith("checkpoints"):
        (tmp_path / "a" / left).mkdir()
    else:
        (tmp_path / "a" / left).write_text("{}\n")
    with pytest.raises(ConfigError, match="another config"):
        enter(tmp_path / "a", Config(steps=11))


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    leave_a_row(tmp_path / "a", resume="never")
    with pytest.raises(ConfigError, match=r"run\.resume=auto"):
        enter(tmp_path / "a", resume="never")


def test_a_named_checkpoint_is_taken_up(tmp_path):
    (tmp_path / "c").mkdir()
    with enter(tmp_path / "a", resume=str(tmp_path / "c")) as folder:
        assert folder.checkpoint == tmp_path / "c"
    with pytest.raises(ConfigError, match="no such checkpoint"):
        enter(tmp_path / "b", resume=str(tmp_path / "nothing"))
    assert not (tmp_path / "b").exists()


def test_overwrite_removes_the_run_and_nothing_else(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1, "loss": 0.5})
        (folder.path / "checkpoints/step_000001").mkdir(parents=True)
        (folder.path / "my notes.txt").write_text("keep me")
    with enter(tmp_path / "a", Config(steps=99), overwrite=True) as folder:
        assert folder.fresh
        assert not (folder.path / "checkpoints").exists()
        assert (folder.path / "my notes.txt").read_text() == "keep me"
        folder.log({"step": 1, "loss": 0.25})
    assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.25}]


class Starting(Config):
    paths: ClassVar[tuple[str, ...]] = ("start",)
    start: str = ""


def test_a_run_that_fails_before_its_first_step_gives_the_replaced_run_back(tmp_path, caplog):
    leave_a_row(tmp_path / "a")
    (tmp_path / "a/model").mkdir()
    (tmp_path / "a/model/config.json").write_text("{}")
    with pytest.raises(DataError), enter(tmp_path / "a", Config(steps=99), overwrite=True) as new:
        assert new.fresh and not (new.path / "model").exists()
        raise DataError("train.jsonl:3: no prompt")
    assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.5}]
    assert (tmp_path / "a/model/config.json").read_text() == "{}"
    assert load_settings(Config, [tmp_path / "a/config.yaml"]).settings == Config()
    assert "the earlier one is back" in caplog.text
    with enter(tmp_path / "a") as folder:
        assert not folder.fresh


def test_a_run_that_is_stopped_before_its_first_step_gives_the_replaced_run_back(tmp_path):
    leave_a_row(tmp_path / "a")
    for finished in (False, True):
        with enter(tmp_path / "a", Config(steps=99), overwrite=True) as new:
            new.write_summary({"steps": 0, "finished": finished})
        assert rows(tmp_path / "a") == ([] if finished else [{"step": 1, "loss": 0.5}])
        assert (tmp_path / "a/summary.json").exists() == finished


def test_a_replaced_run_is_gone_once_the_new_one_has_a_step(tmp_path):
    leave_a_row(tmp_path / "a")
    with pytest.raises(DataError), enter(tmp_path / "a", Config(steps=9), overwrite=True) as new:
        new.log({"step": 1, "loss": 0.25})
        raise DataError("train.jsonl:3: no prompt")
    assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.25}]
    assert load_settings(Config, [tmp_path / "a/config.yaml"]).settings == Config(steps=9)
    assert not list((tmp_path / "a").glob(".repl*"))


@pytest.mark.parametrize("step", ["set aside", "begun", "restored"])
def test_a_process_that_is_killed_while_it_replaces_a_run_loses_nothing(tmp_path, step):
    leave_a_row(tmp_path / "a")
    code = (
        "import os, sys, pathlib\n"
        "from lightrft.config.base import Settings\n"
        "from lightrft.observability.run_directory import RunDirectory\n"
        "def die(*_): os._exit(9)\n"
        "rename, count = pathlib.Path.rename, [0]\n"
        "def renamed(self, target):\n"
        "    count[0] += 1\n"
        "    if count[0] == int(sys.argv[2]): die()\n"
        "    return rename(self, target)\n"
        "pathlib.Path.rename = renamed\n"
        "with RunDirectory.open(pathlib.Path(sys.argv[1]), Settings(), resume='auto', "
        "overwrite=True) as folder:\n"
        "    die() if sys.argv[3] == 'begun' else sys.exit(3)\n"
    )
    # rollouts, metrics.jsonl, log.txt, config.yaml and their folder are renamed, then come back
    dies_at = {"set aside": 3, "begun": 99, "restored": 8}[step]
    words = [sys.executable, "-c", code, str(tmp_path / "a"), str(dies_at), step]
    assert subprocess.run(words, check=False).returncode == 9
    with enter(tmp_path / "a") as folder:
        assert not folder.fresh
    assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_never_replaces_the_folder_that_it_reads_from(tmp_path, linked):
    leave_a_row(tmp_path / "a")
    if linked:
        (tmp_path / "b").symlink_to(tmp_path / "a")
    path = tmp_path / ("b" if linked else "a")
    with pytest.raises(ConfigError, match=r"run\.overwrite = true would remove what start names"):
        enter(path, Starting(start=str(tmp_path / "a/model")), overwrite=True)
    assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.5}]
    enter(path, Starting(start=str(tmp_path / "ab/model")), overwrite=True).close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("work of years")
    with pytest.raises(ConfigError, match="not a run's folder"):
        enter(tmp_path, overwrite=overwrite)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["thesis.tex"]


def test_a_file_in_the_way_is_a_clear_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        enter(tmp_path / "a")


def test_a_folder_in_use_by_another_process_is_refused(tmp_path):
    code = (
        "import sys, pathlib\nfrom lightrft.observability.run_directory import "
        "RunDirectory\nfrom lightrft.config.base import Settings\n"
        "RunDirectory.open(pathlib.Path(sys.argv[1]), Settings(), resume='auto', "
        "overwrite=True)\n"
    )
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1})
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "in use by process" in out.stderr
        assert rows(tmp_path / "a") == [{"step": 1}]


def test_rewinding_leaves_each_step_once(tmp_path):
    with enter(tmp_path / "a") as folder:
        for step in range(1, 7):
            folder.log({"step": step, "loss": float(step)})
            folder.write_rollouts(step, [])
    with enter(tmp_path / "a") as folder:
        folder.rewind(4)
        for step in (5, 6, 7):
            folder.log({"step": step, "loss": -float(step)})
            folder.write_rollouts(step, [])
    assert [(r["step"], r["loss"]) for r in rows(tmp_path / "a")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, -5),
        (6, -6),
        (7, -7),
    ]
    assert [p.name for p in sorted((tmp_path / "a/rollouts").iterdir())] == [
        f"step_{s:06d}.jsonl" for s in range(1, 8)
    ]


def two_phases(path):
    with enter(path) as folder:
        for phase, last in (("sft", 3), ("rl", 5)):
            for step in range(1, last + 1):
                folder.log({"step": step, "phase": phase})
                if phase == "rl":
                    folder.write_rollouts(step, [])


@pytest.mark.parametrize(
    ("step", "phase", "sft", "rl"),
    [(2, "rl", [1, 2, 3], [1, 2]), (0, "rl", [1, 2, 3], []), (2, "sft", [1, 2], [])],
)
def test_rewinding_a_phase_cuts_that_phase_and_later_ones(tmp_path, step, phase, sft, rl):
    two_phases(tmp_path / "a")
    with enter(tmp_path / "a") as folder:
        folder.rewind(step, phase)
    left = rows(tmp_path / "a")
    assert [r["step"] for r in left if r["phase"] == "sft"] == sft
    assert [r["step"] for r in left if r["phase"] == "rl"] == rl
    assert len(list((tmp_path / "a/rollouts").iterdir())) == len(rl)


def test_rewinding_sft_keeps_the_responses_of_earlier_evaluations(tmp_path):
    with enter(tmp_path / "a") as folder:
        for step in (0, 2, 4):
            folder.log({"step": step, "phase": "sft"})
            folder.write_rollouts(step, [], name="eval")
    with enter(tmp_path / "a") as folder:
        folder.rewind(2, "sft")
    left = sorted(path.name for path in (tmp_path / "a/rollouts").iterdir())
    assert left == ["eval_000000.jsonl", "eval_000002.jsonl"]


def test_a_row_torn_by_a_kill_is_cut_and_a_torn_rollout_file_is_gone(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1})
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    (tmp_path / "a/rollouts/.step_000002.jsonl.tmp").write_text("half")
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 2})
    assert rows(tmp_path / "a") == [{"step": 1}, {"step": 2}]
    assert not list((tmp_path / "a/rollouts").iterdir())


def test_a_damaged_row_in_the_middle_is_named(tmp_path):
    enter(tmp_path / "a").close()
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        enter(tmp_path / "a")


def test_a_step_cannot_be_logged_twice(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 2})
        with pytest.raises(ValueError, match="step 2"):
            folder.log({"step": 2})
        folder.write_rollouts(2, [])
        with pytest.raises(ValueError, match="before"):
            folder.write_rollouts(2, [])


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1, "loss": 0.1})
        assert rows(tmp_path / "a") == [{"step": 1, "loss": 0.1}]


def test_numbers_that_are_not_finite_are_null_and_said_once(tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1, "loss": float("nan")})
        folder.log({"step": 2, "loss": float("inf")})
    assert [r["loss"] for r in rows(tmp_path / "a")] == [None, None]
    assert (tmp_path / "a/log.txt").read_text().count("not finite") == 1


def test_the_log_is_the_packages_and_ends_with_the_run(tmp_path):
    log = logging.getLogger("lightrft.trainer.anything")
    with enter(tmp_path / "a"):
        log.info("inside")
        logging.getLogger("other").warning("not ours")
    log.info("outside")
    text = (tmp_path / "a/log.txt").read_text()
    assert "inside" in text
    assert "not ours" not in text
    assert "outside" not in text


def test_the_summary_says_which_settings_were_changed(tmp_path):
    with enter(tmp_path / "a", Config(optimizer=Inner(lr=0.5))) as folder:
        folder.write_summary({"seconds": 3})
    assert json.loads((tmp_path / "a/summary.json").read_text()) == {
        "seconds": 3,
        "changed": {"optimizer.lr": 0.5},
    }


def test_an_error_in_the_run_is_not_hidden_by_one_while_closing(tmp_path, monkeypatch):
    folder = enter(tmp_path / "a")
    with pytest.raises(ZeroDivisionError) as error, folder:
        monkeypatch.setattr(
            folder._writer, "flush", lambda: (_ for _ in ()).throw(ResourceError("disk"))
        )
        raise ZeroDivisionError
    assert any("disk" in note for note in error.value.__notes__)
    enter(tmp_path / "a").close()  # and the folder is free again


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with enter(tmp_path / "a", trackers=LogConfig()) as folder:
        for step in (1, 2, 3):
            folder.show_samples([{"prompt": f"{step}+1=", "response": "two\nlines"}])
            folder.log({"step": step, "phase": "rl", "loss": float(step)})
    with enter(tmp_path / "a", trackers=LogConfig()) as folder:
        folder.rewind(2, "rl")
        folder.show_samples([{"prompt": "again"}])
        folder.log({"step": 3, "phase": "rl", "loss": 30.0})
    events = EventAccumulator(str(tmp_path / "a/tensorboard/rl"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    texts = [(e.step, e.tensor_proto.string_val[0]) for e in events.Tensors("samples/text_summary")]
    assert texts == [
        (step, f"    prompt: {step}+1=\n    response: two\n    lines".encode())
        for step in (1, 2, 3)
    ]
