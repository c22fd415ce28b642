"""FSDP2 on real processes: the numbers of one, where weights lie, and that nobody reads more of them than he keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from lightrft.models.loading.save_model import save_model
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests.unit.strategy import fsdp2_work

pytestmark = pytest.mark.slow

HEADS = {"num_key_value_heads": 2}
"""That a team of two can share out."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """By number of ranks and rank, what each cell gives. It takes a minute, so the workers of pytest share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "fsdp2"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "complete").exists():
            save_models(folder)
            run(folder)
            (folder / "complete").touch()
    return results_of(folder)


def save_models(folder: Path) -> None:
    """The models that the ranks load."""
    for name, options in {
        "untied": {"tie_word_embeddings": False},
        "tied": {"tie_word_embeddings": True},
    }.items():
        save_model(tiny_model("qwen2", **options, **HEADS), tiny_tokenizer(), folder / name)
    save_model(tiny_model("qwen3_moe", **HEADS), tiny_tokenizer(), folder / "experts")
    for family in ("qwen2", "qwen3_moe", "gemma2", "gemma3"):
        tiny_model(family, seed=1, **HEADS).save_pretrained(
            folder / "families" / family, max_shard_size="60KB"
        )
    for family in ("qwen2_5_vl", "qwen2_audio"):
        save_tiny_media(family, folder / "families" / family, **HEADS)
    odd = tiny_model("qwen2", **HEADS)
    odd.save_pretrained(folder / "families" / "no_safetensors")
    (folder / "families" / "no_safetensors" / "model.safetensors").unlink()
    torch.save(odd.state_dict(), folder / "families" / "no_safetensors" / "pytorch_model.bin")
    lacking = tiny_model("qwen2").state_dict()
    del lacking["model.layers.1.mlp.up_proj.weight"]
    tiny_model("qwen2").save_pretrained(folder / "lacking", state_dict=lacking)


