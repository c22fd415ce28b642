"""Callbacks of a program: what they see, what they may ask for, and that a resume gives the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.observability.events import EVENTS
from lightrft.utils.errors import ConfigError

SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
SMALL = {
    "log": {"tensorboard": False},
    "run.progress": False,
    "run.threads": 1,
}
RL = {
    "algorithm": {"preset": "grpo", "kl": {"where": "loss", "coef": 0.1}},
    "optimizer": {"lr": 1e-3, "schedule": "cosine"},
    "rollout": {"prompts_per_step": 2, "group_size": 4},
    "sampling": {"max_new_tokens": 5},
    "checkpoint": {"every": 2, "every_minutes": 0},
    "eval": {"data": {"sources": SUMS[:2]}, "sampling": {"max_new_tokens": 3}, "at_start": False},
    "steps": 6,
}
TIMES = ("seconds", "tokens_per_second", "time/", "perf/", "gpu/")


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()


@pytest.fixture
def rl(model, tmp_path: Path):
    def even(rollout):
        return sum(ord(letter) % 2 == 0 for letter in rollout.text) / max(1, len(rollout.text))

    def run(name: str, **over):
        given = {"model": model, "data": SUMS[2:], "rewards": [even], "dir": str(tmp_path)}
        return lightrft.rl(**{**SMALL, **RL, **given, "name": name, **over})

    return run


def numbers(run: lightrft.Run):
    """Everything of a run that has no time in it: metrics, responses and weights."""
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]
    texts = [list(run.rollouts(step)["text"]) for step in run.metrics.index if step]
    weights = {name: w.tolist() for name, w in load_file(run.model / "model.safetensors").items()}
    return rows, texts, weights


def test_each_event_is_called_in_its_place_with_its_fields_and_changes_no_number(rl):
    seen: list = []
    run = rl("watched", **dict.fromkeys(EVENTS, seen.append))
    told = [(event.name, event.number) for event in seen]
    step = lambda n: [("on_rollouts", n), ("on_step", n)]  # noqa: E731
    saved = lambda n: [*step(n), ("on_checkpoint", n)]  # noqa: E731
    last = [("on_rollouts", 6), ("on_eval", 6), ("on_step", 6), ("on_checkpoint", 6), ("on_end", 6)]
    middle = [*step(1), *saved(2), *step(3), *saved(4), *step(5)]
    assert told == [("on_start", 0), *middle, *last]
    by_name = {event.name: event for event in seen}
    assert by_name["on_start"].steps == 6 and by_name["on_start"].phase == "rl"
    assert by_name["on_step"].metrics["reward/mean"] == run.metrics["reward/mean"].iloc[-1]
    assert by_name["on_eval"].metrics.items() <= by_name["on_step"].metrics.items()
    assert by_name["on_checkpoint"].path == run.path / "checkpoints/step_000006"
    assert by_name["on_end"].summary == {k: v for k, v in run.summary.items() if k != "changed"}
    assert [one.text for one in by_name["on_rollouts"].rollouts] == list(run.rollouts(6)["text"])
    assert dict(seen[0].settings) == {
        "optimizer.lr": 1e-3,
        "sampling.temperature": 1.0,
        "algorithm.kl.coef": 0.1,
    }
    assert not (run.path / "changes.jsonl").exists()
    assert numbers(run) == numbers(rl("alone"))


def ask(event) -> None:
    """Change something in three kinds of events."""
    if event.name == "on_start" and not event.number:
        event.change("algorithm.kl.coef", 0.3)
    if event.name == "on_step" and event.number == 1:
        event.change("sampling.temperature", 0.5)
    if event.name == "on_rollouts" and event.number == 5:
        event.change("optimizer.lr", event.settings["optimizer.lr"] / 4)
        event.change("algorithm.kl.coef", 0.05)


def test_a_change_holds_from_the_next_step_on_and_a_killed_run_equals_one_without_a_pause(rl):
    asks = dict.fromkeys(("on_start", "on_step", "on_rollouts"), ask)
    whole = rl("whole", **asks)
    changes = [json.loads(line) for line in (whole.path / "changes.jsonl").read_text().splitlines()]
    assert changes == [
        {"step": 0, "name": "algorithm.kl.coef", "value": 0.3},
        {"step": 1, "name": "sampling.temperature", "value": 0.5},
        {"step": 5, "name": "optimizer.lr", "value": 0.00025},
        {"step": 5, "name": "algorithm.kl.coef", "value": 0.05},
    ]
    assert list(whole.metrics["policy/kl_coef"]) == [0.3] * 5 + [0.05]
    plain = rl("plain", on_start=asks["on_start"])
    rates = list(plain.metrics["policy/lr"])
    # The schedule goes on.
    assert list(whole.metrics["policy/lr"]) == pytest.approx([*rates[:5], rates[5] / 4])
    first, later = (plain.rollouts(step)["text"].tolist() for step in (1, 2))
    assert whole.rollouts(1)["text"].tolist() == first
    assert whole.rollouts(2)["text"].tolist() != later

    def kill(event):
        if event.number == 6:
            raise Killed

    for name, callbacks in (("given", asks), ("forgotten", {})):
        with pytest.raises(Killed):
            rl(
                name,
                on_step=lambda event: (ask(event), kill(event)),
                **{key: asks[key] for key in ("on_start", "on_rollouts")},
            )
        # From step 4: the changes after it are taken again, by the callbacks or by the file.
        assert lightrft.Run(whole.path.parent / name).metrics.index[-1] == 5
        assert numbers(rl(name, **callbacks)) == numbers(whole)


def test_a_change_before_the_first_checkpoint_is_taken_again_too(rl):
    def kill(event):
        raise Killed

    with pytest.raises(Killed):
        rl("killed", on_start=ask, on_rollouts=kill)
    run = rl("killed", steps=2)
    assert list(run.metrics["policy/kl_coef"]) == [0.3, 0.3]


def test_a_callback_may_save_and_evaluate_now_and_stop(rl):
    def step(event):
        if event.number == 1:
            event.save()
            event.evaluate()

    def evaluated(event):
        if event.number == 1:
            event.stop()

    told: list = []
    run = rl("asked", on_step=step, on_eval=evaluated, on_checkpoint=told.append)
    assert list(run.metrics.index) == [1] and "eval/reward" in run.metrics
    assert [event.number for event in told] == [1]
    assert run.summary["stopped_by"] == "on_eval" and run.summary["saved_step"] == 1


def test_what_an_event_or_a_run_cannot_do_is_refused_by_name(rl, model, tmp_path):
    def asking(action, *arguments):
        return lambda event: getattr(event, action)(*arguments)

    refused = {
        r"on_checkpoint cannot change; call it in on_start or on_rollouts": (
            {"on_checkpoint": asking("change", "optimizer.lr", 1.0)}
        ),
        "on_start cannot evaluate": {"on_start": asking("evaluate")},
        r"sampling\.top_p cannot change during a run of rl; what can is optimizer\.lr, sam": (
            {"on_start": asking("change", "sampling.top_p", 0.5)}
        ),
        r"optimizer\.lr": {"on_start": asking("change", "optimizer.lr", -1.0)},
        r"algorithm\.kl\.coef = 0\.0 changes what the run needs": (
            {"on_start": asking("change", "algorithm.kl.coef", 0.0)}
        ),
        r"cannot change with rollout\.staleness": {
            "on_start": asking("change", "sampling.temperature", 0.5),
            "rollout": {**RL["rollout"], "staleness": 1},
        },
        r"evaluate\(\) cannot be done: there is nothing to measure": {
            "on_step": asking("evaluate"),
            "eval": {},
        },
        "on_eval is never called: there is nothing to measure": {"on_eval": print, "eval": {}},
        "on_step is of type int, not a function": {"on_step": 3},
    }
    for number, (message, given) in enumerate(refused.items()):
        with pytest.raises(ConfigError, match=message):
            rl(f"refused{number}", **given)
    rows = [{"prompt": "1+1=", "response": "2"}] * 4
    with pytest.raises(ConfigError, match=r"on_rollouts is called by rl, dpo, .*, and sft has no"):
        lightrft.sft(model=model, data=rows, on_rollouts=print, dir=str(tmp_path))
    pairs = [{**row, "chosen": "2", "rejected": "3"} for row in rows]
    given = {**SMALL, "model": model, "batch_size": 4, "steps": 1, "dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"on_rollouts is never called: .*online\.group_size"):
        lightrft.dpo(data=pairs, on_rollouts=print, name="pairs", **given)
    with pytest.raises(ConfigError, match=r"on_rollouts is never called: .*distill\.on_policy"):
        lightrft.distill(data=rows, teacher=model, on_rollouts=print, name="given", **given)


def even(rollout):
    return sum(ord(letter) % 2 == 0 for letter in rollout.text) / max(1, len(rollout.text))


def test_every_verb_that_samples_shows_its_responses(model, tmp_path):
    seen: list = []
    given = {
        **SMALL,
        "model": model,
        "data": SUMS,
        "dir": str(tmp_path),
        "on_rollouts": seen.append,
    }
    train = {**given, "batch_size": 4, "steps": 2, "sampling": {"max_new_tokens": 4}}
    online = {"group_size": 4}
    run = lightrft.dpo(rewards=[even], online=online, name="online", **train)
    written = [list(run.rollouts(step)["text"]) for step in (1, 2)]
    assert [[one.text for one in event.rollouts] for event in seen] == written
    assert [(event.phase, event.number) for event in seen] == [("dpo", 1), ("dpo", 2)]
    seen.clear()
    teacher = {"teacher": str(run.model), "distill": {"on_policy": 1.0}}
    run = lightrft.distill(name="distill", **teacher, **train)
    assert [[one.text for one in event.rollouts] for event in seen] == [
        list(run.rollouts(step)["text"]) for step in (1, 2)
    ]
    seen.clear()
    few = {**given, "data": SUMS[:3], "sampling": {"max_new_tokens": 4}}
    del few["log"]
    rows = lightrft.generate(**few, samples=2, output=str(tmp_path / "answers.jsonl"))
    texts = [one.text for event in seen for one in event.rollouts]
    assert sorted(texts) == sorted(rows["response"])
    assert [(event.phase, event.number) for event in seen] == [("generate", k) for k in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"a generation can be watched, and has no stop\(\)"):
        seen[0].stop()


def test_rounds_show_generation_and_training_and_refuse_an_event_that_neither_has(model, tmp_path):
    seen: list = []
    rounds = {
        "model": model,
        "data": SUMS[:4],
        "rewards": [even],
        "rounds": 1,
        "samples": 2,
        "select": {"keep": "best", "keep_truncated": True},
        "sampling": {"max_new_tokens": 4},
        "sft": {"batch_size": 2, "train": {"steps": 1}},
        "log": {"tensorboard": False},
        "run": {"dir": str(tmp_path), "progress": False, "threads": 1},
    }
    lightrft.iterate(**rounds, name="rounds", on_rollouts=seen.append, on_step=seen.append)
    phases = [event.phase for event in seen]
    assert phases[:4] == ["generate"] * 4 and set(phases[4:]) == {"sft"}
    with pytest.raises(ConfigError, match="on_eval is never called"):
        lightrft.iterate(**rounds, name="other", on_eval=print)
    assert not (tmp_path / "other" / "round_01" / "rows.jsonl").exists()


def test_a_loop_of_the_program_calls_callbacks_too(model, tmp_path):
    seen: list = []
    given = {**SMALL, **RL, "model": model, "data": SUMS[2:], "dir": str(tmp_path)}
    given["rewards"] = [even]

    def watch(event):
        seen.append((event.name, event.number))
        if event.name == "on_step" and event.number == 1:
            event.change("optimizer.lr", 2e-3)
            event.save()
        if event.name == "on_step" and event.number == 2:
            event.stop()

    with lightrft.Policy(**given, name="loop", **dict.fromkeys(EVENTS, watch)) as policy:
        for _ in policy:
            groups = policy.score(policy.sample(policy.prompts()))
            policy.update(policy.batch(groups))
            policy.sync()
        rate = policy.config.optimizer.lr
    step = lambda n: [("on_rollouts", n), ("on_step", n), ("on_checkpoint", n)]  # noqa: E731
    assert seen == [("on_start", 0), *step(1), *step(2), ("on_end", 2)] and rate == 2e-3
    with pytest.raises(ConfigError, match="on_step is of type int, not a function"):
        lightrft.Policy(**given, on_step=3)


def test_other_verbs_change_their_learning_rate_and_resume_with_it(model, tmp_path):
    rows = [{"prompt": row["prompt"], "response": row["label"]} for row in SUMS]

    def halve(event):
        if event.number == 1:
            event.change("optimizer.lr", event.settings["optimizer.lr"] / 2)

    def train(name: str, **over):
        given = {"model": model, "data": rows, "batch_size": 4, "steps": 4, "dir": str(tmp_path)}
        return lightrft.sft(**{**SMALL, **given, "name": name, "lr": 1e-2, **over})

    whole = train("whole", on_step=halve)
    rates = list(whole.metrics["policy/lr"])
    assert rates == [1e-2, 5e-3, 5e-3, 5e-3]
    train("parted", on_step=lambda event: (halve(event), event.number == 2 and event.stop()))
    parted = train("parted")
    assert list(parted.metrics["policy/grad_norm"]) == list(whole.metrics["policy/grad_norm"])
    assert list(parted.metrics["policy/lr"]) == rates


def test_the_example_of_the_page_runs_as_it_is_written(model, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(def watch.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    for part in model:
        part.save_pretrained("model")
    rewards = "def digits(rollout):\n    return float(rollout.text[:1].isdigit()) / 2\n"
    Path("rewards.py").write_text(rewards, encoding="utf-8")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    recipe = {
        "model": "model",
        "data": {"sources": ["rows.jsonl"]},
        "reward": {"terms": ["rewards.py:digits"]},
        "train": {"steps": 3},
        "eval": {**RL["eval"], "data": {"sources": ["rows.jsonl"]}},
        "rollout": RL["rollout"],
        "sampling": RL["sampling"],
        "optimizer": {"lr": 1e-3},
    }
    Path("recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    names = {"lightrft": lightrft}
    exec(example, names)
    assert list(names["run"].metrics["policy/lr"]) == [1e-3, 1e-3, 5e-4]
    assert capsys.readouterr().out.startswith("1 0.")
