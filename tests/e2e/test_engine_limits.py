"""Limits of engines are refused before the first step, and later errors lose no step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import (
    DistillVerbConfig,
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    SFTConfig,
)
from lightrft.engines.http import HTTPEngine
from lightrft.engines.native import NativeEngine
from lightrft.observability.trackers import read_rows
from lightrft.strategy.checkpoint import DiskFullError
from lightrft.trainer import policy_run, rl_step
from lightrft.trainer.distill.run import run_distill
from lightrft.trainer.inference import run_eval
from lightrft.trainer.pipelines.generate import run_generate
from lightrft.trainer.preference.run import run_preference
from lightrft.trainer.rl import run_rl
from lightrft.trainer.run_session import RunSession
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import (
    RESUMES,
    ConfigError,
    ModelError,
    ResourceError,
    RewardError,
    UserError,
)
from tests.serving_helpers import model_server

KEY = "TEST_KEY_OF_SERVERS"
VERBS: dict[str, Any] = {
    "rl": (RLConfig, run_rl),
    "dpo": (DPOConfig, run_preference),
    "distill": (DistillVerbConfig, run_distill),
    "sft": (SFTConfig, run_sft),
    "eval": (EvaluateConfig, run_eval),
    "generate": (GenerateConfig, run_generate),
}
SHARED = ("model", "data", "optimizer", "train", "log", "run", "engine")


@pytest.fixture
def long_prompts(tmp_path: Path) -> list[dict[str, str]]:
    """Nine prompts of 4 or 5 tokens, and one of 24 tokens that the first steps do not sample."""
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(2, 11)]
    rows.append({"prompt": "1+" * 11 + "1=", "label": "12"})
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": str(tmp_path / "long.jsonl")}]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KEY, "secret")
    (tmp_path / "keys").write_text("secret\n")
    return tmp_path / "keys"


def in_verb(verb: str, tree: dict[str, Any], sources: Any, limit: int = 6) -> dict[str, Any]:
    """Return a small run of ``verb`` that responds to ``sources`` by ``limit`` tokens."""
    shared = {name: tree[name] for name in SHARED if name in tree}
    # responses that differ in their reward, so that a step of ``dpo`` takes one round
    rewards = {"reward": {"terms": [tree["reward"]["terms"][0].replace(":ones", ":varied")]}}
    data = {"data": {"sources": sources, "apply_chat_template": False}}
    sampling = {"sampling": {"max_new_tokens": limit}}
    held = {"eval": {**data, **sampling}}
    more: dict[str, dict[str, Any]] = {
        "rl": {**rewards, "rollout": tree["rollout"], **data, **sampling},
        "dpo": {**rewards, "online": {"group_size": 3}, "batch_size": 2, **data, **sampling},
        "distill": {"distill": {"on_policy": 1.0}, "batch_size": 2, **data, **sampling},
        "sft": {**rewards, **held, "batch_size": 2},
        "eval": {**rewards, **held},
        "generate": {**data, **sampling, "output": f"{tree['run']['dir']}/answers.jsonl"},
    }
    if verb == "distill":
        more[verb]["teacher"] = {"path": tree["model"]["path"]}
    if verb in ("eval", "generate"):
        left = ("model", "run") if verb == "eval" else ("model",)
        shared = {name: shared[name] for name in (*left, "engine") if name in shared}
    return {**shared, **more[verb]}


def run(verb: str, tree: dict[str, Any]) -> dict[str, Any]:
    config, start = VERBS[verb]
    return start(build(config, tree))


def steps_of(tree: dict[str, Any]) -> list[dict[str, float]]:
    file = Path(tree["run"]["dir"]) / tree["run"]["name"] / "metrics.jsonl"
    return read_rows(file) if file.is_file() else []


@pytest.mark.parametrize("verb", VERBS)
def test_a_prompt_that_the_cache_cannot_hold_is_refused_before_the_first_step(
    verb: str, rl_tree: dict[str, Any], long_prompts: Any
) -> None:
    tree = in_verb(verb, deep_merge(rl_tree, {"engine": {"max_cache_tokens": 29}}), long_prompts)
    key = "eval.sampling" if verb in ("sft", "eval") else "sampling"
    with pytest.raises(
        ConfigError,
        match=rf"engine\.max_cache_tokens = 29: .* 24 tokens, and with {key}\.max_new_tokens = 6 "
        rf".*at least 30, or lower {key}\.max_new_tokens to 5",
    ):
        run(verb, tree)
    assert steps_of({"run": rl_tree["run"]}) == []


def test_an_eval_prompt_that_the_cache_cannot_hold_is_refused_before_the_first_step(
    rl_tree: dict[str, Any], long_prompts: Any
) -> None:
    over = {
        "eval": {
            "data": {"sources": long_prompts, "apply_chat_template": False},
            "at_start": False,
            "sampling": {"max_new_tokens": 10},
        },
        "data": {"apply_chat_template": False},
        "engine": {"max_cache_tokens": 20},
    }
    with pytest.raises(ConfigError, match=r"eval\.sampling.*lower eval\.data\.max_prompt_tokens"):
        run_rl(build(RLConfig, deep_merge(rl_tree, over)))
    assert steps_of(rl_tree) == []


@pytest.fixture
def small_server(model_folder: Path, keys: Path) -> Iterator[str]:
    tree = {"weights_token_file": str(keys), "engine": {"max_cache_tokens": 29}}
    with model_server(model_folder, **tree) as (url, _):
        yield url


@pytest.mark.parametrize("verb", VERBS)
def test_a_prompt_that_the_server_cannot_hold_is_refused_before_the_first_step(
    verb: str, rl_tree: dict[str, Any], long_prompts: Any, small_server: str
) -> None:
    engine = {"kind": "http", "url": small_server, "api_key_env": KEY}
    tree = in_verb(verb, {**rl_tree, "engine": engine}, long_prompts)
    key = "eval.sampling" if verb in ("sft", "eval") else "sampling"
    with pytest.raises(
        ConfigError, match=rf"{key}\.max_new_tokens = 6: .*{small_server}. holds 29; lower {key}"
    ):
        run(verb, tree)
    assert steps_of({"run": rl_tree["run"]}) == []


def test_a_batch_that_is_generated_ahead_has_the_limits_of_its_server(
    rl_tree: dict[str, Any], long_prompts: Any, small_server: str
) -> None:
    engine = {"kind": "http", "url": small_server, "api_key_env": KEY}
    ahead = {
        "rollout": {"staleness": 1},
        "algorithm": {"importance_sampling": ["tis"]},
        "data": {"sources": long_prompts},
    }
    with pytest.raises(ConfigError, match=rf"{small_server}. holds 29"):
        run_rl(build(RLConfig, deep_merge({**rl_tree, "engine": engine}, ahead)))


@pytest.mark.parametrize(
    ("verb", "key"),
    [("eval", "eval.sampling"), ("generate", "sampling"), ("rl", "sampling")],
)
def test_a_temperature_that_a_server_would_change_is_refused_by_the_name_of_its_setting(
    verb: str,
    key: str,
    rl_tree: dict[str, Any],
    model_folder: Path,
    keys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = HTTPEngine.check_limits

    def of_another_server(engine: HTTPEngine, *given: Any) -> None:
        engine.is_own = False
        check(engine, *given)

    monkeypatch.setattr(HTTPEngine, "check_limits", of_another_server)
    with model_server(model_folder, weights_token_file=str(keys)) as (url, _):
        engine = {"kind": "http", "url": url, "api_key_env": KEY}
        tree = in_verb(verb, {**rl_tree, "engine": engine}, rl_tree["data"]["sources"])
        cold: dict[str, Any] = {"sampling": {"temperature": 0.005}}
        tree = deep_merge(tree, {"eval": cold} if verb == "eval" else cold)
        with pytest.raises(ConfigError, match=rf"^{key}\.temperature = 0\.005"):
            run(verb, tree)
    assert steps_of({"run": rl_tree["run"]}) == []


def failing_from(
    monkeypatch: pytest.MonkeyPatch, call: int, error: Exception, name: str = "generate"
) -> None:
    """Make the method ``name`` of the native engine raise ``error`` from its n-th call on."""
    calls = itertools.count(1)
    method = getattr(NativeEngine, name)

    def failing(engine: NativeEngine, *given: Any) -> Any:
        if next(calls) >= call:
            raise error
        return method(engine, *given)

    monkeypatch.setattr(NativeEngine, name, failing)


@pytest.mark.parametrize("verb", ["rl", "dpo", "distill"])
def test_an_engine_that_fails_in_a_later_step_leaves_a_checkpoint_that_the_run_resumes_from(
    verb: str, rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = in_verb(verb, rl_tree, rl_tree["data"]["sources"])
    tree["run"] = {**tree["run"], "name": "whole"}
    run(verb, tree)
    expected = steps_of(tree)
    tree["run"] = {**tree["run"], "name": "run"}
    with monkeypatch.context() as patch:
        error = ResourceError(f"engine.url = 'x': no answer. {RESUMES}")
        failing_from(patch, 3, error)
        with pytest.raises(
            ResourceError,
            match=r"^engine\.url = 'x': no answer\. .* resumes from step 2, .* saved$",
        ):
            run(verb, tree)
    assert len(steps_of(tree)) == 2
    run(verb, tree)
    found = steps_of(tree)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row["policy/grad_norm"] == other["policy/grad_norm"]
        assert row["response/length"] == other["response/length"]


def test_an_engine_that_fails_while_it_generates_ahead_leaves_a_checkpoint(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}}
    tree = deep_merge(rl_tree, {**ahead, "engine": {"check_logprobs": False}})
    with monkeypatch.context() as patch:
        failing_from(patch, 3, ConfigError("the server refuses"))
        with pytest.raises(
            ConfigError, match=r"the server refuses; .* from step 2, which is saved"
        ):
            run("rl", tree)
    run("rl", tree)
    assert [row["step"] for row in steps_of(tree)] == [1, 2, 3, 4]


def same_rows(tree: dict[str, Any], name: str, other: str) -> bool:
    """Two runs have the same rows but for times."""
    found, expected = (steps_of({"run": {**tree["run"], "name": one}}) for one in (name, other))
    for row in (*found, *expected):
        for key in [key for key in row if key.startswith("time/") or "second" in key]:
            del row[key]
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    return found == expected


@pytest.mark.parametrize(("call", "step"), [(1, 2), (2, 4)])
@pytest.mark.parametrize("error", [ConfigError, RewardError])
@pytest.mark.parametrize("verb", ["sft", "rl"])
def test_an_evaluation_that_fails_is_repeated_when_the_run_resumes(
    verb: str,
    error: type[UserError],
    call: int,
    step: int,
    rl_tree: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = in_verb(verb, rl_tree, rl_tree["data"]["sources"])
    tree |= {"checkpoint": {"best": "eval/reward"}}
    held = in_verb("sft", rl_tree, rl_tree["data"]["sources"])["eval"]
    tree["eval"] = {**held, "at_start": False, "every": 2}
    evaluate, calls = policy_run.evaluate, itertools.count(1)

    def failing(*given: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise error("the server refuses")
        return evaluate(*given, **more)

    tree["run"] = {**tree["run"], "name": "run"}
    with monkeypatch.context() as patch:
        patch.setattr(policy_run, "evaluate", failing)
        with pytest.raises(error, match=rf"the server refuses; .* from step {step}, which is"):
            run(verb, tree)
    again = run(verb, tree)
    tree["run"] = {**tree["run"], "name": "whole"}
    whole = run(verb, tree)
    assert same_rows(tree, "run", "whole")
    assert "eval/reward" in steps_of(tree)[-1]
    assert again["model_step"] == whole["model_step"]
    folders = [Path(tree["run"]["dir"]) / name / "rollouts" for name in ("run", "whole")]
    kept = [sorted(path.name for path in folder.glob("eval_*")) for folder in folders]
    assert kept[0] == kept[1] != []


def test_weights_that_do_not_reach_the_engine_after_an_update_cost_no_step(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {**rl_tree, "run": {**rl_tree["run"], "name": "whole"}}
    run("rl", whole)
    tree = {**rl_tree, "run": {**rl_tree["run"], "name": "run"}}
    with monkeypatch.context() as patch:
        # the first call is before the first step
        failing_from(patch, 3, ResourceError("no answer"), "load_weights")
        with pytest.raises(ResourceError, match=r"^no answer; .* from step 2, which is saved$"):
            run("rl", tree)
    assert len(steps_of(tree)) == 1
    run("rl", tree)
    assert same_rows(tree, "run", "whole")


def test_wrong_weights_of_a_server_cost_no_earlier_step(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_from(patch, 3, ModelError("another run has replaced the weights"))
        with pytest.raises(ModelError, match=r"replaced the weights; .* from step 2, which is"):
            run("rl", rl_tree)
    run("rl", rl_tree)
    assert [row["step"] for row in steps_of(rl_tree)] == [1, 2, 3, 4]


def test_log_probs_that_differ_in_a_later_step_cost_no_earlier_one(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {**rl_tree, "run": {**rl_tree["run"], "name": "whole"}}
    run("rl", whole)
    tree = {**rl_tree, "run": {**rl_tree["run"], "name": "run"}}
    check, calls = rl_step.check_batch, itertools.count(1)

    def failing(*given: Any) -> None:
        if next(calls) == 3:
            raise ModelError("log-probs differ")
        check(*given)

    with monkeypatch.context() as patch:
        patch.setattr(rl_step, "check_batch", failing)
        with pytest.raises(ModelError, match=r"log-probs differ; .* from step 2, which is saved"):
            run("rl", tree)
    run("rl", tree)
    assert same_rows(tree, "run", "whole")


def test_a_run_that_overwrites_says_by_which_command_it_resumes(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = deep_merge(rl_tree, {"run": {"overwrite": True}})
    failing_from(monkeypatch, 3, ResourceError(f"no answer. {RESUMES}"))
    said = r"The same command without run\.overwrite=true resumes from step 2, which is saved$"
    with pytest.raises(ResourceError, match=said):
        run("rl", tree)


def test_a_disk_that_is_full_when_the_engine_fails_hides_no_cause(
    rl_tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise DiskFullError("checkpoints/step_000002 was not saved")

    monkeypatch.setattr(RunSession, "save", full)
    failing_from(monkeypatch, 3, ResourceError("no answer"))
    with pytest.raises(ResourceError, match=r"^no answer; and then: checkpoints/step_000002 was"):
        run("rl", {**rl_tree, "checkpoint": {"every_minutes": 0}})
