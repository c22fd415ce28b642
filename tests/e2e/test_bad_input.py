"""A user's mistakes: a message that names the setting, its value and the way out; status 2; no traceback; nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrft.observability.trackers import read_rows
from tests.e2e.command import Outcome, assert_refused, command, process

Rl = Callable[..., Outcome]


@pytest.fixture
def rl(capsys, monkeypatch, model_folder, data_folder, tmp_path) -> Rl:
    """``rl(overrides...)``: the smallest run, in ``tmp_path/runs/run``."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, verb: str = "rl", **instead: Any) -> Outcome:
        given = {
            "model": model_folder,
            "data.sources": data_folder / "train.jsonl",
            "reward.terms": f"[{data_folder / 'rewards.py'}:varied]",
            "rollout.prompts_per_step": 2,
            "rollout.group_size": 2,
            "sampling.max_new_tokens": 4,
            "train.steps": 1,
            "log.tensorboard": "false",
            "run.progress": "false",
        }
        if verb == "sft":
            given = {
                k: v for k, v in given.items() if not k.startswith(("rollout", "sampling"))
            } | {"batch_size": 2}
        given |= {k.replace("__", "."): v for k, v in instead.items()}
        return command(
            capsys, verb, *(f"{k}={v}" for k, v in given.items() if v is not None), *words
        )

    return run


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


# settings


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "sampling.temprature=1",
            [
                "unknown setting sampling.temprature",
                "command line",
                "did you mean sampling.temperature?",
            ],
        ),
        (
            "rollout.group_siz=4",
            ["unknown setting rollout.group_siz", "did you mean rollout.group_size?"],
        ),
        ("modl.path=x", ["unknown setting modl", "did you mean model?"]),
        ("train.steps=many", ["train.steps = 'many'", "integer"]),
        ("train.steps=-1", ["train.steps = -1", "greater than or equal to 1"]),
        ("sampling.top_p=1.5", ["sampling.top_p = 1.5", "less than or equal to 1"]),
        ("sampling.temperature=1e-45", ["temperature 1e-45 is below 1e-06", "greedy"]),
        ("sampling.first_token_temperature=1e-9", ["first_token_temperature", "equal to 0.000001"]),
        ("sampling.repetition_penalty=1e-300", ["repetition_penalty", "equal to 0.000001"]),
        ("sampling.min_new_tokens=9", ["min_new_tokens 9", "max_new_tokens 4"]),
        ("algorithm.kl.where=nowhere", ["algorithm.kl.where = 'nowhere'", "'loss'"]),
        ("algorithm=grppo", ["unknown preset 'grppo'", "did you mean 'grpo'?"]),
        ("run.seed=[1", ["run.seed", "not a YAML value"]),
        ("no_equals_sign", ["'no_equals_sign'", "neither a .yaml file nor key=value"]),
        ("nowhere.yaml", ["no config file nowhere.yaml"]),
        ("data.apply_chat_template=perhaps", ["data.apply_chat_template"]),
        ("model.dtype=float12", ["model.dtype = 'float12'", "'bfloat16'"]),
        ("strategy.device=cuda:99", ["strategy.device", "cuda:99"]),
        ("algorithm.filters=[nothing_like_it]", ["algorithm.filters.0", "nothing_like_it"]),
        ("reward.terms=[no_such_reward]", ["no_such_reward"]),
        ("algorithm.loss=ppo", ["unknown policy loss 'ppo'; it is a preset: algorithm=ppo."]),
        ("algorithm.advantage=DAPO", ["unknown advantage 'DAPO'; it is a preset: algorithm=dapo."]),
        ("reward.terms=[nowhere.py:f]", ["nowhere.py"]),
        ("reward.terms=[math,math]", ["two terms are called 'math'"]),
        (
            "reward={terms: [math], models: [{path: rm, name: math}]}",
            ["reward.models.0 and reward.terms.0 are both called 'math'", "reward.models.0.name"],
        ),
        (
            "reward={models: [{path: rm, name: q}], judges: [{path: judge, name: q}]}",
            ["reward.judges.0 and reward.models.0 are both called 'q'"],
        ),
        ("reward.models=[{path: rm, weight: .nan}]", ["reward.models.0.weight = nan", "finite"]),
        ("reward.terms=[{function: math, weight: .inf}]", ["reward.terms.0.weight = inf"]),
        ("model.freeze=[no.such.part]", ["model.freeze", "no.such.part"]),
        (
            "model={freeze: [model.norm], lora: {modules_to_save: [model.norm]}}",
            ["model.freeze = 'model.norm'", "model.lora.modules_to_save = ['model.norm']"],
        ),
        ("model.lora.targets=[nope]", ["model.lora.targets", "nope"]),
    ],
)
def test_a_setting_that_cannot_be_is_assert_refused(rl, tmp_path, word, said):
    assert_refused(rl(word), *said)
    assert not (tmp_path / "runs" / "run" / "model").exists()


