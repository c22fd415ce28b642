"""The verbs as functions of Python: what a program or a notebook trains, and what it reads back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.trackers import read_rows
from lightrft.utils.errors import ConfigError, DataError, RewardError
from tests.e2e.command import command
from tests.e2e.finished import steady, weights

ROOT = Path(__file__).resolve().parents[2]
SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
SMALL = {
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "sampling": {"max_new_tokens": 6},
    "log": {"tensorboard": False},
    "run.progress": False,
    "run.threads": 1,
}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()


@pytest.fixture
def rl(model, tmp_path: Path):
    """``rl(settings...)``: a run of two steps, whose reward is the share of even characters."""

    def even(rollout):
        return sum(ord(letter) % 2 == 0 for letter in rollout.text) / max(1, len(rollout.text))

    def run(*configs, **over):
        given = {"model": model, "data": SUMS, "rewards": [even], "steps": 2, "dir": str(tmp_path)}
        return lightrft.rl(*configs, **{**SMALL, **given, **over})

    return run


def test_a_function_rows_and_a_model_of_the_program_train_in_one_call(rl, tmp_path):
    run = rl(name="first")
    assert isinstance(run, lightrft.Run) and run.path == tmp_path / "first"
    assert list(run.metrics.index) == [1, 2]
    assert 0 < run.metrics["reward/mean"].iloc[0] < 1
    assert run.summary["finished"] and run.verb == "rl"
    rollouts = run.rollouts(step=1)
    assert len(rollouts) >= 16 and set(rollouts["step"]) == {1}
    for row in rollouts.to_dict("records"):
        even = sum(ord(letter) % 2 == 0 for letter in row["text"]) / max(1, len(row["text"]))
        assert row["terms"]["even"] == pytest.approx(even)
        [asked] = [one for one in SUMS if one["prompt"] in row["prompt"]]
        assert row["label"] == asked["label"]
    with pytest.raises(DataError, match="no step responses of step 7; it has those of steps 1, 2"):
        run.rollouts(step=7)
    assert "finished at step 2" in repr(run)
    assert lightrft.Run(tmp_path / "first").metrics.equals(run.metrics)


def test_trackers_get_the_responses_that_the_run_prints(rl):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = rl(log={"tensorboard": True, "samples": 1})
    events = EventAccumulator(str(run.path / "tensorboard/rl"))
    events.Reload()
    texts = {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("samples/text_summary")
    }
    assert list(texts) == [1, 2]
    best = re.search("which: best\n    reward: (.*)\n    terms: even", texts[1])
    first = run.rollouts(step=1)
    group = first[first["prompt"] == first["prompt"].iloc[0]]
    assert best and float(best[1]) == max(group["reward"])


def test_a_trained_model_answers_as_in_the_run_and_its_pages_are_shown(rl):
    run = rl()
    greedy = {"sampling.temperature": 0.0}
    texts = run.generate(["1+2=", "2+2="], **greedy)
    assert len(texts) == 2 and texts[1] == run.generate("2+2=", **greedy)
    for page in (run.report(), run.plot()):
        assert page.path.is_file() and page._repr_html_().startswith("<iframe srcdoc=")
    assert "reward" in run.plot().path.read_text(encoding="utf-8")


def test_the_command_line_gives_bit_for_bit_the_same_numbers(rl, tmp_path, capsys):
    run = rl(name="python")
    file = run.path / "config.yaml"
    assert command(capsys, "rl", file, "run.name=shell").status == 0
    other = lightrft.Run(tmp_path / "shell")
    rows = [read_rows(one.path / "metrics.jsonl") for one in (run, other)]
    assert list(map(steady, rows[0])) == list(map(steady, rows[1])) and len(rows[0]) == 2
    own, same = weights(run.path), weights(other.path)
    assert own.keys() == same.keys()
    assert all(torch.equal(own[name], same[name]) for name in own)


def test_the_settings_of_a_finished_run_are_read_from_its_folder(rl):
    run = rl(algorithm="dapo", lr=3e-4)
    assert run.config["algorithm"]["preset"] == "dapo" and run.config["optimizer"]["lr"] == 3e-4
    [source] = run.config["data"]["sources"]
    assert source["name"] == "rows" and Path(source["path"]).parent.name == "inputs"


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_damaged_file_of_a_run_is_named(tmp_path, name, text):
    (tmp_path / "config.yaml").write_text("run: {name: a}")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        getattr(lightrft.Run(tmp_path), name.partition(".")[0])


def test_a_run_is_resumed_with_the_same_functions_and_rows_and_refused_with_others(rl):
    run = rl(name="long", **{"checkpoint.every": 1})
    again = rl(name="long", steps=3, **{"run.resume": "auto"})
    assert list(again.metrics.index) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"reward\.terms"):
        rl(
            name="long",
            steps=4,
            rewards=[lambda rollout: 1.0 * len(rollout.text)],
            **{"run.resume": "auto"},
        )
    with pytest.raises(ConfigError, match=r"data\.sources"):
        rl(name="long", steps=4, data=SUMS[1:], **{"run.resume": "auto"})
    assert list(lightrft.Run(run.path).metrics.index) == [1, 2, 3]


def test_an_interrupt_stops_at_a_checkpoint_and_the_run_goes_on_later(rl, tmp_path):
    def interrupt():
        rows = tmp_path / "cut" / "metrics.jsonl"
        while not rows.is_file() or not rows.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = rl(name="cut", steps=10_000)  # many more than it takes
    thread.join()
    taken = run.summary["steps"]
    assert not run.summary["finished"] and 0 < taken < 10_000
    assert "stopped" in repr(run) and run.summary["saved_step"] == taken
    with pytest.raises(DataError, match="has no model yet"):
        run.generate("1+1=")
    assert list(run.resume(steps=taken + 2).metrics.index) == list(range(1, taken + 3))


def test_a_function_of_the_program_sees_every_step_and_may_stop_the_run(rl):
    seen = []

    def watch(step):
        seen.append((step.number, step.metrics["reward/mean"]))
        if step.number == 3:
            step.stop()

    run = rl(name="watched", steps=50, on_step=watch)
    assert [number for number, _ in seen] == [1, 2, 3]
    assert [mean for _, mean in seen] == list(run.metrics["reward/mean"])
    assert run.summary["stopped_by"] == "on_step" and run.summary["saved_step"] == 3
    assert list(run.resume(steps=4, on_step=watch).metrics.index) == [1, 2, 3, 4]
    with pytest.raises(ConfigError, match="on_step is called in this process"):
        rl(name="two", launch={"processes": 2}, on_step=watch)
    with pytest.raises(ConfigError, match="on_step is called by verbs that train"):
        lightrft.generate(on_step=watch)


def test_a_function_that_cannot_be_sent_is_refused_before_anything_is_written(rl, tmp_path):
    lock = threading.Lock()

    def guarded(rollout):
        with lock:
            return 1.0

    with pytest.raises(
        ConfigError, match=r"uses 'lock', which is of type lock.*lightrft\.here\(function\)"
    ):
        rl(rewards=[guarded], name="none")
    assert not (tmp_path / "none").exists()


def test_a_reward_that_cannot_be_sent_runs_in_the_program_where_it_is_asked_for(rl, tmp_path):
    lock, seen = threading.Lock(), []

    def guarded(rollout, scale=1.0):
        with lock:
            seen.append(rollout.text)
            return {"reward": scale * (len(rollout.text) % 3), "length": len(rollout.text)}

    def of_all(rollouts):
        with lock:
            return [float(rollout.prompt.label == "3") for rollout in rollouts]

    terms = [{"function": lightrft.here(guarded), "options": {"scale": 2.0}}, lightrft.here(of_all)]
    run = rl(rewards=terms, name="here")
    rows = run.rollouts(step=1).to_dict("records")
    assert {row["text"] for row in rows} <= set(seen)
    for row in rows:
        assert row["terms"]["guarded"] == 2.0 * (len(row["text"]) % 3)
        assert row["terms"]["of_all"] == float(row["label"] == "3")
    # The code is the same, so the run goes on; other code is refused.
    assert list(rl(rewards=terms, name="here", steps=3).metrics.index) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"reward\.terms"):
        rl(rewards=[lightrft.here(lambda rollout: 1.0)], name="here", steps=4)
    with pytest.raises(ConfigError, match=r"here\(\) is for rewards"):
        rl(algorithm={"filters": [lightrft.here(of_all)]}, name="filters")


def test_a_reward_in_the_program_that_fails_or_is_slow_is_reported(rl):
    def broken(rollout):
        raise KeyError("answer")

    def slow(rollout):
        time.sleep(1.5)
        return 1.0

    with pytest.raises(RewardError, match="KeyError: 'answer'"):
        rl(rewards=[lightrft.here(broken)], name="broken")
    with pytest.raises(RewardError, match="slow"):
        rl(rewards=[lightrft.here(slow)], name="slow", **{"reward.timeout": 0.2})


def test_a_reward_that_fails_is_reported_with_its_error(rl):
    def broken(rollout):
        raise KeyError("answer")

    with pytest.raises(RewardError, match="answer"):
        rl(rewards=[broken])


def test_closures_are_losses_advantages_filters_and_shapings(rl, tmp_path):
    width, dropped = 0.5, {"3", "7"}

    def loss(logprobs, old, advantages, rows, settings):
        ratio = (logprobs - old).exp()
        return -ratio.clamp(1 - width, 1 + width) * advantages, {"ratio": ratio.detach()}

    def centred(batch, token_rewards, settings):
        means = batch.rewards.view(-1, 4).mean(1).repeat_interleave(4)
        tokens = (batch.rewards - means).repeat_interleave(batch.lengths).to(token_rewards.dtype)
        return tokens, tokens

    def known(group):
        return "known" if group[0].prompt.label in dropped else ""

    def halved(batch, rewards, *, max_new_tokens):
        return rewards * width

    parts = {"loss": loss, "advantage": centred, "filters": [known], "shaping": [halved]}
    run = rl(algorithm=parts, name="parts")
    assert list(run.metrics.index) == [1, 2]
    rows = run.rollouts().to_dict("records")
    assert all((row["advantages"] == []) == (row["label"] in dropped) for row in rows)
    assert any(row["label"] in dropped for row in rows)
    config = (tmp_path / "parts" / "config.yaml").read_text()
    assert all(f":{name}" in config for name in ("loss", "centred", "known", "halved"))
    width = 0.25
    with pytest.raises(ConfigError, match=r"algorithm\.loss"):
        rl(algorithm=parts, name="parts", steps=3)

    def scalar(logprobs, old, advantages, rows, settings):
        return loss(logprobs, old, advantages, rows, settings)[0].mean(), {}

    with pytest.raises(ConfigError, match=r"algorithm\.loss: .*shape \(\), not"):
        rl(algorithm={"loss": scalar}, name="scalar")


def test_a_closure_that_scores_has_the_limits_of_time_and_memory(rl):
    blocks = 512

    def slow(rollout):
        time.sleep(60)

    def greedy(rollout):
        return float(len(bytearray(blocks << 20)))

    with pytest.raises(RewardError, match=r"slow.*took more than|time"):
        rl(rewards=[slow], name="slow", **{"reward.timeout": 0.5})
    with pytest.raises(RewardError, match="memory 64 MiB"):
        rl(rewards=[greedy], name="greedy", **{"reward.memory_mb": 64, "reward.timeout": 30})


def test_supervised_and_preference_training_evaluation_and_generation_are_functions(
    model, tmp_path
):
    common = {"dir": str(tmp_path), "run.progress": False, "log": {"tensorboard": False}}
    rows = [{"prompt": row["prompt"], "response": row["label"]} for row in SUMS]
    sft = lightrft.sft(model=model, data=rows, batch_size=4, steps=2, name="sft", **common)
    assert list(sft.metrics.index) == [1, 2]
    pairs = [{"prompt": row["prompt"], "chosen": row["label"], "rejected": "no"} for row in SUMS]
    dpo = lightrft.dpo(model=sft.model, data=pairs, batch_size=4, steps=2, name="dpo", **common)
    assert dpo.verb == "dpo" and dpo.model.is_dir()
    found = lightrft.eval(
        model=dpo.model,
        eval={"data": {"sources": SUMS[:6]}, "sampling": {"max_new_tokens": 4}},
        rewards=["math"],
        dir=str(tmp_path),
        name="eval",
    )
    assert 0 <= found.metrics["eval/accuracy"] <= 1
    output = tmp_path / "answers.jsonl"
    settings = {"sampling": {"max_new_tokens": 4}, "output": str(output)}
    made = lightrft.generate(model=str(dpo.model), data=SUMS[:3], dir=str(tmp_path), **settings)
    assert list(made["label"]) == ["0", "1", "2"] and made["response"].map(type).eq(str).all()
    assert len(made) == len(output.read_text().splitlines())


@pytest.mark.slow
def test_two_processes_train_with_functions_and_rows_of_the_program(rl):
    run = rl(name="two", launch={"processes": 2}, strategy={"device": "cpu"})
    assert list(run.metrics.index) == [1, 2] and run.summary["finished"]


@pytest.mark.slow
def test_a_failure_of_other_processes_is_an_error_also_where_an_earlier_run_has_ended(rl, capfd):
    rl(name="two")
    with pytest.raises(ConfigError, match=r"lightrft\.rl ended with status"):
        rl(name="two", steps=3, data=SUMS[1:], launch={"processes": 2}, strategy={"device": "cpu"})
    assert 'run={"overwrite": True} to start over' in capfd.readouterr().err


def test_importing_the_package_imports_no_torch_and_no_settings():
    code = "import sys, lightrft; sys.exit(any(m in sys.modules for m in ('torch', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("GRPOTrainer", 'rl(model=..., data=..., algorithm="grpo")'),
        ("SimPOTrainer", 'dpo(model=..., data=..., preference="simpo")'),
        ("RewardTrainer", "rm(model=..., data=...)"),
        ("DPOConfig", "dpo(model=..., data=...)"),
    ],
)
def test_a_class_of_another_framework_names_the_function_here(name, call):
    with pytest.raises(AttributeError) as found:
        getattr(lightrft, name)
    assert str(found.value).endswith(f"; did you mean lightrft.{call}?")


@pytest.mark.parametrize("name", ["chat", "doctor", "_repr_html_", "Foo"])
def test_a_name_that_no_function_is_like_is_not_answered_with_another(name):
    with pytest.raises(AttributeError) as found:
        getattr(lightrft, name)
    assert "did you mean" not in str(found.value)


def test_every_verb_of_the_list_is_a_function_with_a_docstring():
    for name in lightrft.VERBS:
        function = getattr(lightrft, name)
        assert function.__name__ == name and function.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        lightrft.train  # noqa: B018
    with pytest.raises(ConfigError, match="did you mean"):
        lightrft.grm("sftt")


def python_of(page: Path) -> list[str]:
    """The blocks of Python of a page, and the code cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        return ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_the_example_of_the_page_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example, *_ = python_of(ROOT / "docs" / "python.md")
    program = tmp_path / "program.py"
    program.write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "run" / "model").is_dir() and "reward/mean" in done.stdout
