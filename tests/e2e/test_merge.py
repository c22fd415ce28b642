"""``lightrft merge`` and ``lightrft convert`` on tiny model folders, adapters and runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightrft.config.base import build, deep_merge
from lightrft.config.verbs import SFTConfig
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.trainer.merge import run_merge
from lightrft.trainer.sft import run_sft
from tests.e2e.command import Outcome, assert_refused, command

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
Run = Callable[..., Outcome]


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[k].equal(other[k]) for k in one)


def save(model: PreTrainedModel, folder: Path, **tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer(**tokenizer).save_pretrained(folder)
    return folder


def moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """``model`` with noise on every weight, as if fine-tuned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base``, its fine-tunes ``a``, ``b`` and ``c``, and its adapters ``lora`` and ``dora``."""
    folder = tmp_path_factory.mktemp("models")
    save(tiny_model("qwen2", seed=1, **SIZES), folder / "base")
    for seed, name in enumerate("abc"):
        save(moved(tiny_model("qwen2", seed=1, **SIZES), seed), folder / name)
    for seed, name in enumerate(("lora", "dora")):
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        settings = LoraConfig(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "up_proj"],
            use_dora=name == "dora",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted = get_peft_model(base, settings)
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.data.normal_(std=0.1)
        adapted.save_pretrained(str(folder / name))
    return folder


@pytest.fixture
def lightrft(capsys, monkeypatch, models) -> Run:
    """Run a verb in the folder of the models."""
    monkeypatch.chdir(models)
    return lambda *words: command(capsys, *words)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def mixed(models: Path, shares: dict[str, float]) -> dict[str, Tensor]:
    """The sum of the models' weights, each times its share, in float64."""
    parts = {name: weights(models / name) for name in shares}
    return {
        key: sum((shares[name] * parts[name][key].double() for name in shares), torch.zeros(1))
        for key in parts[next(iter(shares))]
    }


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert (value.double() - expected[key]).abs().max() < 1e-6, key


def test_two_models_are_averaged_and_transformers_loads_the_result(lightrft, models, out):
    outcome = lightrft("merge", "a", "b", f"output={out}")
    assert outcome.status == 0, outcome.err
    assert outcome.out.endswith(f" in 1 file\n  lightrft chat model={out}\n")
    assert_near(weights(out), mixed(models, {"a": 0.5, "b": 0.5}))
    assert {p.name for p in out.iterdir()} == {p.name for p in (models / "a").iterdir()}
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(models / "a").get_vocab()


def test_a_file_of_settings_names_models_next_to_it(lightrft, models, out, monkeypatch):
    config = models / "merge.yaml"
    config.write_text(
        "models:\n- {model: a, weight: 3}\n- {model: b, weight: 1}\nmerge_method: linear\n"
    )
    monkeypatch.chdir(out.parent)
    outcome = lightrft("merge", config, f"output={out}")
    assert outcome.status == 0, outcome.err
    assert_near(weights(out), mixed(models, {"a": 0.75, "b": 0.25}))


@pytest.mark.parametrize(
    "words",
    [
        ["a"],
        ["models=[{model: a, weight: 0.3}]"],
        ["a", "b", "merge_method=slerp", "t=0"],
        ["b", "a", "merge_method=slerp", "t=1"],
        ["b", "a", "merge_method=slerp", "t=0", "base_model=a"],
    ],
)
def test_one_model_alone_and_the_ends_of_slerp_are_models_bit_for_bit(lightrft, models, out, words):
    outcome = lightrft("merge", *words, f"output={out}")
    assert outcome.status == 0, outcome.err
    assert same(weights(out), weights(models / "a"))


def test_task_vectors_are_added_to_the_base_whose_own_is_left_out(lightrft, models, out):
    names = ["a", "b", "c"]
    words = [*names, "base", "base_model=base", "merge_method=task_arithmetic", f"output={out}"]
    outcome = lightrft("merge", *words)
    assert outcome.status == 0, outcome.err
    shares = {"base": -2.0, **dict.fromkeys(names, 1.0)}
    assert_near(weights(out), mixed(models, shares))


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_the_other_methods_run_and_repeat_with_the_seed(lightrft, out, method):
    models = "models=[{model: a, density: 0.5}, {model: b, density: 0.5, weight: 0.5}]"
    common = [models, "base_model=base", f"merge_method={method}"]
    found = []
    seeds = [[], []] if method == "ties" else [[], ["seed=0"], ["seed=1"]]
    for i, seed in enumerate(seeds):
        folder = out.with_name(str(i))
        assert lightrft("merge", *common, *seed, f"output={folder}").status == 0
        found.append(weights(folder))
    assert same(found[0], found[1])
    assert len(found) == 2 or not same(found[0], found[2])


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_added_to_their_base_as_peft_does_in_float32(
    lightrft, models, out, name, dtype
):
    base = models / "base"
    if dtype == "bfloat16":
        base = models / "base16"
        assert lightrft("convert", "base", "dtype=bfloat16", f"output={base}").status == 0
    outcome = lightrft("merge", name, f"base_model={base}", f"output={out}", "overwrite=true")
    if dtype == "bfloat16":
        shutil.rmtree(base)
    assert outcome.status == 0, outcome.err
    start = AutoModelForCausalLM.from_pretrained(models / "base")
    if dtype == "bfloat16":
        start = start.bfloat16().float()
    merged = PeftModel.from_pretrained(start, models / name).merge_and_unload().state_dict()
    found = weights(out)
    assert any(not found[k].equal(weights(models / "base")[k]) for k in found)
    for key, value in found.items():
        assert value.dtype == getattr(torch, dtype)
        assert torch.equal(value, merged[key].to(value.dtype)), key


