"""The patches of transformers: none without a call, each with a warning, and each undone."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from lightrft.models import monkey_patch
from lightrft.models.attention.segment_plan import SegmentPlan
from lightrft.models.monkey_patch import apply, hf_generate_patch
from lightrft.models.monkey_patch.apply import (
    apply_monkey_patch_to_llama,
    apply_monkey_patch_to_qwen2,
)
from lightrft.models.monkey_patch.hf_generate_patch import apply_monkey_patch_to_generation_mixin
from lightrft.utils.errors import ModelError
from tests import warm
from tests.model_helpers import Float64, small_model

FAMILIES = ("llama", "qwen2")
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


@pytest.fixture
def unpatched() -> Iterator[None]:
    yield
    monkey_patch.remove_monkey_patches()


def test_importing_the_package_patches_nothing() -> None:
    def methods() -> tuple[Any, ...]:
        return (
            GenerationMixin._get_stopping_criteria,
            LlamaAttention.forward,
            Qwen2Attention.forward,
        )

    before = methods()
    for module in (hf_generate_patch, apply, monkey_patch):
        importlib.reload(module)
    assert methods() == before
    assert all(method.__module__.startswith("transformers.") for method in before)


@pytest.mark.usefixtures("unpatched")
def test_generation_runs_to_the_limit_with_a_warning_until_the_patch_is_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model("llama")
    ids = torch.tensor([[10, 11, 12]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    # The second token that greedy generation gives.
    eos = int(model.generate(ids, eos_token_id=None, **options)[0, 4])
    assert model.generate(ids, eos_token_id=eos, **options).shape[1] <= 5
    with caplog.at_level(logging.WARNING):
        apply_monkey_patch_to_generation_mixin()
    assert "GenerationMixin._get_stopping_criteria" in caplog.text
    assert model.generate(ids, eos_token_id=eos, **options).shape[1] == 9
    apply_monkey_patch_to_generation_mixin()  # a second call is no second patch
    own = StoppingCriteriaList([EosTokenCriteria(eos_token_id=eos)])
    assert model.generate(ids, eos_token_id=eos, stopping_criteria=own, **options).shape[1] <= 5
    monkey_patch.remove_monkey_patches()
    assert GenerationMixin._get_stopping_criteria.__module__ == "transformers.generation.utils"
    assert model.generate(ids, eos_token_id=eos, **options).shape[1] <= 5


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_computes_as_without_the_patch(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = small_model(family), torch.arange(10, 26).view(2, 8)
    before = model(ids).logits
    with caplog.at_level(logging.WARNING):
        monkey_patch.MONKEY_PATCH_FUNC[family]()
    assert "Attention.forward for this process" in caplog.text
    assert torch.equal(model(ids).logits, before)


def expected(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of packed rows by lightrft's plan of each row, on one process."""
    model = small_model(family, torch.float64)
    model.config._attn_implementation = "lightrft"
    logits = []
    for row, positions in zip(torch.arange(10, 26).view(2, 8), PACKED):
        runs = [(0, 5), (5, 3)] if int(positions[5]) == 0 else [(0, 8)]
        plan = SegmentPlan(runs, [], positions)
        options = {"position_ids": positions[None], "attention_plan": plan, "use_cache": False}
        logits.append(model(input_ids=row[None], **options).logits)
    whole = torch.cat(logits)
    whole.square().sum().backward()
    return whole.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def work(rank: int, folder: str) -> None:
    """Each family on this rank's half of the rows."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    apply_monkey_patch_to_llama()
    apply_monkey_patch_to_qwen2()
    own = slice(4 * rank, 4 * rank + 4)
    found = {}
    for family in FAMILIES:
        model = small_model(family, torch.float64)
        with Float64():
            ids = torch.arange(10, 26).view(2, 8)[:, own]
            logits = model(ids, position_ids=PACKED[:, own], use_cache=False).logits
            logits.square().sum().backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        found[family] = (
            logits.detach(),
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        )
        with pytest.raises(ModelError, match="use_cache=False"):
            model(ids, position_ids=PACKED[:, own], use_cache=True)
    torch.save(found, f"{folder}/found_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_half_of_each_row_give_the_logits_and_gradients_of_one_process(
    tmp_path: Path,
) -> None:
    warm.spawn(work, tmp_path)
    ranks = [torch.load(tmp_path / f"found_{rank}.pt", weights_only=True) for rank in (0, 1)]
    for family in FAMILIES:
        with Float64():
            logits, grads = expected(family)
        halves = torch.cat([rank[family][0] for rank in ranks], 1)
        assert (halves - logits).abs().max() < 1e-12
        for rank in ranks:
            assert all((rank[family][1][name] - g).abs().max() < 1e-9 for name, g in grads.items())
