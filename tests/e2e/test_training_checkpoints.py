"""``lightrft convert`` of checkpoints that DeepSpeed and FSDP have written in two processes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from lightrft.config.model import ModelConfig
from lightrft.models.critic import Critic
from lightrft.models.merging.training_checkpoint import open_training_checkpoint
from lightrft.models.reward.reward_model import RewardModel
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.types import Batch, Prompt, Segments
from lightrft.utils.errors import ModelError
from tests.e2e.command import ROOT, Outcome, assert_refused, command
from tests.serving_helpers import free_port

SCRIPT = Path(__file__).parent / "training_checkpoints.py"
Run = Callable[..., Outcome]


def written(folder: Path, *more: str) -> Path:
    """Write a base model to ``folder``, and checkpoints of its training by two processes."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SCRIPT), str(folder)]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*words, rank, "2", port, *more], env=env, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    for process in ranks:
        _, said = process.communicate(timeout=1000)
        assert process.returncode == 0, said.decode()[-3000:]
    return folder


@pytest.fixture(scope="module")
def of_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def of_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed")
    return written(tmp_path_factory.mktemp("zero"), "deepspeed")


@pytest.fixture
def lightrft(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: command(capsys, *map(str, words))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def check_equal(folder: Path, expected: Path) -> None:
    """The folder has the weights that the ranks had in the end."""
    found, wanted = loaded(folder), torch.load(expected, weights_only=True)
    assert len(wanted) > 20
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_a_checkpoint_of_fsdp_loads_in_transformers_with_its_weights(of_fsdp, tmp_path, lightrft):
    step, base = of_fsdp / "fsdp" / "global_step1", of_fsdp / "base"
    said = lightrft("convert", step, "from=fsdp", f"base={base}", f"output={tmp_path / 'out'}")
    assert said.status == 0, said
    check_equal(tmp_path / "out", of_fsdp / "fsdp.pt")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # the files tell the layout too
    said = lightrft("convert", step, f"base={base}", f"output={tmp_path / 'again'}")
    assert said.status == 0, said
    check_equal(tmp_path / "again", of_fsdp / "fsdp.pt")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_zero_loads_in_transformers_with_its_weights(
    of_deepspeed, tmp_path, lightrft, stage
):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    run, base = of_deepspeed / f"zero{stage}", of_deepspeed / "base"
    for path, words in ((run, ["--from", "deepspeed"]), (run / "global_step1", [])):
        out = tmp_path / path.name
        said = lightrft("convert", path, *words, f"base={base}", f"output={out}", "dtype=bfloat16")
        assert said.status == 0, said
        check_equal(out, of_deepspeed / f"zero{stage}.pt")
    # in float32, the weights that DeepSpeed's own script finds
    opened = open_training_checkpoint(str(run), "deepspeed", str(base))
    expected = get_fp32_state_dict_from_zero_checkpoint(str(run))
    assert len(expected) > 20
    for name, tensor in expected.items():
        own = opened.read(name.removeprefix("model."))
        assert torch.equal(own.float(), tensor.float()), name


class Evil:
    """An object whose unpickling calls a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("called",)


def test_a_checkpoint_that_calls_a_function_is_refused_and_the_function_is_not_called(
    tmp_path, lightrft, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp").mkdir()
    (tmp_path / "fsdp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "zero").mkdir()
    state = {"module": {}, "evil": Evil()}
    torch.save(state, tmp_path / "zero" / "mp_rank_00_model_states.pt")
    for name in ("fsdp", "zero"):
        said = lightrft("convert", name, "base=base", "output=out")
        assert_refused(said, "hold more than tensors and plain data", "mkdir")
    assert not (tmp_path / "called").exists()


@pytest.mark.slow
def test_what_is_no_whole_checkpoint_is_refused_with_the_reason(of_fsdp, tmp_path, lightrft):
    step, base = of_fsdp / "fsdp" / "global_step1", of_fsdp / "base"
    out = f"output={tmp_path / 'out'}"
    assert_refused(lightrft("convert", step, out), "set base to the model")
    assert_refused(lightrft("convert", base, f"base={base}", out), "base = ", "leave it out")
    assert_refused(
        lightrft("convert", base, "from=deepspeed", f"base={base}", out), "holds no *_model_states"
    )
    assert_refused(lightrft("convert", base, "from=fsdp", f"base={base}", out), "no .metadata")
    other = tiny_model("llama", seed=1, hidden_size=32, vocab_size=90, num_hidden_layers=1)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    said = lightrft("convert", step, f"base={tmp_path / 'other'}", out)
    assert_refused(said, "does not load in transformers")
    assert not (tmp_path / "out").exists()
    cut = tmp_path / "cut"
    shutil.copytree(step, cut)
    next(cut.glob("__1_*.distcp")).unlink()
    assert_refused(lightrft("convert", cut, f"base={base}", out), "copy it again")


@pytest.mark.slow
def test_a_checkpoint_of_zero_that_lacks_a_rank_is_refused(of_deepspeed, tmp_path):
    shutil.copytree(of_deepspeed / "zero2", tmp_path / "zero2")
    next(tmp_path.glob("zero2/*/*rank_1*_optim_states.pt")).unlink()
    with pytest.raises(ModelError, match="of 1 ranks, and 2 wrote it"):
        open_training_checkpoint(str(tmp_path / "zero2"), "deepspeed", str(of_deepspeed / "base"))


def of_a_scorer(base: Path, head: str, wrapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a critic or a reward model over the model in ``base``."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(base)
    states = {
        f"model.{name}" if wrapped else name: tensor + 0.01
        for name, tensor in model.state_dict().items()
        if wrapped or not name.startswith("lm_head.")
    }
    width = model.config.hidden_size
    if head != "mlp":
        return {**states, head: torch.randn(1, width)}
    sizes = {"0.weight": (width, width), "0.bias": (width,), "1.weight": (width,)}
    layers = {f"preference_head.{k}": torch.randn(size) for k, size in sizes.items()}
    layers["preference_head.3.weight"] = torch.randn(1, width)
    pool = {"query": (width,), "k.weight": (width, width), "v.weight": (width, width)}
    pools = {f"preference_attnpool.{k}": torch.randn(size) for k, size in pool.items()}
    return {**states, **layers, **pools, "preference_logit_scale": torch.tensor([2.0])}


@pytest.mark.parametrize("layout", ["fsdp", "deepspeed"])
@pytest.mark.parametrize(
    ("head", "wrapped"),
    [("score.weight", False), ("value_head.weight", True), ("mlp", False)],
    ids=["openrlhf", "lightrft's critic", "lightrft's reward model"],
)
def test_a_checkpoint_of_a_critic_or_a_reward_model_becomes_a_folder_that_scores(
    tmp_path, lightrft, layout, head, wrapped
):
    tokenizer = tiny_tokenizer()
    base, out, ckpt = (tmp_path / name for name in ("base", "out", "ckpt"))
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    state = of_a_scorer(base, head, wrapped)
    if layout == "fsdp":
        dcp.save(state, checkpoint_id=ckpt, no_dist=True)
    else:
        ckpt.mkdir()
        torch.save({"module": state, "mp_world_size": 1}, ckpt / "mp_rank_00_model_states.pt")
    said = lightrft("convert", ckpt, f"from={layout}", f"base={base}", f"output={out}")
    assert said.status == 0, said
    assert f"lightrft serve-rm {out}" in said.out
    reward = RewardModel.open(out)
    written = {n.removeprefix("model.") if wrapped else n: t for n, t in state.items()}
    for name, tensor in reward.base.state_dict().items():
        if name in written:
            assert torch.equal(tensor, written[name]), name
    ids = [5, 6, 7, 8]
    found = lightrft_scores(reward, ids)
    if head == "mlp":
        assert list(reward.head_names) == ["preference"] and 0 < found < 1
        return
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_state_dict({n: t for n, t in written.items() if n != head}, strict=False)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    assert found == pytest.approx(float(hidden @ state[head][0]), abs=1e-4)
    value = Critic.load(ModelConfig(path=str(out))).value_head.weight
    assert torch.equal(value, state[head])


def lightrft_scores(reward: RewardModel, ids: list[int]) -> float:
    batch = Batch(Segments.of_prompts([Prompt("0", ids, "")]), Segments.of([[]]), torch.tensor([0]))
    with torch.no_grad():
        return float(next(iter(reward(batch).values())).scores[0])


def test_a_checkpoint_with_an_unknown_head_is_refused_by_its_name(tmp_path, lightrft):
    tokenizer, base = tiny_tokenizer(), tmp_path / "base"
    tiny_model("qwen2", seed=1, hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    state = of_a_scorer(base, "score.weight") | {"model.extra.weight": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    said = lightrft("convert", tmp_path / "ckpt", f"base={base}", f"output={tmp_path / 'out'}")
    assert_refused(said, "model.extra.weight is no weight of base", "no head of a critic")
    del state["model.extra.weight"], state["model.norm.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "less", no_dist=True)
    said = lightrft("convert", tmp_path / "less", f"base={base}", f"output={tmp_path / 'out'}")
    assert_refused(said, "norm.weight")
    assert not (tmp_path / "out").exists()