def test_several_adapters_are_added_to_one_base(lightrft, models, out):
    for name in ("lora", "dora"):
        assert lightrft("merge", name, f"output={out.with_name(name)}").status == 0
    words = ["lora", "dora", "base_model=base", "merge_method=task_arithmetic", f"output={out}"]
    outcome = lightrft("merge", *words)
    assert outcome.status == 0, outcome.err
    base, one, other = (
        weights(f) for f in (models / "base", *map(out.with_name, ("lora", "dora")))
    )
    expected = {k: one[k].double() + other[k].double() - base[k].double() for k in base}
    assert_near(weights(out), expected)


def test_modules_that_were_trained_whole_replace_those_of_the_base(lightrft, models, out):
    base = AutoModelForCausalLM.from_pretrained(models / "base")
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    adapted = get_peft_model(base, settings)
    for key, parameter in adapted.named_parameters():
        if "modules_to_save" in key:
            parameter.data.fill_(0.5)
    adapted.save_pretrained(str(out.with_name("adapters")))
    outcome = lightrft("merge", out.with_name("adapters"), f"output={out}")
    assert outcome.status == 0, outcome.err
    base_weights = weights(models / "base")
    for key, value in weights(out).items():
        # peft compares the ends of names
        is_norm = key.endswith("norm.weight")
        assert value.equal(torch.full_like(value, 0.5) if is_norm else base_weights[key]), key


def test_runs_and_checkpoints_are_models_too(lightrft, models, out, data_folder):
    tree: dict[str, Any] = {
        "run": {"dir": str(out.parent)},
        "model": {"path": str(models / "base")},
        "data": {"sources": [str(data_folder / "train.jsonl")]},
        "batch_size": 2,
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 2},
        "checkpoint": {"every": 1, "keep": 9},
        "log": {"tensorboard": False},
    }
    more = {"whole": {}, "adapted": {"model": {"lora": {"rank": 2}}}}
    for name, over in more.items():
        run_sft(build(SFTConfig, deep_merge(tree, deep_merge(over, {"run": {"name": name}}))))
    first = out.parent / "whole" / "checkpoints" / "step_000001"
    words = [out.parent / "adapted", first, f"output={out}"]
    outcome = lightrft("merge", *words)
    assert outcome.status == 0, outcome.err
    assert lightrft("export", first, f"output={out.parent / 'first'}").status == 0
    halves = {"adapted/model": 0.5, "first": 0.5}
    assert_near(weights(out), mixed(out.parent, halves))
    assert not (out / ".runs").exists()


def test_weights_are_cut_into_files_of_a_size_and_joined_again(lightrft, models, out):
    cut = out.with_name("cut")
    assert lightrft("convert", "a", "max_shard_size=20KB", f"output={cut}").status == 0
    files = sorted(cut.glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 25_000 for file in files)
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    loaded = AutoModelForCausalLM.from_pretrained(cut).state_dict()
    assert all(value.equal(loaded[key]) for key, value in weights(models / "a").items())
    assert lightrft("convert", cut, f"output={out}").status == 0
    assert same(weights(out), weights(models / "a"))
    assert not (out / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_type_of_the_weights_is_converted_and_the_config_says_so(lightrft, models, out, dtype):
    outcome = lightrft("convert", models / "a", f"dtype={dtype}", f"output={out}")
    assert outcome.status == 0, outcome.err
    kind = getattr(torch, dtype)
    assert all(v.equal(weights(models / "a")[k].to(kind)) for k, v in weights(out).items())
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == kind


def test_pytorch_model_bin_is_read_without_the_copy_of_tied_weights(lightrft, models, out):
    model = tiny_model("qwen2", seed=1, tie_word_embeddings=True, **SIZES)
    folder = save(model, out.with_name("tied"))
    expected = weights(folder)
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    assert "lm_head.weight" in state and "lm_head.weight" not in expected
    assert lightrft("convert", folder, f"output={out}").status == 0
    assert same(weights(out), expected)
    assert not (out / "pytorch_model.bin").exists()
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]


