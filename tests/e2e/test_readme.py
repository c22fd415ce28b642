"""The README's shell blocks, executed one after another in one folder as a reader would type them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from lightrft.config.base import deep_merge
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer
from tests.architecture.test_docs import blocks
from tests.e2e.command import ROOT, process

README = ROOT / "README.md"
NOT_RUN = {
    "git clone": "has no address to clone from; tests/e2e/test_demo.py runs the demo",
    "make install": "downloads packages; .ci/run installs by it",
    "python3 -m venv": "downloads the packages that .ci/run installs by make install",
    "docker build": "needs Docker and a network",
    "make test": "runs the tests, of which this is one",
}
"""Beginnings of the blocks that this test leaves out, and the reasons."""
SMALL = {
    "rollout": {"prompts_per_step": 4, "group_size": 32},
    "sampling": {"max_new_tokens": 1},
    "train": {"steps": 2},
}
"""Settings in place of those of the README's config, which are meant for a real model.

A random model with few tokens finds some labels of one character.
"""
STDIN = {"chat": "hello\n"}
"""Text that a verb reads from the terminal."""


def lines_of(body: str) -> list[list[str]]:
    """Return the words of each command of a shell block."""
    return [shlex.split(line, comments=True) for line in body.replace("\\\n", " ").splitlines()]


def write_files(folder: Path) -> None:
    """Write the files that the README shows or names: blocks that begin with ``# name``, rows and a model."""
    for block in blocks(README):
        first = block.body.partition("\n")[0]
        name = first.removeprefix("# ")
        if first.startswith("# ") and name.endswith((".py", ".yaml")):
            body = block.body
            if name.endswith(".yaml"):
                body = yaml.safe_dump(deep_merge(yaml.safe_load(body), SMALL))
            (folder / name).write_text(body, encoding="utf-8")
    row = '{"prompt": "What is 17 * 3?", "label": "51"}'
    assert row in README.read_text(encoding="utf-8")
    for name, shown, text in (
        ("train.jsonl", [row], "What is 1 * {n}?"),
        ("test.jsonl", [], "What is {n} * 1?"),
    ):
        rows = [{"prompt": text.format(n=n), "label": str(n)} for n in range(1, 10)]
        lines = [*shown, *(json.dumps(one) for one in rows)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = tiny_tokenizer(chars="\nWhat is 0123456789*?elo", whole_roles=True)
    model = tiny_model("qwen2", hidden_size=32, intermediate_size=64, vocab_size=len(tokenizer))
    model.save_pretrained(folder / "path" / "to" / "a" / "model")
    tokenizer.save_pretrained(folder / "path" / "to" / "a" / "model")


@pytest.mark.slow
def test_every_shell_block_of_the_readme_runs_in_its_order_or_is_left_out_for_a_reason(
    tmp_path: Path,
) -> None:
    """Before, the second command of a run was refused, since its folder held the first one's."""
    write_files(tmp_path)
    done, left_out = [], []
    for block in blocks(README):
        if block.kind not in {"bash", "sh", "console"}:
            continue
        left = [start for start in NOT_RUN if block.body.startswith(start)]
        left_out += left
        for words in [] if left else lines_of(block.body):
            assert words[0] == "lightrft", words
            outcome = process(*words[1:], cwd=tmp_path, stdin=STDIN.get(words[1], ""))
            assert outcome.status == 0, (words, outcome.out, outcome.err)
            done.append(" ".join(words[1:]))
    assert left_out == list(NOT_RUN)
    assert {words.split()[0] for words in done} == {"doctor", "rl", "explain", "chat", "check"}
    runs = ["faster", "my_reward", "my_run"]
    assert sorted(one.name for one in (tmp_path / "runs").iterdir()) == runs
    for name in runs:
        assert (tmp_path / "runs" / name / "model" / "config.json").is_file()
