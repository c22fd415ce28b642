"""The section of a report about the scores of a reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightrft.viewer.report import write_report
from tests.unit.viewer.browser import drive, needs_browser
from tests.unit.viewer.runs import HOSTILE

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360f8cf500f0003860180a4f9e2d30000000049454e44ae426082"
)


def estimate(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "count": 9, "stderr": 0.05}


def run_folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "media").mkdir()
    (path / "media" / "a.png").write_bytes(PNG)
    side = {"text": HOSTILE, "score": 1.25, "attachments": []}
    pair = {"id": HOSTILE, "source": "s", "prompt": HOSTILE, "attachments": ["a.png", "gone.wav"]}
    content = {
        "head": "preference",
        "pairs": 1234,
        "distribution": {"centers": [-0.5, 0.5], "better": [0.25, 0.75], "worse": [0.5, 0.5]},
        "calibration": [
            {"confidence": 0.6, "accuracy": 0.5, "count": 3},
            {"confidence": 0.9, "accuracy": 1.0, "count": 1},
        ],
        "subsets": [{"name": HOSTILE, **estimate(0.7)}, {"name": "hard", **estimate(0.4)}],
        "best_of_n": [{"n": n, "chosen": estimate(n / 10), "best": estimate(n)} for n in (1, 2, 3)],
        "worst": [{**pair, "better": side, "worse": {**side, "score": 3.5}}],
        **changes,
    }
    (path / "reward_scores.json").write_text(json.dumps(content), encoding="utf-8")
    (path / "config.yaml").write_text("run: {name: x}\n", encoding="utf-8")
    return path


def test_numbers_texts_and_media_are_shown_and_texts_are_escaped(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path / "run")).read_text(encoding="utf-8")
    assert HOSTILE not in page
    assert "1,234 pairs" in page
    assert "wrong by 2.25" in page
    assert 'src="data:image/png' in page
    assert "gone.wav is missing" in page
    # the worst data source comes first
    assert page.index(">hard<") < page.index("70%")
    # (|0.6 - 0.5| * 3 + |0.9 - 1| * 1) / 4
    assert ">0.1</span><h3>Calibration<" in page
    # 0.25 * -0.5 + 0.75 * 0.5, less 0
    assert ">0.25</span><h3>Distribution of scores<" in page
    assert ">0.3</span><h3>Best of n<" in page


def test_a_pair_whose_files_are_gone_is_named_and_empty_parts_have_no_card(tmp_path: Path) -> None:
    lost = [{"id": "7", "source": "s", "missing": "x.png: no such file"}]
    folder = run_folder(tmp_path / "run", worst=lost, best_of_n=[], calibration=[], subsets=[])
    page = write_report(folder).read_text(encoding="utf-8")
    assert "s 7: x.png: no such file" in page
    assert "Best of n" not in page
    assert "Data source" not in page


@needs_browser
def test_plots_have_fractions_on_their_axis_and_show_them_at_the_pointer(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path / "run"))
    script = """
      return {
        calibration: (await hover("Calibration", 0.99))[0],
        best: (await hover("Best of n", 0.99))[0],
        policy: page.querySelector(".subsets svg").getBoundingClientRect().width > 50,
      };
    """
    said = drive(page, script)
    assert said["calibration"][0] == "confidence 1"
    assert said["best"][:2] == ["n 3", "by the model: 0.3"]
    assert said["policy"]
