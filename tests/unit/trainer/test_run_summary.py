"""What a reader sees of a run's answers."""

import json
from pathlib import Path

import pytest

from lightrft.rewards.success import Success
from lightrft.trainer.run_summary import headline, question, samples


def test_of_a_chat_prompt_the_last_message_of_the_user_is_shown() -> None:
    first = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert (
        question(first + "<|im_start|>user\n2+2=?\nQuickly.<|im_end|>\n<|im_start|>assistant\n")
        == "2+2=?\nQuickly."
    )


def test_any_other_prompt_is_shown_whole() -> None:
    assert question("What is 2+2?\nAnswer:") == "What is 2+2?\nAnswer:"


def test_where_something_is_attached_the_tokens_that_stand_for_it_are_left_out() -> None:
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Is 2 <|3?<|im_end|>\n"
    assert question(prompt, attached=True) == "Is 2 <|3?"
    assert "<|image_pad|>" in question(prompt)


def write_eval(folder: Path, step: int, prompts: int, attached: bool) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    rows = [
        {
            "prompt": {
                "id": f"{i:03}",
                "text": f"ask {i}",
                "label": 1,
                "data_source": "",
                "attachments": [f"{i}.png"] if attached else [],
            },
            "text": "1",
            "failed": "",
            "reward": float(step > 0 and i % 2),
            "terms": {},
        }
        for i in range(prompts)
    ]
    (folder / "rollouts" / f"eval_{step:06d}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


@pytest.mark.parametrize("prompts", [7, 40, 101])
def test_of_prompts_with_attachments_the_samples_are_spread_over_all_right_or_wrong(
    tmp_path: Path, prompts: int
) -> None:
    for step in (0, 9):
        write_eval(tmp_path, step, prompts, attached=True)
    before, after = samples(tmp_path, Success())
    places = [int(row["prompt"].split()[1]) for row in after]
    assert len(places) == len(set(places)) == min(prompts, 40)
    assert places == sorted(places) and places[0] == 0 and places[-1] >= prompts - 3
    assert [row["correct"] for row in after] == [bool(place % 2) for place in places]
    assert [row["attachments"] for row in before] == [[f"{place}.png"] for place in places]


def test_of_prompts_of_text_alone_few_are_shown_and_one_that_is_still_wrong(tmp_path: Path) -> None:
    for step in (0, 9):
        write_eval(tmp_path, step, 30, attached=False)
    before, after = samples(tmp_path, Success())
    assert [row["correct"] for row in after] == [True] * 4 + [False]
    assert not any(row["correct"] for row in before)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((0,), {"heldout_best": 0.0, "heldout_before": 0.0}),
        ((4, 8), {"heldout_best": 0.8, "heldout_after": 0.8}),
        ((0, 8), {"heldout_best": 0.8, "heldout_before": 0.0, "heldout_after": 0.8}),
    ],
)
def test_an_accuracy_before_or_after_training_is_given_only_where_it_was_measured(
    tmp_path: Path, steps, found
) -> None:
    rows = [{"phase": "rl", "step": step, "eval/accuracy": step / 10} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {
        name: value
        for name, value in headline(tmp_path, "rl").items()
        if name.startswith("heldout")
    } == found


@pytest.mark.parametrize(("step", "empty"), [(0, 1), (9, 0)])
def test_after_a_single_evaluation_there_are_no_answers_before_and_after(
    tmp_path: Path, step, empty
) -> None:
    write_eval(tmp_path, step, 7, attached=False)
    sides = samples(tmp_path, Success())
    assert not sides[empty] and len(sides[1 - empty]) == 5
