"""``lightrft.data`` and ``lightrft data`` show rows, lengths, duplicates and overlap, also as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightrft
from lightrft.api.shown_data import ShownData
from lightrft.cli.main import main
from lightrft.models.tiny import save_tiny_media
from lightrft.models.tiny.text import tiny_model
from lightrft.observability.data_record import TokenLengths
from lightrft.utils.errors import ConfigError, DataError
from tests.unit.datasets.media_files import picture
from tests.unit.datasets.tokenizers import chat_tokenizer
from tests.unit.viewer.runs import HOSTILE
from tests.unit.viewer.test_report import Page

SUMS = [{"prompt": f"{a}+{a}=", "response": "2" * (a + 1)} for a in range(4)]
HELD_OUT = [{"prompt": "3+3=", "label": "6"}, {"prompt": "new", "label": "7"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen2", seed=0).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def shown(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return lambda **settings: lightrft.data(**{"model": model, **settings})


def page_of(data: ShownData, folder: Path) -> tuple[Page, str]:
    html = data.save(folder / "pages" / "rows.html").path.read_text(encoding="utf-8")
    return Page(html), html


def test_supervised_rows_are_shown_with_lengths_duplicates_and_overlap(shown, tmp_path) -> None:
    data = shown(data=[*SUMS, SUMS[2], SUMS[0]], eval=HELD_OUT, show={"rows": 2})
    assert list(data.table["name"]) == ["rows/0", "rows/1", "rows/0", "rows/1"]
    assert [row["section"] for row in data.rows] == ["data", "data", "eval.data", "eval.data"]
    assert data.rows[1]["trained"] == ["22<|im_end|>"] and data.rows[2]["trained"] == []
    learned, held_out = data.figures.to_dict("records")
    assert learned["duplicates"] == [("rows/4", "rows/2"), ("rows/5", "rows/0")]
    assert learned["overlap"] is None and held_out["overlap"] == [("rows/0", "rows/3")]
    own = data.rows[0]
    assert len(learned["lengths"]["prompt"]) == len(learned["lengths"]["response"]) == 6
    assert learned["lengths"]["prompt"][0] + learned["lengths"]["response"][0] == own["tokens"]
    assert list(held_out["lengths"]) == ["prompt"]
    text = repr(data)
    assert "duplicates: 2 of 6 prompts equal an earlier prompt; the first is rows/4" in text
    assert "overlap: 1 of 2 prompts equal a prompt of data; the first is rows/0" in text
    page, html = page_of(data, tmp_path)
    assert "overlap: 1 of 2 prompts" in page.text and "<mark>22&lt;|im_end|&gt;</mark>" in html
    assert len(page.all("figure")) == 3 and page.all("rect")


def test_pairs_are_shown_with_each_response_and_their_prompts_are_compared(shown) -> None:
    pairs = [{"prompt": p, "chosen": "22", "rejected": "3"} for p in ("1?", "2?", "1?")]
    data = shown(data=pairs, validation=[pairs[1]], show={"verb": "dpo"})
    assert list(data.table["name"])[:2] == ["rows/0, chosen", "rows/0, rejected"]
    learned, held_out = data.figures.to_dict("records")
    assert learned["duplicates"] == [("rows/2", "rows/0")]
    assert held_out["overlap"] == [("rows/0", "rows/1")]
    assert len(learned["lengths"]["prompt"]) == 3
    trained = [row["trained"] for row in data.rows if row["section"] == "data"]
    assert len(learned["lengths"]["response"]) == len(trained) == 6


def test_prompts_to_sample_for_are_shown_without_responses(shown) -> None:
    data = shown(data=HELD_OUT, rewards=["math"])
    assert data.rows[0]["label"] == "6" and data.rows[0]["trained"] == []
    (figures,) = data.figures.to_dict("records")
    assert list(figures["lengths"]) == ["prompt"] and figures["duplicates"] == []


def test_rows_of_another_verb_are_refused_with_the_setting_that_reads_them(shown) -> None:
    words = r'no response to learn from.* as those of lightrft\.sft; set show=\{"verb": "rl"\}'
    with pytest.raises(DataError, match=words):
        shown(data=HELD_OUT)
    assert shown(data=HELD_OUT, show={"verb": "rl"}, rewards=["math"]).rows[0]["label"] == "6"
    with pytest.raises(DataError) as found:
        shown(data=HELD_OUT, show={"verb": "sft"})
    assert "show" not in str(found.value)


def test_steps_are_shown_with_the_lengths_of_their_responses(shown) -> None:
    steps = [{"prompt": "1+1?", "completions": ["1", "2"], "labels": [True, False]}] * 2
    (figures,) = shown(data=steps, show={"verb": "prm"}).figures.to_dict("records")
    assert figures["duplicates"] == [("rows/1", "rows/0")]
    assert len(figures["lengths"]["response"]) == 2


def test_hostile_rows_are_text_of_the_page_and_of_the_notebook(shown, tmp_path) -> None:
    row = {"id": HOSTILE, "prompt": HOSTILE, "response": f"{HOSTILE}\x1b[2J", HOSTILE: "x"}
    other = {"prompt": "1", "label": f"{HOSTILE}\ud800", "id": "\x1b[2J"}
    data = shown(data=[row], eval=[other])
    page, html = page_of(data, tmp_path)
    assert page.all("script") == [] and page.all("img") == [] and page.text.count(HOSTILE) >= 4
    assert "\\ud800" in page.text and "\x1b" not in html + repr(data)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    (policy,) = [meta["content"] for meta in page.all("meta") if "content" in meta][:1]
    assert "default-src 'none'" in policy and "script-src 'none'" in policy
    (outer,) = Page(data._repr_html_()).tags
    assert outer[0] == "iframe" and outer[1]["srcdoc"] == html
    assert data.table["label"].iloc[-1].endswith("\\ud800")


def test_a_picture_is_embedded_and_its_prompt_is_not_compared(shown, tmp_path) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "eye")
    picture(tmp_path / "a.png", seed=1)
    rows = [{"prompt": "see?", "image": "a.png", "label": "1"}] * 2
    data = shown(model=str(tmp_path / "eye"), data=rows, rewards=["math"])
    page, html = page_of(data, tmp_path)
    assert len(page.all("img")) == 2 and all(
        image["src"].startswith("data:image/png;base64,") for image in page.all("img")
    )
    assert "image &#x27;a.png&#x27;" in html and "[image: " in page.text
    assert "prompts with media, which are not compared: 2" in page.text
    assert "duplicates: 0 of 0 prompts" in repr(data)


def test_a_picture_that_cannot_be_decoded_is_named(shown, tmp_path) -> None:
    save_tiny_media("qwen2_5_vl", tmp_path / "eye")
    picture(tmp_path / "a.png", 200, 300, seed=1)
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    rows = [{"prompt": "see?", "image": "a.png", "label": "1"}]
    found = shown(model=str(tmp_path / "eye"), data=rows, rewards=["math"])
    assert "a.png" in found.rows[0]["unreadable media"] and "unreadable media" in repr(found)


def test_an_iterator_and_a_model_of_the_program_are_read_once_for_all_verbs(
    shown, tmp_path
) -> None:
    pair = tiny_model("qwen2", seed=0), chat_tokenizer()
    data = shown(model=pair, data=iter(SUMS))
    assert [row["tokens"] for row in data.rows][:1] == [shown(data=SUMS).rows[0]["tokens"]]
    assert len(list((tmp_path / "runs" / "inputs").glob("model-*"))) == 1


def test_the_page_of_the_verb_has_the_figures_of_its_text(
    shown, model, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*SUMS, SUMS[1]]))
    words = ["data", f"model={model}", "data=t.jsonl", "show.verb=sft", "show.page=new/rows.html"]
    assert main(words) == 0
    text = capsys.readouterr().out
    figure = "duplicates: 1 of 5 prompts equal an earlier prompt; the first is t/4, equal to t/1"
    assert f"-- {figure}" in text and text.endswith("page: new/rows.html\n")
    page = Page((tmp_path / "new" / "rows.html").read_text(encoding="utf-8"))
    histogram = "responses: 2 to 5 tokens, median 3; 2-2: 1, 3-3: 2, 4-4: 1, 5-5: 1"
    assert figure in page.text and f"-- {histogram}" in text
    assert histogram in [svg["aria-label"] for svg in page.all("svg")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"show": {"page": "rows.jsonl"}}, r"show\.page.*'rows\.jsonl' is no HTML file"),
        ({"show.rws": 3}, r"show\.rws"),
        ({"show": {"verb": "eval"}}, r"show\.verb"),
        ({"on_step": print}, "on_step is called by verbs that train, and data does not"),
        ({"optimiser": {"lr": 1}}, "optimiser"),
    ],
)
def test_a_setting_that_does_not_exist_or_fit_is_refused_by_name(
    shown, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        shown(data=SUMS, **settings)


@given(st.lists(st.integers(0, 5000), min_size=1))
def test_each_length_is_in_exactly_one_bin(tokens: list[int]) -> None:
    bins = TokenLengths("prompt", tokens).bins
    for low, high, count in bins:
        assert count == sum(low <= one <= high for one in tokens)
    assert len(bins) <= 10 and sum(count for _, _, count in bins) == len(tokens)
    assert (bins[0][0], bins[-1][1]) == (min(tokens), max(tokens))
