"""DeepSpeed in each of its stages. That all ways give the numbers of one process is in ``test_parity``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightrft.models.tiny_media import save_tiny_media
from lightrft.utils.settings import deep_merge
from lightrft.utils.trackers import read_rows
from tests.e2e.several import config_file

ROUNDING = ("time", "seconds", "tokens_per_second", "policy/sampler_gap")
"""What depends on the clock, or measures rounding itself."""

DIFFERENCES = {"policy/kl_per_answer": 1e-6}
"""How well sums over an answer of differences of log-probs are known: one process alone moves this one, of 0.03, by 6e-7 when it takes
other micro-batches."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"preset": "grpo"}},
    "ppo": {"algorithm": {"preset": "ppo", "kl": {"coef": 0.01}}},
    "lora": {"algorithm": {"preset": "grpo", "kl": {"coef": 0.01}}, "model": {"lora": {"rank": 4}}},
}

DEEPSPEED = [
    pytest.mark.slow,
    pytest.mark.deepspeed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the package deepspeed is not installed"),
]


def zero(stage: int) -> tuple[str, str]:
    """The arguments that ask for a stage of ZeRO."""
    return "strategy.kind=deepspeed", f"strategy.stage={stage}"


def rows_with_pictures(folder: Path) -> list[dict[str, Any]]:
    """Most rows have none, so that some rank has none in its part."""
    rows: list[dict[str, Any]] = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)]
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (12 + 8 * i, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append({"prompt": "which?", "images": [f"{i}.png"], "label": "1"})
    return rows


def check_equal(
    found: Path, expected: Path, loader: Any = AutoModelForCausalLM, known: float = 2e-7, ignore: tuple[str, ...] = ()
) -> None:
    """The metrics of two runs, but for rounding and what begins with one of ``ignore``, and their weights. Numbers near 0 are ``known``
    to so much."""
    rows, wanted = (read_rows(path / "metrics.jsonl") for path in (found, expected))
    assert [r["step"] for r in rows] == [r["step"] for r in wanted]
    for row, want in zip(rows, wanted):
        row, want = ({k: v for k, v in r.items() if not k.startswith((*ROUNDING, *ignore))} for r in (row, want))
        assert row.keys() == want.keys()
        for key, value in want.items():
            nearest = max(known, 1.2e-6 if key.endswith("per_answer") else 0)  # a sum over six tokens
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=nearest)
            assert row[key] == near, (row["step"], key)
    models = [loader.from_pretrained(path / "model").state_dict() for path in (found, expected)]
    for key, tensor in models[1].items():
        torch.testing.assert_close(models[0][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.fixture
def tree(rl_tree: dict[str, Any]) -> dict[str, Any]:
    """Five groups of three, which do not divide by two or three ranks, in micro-batches of a few rows; held-out answers too."""
    sources = rl_tree["data"]["sources"]
    more = {
        "rollout": {"prompts": 5, "samples": 3},
        "train": {"micro_batch_tokens": 60},
        "eval": {"data": {"sources": sources}, "every": 2, "sampling": {"max_new_tokens": 4}},
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-3},
    }
    return deep_merge(rl_tree, more)


CELLS = """
import sys
from contextlib import nullcontext
from lightrft.cli.common import set_threads, settings_of
from lightrft.config import RLConfig
from lightrft.trainer import rl
from lightrft.utils.ranks import joined

if __name__ == "__main__":
    set_threads(1)
    with joined(5.0) as ranks:
        rl.joined = lambda minutes: nullcontext(ranks)
        for cell in sys.argv[1:]:
            rl.run_rl(settings_of("rl", RLConfig, cell.split(), ""))
"""


Cell = tuple[Path, Sequence[str]]
"""A config file, and more arguments."""


def train_all(cells: Iterable[Cell], folder: Path, processes: int) -> None:
    """Runs one after another in the same processes, whose start costs more than the runs."""
    script = folder / "cells.py"
    script.write_text(CELLS)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    runs = [" ".join([str(file), *more]) for file, more in cells]
    done = subprocess.run(
        [sys.executable, *several, str(script), *runs], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


class TestZero:
    """The same by DeepSpeed, in each of its stages."""

    pytestmark = DEEPSPEED

    @pytest.fixture
    def cells(self, tree, tmp_path):
        """Configurations by name. Adapters with all that an optimizer can be told, and pictures that some rank has none of."""
        save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path)))
        rows = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
        optimizer = {"max_grad_norm": 0.05, "weight_decay": 0.1, "schedule": "cosine", "warmup": 2, "lr_of": {"language": 2e-3}}
        recomputed = {"optimizer": optimizer, "model": {"gradient_checkpointing": True}, "train": {"steps": 3}}
        return {
            "ppo": deep_merge(tree, {**PRESETS["ppo"], "train": {"steps": 3}}),
            "lora": deep_merge(deep_merge(tree, PRESETS["lora"]), recomputed),
            "all": deep_merge(tree, recomputed),
            "pictures": deep_merge(
                tree, {"model": {"path": str(tmp_path / "reader")}, "data": rows, "eval": {"data": rows}, "train": {"steps": 2}}
            ),
        }

    def test_every_stage_gives_the_numbers_of_one_process_and_goes_on_from_any_other(self, tree, cells, tmp_path, subtests):
        """In as few process groups as can be: what has three ranks, and what lies in the host's memory, with the rest."""
        host = {"offload_optimizer": {"device": "cpu"}}
        in_host = {2: host, 3: host | {"offload_param": {"device": "cpu"}}}
        few = deep_merge(tree, {"rollout": {"prompts": 2, "samples": 2}, "train": {"steps": 2}})
        long = deep_merge(tree, {**PRESETS["ppo"], "eval": {"every": 1}, "train": {"steps": 8}})
        checked: list[tuple[str, str]] = []

        def cell(name: str, tree: dict[str, Any], stage: int, zero_optimization: dict[str, Any] | None = None) -> Cell:
            checked.append((f"{name}{stage}", name.removesuffix("-host")))
            settings = {"zero_optimization": zero_optimization} if zero_optimization else {}
            tree = deep_merge(tree, {"strategy": {"kind": "deepspeed", "deepspeed": settings}})
            return config_file(tree, tmp_path, f"{name}{stage}"), zero(stage)

        def moved(step: int, *kind: str) -> Cell:
            return config_file(long, tmp_path, "moved"), (f"train.steps={step}", *kind)

        alone = {**cells, "few": few, "long": long}
        one = [(config_file(alone[name], tmp_path, name), ()) for name in alone]
        two = [cell(name, cells[name], stage) for name in cells for stage in (1, 2, 3)]
        two += [cell("all-host", cells["all"], stage, zero_optimization) for stage, zero_optimization in in_host.items()]
        three = [cell("few", few, stage) for stage in (1, 2, 3)]
        train_all([*one, moved(1)], tmp_path, 1)
        train_all([*two, moved(2, *zero(1)), moved(3, *zero(3)), moved(4), moved(5, *zero(2))], tmp_path, 2)
        train_all([*three, moved(6, *zero(3)), moved(7, *zero(2))], tmp_path, 3)
        train_all([moved(8)], tmp_path, 1)
        for found, expected in [*checked, ("moved", "long")]:
            with subtests.test(found):
                loader = AutoModelForImageTextToText if expected == "pictures" else AutoModelForCausalLM
                check_equal(tmp_path / found, tmp_path / expected, loader)
