"""What every verb has in common: help, names, exit statuses, and an output that holds nothing but what was asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lightrft import __version__
from lightrft.cli.demo import preset
from lightrft.config.base import build
from lightrft.config.demo import DemoConfig
from lightrft.trainer.demo import make_start
from lightrft.utils.yaml_text import parse_yaml
from lightrft.verbs import VERBS
from tests.e2e.command import ROOT, assert_refused, command, process


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_without_a_verb_the_verbs_are_shown(capsys, words):
    outcome = command(capsys, *words)
    assert outcome.status == 0
    assert all(verb in outcome.out for verb in VERBS)


def test_the_version_is_said(capsys):
    assert __version__ in command(capsys, "--version").out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_says_what_it_takes(capsys, verb, flag):
    outcome = command(capsys, verb, flag)
    assert outcome.status == 0
    assert f"lightrft {verb}" in outcome.out
    shown = {
        "explain": "presets of rl:",
        "grm": "sft | rl | dpo",
        "check": "kinds:",
        "data": "show.rows",
        "doctor": "doctor.device_memory",
        "report": "run folder",
        "settings": "descriptions",
        "completion": "bash | zsh | fish",
        "export": "adapters",
        "compare": "confidence",
        "merge": "merge_method",
        "convert": "max_shard_size",
        "import-config": "framework",
        "serve": "max_body_mb",
        "serve-rm": "max_body_mb",
        "serve-tinker": "max_body_mb",
    }
    assert shown.get(verb, "run.name") in outcome.out


def test_an_unknown_method_of_grm_is_refused_in_one_sentence(capsys):
    outcome = command(capsys, "grm", "stf")
    assert outcome.status == 2
    assert outcome.err.startswith("lightrft grm: the first word is the method, one of sft, rl, dpo")
    assert outcome.err.count("lightrft grm") == 1 and "did you mean 'sft'" in outcome.err


def test_help_wins_over_settings_that_are_wrong(capsys):
    assert command(capsys, "rl", "no.such=1", "--help").status == 0


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("evla", "eval"),
        ("sfft", "sft"),
        ("generat", "generate"),
        ("train", "rl"),
        ("finetune", "sft"),
        ("Evaluate", "eval"),
    ],
)
def test_a_verb_that_does_not_exist_names_the_nearest(capsys, wrong, near):
    assert_refused(command(capsys, wrong), repr(wrong), f"did you mean '{near}'")


def test_a_verb_like_no_other_shows_all_of_them(capsys):
    outcome = command(capsys, "zzzzz")
    assert_refused(outcome, *VERBS)
    assert "did you mean" not in outcome.err


def test_an_output_where_nothing_can_be_written_is_refused_by_its_name(
    capsys, model_folder, tmp_path
):
    file, rows = tmp_path / "file", tmp_path / "p.jsonl"
    file.touch()
    rows.write_text('{"prompt": "1+1?"}\n')
    output = str(file / "inside" / "x.jsonl")
    for words in [
        ("generate", f"model.path={model_folder}", f"data.sources=[{rows}]"),
        ("convert", model_folder),
        ("import-config", rows),
    ]:
        said = f"output = {output!r}: no file can be written in {file} (Not a directory)"
        assert_refused(command(capsys, *words, f"output={output}"), said, "choose another output")


def test_the_settings_and_files_may_come_in_any_order(capsys, tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("rollout: {group_size: 3}\nsampling: {temperature: 0.5}\n")
    two.write_text("rollout: {group_size: 5}\n")
    out = command(capsys, "explain", "sampling.max_new_tokens=9", one, two).out
    values = {
        line.split()[0]: line.split()[1]
        for line in out.splitlines()
        if line.startswith("  ") and len(line.split()) > 2
    }
    assert values["rollout.group_size"] == "5"
    assert values["sampling.temperature"] == "0.5"
    assert values["sampling.max_new_tokens"] == "9"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["model.lora.rank=2", "model.gradient_checkpointing=true", "model.dtype=bfloat16"]]
)
def test_a_run_writes_its_progress_and_what_to_type_next_and_nothing_else(
    model_folder, data_folder, tmp_path, more
):
    words = [
        "rl",
        f"model={model_folder}",
        f"data.sources={data_folder / 'train.jsonl'}",
        f"reward.terms=[{data_folder}/rewards.py:varied]",
    ]
    small = [
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "sampling.max_new_tokens=600",
        "train.steps=2",
        "log.tensorboard=false",
    ]
    outcome = process(*words, *small, *more, cwd=tmp_path)
    assert outcome.status == 0, outcome.err
    assert [line.split(" · ")[0] for line in outcome.err.splitlines()] == ["rl 1/2", "rl 2/2"], (
        outcome.err
    )
    # Where lightrft is not on the path.
    said = [line for line in outcome.out.splitlines() if not line.startswith("  source ")]
    assert said[0].startswith("finished at step 2") and "runs/run" in said[0]
    assert (
        "report: runs/run/report.html" in said
        and (tmp_path / "runs" / "run" / "report.html").is_file()
    )
    said.remove("report: runs/run/report.html")
    assert said[1].startswith("the checkpoint is of step 2")
    assert said[2:] == [
        "  lightrft chat model=runs/run/model",
        "  lightrft explain runs/run/config.yaml",
    ]


@pytest.mark.slow
def test_what_a_run_says_to_type_next_works(
    capsys, monkeypatch, model_folder, data_folder, tmp_path
):
    monkeypatch.chdir(tmp_path)
    data = f"[{data_folder / 'train.jsonl'}]"
    words = [f"model={model_folder}", f"data.sources={data}", f"eval.data.sources={data}"]
    words.append(f"reward.terms=[{data_folder}/rewards.py:varied]")
    small = [
        "train.steps=1",
        "eval.sampling.max_new_tokens=4",
        "log.tensorboard=false",
        "run.progress=false",
    ]
    only_rl = ["rollout.prompts_per_step=2", "rollout.group_size=2", "sampling.max_new_tokens=4"]
    for verb, more in (("rl", only_rl), ("sft", ["batch_size=2"])):
        outcome = command(capsys, verb, *words, *small, *more, f"run.name={verb}")
        assert outcome.status == 0, outcome.err
        assert (tmp_path / "runs" / verb / "report.html").is_file()
        lines = [
            line.strip() for line in outcome.out.splitlines() if line.startswith("  lightrft ")
        ]
        (evaluation,) = [line for line in lines if line.startswith("lightrft eval ")]
        again = command(capsys, *evaluation.split()[1:])
        assert again.status == 0, again.err
        assert '"eval/accuracy"' in again.out


@pytest.mark.slow
def test_an_interruption_before_training_begins_ends_with_130_and_no_traceback(tmp_path):
    outcome = process(
        "explain",
        "grpo",
        cwd=tmp_path,
        prelude=_interrupting("lightrft.trainer.explanation.explain", "explain"),
    )
    assert outcome.status == 130
    assert "Traceback" not in outcome.err


SIGNALLED = """
import os, signal
from lightrft.engines.native import NativeEngine
generate = NativeEngine.generate
def signalled(self, *given, **options):
    rollouts = generate(self, *given, **options)
    yield next(rollouts)
    if signal.{name} == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever started this has it ignored
    os.kill(os.getpid(), signal.{name})
    yield from rollouts