def test_pytorch_model_bin_in_several_files_is_read_by_its_index(lightrft, models, out):
    folder = shutil.copytree(models / "a", out.with_name("bins"))
    (folder / "model.safetensors").unlink()
    expected = weights(models / "a")
    names = sorted(expected)
    files = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, some in files.items():
        torch.save({name: expected[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert lightrft("convert", folder, f"output={out}").status == 0
    assert same(weights(out), expected)
    assert not list(out.glob("*.index.json"))


def test_an_untied_head_that_equals_the_embeddings_stays(lightrft, out):
    model = tiny_model("qwen2", seed=1, tie_word_embeddings=False, **SIZES)
    model.lm_head.weight.data.copy_(model.get_input_embeddings().weight.data)
    folder = save(model, out.with_name("untied"))
    assert lightrft("convert", folder, f"output={out}").status == 0
    assert "lm_head.weight" in weights(out)


def test_code_in_pytorch_model_bin_is_not_run(lightrft, models, out):
    folder = out.with_name("bad")
    shutil.copytree(models / "a", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"x": Path("/")}, folder / "pytorch_model.bin")
    assert_refused(lightrft("convert", folder, f"output={out}"), "holds more than tensors")


def test_a_model_that_reads_images_keeps_its_processor(lightrft, out):
    folder = out.with_name("vision")
    save_tiny_media("qwen2_5_vl", folder)
    assert lightrft("merge", folder, folder, "dtype=bfloat16", f"output={out}").status == 0
    assert {p.name for p in folder.iterdir()} == {p.name for p in out.iterdir()}
    assert weights(out).keys() == weights(folder).keys()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in weights(out).values()} == {torch.bfloat16}


def test_a_tokenizer_source_without_a_processor_leaves_the_processor_of_the_model(lightrft, out):
    folder, text = out.with_name("vision"), out.with_name("text")
    save_tiny_media("qwen2_5_vl", folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(text)
    outcome = lightrft("merge", folder, f"tokenizer_source={text}", f"output={out}")
    assert outcome.status == 0, outcome.err
    assert (out / "preprocessor_config.json").read_bytes() == (
        folder / "preprocessor_config.json"
    ).read_bytes()


def test_a_value_beyond_float16_is_an_error_that_names_the_tensor(lightrft, out):
    model = tiny_model("qwen2", seed=1, **SIZES)
    model.get_input_embeddings().weight.data[3, 4] = -70_000.0
    folder = save(model, out.with_name("large"))
    refused = lightrft("convert", folder, "dtype=float16", f"output={out}")
    assert_refused(refused, "model.embed_tokens.weight has 1 values", "70000", "bfloat16")
    assert sorted(p.name for p in out.parent.iterdir()) == ["large"]
    assert lightrft("convert", folder, "dtype=bfloat16", f"output={out}").status == 0


def test_values_that_become_zero_are_counted(lightrft, out):
    model = tiny_model("qwen2", seed=1, **SIZES)
    model.get_input_embeddings().weight.data[3, :5] = 1e-12
    folder = save(model, out.with_name("small"))
    outcome = lightrft("convert", folder, "dtype=float16", f"output={out}")
    assert outcome.status == 0 and "5 values are too small" in outcome.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["merge"], ["models is empty"]),
        (["convert"], ["path is empty"]),
        (["merge", "a", "t=0.3"], ["t is not read by merge_method = 'linear'"]),
        (["merge", "a", "b", "seed=3"], ["seed is not read", "dare_linear"]),
        (["merge", "a", "b", "c", "merge_method=slerp"], ["models has 3"]),
        (["merge", "a", "b", "merge_method=ties"], ["needs base_model"]),
        (["merge", "a", "b", "merge_method=tys"], ["merge_method = 'tys'"]),
        (["merge", "a", "b", "base_model=base"], ["base_model is not read", "leave it out"]),
        (["merge", "models=[{model: a, weight: 1}, {model: b, weight: -1}]"], ["sum to 0"]),
        (["merge", "a", "models=[b]"], ["with its key and without"]),
        (["merge", "models=[{model: a, parameters: {weight: 1}}]"], ["is models.weight here"]),
        (["merge", "models=[nowhere/b]"], ["nowhere/b", "no folder of that name"]),
        (["convert", "a", "max_shard_size=5"], ["max_shard_size", "'5' is not a size", "5GB"]),
        (["convert", "a", "dtype=int8"], ["dtype = 'int8'"]),
        (["convert", "a", "b"], ["2 folders are named"]),
        (["merge", "a", "tokenizer_source=lora"], ["holds no tokenizer"]),
    ],
)
def test_settings_that_make_no_sense_are_refused(lightrft, out, words, said):
    assert_refused(lightrft(*words, f"output={out}"), *said)
    assert not list(out.parent.iterdir())