def run(folder: Path) -> None:
    """Let 2 and 4 ranks, and one process, write what they find in ``folder``."""
    command = [sys.executable, "-m", "tests.unit.strategy.fsdp2_work", str(folder), "2", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def results_of(folder: Path) -> dict[Any, Any]:
    """What 2 and 4 ranks, and one process, found in ``folder``."""
    files = {
        (size, rank): folder / f"found-{size}-{rank}.pt" for size in (2, 4) for rank in range(size)
    }
    return {
        key: torch.load(file, weights_only=True)
        for key, file in {**files, 1: folder / "found-1.pt"}.items()
    }


def cells(found: dict[Any, Any], *names: str) -> list[tuple[str, dict[str, Any]]]:
    """Each cell, or those of ``names``, as each rank has it."""
    ranks = [ranks for key, ranks in found.items() if key != 1]
    every = {**fsdp2_work.CELLS, **fsdp2_work.OF_FOUR}
    return [(name, rank[name]) for rank in ranks for name in rank if name in (names or every)]


def one(found: dict[Any, Any], name: str) -> dict[str, Any]:
    """What one process gives."""
    return found[1][
        name if name in found[1] else "tied bfloat16" if name == "all at once" else "float32"
    ]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far two moves of weights are apart, as a share of the move."""
    gap = sum(
        float((found[name].double() - move.double()).square().sum())
        for name, move in expected.items()
    )
    return (gap / sum(float(move.double().square().sum()) for move in expected.values())) ** 0.5


def test_every_cell_gives_the_losses_gradients_and_weights_of_one_process(found):
    for name, cell in cells(found):
        expected = one(found, name)
        half = "bfloat16" in name or name == "all at once"
        near = 5e-3 if half else 1e-5  # a sum of bfloat16 numbers in another order
        assert cell["losses"] == pytest.approx(expected["losses"], rel=near), name
        assert cell["norms"] == pytest.approx(expected["norms"], rel=near), name
        assert cell["drawn"] == pytest.approx(expected["drawn"], rel=2 * near), name
        assert list(cell["weights"]) == list(expected["weights"])
        assert {k: t.dtype for k, t in cell["weights"].items()} == {
            k: t.dtype for k, t in expected["weights"].items()
        }
        assert distance(cell["moved"], expected["moved"]) < (0.05 if half else 1e-4), name


def test_each_rank_holds_its_part_of_weights_and_of_optimizer_state(found):
    for name, cell in cells(found):
        expected = one(found, name)
        parts = {"kept on two": 4}.get(name, 2)
        assert cell["held"] <= expected["held"] / parts * 1.01 + 64, name
        assert cell["state"] <= expected["state"] / parts * 1.01 + 64, name


def test_no_gradient_is_whole_after_a_micro_batch(found):
    assert all(cell["whole gradients"] == [0, 0, 0, 0] for _, cell in cells(found))


def test_half_precision_is_computed_with_one_float32_copy_of_the_weights(found):
    assert found[1]["bfloat16"]["masters apart"] > 0
    for name, cell in cells(found, "bfloat16", "bfloat16 critic", "tied bfloat16", "all at once"):
        assert cell["master"] == ["torch.float32"] and cell["masters apart"] == 0, name
    for name, cell in cells(found, "bfloat16"):
        assert cell["losses"] != found[1]["float32"]["losses"], name  # it is bfloat16 that computes


def test_reshard_says_what_lies_here_between_the_passes(found):
    blocks = {
        name: cell["after forward"][0]
        for name, cell in cells(found, "float32", "kept whole", "kept on two")
    }
    assert blocks["kept whole"] == 2 * blocks["float32"] == 2 * blocks["kept on two"]


def test_activations_go_to_the_host_and_of_recomputed_layers_only_their_inputs(found):
    copied = {
        name: cell["copied"]
        for name, cell in cells(found, "float32", "activations", "activations of layers")
    }
    assert copied["activations"] > 5 * copied["activations of layers"] > 0
    assert copied["float32"] == 0 < found[1]["activations"]["copied"]


def test_a_checkpoint_of_any_cell_gives_back_its_weights(found):
    assert all(cell["restored"] for _, cell in cells(found))


def test_of_what_a_checkpoint_holds_one_tensor_at_a_time_is_whole_on_a_device(found):
    assert all(cell["whole at once"] == 1 for _, cell in cells(found))


def test_masters_and_moments_that_sleep_leave_the_device_with_their_shards(found):
    assert (
        dict(cells(found, "team of a bfloat16 critic"))["team of a bfloat16 critic"][
            "masters apart"
        ]
        > 0
    )
    assert all(cell["asleep"] == [("meta", "meta")] for _, cell in cells(found))


def test_what_is_laid_out_like_an_offloaded_shard_lies_where_that_lies(found):
    whole = torch.arange(14.0).view(7, 2)
    for rank, held in enumerate(whole.split(4)):
        on_host = {
            "like": ["cpu", "cpu"],
            "moved": ["cpu", "cpu"],
            "kind": "torch.bfloat16",
            "held": held.tolist(),
        }
        assert found[2, rank]["elsewhere"] == on_host


def test_what_each_rank_has_read_is_what_loading_gives_in_every_family(found):
    assert [rank["families"] for key, rank in found.items() if key != 1] == [{}] * 6


def test_a_weight_that_the_files_lack_is_named_on_every_rank(found):
    for rank in (0, 1):
        assert (
            "1 weights are missing or misshapen, e.g. model.layers.1.mlp.up_proj.weight"
            in found[2, rank]["lacking"]
        )


def test_groups_of_ranks_that_do_not_come_out_even_are_refused(found):
    assert (
        "strategy.hsdp_shard_size = 3 does not divide the 4 processes of this run"
        in found[4, 3]["refused"]
    )


def test_loading_holds_one_copy_of_the_weights_on_all_ranks_together(tmp_path):
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 5,
        "vocab_size": 8000,
    }
    model = tiny_model("qwen2", num_attention_heads=8, **sizes)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights > 250e6
    model.save_pretrained(tmp_path / "large", max_shard_size="80MB")
    run(tmp_path)
    found = results_of(tmp_path)
    assert found[1]["peak"] > 0.95 * weights  # a copy that is there is seen
    for ranks in (2, 4):
        peaks = [found[ranks, rank]["peak"] for rank in range(ranks)]
        assert max(peaks) < 1.15 * weights / ranks + 25e6, peaks
        assert sum(peaks) < 1.15 * weights + ranks * 25e6, peaks
        assert (
            max(found[ranks, rank]["team"] for rank in range(ranks))
            < (0.8 if ranks == 2 else 0.5) * weights
        )