NativeEngine.generate = signalled
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("verb", ["eval", "generate", "chat", "rl"])
def test_a_verb_that_a_signal_ends_while_it_generates_has_the_status_of_that_signal(
    model_folder, data_folder, tmp_path, verb, name, status
):
    data, reward = data_folder / "train.jsonl", f"reward.terms=[{data_folder}/rewards.py:varied]"
    words = {
        "eval": [f"eval.data.sources={data}", reward],
        "generate": [f"data.sources={data}", reward, "output=out.jsonl"],
        "chat": [],
        "rl": [
            f"data.sources={data}",
            reward,
            "rollout.prompts_per_step=2",
            "rollout.group_size=2",
            "sampling.max_new_tokens=4",
        ],
    }
    prelude = SIGNALLED.format(name=name)
    outcome = process(
        verb,
        f"model={model_folder}",
        *words[verb],
        cwd=tmp_path,
        stdin="1+1=\n2+2=\n",
        prelude=prelude,
    )
    assert outcome.status == status, outcome
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_sigterm_before_training_begins_ends_with_143_and_no_traceback(
    model_folder, data_folder, tmp_path
):
    early = (
        "import os, signal\nimport lightrft.trainer.rl as m\nm.run_rl = lambda *given: "
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    words = [
        f"model={model_folder}",
        f"data.sources={data_folder / 'train.jsonl'}",
        "reward.terms=[math]",
    ]
    outcome = process("rl", *words, cwd=tmp_path, prelude=early)
    assert outcome.status == 143, outcome
    assert "Traceback" not in outcome.err


def _interrupting(module: str, name: str) -> str:
    """Python that makes the process get Ctrl-C inside a function, also where whoever started it has it ignored."""
    interrupt = (
        "signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), "
        "signal.SIGINT); time.sleep(600)"
    )
    return f"import {module} as m, os, signal, time\ndef f(*a):\n    {interrupt}\nm.{name} = f"


@pytest.mark.slow
def test_ctrl_c_during_training_saves_and_the_same_command_goes_on(
    model_folder, data_folder, tmp_path
):
    words = [
        "rl",
        f"model={model_folder}",
        f"data.sources={data_folder / 'train.jsonl'}",
        f"reward.terms=[{data_folder}/rewards.py:varied]",
    ]
    small = [
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "sampling.max_new_tokens=4",
        "log.tensorboard=false",
        "run.progress=false",
    ]
    running = subprocess.Popen(
        [sys.executable, "-m", "lightrft", *words, *small, "train.steps=2000"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (
        metrics.exists() and len(metrics.read_text().splitlines()) > 1
    ):
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the reward workers too
    out, err = running.communicate(timeout=240)
    assert running.returncode == 130, err
    assert "the same command resumes" in out and "Traceback" not in err
    stopped = len(metrics.read_text().splitlines())
    outcome = process(*words, *small, f"train.steps={stopped + 1}", cwd=tmp_path)
    assert outcome.status == 0, outcome.err
    assert f"finished at step {stopped + 1}" in outcome.out


FIRST = """
import os, sys
import torch, transformers.modeling_layers, transformers.modeling_utils
known = {name.partition('.')[0] for name in sys.modules} | set(sys.stdlib_module_names)
import lightrft.cli.main
def watch():
    from lightrft.engines.native import NativeEngine
    def generate(self, *args, **options):
        print('first', *sorted({name.partition('.')[0] for name in sys.modules} - known), flush=True)
        os._exit(0)
    NativeEngine.generate = generate
import lightrft.api.start as launch
real = launch.program
def program(*args):
    found = real(*args)
    watch()
    return found
import lightrft.cli.verbs
lightrft.cli.verbs.program = program
"""
AT_THE_FIRST_TOKEN = {
    *("lightrft", "annotated_types", "pydantic", "pydantic_core", "typing_inspection"),
    *("PIL", "google", "rich", "tokenizers"),
}
"""Packages that a run of text imports before it samples, beyond those that transformers imports."""


@pytest.mark.slow
def test_a_run_of_text_imports_what_its_first_token_needs_and_no_more(data_folder, tmp_path):
    """Most of the time of a start is that of its imports."""
    settings = parse_yaml(preset("arithmetic").read_text(encoding="utf-8"))
    make_start(build(DemoConfig, settings), tmp_path / "start", 0)
    said = process(
        "rl",
        f"model={tmp_path / 'start'}",
        f"data.sources={data_folder / 'train.jsonl'}",
        "reward.terms=[math]",
        "rollout.prompts_per_step=4",
        "train.steps=1",
        cwd=tmp_path,
        prelude=FIRST,
        fresh=True,
    ).out
    [imported] = [line.split()[1:] for line in said.splitlines() if line.startswith("first ")]
    assert "lightrft" in imported
    assert set(imported) <= AT_THE_FIRST_TOKEN


def test_python_without_docstrings_is_refused_before_transformers_misses_its_own():
    command_line = [sys.executable, "-OO", "-m", "lightrft", "sft", "model=m", "data=rows.jsonl"]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("lightrft sft: Python runs with -OO (PYTHONOPTIMIZE=2)")
