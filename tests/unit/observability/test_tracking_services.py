"""What W&B, MLflow, Trackio and SwanLab hold of a run, read back from the real packages without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightrft.config.base import Settings
from lightrft.config.run import LogConfig
from lightrft.observability import tracking_services
from lightrft.observability.run_directory import RunDirectory
from lightrft.observability.tracking_services import SERVICES, mlflow_name
from lightrft.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = {"prompt": "1+1=", "label": "2", "which": "best", "reward": 1.0, "response": "it is\n2"}


class Config(Settings):
    lr: float = 0.5
    words: tuple[str, ...] = ("a", "b")


def enter(folder: Path, lr: float = 0.5, ignore: tuple[str, ...] = ("lr",), **services: str):
    logs = LogConfig(tensorboard=False, **services)
    options = {"resume": "auto", "overwrite": False, "ignore": ignore}
    return RunDirectory.open(folder, Config(lr=lr), trackers=logs, **options)


class Service:
    """Keeps what it is sent in a list that outlives it. ``fails`` is how many sends raise."""

    ignores_repeats = False

    def __init__(self, run):
        self.run = run
        SENT.append(("start", run.project, run.identity, dict(run.settings)))

    def send(self, step):
        if FAILS:
            raise ConnectionError(FAILS.pop())
        SENT.append((step.prefix, step.number, step.metrics, list(step.samples)))

    def close(self):
        SENT.append("end")


SENT: list = []
FAILS: list[str] = []


@pytest.fixture
def service(monkeypatch):
    SENT.clear()
    FAILS.clear()
    monkeypatch.setitem(SERVICES, "mlflow", Service)
    return SENT


def test_a_resumed_run_goes_on_with_the_same_run_and_sends_each_step_once(service, tmp_path):
    with enter(tmp_path / "a", mlflow="p") as folder:
        for step in (1, 2, 3):
            folder.show_samples([SAMPLE])
            folder.log({"step": step, "phase": "rl", "loss": float(step)})
    with enter(tmp_path / "a", lr=0.1, mlflow="p") as folder:
        folder.rewind(1, "rl")
        for step in (2, 3, 4):
            folder.log({"step": step, "phase": "rl", "loss": 9.0})
    first, *rows, end = service[:5]
    assert (first, end) == (("start", "p", first[2], {"lr": 0.5, "words": ["a", "b"]}), "end")
    assert rows == [("rl/", n, {"rl/loss": float(n)}, [SAMPLE]) for n in (1, 2, 3)]
    assert service[5:] == [
        ("start", "p", first[2], {"lr": 0.1, "words": ["a", "b"]}),
        ("rl/", 4, {"rl/loss": 9.0}, []),
        "end",
    ]


def test_a_service_that_ignores_repeated_steps_gets_those_of_a_killed_process_again(
    service, tmp_path, monkeypatch
):
    monkeypatch.setattr(Service, "ignores_repeats", True)
    with enter(tmp_path / "a", mlflow="p") as folder:
        folder.log({"step": 1, "loss": 1.0})
    folder = enter(tmp_path / "a", mlflow="p")
    folder.log({"step": 2, "loss": 2.0})
    monkeypatch.setattr(Service, "close", lambda self: 1 / 0)  # a kill
    folder.close()
    with enter(tmp_path / "a", mlflow="p") as folder:
        folder.log({"step": 3, "loss": 3.0})
    assert [row[1] for row in service if row[0] == ""] == [1, 2, 2, 3]


def test_a_service_that_is_named_later_gets_the_earlier_rows_too(service, tmp_path):
    with enter(tmp_path / "a") as folder:
        folder.log({"step": 1, "phase": "sft", "loss": 1.0})
        folder.log({"step": 1, "phase": "rl", "loss": float("nan")})
    with enter(tmp_path / "a", mlflow="p") as folder:
        folder.log({"step": 2, "phase": "rl", "loss": 2.0})
    rows = [("sft/", 1, {"sft/loss": 1.0}), ("rl/", 1, {}), ("rl/", 2, {"rl/loss": 2.0})]
    assert service[1:-1] == [(*row, []) for row in rows]


def test_another_project_gets_a_run_of_its_own_with_every_row(service, tmp_path):
    for project, step in (("p", 1), ("q", 2)):
        with enter(tmp_path / "a", mlflow=project) as folder:
            folder.log({"step": step, "loss": 0.0})
    one, other = (row for row in service if row[0] == "start")
    assert one[2] != other[2]
    assert [row[1] for row in service if row[0] == ""] == [1, 1, 2]


def test_a_service_that_fails_ends_no_run_and_gets_the_rows_later(service, tmp_path, caplog):
    FAILS.extend(["no network"])
    with enter(tmp_path / "a", mlflow="p") as folder:
        for step in (1, 2, 3):
            folder.log({"step": step, "loss": float(step)})
        assert len(service) == 1  # a pause, in which nothing is tried
        assert "log.mlflow: step 1 is not sent (no network); it is tried again" in caplog.text
    assert [row[1] for row in service[1:-1]] == [1, 2, 3]
    with enter(tmp_path / "a", mlflow="p") as folder:
        FAILS.extend(["no network"] * 9)
        folder.log({"step": 4, "loss": 4.0})
        folder.write_summary({})
    assert json.loads((tmp_path / "a/summary.json").read_text())["mlflow_rows_lost"] == 1
    FAILS.clear()
    with enter(tmp_path / "a", mlflow="p") as folder:
        folder.log({"step": 5, "loss": 5.0})
    assert [row[1] for row in service if row[0] == ""] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", SERVICES)
def test_a_package_that_is_missing_is_refused_at_start_and_frees_the_folder(
    name, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, name, None)
    missing = rf"log\.{name} = 'p' needs the package {name}.*pip install -e '\.\[{name}\]'"
    with pytest.raises(ConfigError, match=missing):
        enter(tmp_path / "a", **{name: "p"})
    enter(tmp_path / "a").close()


def test_a_service_that_does_not_start_is_refused_by_the_setting(tmp_path, monkeypatch):
    def start(**options):
        raise RuntimeError("no API key\nlog in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=start, Table=list))
    with pytest.raises(ConfigError, match=r"log\.wandb = 'p': wandb does not start \(no API key"):
        enter(tmp_path / "a", wandb="p")


def test_wandb_gets_rows_by_step_of_the_same_run(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(
            (options["project"], options["id"], options["resume"], options["config"]["lr"])
        )
        return SimpleNamespace(log=calls.append, finish=calls.clear, define_metric=define)

    def define(name, step_metric):
        calls.append((name, step_metric))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=dict))
    folder = enter(tmp_path / "a", wandb="p")
    folder.show_samples([SAMPLE])
    folder.log({"step": 1, "phase": "rl", "loss": 0.5})
    table = {"columns": list(SAMPLE), "data": [list(SAMPLE.values())]}
    assert calls[1:] == [
        ("rl/*", "rl/step"),
        {"rl/step": 1, "rl/loss": 0.5, "rl/samples": table},
    ]
    start = calls[0]
    folder.close()
    assert calls == [] and start[0] == "p" and start[2:] == ("allow", 0.5)
    with enter(tmp_path / "a", wandb="p"):
        assert calls == [start]


def test_names_of_metrics_stay_different_in_the_characters_of_mlflow():
    names = ["eval/pass@4", "eval/pass^4", "kl (k3)", "source/a,b", "source/a;b"]
    assert mlflow_name("eval/pass@4") == "eval/pass_at_4"
    assert len({mlflow_name(name) for name in names}) == len(names)


def test_what_a_service_prints_is_not_among_results_and_ctrl_c_stays_ours(capsys):
    import signal

    handler = signal.getsignal(signal.SIGINT)
    with tracking_services._quiet():
        print("welcome")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is handler
    assert capsys.readouterr() == ("", "welcome\n")


RUN = """
import json, os, sys, time
from pathlib import Path
from tests.unit.observability.test_tracking_services import SAMPLE, enter
folder, name, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
run = enter(folder, lr=0.5 if kind == "kill" else 0.25, **{name: "project"})
first = 1
if kind == "resume":
    run.rewind(2, "rl")
    first = 3