def test_every_problem_is_told_at_once(rl):
    assert_refused(
        rl("sampling.temprature=1", "train.steps=many", "rollout.smaples=3"),
        "temprature",
        "'many'",
        "smaples",
    )


def test_a_config_file_that_is_not_yaml_or_holds_a_wrong_key_is_named(rl, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("run: [\n")
    assert_refused(rl(str(wrong)), "wrong.yaml", "not YAML")
    wrong.write_text("sampling: {temprature: 1}\n")
    assert_refused(
        rl(str(wrong)), "unknown setting sampling.temprature", "wrong.yaml", "sampling.temperature"
    )
    assert_refused(rl(str(tmp_path / "wrongg.yaml")), "wrongg.yaml", "did you mean", "wrong.yaml")


def test_an_adaptive_kl_that_could_turn_negative_is_assert_refused(rl):
    kl = [
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.horizon=4",
        "rollout.prompts_per_step=5",
        "rollout.group_size=4",
    ]
    assert_refused(rl(*kl), "algorithm.kl.horizon = 4", "rollout.prompts_per_step", "20", "above 4")


# data


def test_a_data_file_that_does_not_exist_is_named(rl, tmp_path):
    assert_refused(rl(data__sources="nowhere.jsonl"), "nowhere.jsonl", "data.sources")
    assert_refused(rl(f"eval.data.sources={tmp_path}/gone.jsonl"), "gone.jsonl")


def test_a_column_that_does_not_exist_is_named_with_those_there_are(rl):
    assert_refused(rl("data.columns.prompt=query"), "query", "prompt", "label", "train.jsonl")
    assert_refused(rl("data.template='{problem}'"), "{problem}", "prompt", "label")


def test_an_empty_data_set_is_assert_refused(rl, tmp_path):
    assert_refused(rl(data__sources=jsonl(tmp_path / "empty.jsonl", [])), "empty.jsonl")


def test_a_malformed_row_is_named_by_file_and_line_and_can_be_skipped(rl, tmp_path):
    data = jsonl(
        tmp_path / "torn.jsonl",
        [{"prompt": "1+1=", "label": "2"}, '{"prompt": "2+', {"prompt": "3+3=", "label": "6"}],
    )
    assert_refused(rl(data__sources=data), "torn.jsonl, line 2", "data.bad_rows: skip")
    assert rl("data.bad_rows=skip", data__sources=data).status == 0


def test_a_row_without_a_prompt_is_named(rl, tmp_path):
    data = jsonl(
        tmp_path / "gap.jsonl", [{"prompt": "1+1=", "label": "2"}, {"prompt": None, "label": "2"}]
    )
    assert_refused(rl(data__sources=data), "gap.jsonl, line 2")


def test_a_prompt_over_the_limit_is_dropped_and_counted_or_an_error_as_set(rl, tmp_path):
    data = jsonl(
        tmp_path / "long.jsonl",
        [{"prompt": "1+1=", "label": "2"}, {"prompt": "9" * 500, "label": "2"}],
    )
    limit = "data.max_prompt_tokens=100"
    assert_refused(
        rl(limit, "data.overlong_prompts=error", data__sources=data),
        "long.jsonl, line 2",
        "data.max_prompt_tokens = 100",
        "overlong",
    )
    assert rl(limit, "rollout.prompts_per_step=1", data__sources=data).status == 0
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert "1 overlong" in log and "long.jsonl, line 2" in log
    only = jsonl(tmp_path / "only.jsonl", [{"prompt": "9" * 500, "label": "2"}])
    assert_refused(
        rl(limit, "run.name=other", data__sources=only),
        "only.jsonl",
        "nothing is left",
        "1 overlong",
    )


def test_rows_without_an_answer_cannot_be_learned_from(rl, tmp_path):
    data = jsonl(tmp_path / "asked.jsonl", [{"prompt": "1+1="}])
    assert_refused(
        rl(verb="sft", data__sources=data, reward__terms=None),
        "asked.jsonl, line 1",
        "data.columns.response",
    )


def test_a_label_that_a_reward_needs_and_a_row_lacks_is_said(rl, tmp_path):
    data = jsonl(tmp_path / "bare.jsonl", [{"prompt": "1+1="}, {"prompt": "2+2="}])
    assert_refused(
        rl(data__sources=data, reward__terms="[math]"), "bare.jsonl, line 1", "no label", "'math'"
    )


# models


def test_a_model_folder_that_is_none_is_assert_refused(rl, tmp_path):
    assert_refused(rl(model=tmp_path / "gone"), "model.path", "gone", "no such folder")
    (tmp_path / "bare").mkdir()
    assert_refused(rl(model=tmp_path / "bare"), "model.path", "bare", "config.json")


def test_a_model_file_that_is_cut_short_is_assert_refused(rl, model_folder, tmp_path):
    cut = copied(model_folder, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    assert_refused(rl(model=cut), "model.path", "cannot be read")
    weights.unlink()
    assert_refused(rl(model=cut), "model.path", "cut")


def test_a_tokenizer_of_another_model_is_assert_refused(rl, model_folder, tmp_path):
    small = copied(model_folder, tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.add_tokens([f"word{i}" for i in range(500)])
    tokenizer.save_pretrained(small)
    assert_refused(rl(model=small), "tokens", "do not belong together")


def test_a_model_without_a_chat_template_says_how_to_give_one(rl, model_folder, tmp_path):
    plain = copied(model_folder, tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.chat_template = None
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(plain)
    assert_refused(
        rl("data.apply_chat_template=true", model=plain),
        "data.apply_chat_template",
        "no chat template",
        "model.chat_template",
    )
    assert rl(model=plain).status == 0


def test_an_end_token_that_also_pads_is_still_learned_and_sampled(
    rl, model_folder, tmp_path, capsys
):
    same = copied(model_folder, tmp_path / "same")
    tokenizer = AutoTokenizer.from_pretrained(same)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(same)
    outcome = rl(model=same)
    assert outcome.status == 0, outcome.err
    assert "end token as pad" in outcome.err
    assert rl(verb="sft", model=same, reward__terms=None, run__name="sft").status == 0


def test_several_turns_under_a_template_that_rewrites_earlier_ones_are_assert_refused(
    rl, model_folder, tmp_path
):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and "
        "not loop.last %}...{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}{% if "
        "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "forgetful.jinja").write_text(template)
    turns = [
        {"role": r, "content": c}
        for r, c in [("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4")]
    ]
    data = jsonl(tmp_path / "turns.jsonl", [{"messages": turns}] * 2)
    sft = {"verb": "sft", "data__sources": data, "reward__terms": None}
    word = "model.chat_template=forgetful.jinja"
    assert_refused(rl(word, **sft), "chat template", "data.turns", "model.chat_template")
    assert rl(word, "data.turns=each", **sft).status == 0


def test_lengths_beyond_what_the_model_was_made_for_are_refused_at_the_start(rl, tmp_path):
    assert_refused(
        rl("sampling.max_new_tokens=5000"),
        "sampling.max_new_tokens = 5000",
        "max_position_embeddings",
        "2048",
    )
    assert_refused(
        rl(
            "eval.sampling.max_new_tokens=5000",
            "eval.data.sources="
            + str(jsonl(tmp_path / "e.jsonl", [{"prompt": "1", "label": "1"}])),
        ),
        "eval.sampling.max_new_tokens = 5000",
        "2048",
    )
    long = jsonl(tmp_path / "long.jsonl", [{"prompt": "1+1=", "response": "2" * 3000}])
    assert_refused(
        rl("max_tokens=4000", "batch_size=1", verb="sft", data__sources=long, reward__terms=None),
        "max_tokens = 4000",
        "2048",
        "lower max_tokens",
    )


@pytest.mark.parametrize("key", ["sampling", "eval.sampling"])
def test_a_stop_token_that_the_model_does_not_have_is_refused_at_the_start(rl, tmp_path, key):
    held_out = jsonl(tmp_path / "e.jsonl", [{"prompt": "1", "label": "1"}])
    words = (f"{key}.stop_token_ids=[5,99999]", f"eval.data.sources={held_out}")
    assert_refused(rl(*words), f"{key}.stop_token_ids has 99999", "would end no response")
    assert rl(words[0].replace("99999", "6"), words[1]).status == 0


def test_an_engine_budget_that_cannot_hold_one_answer_is_assert_refused(rl):
    assert_refused(
        rl("engine.max_cache_tokens=5"),
        "engine.max_cache_tokens = 5",
        "raise engine.max_cache_tokens",
    )


# rewards

REWARDS = """
import math, os
def nan(rollout): return math.nan
def text(rollout): return "good"
def pair(rollout): return [1.0, 2.0]
def nothing(rollout): return None
def raises(rollout): raise KeyError("no such key")
def dies(rollout): os._exit(3)
def half_nan(rollout): return math.nan if rollout.seed % 2 else sum(rollout.token_ids) % 7 / 7
def breaks_later(rollout): return float(rollout.text) if rollout.seed > 100 else 1.0
"""


@pytest.fixture
def rewards(tmp_path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nan", "nan"),
        ("text", "returned str, not a number"),
        ("pair", "returned list, not a number"),
        ("nothing", "returned NoneType, not a number"),
        ("raises", "no such key"),
        ("dies", "ended its process (status 3)"),
    ],
)
def test_a_reward_that_fails_every_made_up_response_is_refused_before_anything_is_evaluated_or_trained(
    rl, rewards, data_folder, tmp_path, function, said
):
    held_out = {"eval__data__sources": data_folder / "train.jsonl", "eval__every": 1}
    assert_refused(
        rl(reward__terms=f"[{rewards}:{function}]", **held_out), "made-up responses", said
    )
    run = tmp_path / "runs" / "run"
    assert not (run / "model").exists()
    assert not (run / "metrics.jsonl").exists() or not read_rows(run / "metrics.jsonl")
    assert not list(run.rglob("rollouts/*"))


def test_a_reward_that_fails_every_answer_of_a_step_ends_the_run_and_says_why(
    rl, rewards, tmp_path
):
    said = ["every response", "step 1", "could not convert string to float"]
    assert_refused(rl(reward__terms=f"[{rewards}:breaks_later]"), *said)
    assert not (tmp_path / "runs" / "run" / "model").exists()


def test_a_reward_that_fails_some_answers_costs_those_only_and_they_are_counted(
    rl, rewards, tmp_path
):
    outcome = rl(
        "rollout.prompts_per_step=4", "rollout.group_size=4", reward__terms=f"[{rewards}:half_nan]"
    )
    assert outcome.status == 0, outcome.err
    (row,) = read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert 0 < row["rollout/num_failed"] < 16
    assert row["rollout/tokens_trained"] > 0 and row["rollout/tokens_failed"] > 0
    assert "responses were not scored: " in (tmp_path / "runs" / "run" / "log.txt").read_text()


def test_an_evaluation_in_which_every_answer_fails_is_no_accuracy_of_zero(rl, rewards, data_folder):
    words = {
        "data__sources": None,
        "rollout__prompts_per_step": None,
        "rollout__group_size": None,
        "sampling__max_new_tokens": None,
    }
    words |= {
        "train__steps": None,
        "log__tensorboard": None,
        "reward__terms": f"[{rewards}:raises]",
    }
    assert_refused(
        rl(
            f"eval.data.sources={data_folder / 'train.jsonl'}",
            "eval.sampling.max_new_tokens=4",
            verb="eval",
            **words,
        ),
        "made-up responses",
        "no such key",
    )


def test_steps_taken_before_the_reward_broke_are_not_lost(rl, tmp_path):
    file = tmp_path / "breaks.py"
    file.write_text(
        f"from pathlib import Path\nbroken = Path({str(tmp_path / 'broken')!r})\ncalls = "
        f"Path({str(tmp_path / 'calls')!r})\ndef score(rollout):\n    calls.touch()\n    with "
        "calls.open('a') as f: f.write('x')\n    if len(calls.read_text()) > 10 + 8 and not "
        "broken.exists(): raise OSError('the judge is down')\n    return float(rollout.seed % "
        "2)\n"
    )
    words = {"reward__terms": f"[{file}:score]", "train__steps": 4}
    assert_refused(rl(**words), "every response", "step 3", "the judge is down", "step 2")
    (tmp_path / "broken").touch()
    outcome = rl(**words)
    assert outcome.status == 0, outcome.err
    assert [r["step"] for r in read_rows(tmp_path / "runs" / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]


# run folders and checkpoints


def test_a_run_folder_that_exists_is_not_touched_unless_asked(rl, tmp_path):
    assert rl().status == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    assert_refused(rl("run.resume=never"), "runs/run", "run.overwrite=true", "run.name")
    assert_refused(
        rl("optimizer.lr=0.5", "sampling.temperature=0.7"),
        "optimizer.lr",
        "0.5",
        "sampling.temperature",
        "run.overwrite=true",
    )
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text() == before
    assert rl("optimizer.lr=0.5", "run.overwrite=true").status == 0


def test_a_refused_config_names_the_command_that_goes_on_with_other_settings(rl, tmp_path):
    assert rl(optimizer__lr=1e-3).status == 0
    refused = rl("optimizer.lr=0.25", "train.steps=2")
    [resume] = re.findall(r"set another run.name \(and (run\.resume=\S+) to go on", refused.err)
    outcome = rl("optimizer.lr=0.25", "train.steps=2", "run.name=faster", resume)
    assert outcome.status == 0, outcome.err
    rows = read_rows(tmp_path / "runs" / "faster" / "metrics.jsonl")
    assert [(row["step"], row["policy/lr"]) for row in rows] == [(1, 1e-3), (2, 0.25)]


def test_overwriting_removes_what_the_earlier_run_exported(rl, tmp_path):
    assert rl().status == 0
    (tmp_path / "runs" / "run" / "model" / "old").touch()
    assert rl("run.overwrite=true").status == 0
    assert not (tmp_path / "runs" / "run" / "model" / "old").exists()


def test_a_folder_that_is_no_run_is_not_written_into(rl, tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "thesis.tex").write_text("everything")
    assert_refused(rl(), "is not a run's folder", "thesis.tex")
    assert_refused(rl("run.overwrite=true"), "is not a run's folder", "thesis.tex")
    assert (tmp_path / "runs" / "run" / "thesis.tex").read_text() == "everything"


def test_a_checkpoint_that_is_named_and_not_there_is_assert_refused(rl):
    assert_refused(
        rl("run.resume=nowhere/step_1"), "run.resume = 'nowhere/step_1'", "no such checkpoint"
    )


def test_a_checkpoint_that_is_cut_short_is_refused_and_kept(rl, tmp_path):
    assert rl().status == 0
    state = (
        tmp_path / "runs" / "run" / "checkpoints" / "step_000001" / "policy" / "state.safetensors"
    )
    whole = state.read_bytes()
    state.write_bytes(whole[:-1000])
    assert_refused(rl("train.steps=2"), "step_000001", "state.safetensors", "run.overwrite=true")
    assert state.exists()
    state.write_bytes(whole)
    assert rl("train.steps=2").status == 0


def test_a_checkpoint_of_another_model_is_assert_refused(rl, model_folder, tmp_path):
    from lightrft.models.tiny.text import tiny_model

    assert rl().status == 0
    other = copied(model_folder, tmp_path / "other")
    tiny_model("qwen2", hidden_size=64).save_pretrained(other)
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_000001"
    assert_refused(
        rl(f"run.resume={checkpoint}", "run.name=second", model=other),
        "step_000001",
        "belongs to something else",
        "the model",
    )


def test_output_that_exists_is_refused_before_any_work(rl, tmp_path):
    (tmp_path / "answers.jsonl").write_text("mine\n")
    instead = dict.fromkeys(
        ("rollout__prompts_per_step", "rollout__group_size", "train__steps", "log__tensorboard")
    )
    assert_refused(
        rl(verb="generate", model="nowhere/at/all", **instead),
        "answers.jsonl",
        "exists",
        "run.overwrite=true",
    )
    assert (tmp_path / "answers.jsonl").read_text() == "mine\n"


# disks and memory


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if (
        mount is None
        or os.geteuid() != 0
        or subprocess.run(command, capture_output=True).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_at_the_end_is_said_and_an_earlier_checkpoint_stays(
    rl, small_disk, tmp_path
):
    words = {"run__dir": small_disk, "checkpoint__every": 1}
    assert rl(**words).status == 0
    checkpoints = small_disk / "run" / "checkpoints"
    ballast = small_disk / "ballast"
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * (free - 100_000))
    outcome = rl("train.steps=2", **words)
    assert_refused(outcome, "disk", "free")
    assert [c.name for c in checkpoints.iterdir() if not c.name.startswith(".")] == ["step_000001"]
    ballast.unlink()
    assert rl("train.steps=2", **words).status == 0
    assert [r["step"] for r in read_rows(small_disk / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.slow
def test_too_little_memory_says_what_to_lower(model_folder, data_folder, tmp_path):
    """The process gets 300 MiB beyond what it holds once torch is loaded, and a step that needs more than 600."""
    bound = (
        "import resource, torch, lightrft.trainer.rl\n"
        "torch.set_num_threads(1)\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + (300 << 20), resource.RLIM_INFINITY))\n"
    )
    many = jsonl(
        tmp_path / "many.jsonl", [{"prompt": f"{10 + i}+" * 500, "label": "1"} for i in range(32)]
    )
    words = [
        f"model={model_folder}",
        f"data.sources={many}",
        f"reward.terms=[{data_folder / 'rewards.py'}:ones]",
    ]
    large = [
        "rollout.prompts_per_step=32",
        "rollout.group_size=2",
        "sampling.max_new_tokens=8",
        "train.steps=1",
        "data.max_prompt_tokens=1600",
    ]
    outcome = process(
        "rl",
        *words,
        *large,
        "train.max_tokens_per_micro_batch=2000000",
        cwd=tmp_path,
        prelude=bound,
        fresh=True,
    )
    assert_refused(
        outcome, "out of memory", "train.max_tokens_per_micro_batch", "engine.max_cache_tokens"
    )
