"""Model folders with code of their own that reads pictures: trained as transformers' classes are, where the user allows the code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrft.config.base import build, deep_merge
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import RLConfig, SFTConfig
from lightrft.models import ActorVL, CriticVL
from lightrft.models.families import UNREAD, family_of
from lightrft.models.loading.from_pretrained import load_tokenizer, model_settings
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.observability.trackers import read_rows
from lightrft.trainer.rl import run_rl
from lightrft.trainer.sft import run_sft
from lightrft.utils.errors import ModelError

CODE = {
    "configuration_seer.py": """
from transformers import LlavaConfig

class SeerConfig(LlavaConfig):
    model_type = "seer"
""",
    "modeling_seer.py": """
from transformers import LlavaForConditionalGeneration
from .configuration_seer import SeerConfig

class SeerForConditionalGeneration(LlavaForConditionalGeneration):
    config_class = SeerConfig
""",
    "words_seer.py": "SIGN = '<image>'\n",
    "processing_seer.py": """
from transformers import LlavaProcessor
from .words_seer import SIGN

class SeerProcessor(LlavaProcessor):
    def __call__(self, images=None, text=None, **options):
        assert all(SIGN in one for one in text)
        return super().__call__(images=images, text=text, **options)
""",
}
AUTO = {
    "AutoConfig": "configuration_seer.SeerConfig",
    "AutoModelForImageTextToText": "modeling_seer.SeerForConditionalGeneration",
    "AutoProcessor": "processing_seer.SeerProcessor",
}
ALLOWED = {"trust_remote_code": True, "unproved_family": "allow"}


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_tiny_media("llava", tmp_path / "plain", initializer_range=0.3)
    return tmp_path / "plain"


@pytest.fixture
def coded(plain: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "coded"
    shutil.copytree(plain, folder)
    model = AutoModelForImageTextToText.from_pretrained(plain)
    # The names of the class itself, where transformers renames those of published LLaVA.
    save_file(
        {name: weight.contiguous() for name, weight in model.state_dict().items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    for name, text in CODE.items():
        (folder / name).write_text(text)
    change(
        folder / "config.json",
        model_type="seer",
        architectures=["SeerForConditionalGeneration"],
        auto_map={name: AUTO[name] for name in list(AUTO)[:2]},
    )
    change(
        folder / "processor_config.json",
        processor_class="SeerProcessor",
        auto_map={"AutoProcessor": AUTO["AutoProcessor"]},
    )
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    rows = []
    for k in range(4):
        pixels = np.random.default_rng(k).integers(0, 256, size=(20 + k, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k}.png")
        rows.append(
            {"prompt": "<image> what?", "images": [f"{k}.png"], "label": str(k), "response": str(k)}
        )
    varied = "def varied(rollout):\n    return float(sum(rollout.token_ids) % 7)\n"
    (tmp_path / "reward.py").write_text(varied)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return {
        "data": {"sources": [str(tmp_path / "rows.jsonl")]},
        "train": {"steps": 2},
        "optimizer": {"lr": 0.01},
        "run": {"dir": str(tmp_path / "runs"), "name": "run"},
    }


RL: dict[str, Any] = {
    "algorithm": {"preset": "grpo"},
    "rollout": {"prompts_per_step": 2, "group_size": 4},
    "sampling": {"max_new_tokens": 5},
}
NUMBERS = ("policy/loss", "loss", "policy/grad_norm", "reward/mean", "policy/rollout_logprob_diff")


def numbers(tree: dict[str, Any], model: dict[str, Any], name: str, verb: str) -> list[Any]:
    own = deep_merge(tree, {"model": model, "run": {"name": name}})
    if verb == "rl":
        reward = f"{Path(tree['run']['dir']).parent}/reward.py:varied"
        run_rl(build(RLConfig, deep_merge(own, {**RL, "reward": {"terms": [reward]}})))
    else:
        run_sft(build(SFTConfig, deep_merge(own, {"batch_size": 2})))
    rows = read_rows(Path(tree["run"]["dir"]) / name / "metrics.jsonl")
    return [[row.get(number) for number in NUMBERS] for row in rows if "policy/grad_norm" in row]


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("verb", ["rl", "sft"])
def test_a_run_has_the_numbers_of_the_same_model_without_code(
    verb: str, lora: dict[str, Any] | None, plain: Path, coded: Path, tree: dict[str, Any]
) -> None:
    expected = numbers(tree, {"path": str(plain), "lora": lora}, "plain", verb)
    found = numbers(tree, {"path": str(coded), "lora": lora, **ALLOWED}, "coded", verb)
    assert found == expected and len(found) == 2
    written = Path(tree["run"]["dir"]) / "coded" / "model"
    assert set(CODE) <= {file.name for file in written.iterdir()}
    # as a user loads it, without this package
    AutoModelForImageTextToText.from_pretrained(written, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(written, trust_remote_code=True)
    assert type(processor).__name__ == "SeerProcessor"


def test_the_code_is_not_run_unless_the_user_allows_it(coded: Path) -> None:
    (coded / "configuration_seer.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ModelError, match=r"to run this code, set model\.trust_remote_code=true"):
        model_settings(ModelConfig(path=str(coded)))


@pytest.mark.parametrize("kind", ["internvl_chat", "multi_modality", "phi4mm"])
def test_a_published_folder_of_code_is_refused_with_the_folder_that_is_read(
    kind: str, coded: Path
) -> None:
    change(coded / "config.json", model_type=kind)
    with pytest.raises(ModelError, match=UNREAD[kind]) as found:
        model_settings(ModelConfig(path=str(coded)))
    assert "trust_remote_code" not in str(found.value)


def test_code_that_no_test_has_proved_is_asked_about(coded: Path, tree: dict[str, Any]) -> None:
    model = {"path": str(coded), "trust_remote_code": True}
    with pytest.raises(ModelError, match=r"'seer' is not known.*model\.unproved_family=allow"):
        numbers(tree, model, "run", "sft")


def test_a_processor_without_the_code_of_its_class_is_refused_with_its_name(coded: Path) -> None:
    change(coded / "processor_config.json", auto_map={})
    config = ModelConfig(path=str(coded), **ALLOWED)
    with pytest.raises(ModelError, match="has no processor 'SeerProcessor'"):
        load_processor(config, load_tokenizer(config))


def test_code_without_methods_that_compute_features_reads_text_alone(coded: Path) -> None:
    (coded / "modeling_seer.py").write_text(
        "from transformers import LlamaForCausalLM\n\n"
        "class SeerForConditionalGeneration(LlamaForCausalLM):\n    pass\n"
    )
    config = ModelConfig(path=str(coded), **ALLOWED)
    assert family_of(model_settings(config)).reader is None
    with pytest.raises(ModelError, match="has parts besides a language model"):
        load_processor(config, load_tokenizer(config))


@torch.no_grad()
def test_public_classes_run_the_code_of_a_folder_where_the_user_allows_it(
    coded: Path, plain: Path
) -> None:
    made = AutoProcessor.from_pretrained(plain)(
        images=[Image.fromarray(np.full((20, 30, 3), 90, np.uint8))],
        text=["<image>what is it?"],
        return_tensors="pt",
    )
    ids, mask, pixels = made["input_ids"], made["attention_mask"], made["pixel_values"]
    for kind in (ActorVL, CriticVL):
        with pytest.raises(ModelError, match="trust_remote_code"):
            kind(str(coded), bf16=False)
    actor = ActorVL(str(coded), bf16=False, trust_remote_code=True).eval()
    assert type(actor.model).__name__ == "SeerForConditionalGeneration"
    found = actor(ids, 3, mask, pixel_values=pixels)
    expected = ActorVL(str(plain), bf16=False).eval()(ids, 3, mask, pixel_values=pixels)
    assert torch.allclose(found, expected, atol=1e-5)
    critic = CriticVL(str(coded), bf16=False, trust_remote_code=True)
    assert critic(ids, 3, mask, pixel_values=pixels).shape == found.shape
