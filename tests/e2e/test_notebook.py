"""A run in a notebook: one output that changes, and the interrupt button."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightrft.api.progress import NotebookObserver, curve

START = """
import os
import lightrft
from lightrft.models.tiny.text import tiny_model, tiny_tokenizer

def digits(rollout):
    return sum(map(str.isdigit, rollout.text)) / max(1, len(rollout.text))

given = {
    "model": (tiny_model("llama"), tiny_tokenizer()),
    "data": [{"prompt": f"{a}+{a}=", "label": str(2 * a)} for a in range(8)],
    "rewards": [digits],
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "sampling": {"max_new_tokens": 6},
    "log": {"tensorboard": False, "samples": 1},
    "run.threads": 1,
}
open("pid", "w").write(str(os.getpid()))
"""
SHORT = 'run = lightrft.rl(**given, steps=12, name="short")'
CUT = 'run = lightrft.rl(**given, steps=100_000, name="cut")\nprint("taken", run.summary["steps"])'
RESUME = 'print("then", run.resume(steps=run.summary["steps"] + 2).summary["steps"])'


def text_of(cell) -> str:
    return "".join(one.get("text", "") for one in cell.outputs)


@pytest.mark.slow
def test_a_run_is_one_output_that_changes_and_an_interrupted_one_goes_on(tmp_path: Path):
    import nbclient
    import nbformat

    rows = tmp_path / "runs" / "cut" / "metrics.jsonl"

    def press_the_interrupt_button():
        while not rows.is_file() or not rows.read_text():
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)

    cells = [nbformat.v4.new_code_cell(source) for source in (START, SHORT, CUT, RESUME)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    thread = threading.Thread(target=press_the_interrupt_button, daemon=True)
    thread.start()
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=1000, resources=place).execute()

    _, short, cut, resumed = notebook.cells
    [shown] = [one for one in short.outputs if one.output_type == "display_data"]
    page = shown["data"]["text/html"]
    assert "12/12" in page and "left" in page and page.count("<svg") == 2
    assert "reward" in page and "best" in page and "WARNING" in page
    assert len(short.outputs) <= 3
    taken = int(text_of(cut).rpartition("taken ")[2])
    assert 0 < taken < 100_000
    summary = json.loads((tmp_path / "runs" / "cut" / "summary.json").read_text())
    assert text_of(resumed).split()[-2:] == ["then", str(taken + 2)]
    assert summary["finished"] and summary["steps"] == taken + 2


def test_the_observer_of_a_notebook_changes_one_output(monkeypatch):
    shown = []
    display = pytest.importorskip("IPython.display")
    monkeypatch.setattr(display, "display", lambda content, **how: shown.append((content, how)))
    with ExitStack() as stack:
        observer = NotebookObserver(stack, {})
        observer.begin("rl", 100, 0)
        for step in range(1, 101):
            observer.update({"step": step, "reward/mean": step / 100, "policy/loss": 1 / step})
        observer.note("step 100: <b>text</b>")
        observer.write("WARNING: set log.samples\n")
        observer.draw()
    assert [how["update"] for _, how in shown] == [False] + [True] * (len(shown) - 1)
    assert len({how["display_id"] for _, how in shown}) == 1
    assert len(shown) < 20  # far fewer than steps
    page = shown[-1][0]["text/html"]
    assert 'value="100" max="100"' in page and page.count("<polyline") == 2
    assert "&lt;b&gt;text" in page and "WARNING: set log.samples" in page


def test_a_curve_has_the_range_of_its_values_and_needs_two():
    drawn = curve("reward", [(1, 0.5), (2, float("inf")), (3, 0.25)])
    assert "reward 0.25, from 0.25 to 0.5" in drawn and "steps 1 to 3" in drawn
    assert drawn.count(",") >= 2 and "inf" not in drawn
    assert curve("reward", [(1, 0.5)]) == ""
