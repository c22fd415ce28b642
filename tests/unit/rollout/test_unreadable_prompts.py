"""Prompts drawn step by step: those whose media are gone are passed over and counted, and a run that goes on does the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.rollout import CurriculumConfig, EvalConfig
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.sampler import in_parts
from lightrft.distributed.process_group import ProcessGroup
from lightrft.rollout.accounting import CollectedRollouts, rollout_metrics
from lightrft.rollout.evaluation import Evaluation, evaluate, load_eval_prompts
from lightrft.rollout.generation import requests_for
from lightrft.rollout.prompt_stream import PromptStream
from lightrft.types import Prompt
from lightrft.utils.errors import DataError
from tests import warm
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import config_of, picture, written
from tests.unit.rollout.test_collect import FakeEngine, FakeScorer, of_all_ranks


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Twelve rows with a picture each."""
    for k in range(12):
        picture(tmp_path / f"{k}.png", 8 + k, 12, seed=k)
    return written(
        tmp_path, [{"id": str(k), "prompt": f"{k}", "image": f"{k}.png"} for k in range(12)]
    )


def stream(
    eye: Rig, rows: str, *, curriculum: CurriculumConfig | None = None, **settings: Any
) -> PromptStream:
    return PromptStream.of(
        config_of(rows, **settings), eye.tokenizer, 3, curriculum, processor=eye.processor
    )


def ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


def test_the_order_is_that_of_a_stream_without_threads(eye: Rig, rows: str) -> None:
    one, two = stream(eye, rows), stream(eye, rows, media={"workers": 0})
    for count in (4, 5, 6, 1):
        first, second = one.draw(count), two.draw(count)
        assert ids(first) == ids(second) and len(first) == count
        assert all(p.media and p.attachments for p in first)


def test_the_prompts_of_the_next_step_are_begun_while_this_one_runs(eye: Rig, rows: str) -> None:
    drawing = stream(eye, rows)
    drawing.draw(4)
    begun = set(drawing.dataset._fetcher._begun)
    assert begun == set(drawing.sampler.peek(4))
    assert {drawing.dataset.ids[i] for i in begun} == set(ids(drawing.draw(4)))


def test_what_was_begun_is_let_go_when_a_run_ends(eye: Rig, rows: str) -> None:
    drawing = stream(eye, rows, media={"workers": 1})
    drawing.draw(4)
    begun = list(drawing.dataset._fetcher._begun.values())
    drawing.close()
    assert drawing.dataset._fetcher._begun == {} and all(
        f.cancelled() or f.running() or f.done() for f in begun
    )
    assert ids(drawing.draw(4)) == ids(stream(eye, rows).draw(8))[4:]


def test_prompts_whose_files_are_gone_are_passed_over_and_counted(eye: Rig, rows: str) -> None:
    folder = Path(rows).parent
    calm, harmed = stream(eye, rows, bad_rows="skip"), stream(eye, rows, bad_rows="skip")
    order = ids([p for _ in range(3) for p in calm.draw(4)])
    for name in (order[1], order[6]):
        (folder / f"{name}.png").unlink()
    kept = [name for name in order if name not in (order[1], order[6])]
    state = harmed.state_dict()
    found = ids(harmed.draw(4) + harmed.draw(4))
    assert found == kept[:8]
    assert harmed.dataset.counts["unreadable"] == 2
    collected = CollectedRollouts()
    harmed.record_results(collected)
    assert rollout_metrics(collected).compute()["rollout/dropped/unreadable"] == 2
    harmed.record_results(again := CollectedRollouts())
    assert not again.dropped
    twin = PromptStream(harmed.dataset, harmed.sampler)
    twin.load_state_dict(state)
    assert ids(twin.draw(4)) == found[:4]
    halfway = twin.state_dict()
    twin.draw(2)
    twin.load_state_dict(halfway)
    assert ids(twin.draw(4)) == found[4:]


def test_a_file_that_is_gone_is_an_error_that_names_it_where_rows_must_be_good(
    eye: Rig, rows: str
) -> None:
    drawing = stream(eye, rows)
    for path in Path(rows).parent.glob("*.png"):
        path.unlink()
    with pytest.raises(
        MalformedRow, match=r"line \d+, column 'image': '\d+\.png': there is no file"
    ):
        drawing.draw(2)


def test_data_that_is_wholly_gone_ends_in_an_error(eye: Rig, rows: str) -> None:
    drawing = stream(eye, rows, bad_rows="skip")
    for path in Path(rows).parent.glob("*.png"):
        path.unlink()
    with pytest.raises(
        DataError,
        match=r"1[2-9] rows in a row cannot be read any more; the last: .*there is no file",
    ):
        drawing.draw(5)


