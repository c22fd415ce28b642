"""Loops that a program writes itself, by the parts of a step: the numbers of ``lightrft.rl``, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.strategy.checkpoint import CheckpointError
from lightrft.utils.errors import ConfigError, RewardError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"
SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
OF_TIME = ("seconds", "time/", "tokens_per_second", "compute/", "memory/")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()


@pytest.fixture
def settings(model, tmp_path):
    def even(rollout):
        return sum(ord(letter) % 2 == 0 for letter in rollout.text) / max(1, len(rollout.text))

    return {
        "model": model,
        "data": SUMS,
        "rewards": [even],
        "steps": 3,
        "dir": str(tmp_path),
        "lr": 1e-3,
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "sampling": {"max_new_tokens": 6},
        "log": {"tensorboard": False, "rollouts_every": 1},
        "run.progress": False,
        "run.threads": 1,
    }


def loop(**settings):
    """Train by the shortest loop, and return the run."""
    with lightrft.Policy(**settings) as policy:
        for _ in policy:
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
            policy.sync()
    return lightrft.Run(Path(settings["dir"]) / settings["name"])


def check_same(run, other, but=()):
    """Compare every metric but times and those of ``but``, and every weight, bit for bit."""
    frames = [
        one.metrics.drop(columns=[c for c in one.metrics if c.startswith(OF_TIME) or c in but])
        for one in (run, other)
    ]
    assert list(frames[0].columns) == list(frames[1].columns)
    for name in frames[0]:
        assert list(frames[0][name].fillna(-1)) == list(frames[1][name].fillna(-1)), name
    weights = [load_file(one.model / "model.safetensors") for one in (run, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


CHOICES = {
    "grpo": {},
    "ppo": {"algorithm": "ppo", "train": {"num_mini_batches": 2, "ppo_epochs": 2}},
    "reinforce++": {"algorithm": {"preset": "reinforce++", "kl": {"coef": 0.1}}},
    "remax": {"algorithm": "remax"},
    "filtered": {"algorithm": "dapo", "rollout.max_rounds": 1},
    "evaluated": {
        "eval": {"data": {"sources": SUMS[:4]}, "every": 2, "sampling.max_new_tokens": 4}
    },
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_loop_of_the_program_gives_bit_for_bit_the_numbers_of_rl(name, settings):
    given = {**settings, **CHOICES[name]}
    check_same(loop(**given, name="own"), lightrft.rl(**given, name="rl"))


SEVERAL = '"steps": 3, "train": {"num_mini_batches": 2, "ppo_epochs": 2}'


@pytest.mark.parametrize("steps", ['"steps": 20', SEVERAL], ids=["as it is", "several updates"])
def test_the_example_gives_bit_for_bit_the_numbers_of_rl(tmp_path, monkeypatch, steps):
    """Of each metric but the two that the loss of the package reports itself."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}  # of a program, whose functions are written by value
    program = EXAMPLE.read_text(encoding="utf-8").replace('"steps": 20', steps)
    exec(compile(program, EXAMPLE, "exec"), names)
    settings = names["settings"]
    other = lightrft.rl(**{**settings, "run": {"name": "rl"}})
    check_same(lightrft.Run("own_loop"), other, but=["policy/ratio", "policy/clip_fraction"])
    rewards = other.metrics["reward/mean"]
    assert steps == SEVERAL or (rewards.iloc[0] < 0.3 and rewards.iloc[-1] > 0.6)


def test_the_loss_of_a_batch_is_what_an_update_minimizes(settings):
    with lightrft.Policy(**{**settings, "steps": 1}, name="own") as policy:
        for _ in policy:
            batch = policy.batch(policy.score(policy.sample(policy.prompts())))
            loss, metrics = policy.loss(batch)
            loss.backward()
            found = [p.grad for p in policy.model.parameters() if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in found]).norm()
            policy.model.zero_grad()
            policy.update(batch)
            row = policy.sync()
    assert metrics["policy/old_kl"] == 0
    assert float(loss.detach()) == pytest.approx(row["policy/loss"], abs=1e-6)
    assert float(norm) == pytest.approx(row["policy/grad_norm"], rel=1e-4)


def test_a_loop_that_was_stopped_goes_on_where_it_was(settings):
    whole = lightrft.rl(**settings, name="whole")
    with lightrft.Policy(**settings, name="own") as policy:
        for step in policy:
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
            policy.sync()
        pytest.fail("the interrupt must end the context")
    run = lightrft.Run(policy.config.run.folder)
    assert run.summary["saved_step"] == 1 and not run.summary["finished"]
    check_same(loop(**settings, name="own"), whole)


def test_a_policy_goes_back_to_a_checkpoint_and_takes_the_same_step_again(settings):
    with lightrft.Policy(**settings, name="own") as policy:
        rows = []
        for step in policy:
            saved = policy.save() if step == 2 and not rows else None
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
            row = policy.sync()
            if saved:
                rows.append(row)
                policy.load(saved)
                assert policy.step == 1
            elif step == 2:
                rows.append(row)
        with pytest.raises(CheckpointError):
            policy.load(policy.config.run.folder)
    for name in ("policy/loss", "policy/grad_norm", "reward/mean", "response/length"):
        assert rows[0][name] == rows[1][name]
    assert list(lightrft.Run(policy.config.run.folder).metrics.index) == [1, 2, 3]


