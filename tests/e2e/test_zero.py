"""DeepSpeed in each of its stages. That all ways give the numbers of one process is in ``test_parity``."""

from __future__ import annotations

import json

import pytest

from benchmarks.parity import Tree, run_all, zero
from lightrft.config.base import deep_merge
from lightrft.models.tiny import save_tiny_media
from tests import warm
from tests.e2e.several import (
    BEYOND,
    DEEPSPEED,
    PRESETS,
    beside,
    check_equal,
    named,
    rows_with_pictures,
)

pytestmark = DEEPSPEED

HOST: Tree = {"offload_optimizer": {"device": "cpu"}}
IN_HOST: dict[int, Tree] = {2: HOST, 3: HOST | {"offload_param": {"device": "cpu"}}}
MOVES: list[tuple[int, Tree]] = [
    (1, {}),
    (2, zero(1)),
    (2, zero(3)),
    (2, {}),
    (2, zero(2)),
    (3, zero(3)),
    (3, zero(2)),
    (1, {}),
]
"""Processes and settings of each step of one run: every stage goes on from another way to run, and is gone on from."""


@pytest.fixture
def cells(uneven_tree, tmp_path) -> dict[str, Tree]:
    """Return configs by name.

    They have adapters, every option of the optimizer, pictures that one rank has none of, and roles and batches that outlive a step.
    A critic is in "long" alone: one step in each stage, with four updates of policy and critic.
    """
    save_tiny_media("qwen2_5_vl", tmp_path / "reader", hidden_size=32)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows_with_pictures(tmp_path))
    )
    rows = {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
    optimizer = {
        "max_grad_norm": 0.05,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_steps": 2,
        "lr_of": {"language": 2e-3},
    }
    recomputed = {"optimizer": optimizer, "model": {"gradient_checkpointing": True}}
    trees: dict[str, Tree] = {
        "lora": deep_merge(PRESETS["lora"], recomputed),
        "all": recomputed,
        "pictures": {
            "model": {"path": str(tmp_path / "reader")},
            "data": rows,
            "eval": {"data": rows},
            "train": {"steps": 2},
        },
        "roles": deep_merge(beside(tmp_path / "teacher"), {"train": {"steps": 2}}),
        "refills": BEYOND["refills"],
        "few": {"rollout": {"prompts_per_step": 2, "group_size": 2}, "train": {"steps": 2}},
        "long": deep_merge(PRESETS["ppo"], {"eval": {"every": 1}, "train": {"steps": len(MOVES)}}),
    }
    return {name: deep_merge(uneven_tree, tree) for name, tree in trees.items()}


def test_every_stage_gives_the_numbers_of_one_process_and_goes_on_from_any_other(
    cells, tmp_path, subtests
):
    """In as few process groups as can be: what has three ranks, and what lies in the host's memory, with the rest."""
    expected = {"moved": "long"}
    plans: dict[int, list[Tree]] = {
        1: [named(tree, tmp_path, name) for name, tree in cells.items()],
        2: [],
        3: [],
    }

    def add(processes: int, name: str, stage: int, suffix: str = "", **settings: Tree) -> None:
        found = f"{name}-{stage}{suffix}"
        expected[found] = name
        own = deep_merge(zero(stage), {"strategy": {"deepspeed": settings}})
        plans[processes].append(named(deep_merge(cells[name], own), tmp_path, found))

    for stage in (1, 2, 3):
        for name in cells:
            if name != "long":
                add(3 if name == "few" else 2, name, stage)
    for stage, settings in IN_HOST.items():
        add(2, "all", stage, "-host", zero_optimization=settings)
    steps = [
        (
            processes,
            named(
                deep_merge(cells["long"], {**settings, "train": {"steps": step}}), tmp_path, "moved"
            ),
        )
        for step, (processes, settings) in enumerate(MOVES, start=1)
    ]
    for processes, tree in steps[:-1]:
        plans[processes].append(tree)
    for processes, trees in plans.items():
        run_all(trees, tmp_path / f"plan{processes}", processes, start=warm.run)
    run_all([steps[-1][1]], tmp_path / "plan1", 1, start=warm.run)
    for found, one in expected.items():
        with subtests.test(found):
            check_equal(tmp_path / found, tmp_path / one)
