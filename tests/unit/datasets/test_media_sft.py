"""Conversations with media to learn from: which tokens are trained, and on which side of them each item is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.data import SFTDataConfig
from lightrft.datasets.row_tables import MalformedRow
from lightrft.datasets.sft_dataset import Example, SFTDataset
from lightrft.learner.sft_step import examples_to_batch
from tests.media_helpers import Rig, rig
from tests.unit.datasets.media_files import config_of, picture, written

PAD = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return rig("qwen2_5_vl", tmp_path_factory.mktemp("eye"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    picture(tmp_path / "a.png", 20, 30, seed=1)
    picture(tmp_path / "b.png", 32, 16, seed=2)
    return tmp_path


def dataset(
    eye: Rig, folder: Path, *rows: dict[str, Any], max_tokens: int = 512, **settings: Any
) -> SFTDataset:
    config = SFTDataConfig(sources=(written(folder, rows),), **settings)
    return SFTDataset(config, eye.tokenizer, max_tokens=max_tokens, seed=0, processor=eye.processor)


def learned(eye: Rig, example: Example) -> str:
    return eye.tokenizer.decode(
        [t for t, trained in zip(example.response_ids, example.trained, strict=True) if trained]
    )


def features(eye: Rig, media: Any) -> int:
    return (
        eye.processor.parts["image"].count({k: r.values for k, r in media.items()}) if media else 0
    )


def part(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_a_picture_of_the_question_belongs_to_the_prompt(eye: Rig, folder: Path) -> None:
    (example,) = dataset(
        eye, folder, {"prompt": "<image>what?", "response": "a cat", "image": "a.png"}
    )
    pad = eye.processor.tokens["image"]
    assert features(eye, example.prompt_media) == example.prompt_ids.count(pad) > 0
    assert example.response_media == {} and pad not in example.response_ids
    assert learned(eye, example) == "a cat<|im_end|>"


def test_pictures_of_later_turns_are_in_the_response_and_never_trained(
    eye: Rig, folder: Path
) -> None:
    talk = [
        {"role": "user", "content": [part("a.png"), text("first?")]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [text("and "), part("b.png"), part("a.png")]},
        {"role": "assistant", "content": [text("this: "), part("b.png")]},
    ]
    (example,) = dataset(eye, folder, {"messages": talk})
    pad = eye.processor.tokens["image"]
    assert features(eye, example.prompt_media) == example.prompt_ids.count(pad) > 0
    assert features(eye, example.response_media) == example.response_ids.count(pad)
    assert example.response_media["image_grid_thw"].lengths.tolist() == [3]
    assert not any(
        t for t, i in zip(example.trained, example.response_ids, strict=True) if i == pad
    )
    assert learned(eye, example) == "one<|im_end|>this: <|vision_start|><|vision_end|><|im_end|>"


def test_turns_that_are_learned_one_by_one_have_the_pictures_up_to_them(
    eye: Rig, folder: Path
) -> None:
    talk = [
        {"role": "user", "content": "first <image>?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "then <image>?"},
        {"role": "assistant", "content": "two"},
    ]
    row = {"messages": talk, "images": ["a.png", "b.png"]}
    first, second = dataset(eye, folder, row, turns="each")
    assert [e.prompt_media["image_grid_thw"].lengths.tolist() for e in (first, second)] == [
        [1],
        [2],
    ]
    assert [learned(eye, e) for e in (first, second)] == ["one<|im_end|>", "two<|im_end|>"]
    (last,) = dataset(eye, folder, row, turns="last")
    assert last.prompt_ids == second.prompt_ids
    (whole,) = dataset(eye, folder, row)
    assert (features(eye, whole.prompt_media), features(eye, whole.response_media)) == tuple(
        part.count(eye.processor.tokens["image"]) for part in (whole.prompt_ids, whole.response_ids)
    )


def test_without_a_chat_template_the_picture_stands_in_the_text(eye: Rig, folder: Path) -> None:
    row = {"prompt": "see <image>: ", "response": "a cat", "image": "a.png"}
    (example,) = dataset(eye, folder, row, apply_chat_template=False)
    assert (
        features(eye, example.prompt_media)
        == example.prompt_ids.count(eye.processor.tokens["image"])
        > 0
    )


def test_an_example_is_cut_behind_its_pictures_or_not_at_all(eye: Rig, folder: Path) -> None:
    long = {"prompt": "<image>what?", "response": "a" * 300, "image": "a.png"}
    late = {
        "messages": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "b" * 60},
            {"role": "user", "content": [part("a.png")]},
            {"role": "assistant", "content": "c"},
        ]
    }
    found = dataset(eye, folder, long, late, max_tokens=64, overlong_prompts="truncate")
    assert (found.counts["truncated"], found.counts["overlong"], len(found)) == (1, 1, 1)
    assert features(eye, found[0].prompt_media) > 0


def test_a_picture_that_cannot_be_read_is_a_counted_skip_at_first_and_told_later(
    eye: Rig, folder: Path
) -> None:
    rows = [{"prompt": "x", "response": "y", "image": name} for name in ("a.png", "gone.png")]
    found = dataset(eye, folder, *rows, bad_rows="skip")
    assert (len(found), found.counts["malformed"]) == (1, 1)
    picture(folder / "a.png", 64, 64)
    (lost,) = found.fetch([0])
    assert isinstance(lost, MalformedRow) and "line 1" in str(lost)
    found.lose(lost)
    assert found.counts["unreadable"] == 1


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("picture", [{}, {"image": "a.png"}])
def test_an_answer_that_holds_the_mark_of_a_picture_is_a_malformed_row(
    eye: Rig, folder: Path, picture: dict[str, str], chat: bool
) -> None:
    mark = "\ufdd2image:0\ufdd3"
    bad: list[dict[str, Any]] = [{"prompt": "x", "response": mark, **picture}]
    if chat:
        call = {
            "role": "assistant",
            "content": "y",
            "tool_calls": [{"function": {"name": "f", "arguments": {"of": mark}}}],
        }
        bad.append({"messages": [{"role": "user", "content": "x"}, call], **picture})
    fine = {"prompt": "x", "response": "y", **picture}
    found = dataset(eye, folder, *bad, fine, bad_rows="skip", apply_chat_template=chat)
    assert (len(found), found.counts["malformed"]) == (1, len(bad))
    with pytest.raises(MalformedRow, match=r"line 1, response: the text holds U\+FDD2"):
        dataset(eye, folder, bad[0], apply_chat_template=chat)


def test_an_assistant_that_only_shows_a_picture_learns_to_stop(eye: Rig, folder: Path) -> None:
    eye_without_marks = (
        "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' "
        "%}<|image_pad|>{% else %}"
    )
    eye_without_marks += "{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    before = eye.tokenizer.chat_template
    eye.tokenizer.chat_template = eye_without_marks
    try:
        row = {
            "messages": [
                {"role": "user", "content": "draw"},
                {"role": "assistant", "content": [part("a.png")]},
            ]
        }
        (example,) = dataset(eye, folder, row)
    finally:
        eye.tokenizer.chat_template = before
    assert (
        features(eye, example.prompt_media)
        == example.prompt_ids.count(eye.processor.tokens["image"])
        > 0
    )
    assert example.response_ids == [eye.tokenizer.eos_token_id] and example.trained == [True]


def test_media_are_the_same_tensors_as_a_prompt_gets(eye: Rig, folder: Path) -> None:
    from lightrft.datasets.prompt_dataset import PromptDataset

    row = {"prompt": "<image>what?", "response": "a cat", "image": "a.png"}
    (example,) = dataset(eye, folder, row)
    (prompt,) = PromptDataset(
        config_of(written(folder, [row])), eye.tokenizer, seed=0, processor=eye.processor
    )
    assert example.prompt_ids == prompt.token_ids
    for name, rows in prompt.media.items():
        assert torch.equal(example.prompt_media[name].values, rows.values)


def test_on_all_tokens_placeholders_are_not_trained_and_the_model_reads_the_same(
    eye: Rig, folder: Path
) -> None:
    row = {"prompt": "<image>what?", "response": "a cat", "image": "a.png"}
    (assistant,) = dataset(eye, folder, row)
    (whole,) = dataset(eye, folder, row, loss_on="all")
    both = whole.prompt_ids + whole.response_ids
    assert both == assistant.prompt_ids + assistant.response_ids
    assert len(whole.prompt_ids) == 1 and not whole.prompt_media
    assert features(eye, whole.response_media) == features(eye, assistant.prompt_media) > 0
    placeholder = eye.processor.tokens["image"]
    weights = dict(zip(range(1, len(both)), whole.weights, strict=True))
    assert {k for k, w in weights.items() if not w} == {
        k for k, token in enumerate(both) if token == placeholder
    }
    with torch.no_grad():
        batches = [examples_to_batch([one]) for one in (assistant, whole)]
        answer, all_tokens = (eye.actor.score(batch).logprobs for batch in batches)
    assert torch.allclose(all_tokens[-len(answer) :], answer, rtol=0, atol=1e-5)