def other_vocabulary(folder: Path) -> None:
    backend = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = backend["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(backend))


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))


def wider(folder: Path) -> None:
    tiny_model("qwen2", seed=1, **(SIZES | {"intermediate_size": 80})).save_pretrained(folder)


def deeper(folder: Path) -> None:
    tiny_model("qwen2", seed=1, num_hidden_layers=3, **SIZES).save_pretrained(folder)


def another_family(folder: Path) -> None:
    tiny_model("llama", seed=1, **SIZES).save_pretrained(folder)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            other_vocabulary,
            ["the tokenizers differ: 'b' is token 70", "token 71 in a, where 70 is 'a'"],
        ),
        (quantised, ["its weights are quantised"]),
        (wider, ["mlp.down_proj.weight has the shape [32, 64] in a and [32, 80] in"]),
        (deeper, ["a lacks 12 tensors of", "e.g. model.layers.2."]),
        (another_family, ["is of the type llama, and a of the type qwen2"]),
        (truncated, ["the weights cannot be read"]),
        (without_weights, ["it has no weights"]),
    ],
)
def test_models_that_do_not_fit_each_other_are_refused_by_name(lightrft, models, out, change, said):
    other = shutil.copytree(models / "b", out.with_name("other"))
    change(other)
    assert_refused(lightrft("merge", "a", other, f"output={out}"), *said)
    assert [p.name for p in out.parent.iterdir()] == ["other"]


def test_a_token_that_one_model_has_more_is_said(lightrft, models, out):
    larger = shutil.copytree(models / "b", out.with_name("larger"))
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(larger)
    outcome = lightrft("merge", "a", larger, f"output={out}")
    assert outcome.status == 0 and "has 1 tokens that" in outcome.err
    words = ["a", larger, f"tokenizer_source={larger}", f"output={out}", "overwrite=true"]
    assert lightrft("merge", *words).err.count("tokens that") == 0
    assert "<more>" in AutoTokenizer.from_pretrained(out).get_vocab()


def test_adapters_whose_weights_have_names_of_another_base_are_refused(lightrft, models, out):
    adapters = shutil.copytree(models / "lora", out.with_name("adapters"))
    file = adapters / "adapter_model.safetensors"
    named = {key.replace(".layers.", ".text.layers."): v for key, v in weights(adapters).items()}
    save_file(named, file, metadata={"format": "pt"})
    refused = lightrft("merge", adapters, f"output={out}")
    misfits = "8 tensors are missing", "layers.0.mlp.up_proj.lora_A", "8 tensors fit no module"
    assert_refused(refused, "do not fit their base model", *misfits)
    assert not out.exists()


def test_a_folder_is_replaced_only_if_it_is_a_model_and_that_is_asked_for(lightrft, models, out):
    out.mkdir()
    (out / "notes.txt").write_text("precious")
    assert_refused(lightrft("merge", "a", f"output={out}", "overwrite=true"), "no model folder")
    own = shutil.copytree(models / "a", out.with_name("own"))
    assert_refused(lightrft("convert", own, f"output={own}"), "set overwrite=true")
    words = ["convert", own, "dtype=bfloat16", f"output={own}", "overwrite=true"]
    assert lightrft(*words).status == 0
    assert {v.dtype for v in weights(own).values()} == {torch.bfloat16}


def test_a_full_disk_is_known_before_anything_is_written(lightrft, out, monkeypatch):
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert_refused(lightrft("merge", "a", f"output={out}"), "1000 B are free", "another disk")
    assert not list(out.parent.iterdir())


def test_a_merge_that_is_interrupted_leaves_nothing(lightrft, out, monkeypatch):
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightrft.trainer.merge.merge_tensors", stop)
    assert lightrft("merge", "a", f"output={out}").status == 130
    assert not list(out.parent.iterdir())


def test_one_file_of_the_result_is_in_memory_at_a_time(models, out, monkeypatch):
    import weakref

    from lightrft.config.model import MergeConfig
    from lightrft.models.merging import methods

    alive: dict[int, int] = {}
    most = [0]

    def counted(*given: Any) -> Tensor:
        tensor = methods.merge_tensors(*given)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        most[0] = max(most[0], sum(alive.values()))
        return tensor

    monkeypatch.setattr("lightrft.trainer.merge.merge_tensors", counted)
    inputs = [{"model": str(models / name)} for name in "ab"]
    tree = {"models": inputs, "max_shard_size": "20KB", "output": str(out)}
    run_merge(build(MergeConfig, tree))
    total = sum(value.nbytes for value in weights(out).values())
    # The last tensor of a file is made while those before it wait to be written.
    assert most[0] < 40_000 < total / 2