def test_responses_of_a_step_are_of_any_number_and_differ_from_call_to_call(settings):
    with lightrft.Policy(**{**settings, "steps": 1}, name="own") as policy:
        for _ in policy:
            prompts = policy.prompts(2)
            first, second = policy.sample(prompts, 3), policy.sample(prompts, 3)
            assert [len(group) for group in first] == [3, 3]
            assert all(r.reward is None for group in first for r in group)
            texts = [[r.token_ids for group in groups for r in group] for groups in (first, second)]
            assert texts[0] != texts[1]
            for group in first:
                for rollout in group:
                    rollout.reward = float(rollout.sample)
            policy.update(policy.batch(first))
            row = policy.sync({"mine/groups": len(first)})
    assert row["reward/mean"] == 1.0 and row["mine/groups"] == 2.0


def test_a_step_without_a_group_trains_nothing_and_the_loop_goes_on(settings):
    equal = {**settings, "rewards": [lambda rollout: 1.0], "algorithm": "dapo", "steps": 2}
    equal["rollout.max_rounds"] = 1
    with pytest.raises(Exception, match="nothing was trained"):
        loop(**equal, name="own")
    assert list(lightrft.Run(Path(settings["dir"]) / "own").metrics.index) == [1, 2]


def test_a_policy_is_closed_once_and_gives_the_run(settings):
    with lightrft.Policy(**{**settings, "steps": 1}, name="own") as policy:
        for _ in policy:
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
            policy.sync()
        run = policy.close()
    assert run.summary["finished"] and run.model.is_dir()
    assert policy.close().path == run.path


def test_what_a_loop_of_the_program_cannot_do_is_refused_at_its_start(settings, tmp_path):
    for over in (
        {"rollout": {"staleness": 1}},
        {"rollout": {"oversample": 2.0}},
        {"rollout": {"max_rounds": 3}},
        {"launch": {"processes": 2}},
        {"launch": {"kind": "ray"}},
    ):
        section = next(iter(over))
        with pytest.raises(ConfigError, match=section):
            lightrft.Policy(**{**settings, **over}, name="none")
    assert not (tmp_path / "none").exists()


def test_mistakes_in_a_loop_are_errors_that_say_what_to_do(settings):
    with (
        pytest.raises(ConfigError, match=r"step 1 did not end; call sync\(\)"),
        lightrft.Policy(**settings, name="a") as policy,
    ):
        for _ in policy:
            policy.update(policy.batch(policy.score(policy.sample(policy.prompts()))))
    with (
        pytest.raises(ConfigError, match=r"batch\(\) was called twice in step 1"),
        lightrft.Policy(**settings, name="b") as policy,
    ):
        groups = policy.score(policy.sample(policy.prompts()))
        policy.batch(groups)
        policy.batch(groups)
    with (
        pytest.raises(ConfigError, match="return the loss of each token"),
        lightrft.Policy(**settings, name="c") as policy,
    ):
        batch = policy.batch(policy.score(policy.sample(policy.prompts())))
        policy.update(batch, lambda logprobs, batch: logprobs.mean())
    with (
        pytest.raises(RewardError, match=r"16 responses have no reward; call score\(\)"),
        lightrft.Policy(**settings, name="d") as policy,
    ):
        policy.batch(policy.sample(policy.prompts()))


def test_a_reward_that_ends_a_loop_leaves_a_checkpoint_of_the_last_whole_step(settings):
    def broken(rollout):
        raise KeyError("answer")

    with (
        pytest.raises(RewardError, match=r"answer.*resumes from step 1"),
        lightrft.Policy(**settings, name="own") as policy,
    ):
        for step in policy:
            groups = policy.score(policy.sample(policy.prompts()))
            if step == 2:
                for group in groups:
                    for rollout in group:
                        rollout.failed, rollout.reward = "KeyError: answer", None
            policy.update(policy.batch(groups))
            policy.sync()
    with lightrft.Policy(**settings, name="own") as policy:
        assert policy.step == 1


def test_the_example_has_forty_lines():
    lines = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line and not line.strip().startswith("#")]) <= 42


@pytest.mark.slow
def test_two_processes_of_torchrun_train_as_one_process_does(tmp_path):
    program = EXAMPLE.read_text(encoding="utf-8").replace('"steps": 20', '"steps": 3')
    program = program.replace('"run": {', '"strategy": {"device": "cpu"}, "run": {')
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        (folder / "loop.py").write_text(program, encoding="utf-8")
        words = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "loop.py"]
        start = words if processes > 1 else ["loop.py"]
        subprocess.run([sys.executable, *start], cwd=folder, check=True, capture_output=True)
        found.append(lightrft.Run(folder / "runs" / "own_loop").metrics)
    for name in ("reward/mean", "policy/loss", "policy/grad_norm"):
        assert list(found[0][name]) == pytest.approx(list(found[1][name]), rel=1e-4, abs=1e-6)
