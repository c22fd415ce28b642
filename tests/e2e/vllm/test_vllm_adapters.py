"""Adapters in vLLM: they are served alone by a name with their version, or merged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import ChatConfig, ExportConfig, RLConfig
from lightrft.engines.vllm import VLLMEngine
from lightrft.engines.vllm_parts import weights as vllm_weights
from lightrft.trainer.inference import Chat
from lightrft.trainer.rl import run_rl
from lightrft.trainer.saved_policy import run_export
from lightrft.utils.errors import ModelError
from tests.e2e.command import command
from tests.e2e.vllm.runs import lines
from tests.model_helpers import save_random_adapters, vllm_model

LORA = {"rank": 3, "alpha": 12.0}
QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
OF_PEFT = {
    "lora": LoraConfig(r=3, lora_alpha=12, **QV),
    "dora": LoraConfig(r=3, use_dora=True, **QV),
    "head": LoraConfig(r=3, use_rslora=True, modules_to_save=["lm_head"], **QV),
}
"""Adapters that vLLM serves, and those that are merged into the weights that it is sent."""


@pytest.fixture
def adapted(tree: dict[str, Any]) -> dict[str, Any]:
    return deep_merge(tree, {"model": {"lora": LORA}, "optimizer": {"lr": 0.05}})


def folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("lightrft-adapter-*")}


def test_an_adapter_is_served_under_the_name_of_its_version_and_resumes(
    adapted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names: list[str] = []
    reloads: list[Any] = []
    serve, reload = vllm_weights.VLLMWeights._serve, vllm_weights.reload

    def note(self: Any, name: str, adapter: Any) -> Any:
        names.append(name)
        found = serve(self, name, adapter)
        assert found.keys() == adapter.keys()
        assert all(".lora_" in key for key in found)
        return found

    monkeypatch.setattr(vllm_weights.VLLMWeights, "_serve", note)
    monkeypatch.setattr(vllm_weights, "reload", lambda *a: (reloads.append(1), reload(*a)))
    before = folders()
    kept = deep_merge(adapted, {"checkpoint": {"every": 1}})
    run_rl(build(RLConfig, deep_merge(kept, {"train": {"steps": 2}})))
    # tried with zeros, the weights that the run starts with, and after each step
    assert names == ["zeros", "policy-v0", "policy-v1", "policy-v2"]
    assert not any("cannot be compared" in one for one in caplog.messages)
    # the frozen weights once
    assert len(reloads) == 1
    run_rl(build(RLConfig, deep_merge(kept, {"train": {"steps": 4}, "run": {"resume": "auto"}})))
    assert names[4:] == ["zeros", "policy-v2", "policy-v3", "policy-v4"]
    assert folders() == before
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5
    sizes = [line["engine/update_bytes"] for line in steps]
    # the first update has the frozen weights
    assert sizes[0] > 2 * sizes[1] > 0 and sizes[1] == sizes[3]
    # else nothing above would tell an adapter from the base model
    assert steps[-1]["policy/grad_norm"] > 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_adapter_that_vllm_cannot_serve_is_merged(
    staleness: int, adapted: dict[str, Any], tmp_path: Path
) -> None:
    over = {"model": {"lora": {"dora": True}}, "rollout": {"staleness": staleness}}
    if staleness:
        over["algorithm"] = {"importance_sampling": ["tis"]}
    # each update is compared with the trainer's log-probs, and a wrong one would end the run
    run_rl(build(RLConfig, deep_merge(adapted, over)))
    steps = lines(tmp_path)
    assert len(steps) == 3
    # the later batches of the other run were sampled by older weights
    fresh = steps[:1] if staleness else steps
    assert max(line["policy/rollout_logprob_diff"] for line in fresh) < 1e-5
    assert steps[-1]["policy/grad_norm"] > 0


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dora", [False, True], ids=["served", "merged"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_weights_in_4_bits_are_sampled_as_the_policy_computes(
    dora: bool, staleness: int, adapted: dict[str, Any], tmp_path: Path
) -> None:
    over: dict[str, Any] = {"model": {"load_in_4bit": True, "lora": {"dora": dora}}}
    if staleness:
        over |= {"rollout": {"staleness": 1}, "algorithm": {"importance_sampling": ["tis"]}}
    run_rl(build(RLConfig, deep_merge(adapted, over)))
    steps = lines(tmp_path)
    assert len(steps) == 3
    fresh = steps[:1] if staleness else steps
    assert max(line["policy/rollout_logprob_diff"] for line in fresh) < 1e-4
    assert steps[-1]["policy/grad_norm"] > 0


# log-probs change by less than bfloat16 rounds
SMALL = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-4}}


def never_loaded(monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine) -> None:
    monkeypatch.setattr(engine._core, "add_lora", lambda request: False)


def of_the_base_model(monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine) -> None:
    add = engine._core.add_request
    monkeypatch.setattr(engine._core, "add_request", lambda *given, lora_request=None: add(*given))


def of_the_old_adapter(monkeypatch: pytest.MonkeyPatch, engine: VLLMEngine) -> None:
    old = engine.weights.adapter
    monkeypatch.setattr(engine._core, "add_lora", lambda request: True)
    monkeypatch.setattr(engine._core, "remove_lora", lambda number: True)
    serve = engine.weights._serve

    def stale(name: str, adapter: Any) -> Any:
        monkeypatch.setattr(engine._core, "list_loras", lambda: set(count))
        count = [peek(engine.weights)]
        found = serve(name, adapter)
        engine.weights.adapter = old
        return found

    monkeypatch.setattr(engine.weights, "_serve", stale)


def peek(weights: Any) -> int:
    """Return the number of the next adapter."""
    number = next(weights._numbers)
    weights._numbers = iter(range(number, number + 100))
    return number


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (never_loaded, r"Cause: the adapter 'policy-v1' was not transferred"),
        (of_the_base_model, r"Cause: "),
        (of_the_old_adapter, r"Cause: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("over", [{}, SMALL], ids=["large", "small"])
def test_a_stale_adapter_stops_the_run_at_its_first_batch(
    fault: Callable[..., None],
    cause: str,
    over: dict[str, Any],
    adapted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = VLLMEngine.load_weights

    def loads(self: VLLMEngine, weights: Any, version: int) -> Any:
        if version == 1:
            fault(monkeypatch, self)
        return load(self, weights, version)

    monkeypatch.setattr(VLLMEngine, "load_weights", loads)
    if over:
        vllm_model(tmp_path / "model", spread=0.02)
    with pytest.raises(ModelError, match=cause):
        run_rl(build(RLConfig, deep_merge(adapted, over)))
    assert len(lines(tmp_path)) <= 1


def answers(path: Path, engine: str, *prompts: str) -> list[Any]:
    """Return greedy responses of a model folder."""
    config = {
        "model": {"path": str(path), "dtype": "float32"},
        "engine": {"kind": engine},
        "sampling": {"max_new_tokens": 12, "temperature": 0.0},
    }
    chat = Chat(build(ChatConfig, config))
    found = []
    for prompt in prompts:
        chat.clear()
        found.append(chat.say(prompt))
    return found


PROMPTS = ("one + two", "the quick", "three = fox")


def check_folder(folder: Path, base: Path) -> None:
    """Check that vLLM samples from the adapters in ``folder`` as the native engine does."""
    found, expected = (answers(folder, engine, *PROMPTS) for engine in ("vllm", "native"))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    plain = answers(base, "native", *PROMPTS)
    assert [one.token_ids for one in plain] != [one.token_ids for one in expected]


@pytest.mark.parametrize("kind", OF_PEFT)
def test_a_folder_of_adapters_is_sampled_and_trained_as_by_the_native_engine(
    kind: str, tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = tmp_path / "model", tmp_path / "adapters"
    save_random_adapters(AutoModelForCausalLM.from_pretrained(base), OF_PEFT[kind], folder)
    check_folder(folder, base)
    written = []
    for engine in ("vllm", "native"):
        output = tmp_path / f"{engine}.jsonl"
        words = (f"data.sources={tmp_path / 'rows.jsonl'}", "sampling.max_new_tokens=8")
        more = ("sampling.temperature=0", f"engine.kind={engine}", f"output={output}")
        outcome = command(capsys, "generate", f"model={folder}", *words, *more)
        assert outcome.status == 0, outcome.err
        written.append(output.read_text())
    assert written[0] == written[1] and written[0].count("\n") == 9
    over = {"model": {"path": str(folder), "dtype": "float32"}, "optimizer": {"lr": 0.05}}
    run_rl(build(RLConfig, deep_merge(tree, over)))
    steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["policy/rollout_logprob_diff"] for line in steps) < 1e-5
    assert steps[-1]["policy/grad_norm"] > 0


def test_adapters_that_export_kept_are_sampled_as_by_the_native_engine(
    adapted: dict[str, Any], tmp_path: Path
) -> None:
    run_rl(build(RLConfig, deep_merge(adapted, {"checkpoint": {"every": 3}})))
    given = {"adapters": "keep", "output": str(tmp_path / "kept")}
    [run] = (tmp_path / "runs").iterdir()
    folder, _ = run_export(build(ExportConfig, {"path": str(run), **given}))
    check_folder(folder, tmp_path / "model")


def test_vllm_leaves_the_generators_and_threads_of_the_process_alone(
    adapted: dict[str, Any],
) -> None:
    import transformers

    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    from lightrft.config.engine import EngineConfig
    from lightrft.config.model import ModelConfig

    tokenizer = transformers.AutoTokenizer.from_pretrained(adapted["model"]["path"])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    engine = VLLMEngine(
        ModelConfig(path=adapted["model"]["path"]), tokenizer, EngineConfig(), [0], torch.float32
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    engine.close()