for step in range(first, first + 3):
    run.show_samples([SAMPLE])
    run.log({"step": step, "phase": "rl", "loss": first + step / 8, "eval/pass@4": 0.5})
if kind == "kill":
    time.sleep(2)  # Trackio writes in a thread.
    os._exit(9)
run.close()
"""
"""Three steps and a kill, or a resume from step 2 and three steps."""
ONCE = {1: 1.125, 2: 1.25, 3: 1.375, 4: 3.5, 5: 3.625}
"""The loss of each step: step 3 is not sent again. SwanLab's killed process kept its one in memory."""


def run(folder: Path, name: str, script: str, *words: str) -> str:
    own = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "SWANLAB_MODE": "offline",
        "WANDB_MODE": "offline",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", script, str(folder / "runs/a"), name, *words]
    done = subprocess.run(
        command, env={**os.environ, **own}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == (9 if words == ("kill",) else 0), done.stderr
    return done.stdout


MLFLOW = """
import json
from mlflow import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("project").experiment_id])
steps = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "rl/loss")}
assert len(client.get_metric_history(run.info.run_id, "rl/eval/pass_at_4")) == len(steps)
path = client.download_artifacts(run.info.run_id, "samples/rl")
from pathlib import Path
tables = [json.loads(file.read_text()) for file in sorted(Path(path).iterdir())]
assert run.info.status == "FINISHED" and run.data.tags["lr"] == "0.25"
columns = dict(zip(tables[0]["columns"], tables[0]["data"][0]))
print(json.dumps([run.data.params["lr"], steps, columns, len(tables)]))
"""
TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
[name] = {one["name"] if isinstance(one, dict) else one for one in SQLiteStorage.get_runs("project")}
rows = SQLiteStorage.get_logs("project", name)
steps = {row["step"]: row["rl/loss"] for row in rows}
assert len(rows) == len(steps)
columns = rows[0]["rl/samples"]["_value"][0]
config = SQLiteStorage.get_run_config("project", name)
print(json.dumps([str(config["lr"]), steps, columns, sum("rl/samples" in row for row in rows)]))
"""
SWANLAB = """
import json, sys
from pathlib import Path
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader
logs = Path(sys.argv[1]) / "swanlog"
files = sorted(logs.glob("run-*/*.swanlab"))
assert len(files) == 2 and len({file.name for file in files}) == 1
steps, texts = [], []
for file in files:
    if not file.stat().st_size:
        continue  # of the killed process, which kept all in memory
    reader = DataStoreReader()
    reader.open(file)
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        if record.HasField("scalar") and record.scalar.key == "rl/loss":
            steps.append((record.scalar.step, record.scalar.value.number))
assert len(dict(steps)) == len(steps)
texts = sorted(logs.glob("run-*/media/text/*.txt"))
lines = [line.strip().partition(": ") for line in texts[0].read_text().splitlines()]
columns = {name: value for name, _, value in lines}
config = (files[1].parent / "files/config.yaml").read_text()
print(json.dumps(["0.25" if "0.25" in config else config, dict(steps), columns, len(texts)]))
"""
WANDB = """
import json, sys
from pathlib import Path
files = sorted((Path(sys.argv[1]) / "wandb").glob("offline-run-*/*.wandb"))
assert len(files) == 2 and len({file.name for file in files}) == 1
tables = sorted((Path(sys.argv[1]) / "wandb").glob("offline-run-*/files/media/table/rl/*.json"))
table = json.loads(tables[0].read_text())
columns = dict(zip(table["columns"], table["data"][0]))
print(json.dumps([None, None, columns, len(tables)]))
"""
"""Its file of rows has no reader in the package: the tables say which steps it has."""


@pytest.mark.trackers
@pytest.mark.parametrize(
    ("name", "read"),
    [("mlflow", MLFLOW), ("trackio", TRACKIO), ("swanlab", SWANLAB), ("wandb", WANDB)],
)
def test_the_real_package_holds_settings_steps_and_samples_of_a_killed_and_resumed_run(
    name, read, tmp_path
):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: make test-trackers")
    run(tmp_path, name, RUN, "kill")
    assert "project" not in run(tmp_path, name, RUN, "resume")
    lr, steps, columns, tables = json.loads(run(tmp_path, name, read).splitlines()[-1])
    # MLflow keeps the first, with a tag. SwanLab writes the text of a step again after a kill.
    assert lr in (None, "0.5", "0.25") and tables == len(ONCE) + (name == "swanlab")
    if steps is not None:
        third = {3: 3.375} if name == "swanlab" else {}
        assert {int(step): value for step, value in steps.items()} == {**ONCE, **third}
    assert {"prompt", "label", "reward", "response"} <= set(columns)
    assert columns["prompt"] == "1+1="
