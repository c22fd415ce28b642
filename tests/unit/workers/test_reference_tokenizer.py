"""A model that log-probs are compared with must have the tokens of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightrft.config.base import build
from lightrft.config.model import LoRAConfig
from lightrft.config.verbs import DPOConfig, KTOConfig, RLConfig
from lightrft.models.lora import add_adapters
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from lightrft.utils.errors import ConfigError
from lightrft.workers.local import check_tokenizers, local_teacher

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of two tokenizers, a model without one, and adapters of both."""
    root = tmp_path_factory.mktemp("models")
    other = tiny_tokenizer()
    other.add_tokens(["<more>"])
    size = len(other)
    for name, tokenizer in (("same", TOKENIZER), ("other", other), ("without", None)):
        tiny_model("qwen2", vocab_size=size).save_pretrained(root / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(root / name)
    for base in ("same", "other"):
        model = tiny_model("qwen2", vocab_size=size)
        model.config._name_or_path = model.name_or_path = str(root / base)
        adapted: Any = add_adapters(model, LoRAConfig(rank=2))
        adapted.peft_config["default"].base_model_name_or_path = str(root / base)
        for name in (f"adapters_{base}", f"adapters_{base}_with_tokenizer"):
            adapted.save_pretrained(root / name)
    TOKENIZER.save_pretrained(root / "adapters_other_with_tokenizer")
    TOKENIZER.save_pretrained(root / "adapters_same_with_tokenizer")
    return root


@pytest.mark.parametrize("kind", [RLConfig, DPOConfig, KTOConfig])
@pytest.mark.parametrize(
    "name", ["other", "without", "adapters_other", "adapters_other_with_tokenizer"]
)
def test_a_reference_of_other_tokens_is_refused(folders, kind, name):
    path = str(folders / name)
    config = build(kind, {"model": {"path": str(folders / "same")}, "reference": path})
    with pytest.raises(ConfigError, match=f"^reference = '{path}'.* (tokenizer|tokens)"):
        check_tokenizers(config, TOKENIZER)


@pytest.mark.parametrize("key", ["critic", "cost_critic", "prm"])
def test_every_model_that_reads_the_tokens_of_the_policy_must_have_them(folders, key):
    def config(name):
        model = {"path": str(folders / "same")}
        return build(RLConfig, {"model": model, key: {"path": str(folders / name)}})

    for name in ("other", "adapters_other"):
        with pytest.raises(ConfigError, match=rf"^{key}\.path = .* a model of the same tokenizer"):
            check_tokenizers(config(name), TOKENIZER)
    for name in ("same", "without"):
        check_tokenizers(config(name), TOKENIZER)


@pytest.mark.parametrize("name", [None, "same", "adapters_same", "adapters_same_with_tokenizer"])
def test_a_reference_of_the_same_tokens_is_read(folders, name):
    path = None if name is None else str(folders / name)
    model = {"path": str(folders / "same"), "tokenizer": str(folders / "same")}
    check_tokenizers(build(RLConfig, {"model": model, "reference": path}), TOKENIZER)


@pytest.mark.parametrize("name", ["other", "adapters_other", "adapters_other_with_tokenizer"])
def test_a_teacher_of_other_tokens_is_refused_also_by_its_base(folders, name):
    tree = {
        "model": {"path": str(folders / "same")},
        "teacher": {"path": str(folders / name)},
        "algorithm": {"preset": "opd"},
    }
    with pytest.raises(ConfigError, match=r"^teacher\.path = .* a teacher of the same tokenizer"):
        local_teacher(build(RLConfig, tree), TOKENIZER, None)  # type: ignore[arg-type]
