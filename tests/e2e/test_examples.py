"""The examples of the documentation are run as they are written, and every public name occurs in one."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.public_names import sections
from lightrft.observability.events import EVENTS
from tests.hub_server import StandIn, stand_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python-examples.md"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield from stand_in(monkeypatch)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def names_of(code: str) -> set[str]:
    """Every name, attribute and keyword of a program."""
    nodes = list(ast.walk(ast.parse(code)))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return found | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


def test_every_public_name_that_is_called_occurs_in_an_example_that_runs() -> None:
    used = set().union(*map(names_of, blocks(PAGE)))
    data = ("Rollout", "Prompt", "Batch")
    wanted = {
        name.rpartition(": ")[2].strip("`")
        for title, _, rows in sections()
        if not title.strip("`").endswith(data)
        for name, _ in rows
    }
    assert len(wanted) > 60 and set(EVENTS) < wanted
    assert wanted - used == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("own_reward", ["own_reward", "here"]),
        ("dpo", ["dpo", "online"]),
        ("own_loop", ["loop"]),
        ("reading_a_run", ["read"]),
        ("vlm", ["vlm"]),
    ],
)
def test_a_notebook_runs_in_jupyter_as_it_is_written(name, runs, tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1000, resources=place).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
    for run in runs:
        summary = json.loads((tmp_path / "runs" / run / "summary.json").read_text())
        assert summary["finished"]


def test_every_notebook_is_run_by_a_test() -> None:
    tested = {"first_run", "own_reward", "dpo", "own_loop", "reading_a_run", "vlm"}
    assert {page.stem for page in (ROOT / "examples").glob("*.ipynb")} == tested


@pytest.mark.slow
def test_the_page_of_examples_runs_from_top_to_bottom(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(PAGE):
        exec(compile(block, str(PAGE), "exec"), names)
    for name in ("sft", "dpo", "kto", "rm", "prm", "judge", "student", "rounds", "run", "loop"):
        assert json.loads((tmp_path / "runs" / name / "summary.json").read_text())["finished"]
    assert names["address"].endswith("/me/model") and "model.safetensors" in hub.files
    assert len(names["answers"]) == 8 and len(names["labels"]) == 1
    assert "group_size: 8" in Path("config.yaml").read_text()
    assert names["positions"].tolist() == [[0, 1, 0, 1, 2]] and names["reads_pictures"]
    assert "on_" not in capsys.readouterr().err