def test_a_curriculum_draws_prompts_with_media_too(eye: Rig, rows: str) -> None:
    drawing = stream(eye, rows, curriculum=CurriculumConfig(name="priority"))
    assert all(p.media for p in drawing.draw(5))


def test_the_data_sources_of_all_prompts_are_known_without_decoding_any(
    eye: Rig, rows: str
) -> None:
    drawing = stream(eye, rows)
    for path in Path(rows).parent.glob("*.png"):
        path.unlink()
    assert list(drawing.dataset.data_sources) == [Path(rows).stem]


def test_held_out_prompts_have_media_while_they_are_asked_and_not_before_or_after(
    eye: Rig, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrft.datasets.sampler.PART", 2)
    found = load_eval_prompts(
        config_of(rows, bad_rows="skip"), eye.tokenizer, 0, 5, processor=eye.processor
    )
    assert len(found) == 5 and not any(p.media for p in found)
    for _ in range(2):
        asked = []
        for first, part in in_parts(found):
            assert first == len(asked) and len(part) <= 2 and all(p.media for p in part)
            asked += part
        assert [p.token_ids for p in asked] == [p.token_ids for p in found]
        assert not any(p.media for p in asked) and all(p.attachments for p in asked)


def test_a_held_out_picture_that_is_gone_is_passed_over_and_counted(eye: Rig, rows: str) -> None:
    found = load_eval_prompts(
        config_of(rows, bad_rows="skip"), eye.tokenizer, 0, None, processor=eye.processor
    )
    for path in sorted(Path(rows).parent.glob("*.png"))[:2]:
        path.unlink()
    evaluated = evaluate(FakeEngine(), FakeScorer(), found, EvalConfig(), 0)  # type: ignore[arg-type]
    assert (len(found), len(evaluated.groups)) == (12, 10)
    assert evaluated.metrics.compute()["eval/media_errors"] == 2


def test_held_out_prompts_that_some_rank_cannot_read_are_asked_by_none_and_counted_once(
    eye: Rig, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightrft.datasets.sampler.PART", 5)
    folders = [
        Path(shutil.copytree(Path(rows).parent, tmp_path / f"rank {rank}")) for rank in range(2)
    ]

    def found(folder: Path, ranks: ProcessGroup, malformed: str) -> Evaluation:
        source = str(folder / Path(rows).name)
        prompts = load_eval_prompts(
            config_of(source, bad_rows=malformed), eye.tokenizer, 0, None, processor=eye.processor
        )
        assert len(prompts) == 12
        ranks.gather(None)  # all have measured theirs
        for k in {folders[0]: (1, 8), folders[1]: (2, 8)}[folder]:
            (folder / f"{k}.png").unlink(missing_ok=True)
        return evaluate(FakeEngine(), FakeScorer(), prompts, EvalConfig(samples=2), 0, ranks=ranks)  # type: ignore[arg-type]

    both = of_all_ranks(lambda ranks: found(folders[ranks.rank], ranks, "skip"), 2)
    for each in both:
        assert {group[0].prompt.id for group in each.groups} == {str(k) for k in range(12)} - {
            "1",
            "2",
            "8",
        }
        assert each.metrics.compute()["eval/media_errors"] == 3
    assert both[0].metrics.compute() == both[1].metrics.compute()


def test_held_out_prompts_asked_in_parts_are_asked_with_the_seeds_of_all_at_once(
    eye: Rig, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_eval_prompts(config_of(rows), eye.tokenizer, 0, 7, processor=eye.processor)

    def seeds() -> list[int]:
        return [
            r.seed
            for first, part in in_parts(found)
            for g in requests_for(part, 2, 3, "eval", first=first)
            for r in g
        ]

    at_once = seeds()
    monkeypatch.setattr("lightrft.datasets.sampler.PART", 3)
    assert seeds() == at_once and len(set(at_once)) == 14


def test_a_process_ends_at_once_while_prompts_are_being_decoded(
    eye: Rig, rows: str, tmp_path: Path
) -> None:
    script = tmp_path / "draws.py"
    script.write_text(
        f"""
import ctypes, time
from lightrft.datasets.media import MediaReader
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.config.model import ModelConfig
from lightrft.config.verbs import DataConfig
from lightrft.rollout.prompt_stream import PromptStream

config = ModelConfig(path={str(eye.path)!r})
tokenizer = load_tokenizer(config)
stream = PromptStream.of(DataConfig(sources=[{rows!r}]), tokenizer, 0, processor=load_processor(config, tokenizer))
made = MediaReader._made
MediaReader._made = lambda *a: time.sleep(0.2) or made(*a)
stream.draw(4)
print("drawn", time.perf_counter())
ctypes.pythonapi.Py_Exit(0)  # ends as an interpreter does that was not forked
"""
    )
    done = warm.run([script], env=os.environ)
    assert done.returncode == 0 and done.stdout.startswith("drawn"), done.stderr
