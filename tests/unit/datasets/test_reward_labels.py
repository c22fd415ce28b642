"""Rows with labels of several heads, as reward models read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.data import PreferenceDataConfig, RewardColumns, RewardDataConfig
from lightrft.datasets.benchmarks.media_preferences import omnirewardbench_t2i, rapidata_t2v
from lightrft.datasets.media import SupportedMedia
from lightrft.datasets.preference.formats import SCORED_FORMATS, format_of
from lightrft.datasets.preference.head_labels import LabelledHeads, win_rates
from lightrft.datasets.preference.preference_dataset import PreferenceDataset
from lightrft.datasets.preference.preference_rows import PreferenceRow, read_preference
from lightrft.datasets.row_tables import MalformedRow
from lightrft.learner.preference_batch import preference_to_batch
from lightrft.types import Batch
from lightrft.utils.errors import ConfigError, DataError
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import picture
from tests.unit.datasets.tokenizers import chat_tokenizer

ROOT = Path(__file__).parents[3]
WATCHES = SupportedMedia({"video": ("<video>",), "image": ("<image>",)})
HELPSTEER2 = {
    "prompt": "1+1?",
    "response": "2",
    "helpfulness": 4,
    "correctness": 3,
    "coherence": 4,
    "complexity": 0,
    "verbosity": 1,
}
PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
RAPIDATA = {
    "prompt": "a cat jumps",
    "file_name1": "1.mp4",
    "file_name2": "2.mp4",
    "weighted_results1_Preference": 0.7,
    "weighted_results2_Preference": 0.3,
    "weighted_results1_Coherence": 0.5,
    "weighted_results2_Coherence": 0.5,
    "weighted_results1_Alignment": 0.2,
    "weighted_results2_Alignment": 0.8,
}
SETTINGS = ("columns", "bad_rows", "token_cache", "token_cache_min_mb")
Make = Callable[..., PreferenceDataset]


def read(row: Any, *names: str, columns: dict[str, str] | None = None, **how: Any) -> PreferenceRow:
    named = RewardColumns(labels=columns or {})
    heads = LabelledHeads(names, columns or {}, **how)
    return read_preference(row, named, "rows.jsonl, line 7", WATCHES, heads=heads)


@pytest.fixture
def examples(tmp_path: Path) -> Make:
    def make(rows: list[dict[str, Any]], kind: Any = "pair", **options: Any) -> PreferenceDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {name: options.pop(name) for name in SETTINGS if name in options}
        config = RewardDataConfig.model_validate({"sources": str(path), **data})
        tokenizer = options.pop("tokenizer", None) or chat_tokenizer()
        return PreferenceDataset(config, tokenizer, kind=kind, max_tokens=500, seed=0, **options)

    return make


def batch_of(dataset: PreferenceDataset) -> Batch:
    return preference_to_batch([dataset[i] for i in range(len(dataset))], dataset.heads)


def test_helpsteer2_labels_a_head_for_each_of_its_ratings() -> None:
    heads = ("helpfulness", "verbosity", "elegance")
    row = read(HELPSTEER2, *heads, rates=True)
    assert row.labels == [{"helpfulness": 4.0, "verbosity": 1.0}]
    assert [record.response for record in row.responses] == ["2"]


def test_a_list_of_responses_has_a_list_of_labels() -> None:
    row = {"prompt": "1+1?", "responses": ["2", "3", "4"], "score": [2, 0, 1], "kind": [1, None, 0]}
    found = read(row, "score", "kind", rates=True)
    assert found.labels == [
        {"score": 2.0, "kind": 1.0},
        {"score": 0.0},
        {"score": 1.0, "kind": 0.0},
    ]
    assert found.ranks == [0, 2, 1]
    with pytest.raises(MalformedRow, match="line 7: kind has 2 labels for 3 responses"):
        read({**row, "kind": [1, 0]}, "score", "kind", rates=True)


def test_both_sides_of_a_pair_have_columns_of_labels() -> None:
    row = {**PAIR, "chosen_help": 4, "rejected_help": 1, "tone_chosen": 0, "tone_rejected": 2}
    found = read(row, "helpfulness", "tone", columns={"helpfulness": "help"})
    assert found.labels == [{"helpfulness": 4.0, "tone": 0.0}, {"helpfulness": 1.0, "tone": 2.0}]
    assert found.ranks == [0, 1]


def test_the_first_head_ranks_the_responses() -> None:
    row = {**PAIR, "chosen_tone": 0, "rejected_tone": 2}
    assert read(row, "tone").ranks == [1, 0]
    assert read(row, "preference", "tone").ranks == [0, 1]


def test_ranks_label_the_first_head_by_the_fraction_of_responses_that_are_worse() -> None:
    assert read(PAIR, "preference").labels == [{"preference": 1.0}, {"preference": 0.0}]
    assert win_rates([0, 2, 1, 1]) == [1.0, 0.0, 0.5, 0.5]
    assert win_rates([5, 5]) == [0.5, 0.5]


def test_ratings_of_a_row_label_the_first_head_where_the_loss_reads_ratings() -> None:
    row = {**PAIR, "score_chosen": 7.5, "score_rejected": 2}
    assert read(row, "quality", rates=True).labels == [{"quality": 7.5}, {"quality": 2.0}]
    assert read(row, "quality").labels == [{"quality": 1.0}, {"quality": 0.0}]


def test_labels_that_rank_the_responses_are_the_margins_of_the_row_too() -> None:
    # the row's own scores prefer the other response, so that their difference would be below 0
    row = {**PAIR, "score_chosen": 7, "score_rejected": 2, "chosen_tone": 1, "rejected_tone": 4}
    assert read(row, "tone").margins == [0.0, 3.0]
    assert read(row, "preference", "tone").margins == [5.0, 0.0]


def test_good_and_bad_responses_label_the_first_head() -> None:
    row = {"prompt": "1+1?", "response": "2", "label": True}
    assert read(row, "good", rates=True).labels == [{"good": 1.0}]
    assert read({**row, "label": False}, "good", rates=True).labels == [{"good": 0.0}]


def test_ultrafeedback_has_labels_of_each_aspect() -> None:
    def answer(text: str, truth: str, help_: str) -> dict[str, Any]:
        notes = {"truthfulness": {"Rating": truth}, "helpfulness": {"Rating": help_}}
        return {"response": text, "annotations": notes}

    row = {"instruction": "1+1?", "completions": [answer("2", "5", "N/A"), answer("3", "1", "4")]}
    found = read(row, "truthfulness", "helpfulness")
    assert found.labels == [{"truthfulness": 5.0}, {"truthfulness": 1.0, "helpfulness": 4.0}]


def test_booleans_of_pku_saferlhf_are_labels() -> None:
    row = {"prompt": "1+1?", "response_0": "2", "response_1": "3", "better_response_id": 1}
    row |= {"is_response_0_safe": True, "is_response_1_safe": False}
    named = RewardColumns(layout="pku_better")
    heads = LabelledHeads(("help", "safe"))
    found = read_preference(row, named, "line 7", heads=heads)
    assert found.labels == [{"help": 0.0, "safe": 1.0}, {"help": 1.0, "safe": 0.0}]


@pytest.mark.parametrize(
    ("safe", "safer", "ratings"),
    [
        ((True, True), 0, [0.0, 1.0]),
        ((True, False), 0, [0.0, 3.0]),
        ((False, True), 1, [3.0, 0.0]),
        ((False, False), 1, [3.0, 2.0]),
    ],
)
def test_rows_of_pku_saferlhf_are_harm_ratings_with_order_and_sign(
    safe: tuple[bool, bool], safer: int, ratings: list[float]
) -> None:
    row = {"prompt": "1+1?", "response_0": "2", "response_1": "3", "safer_response_id": safer}
    row |= {f"is_response_{k}_safe": good for k, good in enumerate(safe)}
    named, heads = RewardColumns(layout="pku_cost"), LabelledHeads(("cost",))
    found = read_preference(row, named, "line 7", heads=heads)
    assert [one["cost"] for one in found.labels] == ratings
    assert [rating >= 2 for rating in ratings] == [not good for good in safe]


def test_a_row_whose_order_contradicts_its_signs_is_refused() -> None:
    row = {"prompt": "1+1?", "response_0": "2", "response_1": "3", "safer_response_id": 0}
    row |= {"is_response_0_safe": False, "is_response_1_safe": True}
    named, heads = RewardColumns(layout="pku_cost"), LabelledHeads(("cost",))
    with pytest.raises(MalformedRow, match="line 7: safer_response_id is 0, and only the other"):
        read_preference(row, named, "line 7", heads=heads)


@pytest.mark.parametrize(("strength", "ranks"), [(-2, [0, 1]), (3, [1, 0])])
def test_helpsteer2_preferences_are_pairs_with_a_margin(strength: int, ranks: list[int]) -> None:
    row = {"prompt": "1+1?", "response_1": "2", "response_2": "3", "preference_strength": strength}
    found = read(row, "preference")
    assert found.ranks == ranks
    assert found.margins == [float(abs(strength)) if rank == 0 else 0.0 for rank in ranks]


def test_lists_of_chosen_and_rejected_texts_are_one_group() -> None:
    row = {"prompt": "1+1?", "chosen": ["2", "two"], "rejected": ["3", "4", "5"]}
    found = read_preference(row, RewardColumns(), "line 7")
    assert found.ranks == [0, 0, 1, 1, 1]
    assert [record.response for record in found.responses] == ["2", "two", "3", "4", "5"]


def test_letters_of_media_preferences_label_their_heads() -> None:
    question = rapidata_t2v(RAPIDATA)
    heads = ("preference", "coherence", "alignment")
    found = read(question, *heads)
    first = question["shown"].index(0)
    assert found.labels[first] == {"preference": 1.0, "coherence": 0.5, "alignment": 0.0}
    assert found.labels[1 - first] == {"preference": 0.0, "coherence": 0.5, "alignment": 1.0}
    assert found.ranks[first] == 0
    assert [r.media[0].value for r in found.responses][first] == "1.mp4"
    assert not found.is_split


def test_the_criteria_of_a_comparison_are_part_of_both_conversations() -> None:
    row = {"prompt": "a cat", "criteria": "its fur", "criteria_preference": "response2"}
    row |= {"response1": "1.png", "response2": "2.png", "id": "7"}
    found = read(omnirewardbench_t2i(row), "preference")
    for record in found.responses:
        assert str(record.messages[-1]["content"]).startswith("a cat\n\nits fur\n\n")


def test_media_that_tie_are_refused_unless_ties_are_kept() -> None:
    row = {**RAPIDATA, "weighted_results2_Preference": 0.7}
    with pytest.raises(MalformedRow, match="line 7: every head has one label for all 2 resp"):
        read(rapidata_t2v(row), "preference")
    kept = read(rapidata_t2v(row), "preference", keep_ties=True)
    assert kept.labels == [{"preference": 0.5}, {"preference": 0.5}]
    # a difference of another head is one to learn from
    assert read(rapidata_t2v(row), "preference", "alignment").ranks == [0, 0]
    same = {**RAPIDATA, "file_name2": "1.mp4"}
    with pytest.raises(MalformedRow, match="line 7: A and B are the same video"):
        read(rapidata_t2v(same), "preference")


@pytest.mark.parametrize("keep_ties", [False, True])
def test_a_pair_with_one_label_compares_nothing(keep_ties: bool) -> None:
    row = {**PAIR, "chosen_tone": 3, "rejected_tone": None}
    with pytest.raises(MalformedRow, match="line 7: no head has labels of two of the 2 responses"):
        read(row, "tone", keep_ties=keep_ties)
    assert read(row, "tone", rates=True).labels == [{"tone": 3.0}, {}]


def test_equal_responses_are_refused_even_where_ties_are_kept() -> None:
    with pytest.raises(MalformedRow, match="chosen is equal to rejected, but one is better"):
        read({**PAIR, "rejected": "2 "}, "preference", keep_ties=True)


@pytest.mark.parametrize("rating", [5, -1, 2.5])
def test_a_rating_out_of_range_is_named(rating: float) -> None:
    row = {**HELPSTEER2, "correctness": rating}
    ranges = {"correctness": 5}
    problem = rf"line 7: correctness of response is {rating:g}, not an integer from 0 to 4; .*size"
    with pytest.raises(MalformedRow, match=problem):
        read(row, "helpfulness", "correctness", rates=True, ranges=ranges)
    assert read(HELPSTEER2, "correctness", rates=True, ranges=ranges).labels


def test_labels_of_another_form_are_named() -> None:
    with pytest.raises(MalformedRow, match="tone is 3, one label for 2 responses; give a list, or"):
        read({**PAIR, "tone": 3}, "preference", "tone")
    with pytest.raises(MalformedRow, match="tone of chosen is 'high', not a finite number"):
        read({**PAIR, "tone_chosen": "high", "tone_rejected": 1}, "preference", "tone")
    row = {"prompt": "1+1?", "responses": ["2", "3", "4"], "score": [1, 2, 3], "best": "A"}
    with pytest.raises(MalformedRow, match="best is 'A', which compares two responses, not 3"):
        read(row, "score", "best", rates=True)


def test_a_row_without_a_label_of_any_head_is_refused() -> None:
    with pytest.raises(MalformedRow, match=r"no response has a label of any head \(looked for e"):
        read(HELPSTEER2, "elegance", rates=True)


def test_rows_of_ratings_stay_unknown_to_losses_of_preferences() -> None:
    with pytest.raises(MalformedRow, match="no preference in the row"):
        format_of(HELPSTEER2, RewardColumns(), "line 7")
    assert format_of(HELPSTEER2, RewardColumns(), "line 7", scored=True) is SCORED_FORMATS["scored"]


def test_labels_become_a_column_for_each_head(examples: Make) -> None:
    rows = [{**PAIR, "chosen_tone": 3, "rejected_tone": None}, {**PAIR, "prompt": "0+2?"}]
    dataset = examples(rows, heads=("preference", "tone"))
    assert dataset.counts["labels/preference"] == 4
    assert dataset.counts["labels/tone"] == 1
    labels = batch_of(dataset).labels
    nan = math.nan
    expected = torch.tensor([[1, 3], [0, nan], [1, nan], [0, nan]], dtype=torch.float64)
    assert labels is not None and torch.equal(labels.isnan(), expected.isnan())
    assert torch.equal(labels.nan_to_num(), expected.nan_to_num())


def test_cached_tokens_keep_the_labels(examples: Make, tmp_path: Path) -> None:
    cache = {"token_cache": str(tmp_path / "cache"), "token_cache_min_mb": 0}
    rows = [{**PAIR, "chosen_tone": 3, "rejected_tone": None}]
    options: dict[str, Any] = {"heads": ("preference", "tone"), **cache}
    first, again = examples(rows, **options), examples(rows, **options)
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    assert [response.labels for response in again[0].responses] == [
        {"preference": 1.0, "tone": 3.0},
        {"preference": 0.0},
    ]
    assert again.counts == first.counts
    assert [type(label) for label in again[0].responses[0].labels.values()] == [float, float]
    # other heads have other labels
    other = examples(rows, **{**options, "heads": ("preference",)})
    assert other[0].responses[0].labels == {"preference": 1.0}
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 2


def test_without_heads_a_batch_has_no_labels(examples: Make) -> None:
    assert batch_of(examples([PAIR])).labels is None


def test_rated_responses_need_no_order(examples: Make) -> None:
    rows = [HELPSTEER2, {**PAIR, "chosen_correctness": 2, "rejected_correctness": 2}]
    dataset = examples(rows, "rated", heads=("correctness",), rating_range={"correctness": 5})
    batch = batch_of(dataset)
    assert batch.rank is None and batch.desirable is None
    assert batch.labels is not None and batch.labels.flatten().tolist() == [3.0, 2.0, 2.0]
    assert batch.prompt_of.tolist() == [0, 1, 1]


def test_ties_are_examples_where_the_loss_reads_ties(examples: Make) -> None:
    tie = {**PAIR, "chosen_tone": 1, "rejected_tone": 1}
    options: dict[str, Any] = {"heads": ("tone",), "bad_rows": "skip"}
    told = {**PAIR, "chosen_tone": 1, "rejected_tone": 0}
    dropped = examples([tie, told], **options)
    assert (len(dropped), dropped.counts["malformed"]) == (1, 1)
    assert "rows.jsonl, line 1: every head has one label" in dropped.first_problem
    kept = batch_of(examples([tie, told], keep_ties=True, **options))
    assert kept.rank is not None and kept.rank.tolist() == [0, 0, 0, 1]


def test_a_head_without_any_label_is_an_error_that_names_it(examples: Make) -> None:
    problem = r"rows.jsonl has a label of head 'tone' \(looked for the column 'mood'\); name the"
    with pytest.raises(DataError, match=problem):
        examples([PAIR], heads=("preference", "tone"), columns={"labels": {"tone": "mood"}})


def test_labels_of_an_unknown_head_are_refused(examples: Make) -> None:
    with pytest.raises(ConfigError, match=r"data.columns.labels: no head 'ton'.*tone"):
        examples([PAIR], heads=("tone",), columns={"labels": {"ton": "mood"}})


def test_the_docs_show_a_row_of_every_form_of_labels() -> None:
    page = (ROOT / "docs" / "reward-data.md").read_text()
    rows = [json.loads(text) for text in re.findall(r"\| `(\{.*\})` \|$", page, re.MULTILINE)]
    assert len(rows) == 5
    for row in rows:
        named = RewardColumns(layout="pku_better" if "better_response_id" in row else "")
        found = read_preference(row, named, "docs", heads=LabelledHeads(("tone",), rates=True))
        assert found.labels[0]["tone"] in (1.0, 4.0, 5.0)


def test_preferences_have_no_columns_of_labels(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="labels"):
        PreferenceDataConfig.model_validate(
            {"sources": str(tmp_path), "columns": {"labels": {"a": "b"}}}
        )


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


def test_candidates_share_the_text_before_their_media(
    examples: Make, eye: Rig, tmp_path: Path
) -> None:
    picture(tmp_path / "1.png", 40, 60, seed=1)
    picture(tmp_path / "2.png", 60, 60, seed=2)
    row = {"prompt": "a cat", "criteria": "its fur", "criteria_preference": "response2"}
    row |= {"response1": "1.png", "response2": "2.png", "id": "7"}
    question = omnirewardbench_t2i(row)
    dataset = examples(
        [dict(question)], heads=("preference",), tokenizer=eye.tokenizer, processor=eye.processor
    )
    example = dataset[0]
    assert not example.prompt_media
    placeholders = dataset.encoder.placeholders
    assert placeholders.isdisjoint(example.prompt_ids)
    assert "its fur" in eye.tokenizer.decode(example.prompt_ids)
    best = question["shown"].index(1)
    assert example.responses[best].labels == {"preference": 1.0}
    for response, shown in zip(example.responses, question["shown"], strict=True):
        path = tmp_path / f"{shown + 1}.png"
        parts = [{"type": "text", "text": "a cat\n\nits fur\n\n"}]
        parts.append({"type": "image", "image": str(path)})
        asked = dataset.encoder.ask([{"role": "user", "content": parts}], "here")
        assert asked.token_ids == [*example.prompt_ids, *response.token_ids]
        assert not any(response.trained)
        for name, rows in asked.media.items():
            assert torch.equal(rows.values, response.media[name].values)
    batch = batch_of(dataset)
    assert batch.prompt_of.tolist() == [0, 0]
    assert batch.rank is not None and int(batch.rank[best]) == 0


def test_an_unreadable_candidate_is_one_malformed_row(
    examples: Make, eye: Rig, tmp_path: Path
) -> None:
    picture(tmp_path / "1.png", 40, 60, seed=1)
    picture(tmp_path / "2.png", 40, 60, seed=2)
    row = {"prompt": "a cat", "criteria": "its fur", "criteria_preference": "response2"}
    row |= {"response1": "1.png", "response2": "2.png", "id": "7"}
    lost = {**row, "response1": "8.png", "response2": "9.png"}
    rows = [dict(omnirewardbench_t2i(lost)), dict(omnirewardbench_t2i(row))]
    dataset = examples(
        rows,
        heads=("preference",),
        bad_rows="skip",
        tokenizer=eye.tokenizer,
        processor=eye.processor,
    )
    assert (len(dataset), dataset.counts["malformed"]) == (1, 1)
