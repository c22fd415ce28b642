"""``lightrft compare`` on saved evaluations: pairs, refusals, verdicts, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrft.cli.compare import named
from lightrft.config.base import build
from lightrft.config.config_tools import CompareConfig
from lightrft.diagnostics.comparison.compare import EvalComparison, run_compare
from lightrft.types import Prompt, Rollout
from lightrft.utils.atomic_files import json_line
from lightrft.utils.errors import ConfigError, DataError
from lightrft.utils.statistics.intervals import minimum_effect, paired_difference
from tests.e2e.command import assert_refused, command

Rewards = Mapping[str, Sequence[float | None]]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder of an evaluation: rewards of the responses by ``source/id``; None failed to be scored."""

    def write(
        name: str,
        rewards: Rewards,
        step: int = 0,
        text: str = "",
        label: str = "7",
        **settings: Any,
    ) -> Path:
        folder = tmp_path / name
        (folder / "rollouts").mkdir(parents=True, exist_ok=True)
        tree = {"eval": {"samples": 1, "threshold": 1.0, **settings}, "run": {"seed": 0}}
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        lines = []
        for key, values in rewards.items():
            source = key.rpartition("/")[0]
            asked = Prompt(key, [1], text=f"{text}{key}?", label=label, data_source=source)
            for i, reward in enumerate(values):
                lines.append(json_line(response(asked, i, reward, name)))
        (folder / "rollouts" / f"eval_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return write


def response(asked: Prompt, sample: int, reward: float | None, who: str) -> Rollout:
    size = 3 if who == "one" else 5
    return Rollout(
        asked,
        [1] * size,
        [True] * size,
        [0.0] * size,
        [0] * size,
        "length" if reward is None else "stop",
        seed=sample,
        sample=sample,
        text=f"{who} says {reward}",
        reward=reward,
        failed="" if reward is not None else "broken",
    )


def compared(one: Path, two: Path, **settings: Any) -> EvalComparison:
    tree = {"baseline": {"path": str(one)}, "candidate": {"path": str(two)}, **settings}
    return run_compare(build(CompareConfig, tree))


def single(right: Sequence[int], source: str = "s") -> Rewards:
    return {f"{source}/{i}": [float(reward)] for i, reward in enumerate(right)}


def test_a_difference_within_noise_is_reported_as_noise(saved: Callable[..., Path]) -> None:
    one, two = saved("one", single([1, 0, 0, 1] * 8)), saved("two", single([1, 1, 0, 1] * 8))
    found = compared(one, two).differences["all"]
    assert (found.verdict, found.p_value) == ("better", 2 / 2**8)
    assert compared(two, one).differences["all"].verdict == "worse"
    few = saved("few", single([1, 1, 0, 1] + [1, 0, 0, 1] * 7))
    found = compared(one, few).differences["all"]
    assert (found.verdict, found.p_value) == ("within noise", 1.0)
    assert found.difference.low < 0 < found.difference.high


def test_the_numbers_are_those_of_the_paired_samples(saved: Callable[..., Path]) -> None:
    one = {"s/a": [1.0, 0.0], "s/b": [0.0, None], "s/c": [1.0, 1.0]}
    two = {"s/a": [1.0, 1.0, 0.0], "s/b": [1.0, 1.0, 1.0], "s/c": [0.0, 1.0, 1.0]}
    result = compared(saved("one", one), saved("two", two))
    found = result.differences["all"]
    before, after = [0.5, 0.0, 1.0], [2 / 3, 1.0, 2 / 3]
    assert found.difference == paired_difference(before, after)
    assert found.minimum_effect == minimum_effect(found.difference.stderr)
    # Sizes 1/6, 1 and -1/3: the sum 5/6 is reached by the sign vectors that agree in the largest.
    assert found.p_value == 6 / 8
    assert result.others["length"].mean == 2.0
    assert result.others["truncated"].mean == pytest.approx(-0.5 / 3)
    # The failed response has no reward; the other response to its prompt has.
    assert result.others["reward"].mean == pytest.approx((1 / 6 + 1 - 1 / 3) / 3)


def test_the_outcome_is_compared_and_not_the_sum_of_the_terms(
    saved: Callable[..., Path],
) -> None:
    """A model that is right more often and longer is better, though its rewards are lower."""
    rewards = {"terms": ["math", {"function": "length", "options": {"limit": 9, "buffer": 9}}]}
    right = {"one": [0.0] * 12, "two": [1.0] * 12}
    folders = {}
    for name, values in right.items():
        folder = folders[name] = saved(name, single([0] * 12))
        tree = yaml.safe_load((folder / "config.yaml").read_text())
        (folder / "config.yaml").write_text(yaml.safe_dump({**tree, "reward": rewards}))
        file = folder / "rollouts" / "eval_000000.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row, value in zip(rows, values, strict=True):
            row["terms"] = {"math": value, "length": -value}
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = compared(folders["one"], folders["two"])
    assert found.differences["all"].verdict == "better"
    assert found.differences["all"].difference.mean == 1.0
    by_length = compared(folders["one"], folders["two"], success=["length"], threshold=0.0)
    assert by_length.differences["all"].verdict == "worse"
    with pytest.raises(ConfigError, match=r"reward\.success = 'lenght'.*length"):
        compared(folders["one"], folders["two"], success=["lenght"])


def test_a_score_that_is_compared_as_right_or_wrong_is_noted(saved: Callable[..., Path]) -> None:
    folder = saved("one", single([0] * 12))
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**tree, "reward": {"terms": ["rw.py:similarity"]}})
    )
    file = folder / "rollouts" / "eval_000000.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for k, row in enumerate(rows):
        row["terms"] = {"similarity": k / 12}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    notes = compared(folder, folder).notes
    assert any("12 values on one side of eval.threshold, so it is a score" in one for one in notes)
    assert compared(folder, folder, threshold=0.5).notes == []
    assert compared(folder, folder, success="similarity").notes == []


def test_the_tests_of_several_sources_are_adjusted_for_their_number(
    saved: Callable[..., Path],
) -> None:
    weak, strong = single([0] * 6, "a"), single([0] * 12, "b")
    one = saved("one", {**weak, **strong})
    two = saved("two", {**single([1] * 6, "a"), **single([1] * 12, "b")})
    found = compared(one, two).differences
    assert list(found) == ["all", "a", "b"]
    assert found["a"].p_value == found["a"].adjusted_p == 2 / 2**6
    assert found["b"].adjusted_p == 2 * found["b"].p_value == 2 * 2 / 2**12
    assert found["all"].adjusted_p == found["all"].p_value
    assert found["a"].verdict == "better"
    assert compared(one, two, confidence=0.97).differences["a"].verdict == "within noise"
    equal = single([0] * 20, "c")
    one, two = saved("one", {**weak, **equal}), saved("two", {**single([1] * 6, "a"), **equal})
    found = compared(one, two).differences
    assert (found["a"].adjusted_p, found["a"].verdict) == (2 * 2 / 2**6, "within noise")


def tmp_of(folder: Path) -> Path:
    """The file of the only evaluation in a folder."""
    (file,) = (folder / "rollouts").glob("eval_*.jsonl")
    return file


def test_different_prompts_are_refused_by_name_and_the_common_ones_compared_on_request(
    saved: Callable[..., Path],
) -> None:
    one, two = saved("one", single([1, 0, 1])), saved("two", single([1, 1]))
    with pytest.raises(ConfigError) as refused:
        compared(one, two)
    assert "1 of 3 prompts of" in str(refused.value) and "such as s/2" in str(refused.value)
    assert "set prompts=common to compare the 2 others" in str(refused.value)
    found = compared(one, two, prompts="common")
    assert found.differences["all"].difference.count == 2
    assert any("such as s/2" in note for note in found.notes)


def test_an_id_with_another_label_or_source_is_another_prompt(saved: Callable[..., Path]) -> None:
    one, two = saved("one", single([1, 0])), saved("two", single([1, 0]), label="8")
    with pytest.raises(ConfigError, match=r"2 of 2 prompts have the same id and different labels"):
        compared(one, two)
    with pytest.raises(ConfigError, match="different prompts"):
        compared(one, two, prompts="common")
    elsewhere = saved("else", single([1, 0], "t"))
    with pytest.raises(ConfigError, match=r"2 of 2 prompts of .*one.* are not in .*else"):
        compared(one, elsewhere)


def test_settings_and_texts_that_differ_are_reported(saved: Callable[..., Path]) -> None:
    one = saved("one", single([1, 0]), sampling={"temperature": 0.0, "top_p": 1.0})
    sampling = {"temperature": 0.7, "top_p": 1.0}
    two = saved("two", single([1, 0]), text="Q: ", sampling=sampling, every=5)
    found = compared(one, two)
    assert found.settings == {"eval.sampling.temperature": (0.0, 0.7)}
    assert found.notes == ["the text of 2 of 2 prompts differs, as with another template"]


def test_steps_of_one_run_are_compared_and_an_unknown_step_is_named(
    saved: Callable[..., Path],
) -> None:
    run = saved("run", single([0] * 8))
    saved("run", single([1] * 8), step=20)
    found = compared(run, run, baseline={"path": str(run), "step": 0})
    assert found.differences["all"].difference.mean == 1.0
    assert len(found.improvements) == 8 and not found.regressions
    with pytest.raises(ConfigError, match=r"no evaluation of step 7; it has the steps 0, 20"):
        compared(run, run, candidate={"path": str(run), "step": 7})


def test_a_threshold_replaces_those_of_the_runs(saved: Callable[..., Path]) -> None:
    one = saved("one", {"s/a": [0.5], "s/b": [0.5]}, threshold=0.5)
    two = saved("two", {"s/a": [0.5], "s/b": [0.9]}, threshold=0.8)
    found = compared(one, two)
    assert found.settings == {"eval.threshold": (0.5, 0.8)}
    assert found.differences["all"].difference.mean == -0.5
    assert compared(one, two, threshold=0.6).differences["all"].difference.mean == 0.5


def test_the_largest_changes_come_first(saved: Callable[..., Path]) -> None:
    one = saved("one", {"s/a": [1.0, 0.0], "s/b": [1.0, 1.0], "s/c": [0.0, 0.0]})
    two = saved("two", {"s/a": [0.0, 0.0], "s/b": [0.0, 0.0], "s/c": [1.0, 0.0]})
    found = compared(one, two)
    assert [c.prompt.prompt["id"] for c in found.regressions] == ["s/b", "s/a"]
    assert [c.prompt.prompt["id"] for c in found.improvements] == ["s/c"]


def test_a_file_that_is_no_evaluation_is_refused(
    tmp_path: Path, saved: Callable[..., Path]
) -> None:
    one = saved("one", single([1]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no evaluation"):
        compared(one, tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a file of an evaluation"):
        compared(one, one / "config.yaml")
    tmp_of(one).write_text('{"prompt": {"id": "a"}}\n')
    with pytest.raises(DataError, match="line 1 is not a response"):
        compared(one, one)
    tmp_of(one).write_text("")
    with pytest.raises(DataError, match="holds no response"):
        compared(one, one)
    (one / "config.yaml").unlink()
    with pytest.raises(DataError, match=r"config\.yaml is missing"):
        compared(one, one)
    with pytest.raises(ConfigError, match=r"candidate\.path is empty"):
        run_compare(build(CompareConfig, {"baseline": {"path": str(one)}}))


def test_responses_of_other_settings_than_those_of_the_folder_are_refused(
    saved: Callable[..., Path],
) -> None:
    one = saved("one", single([1]), sampling={"top_p": 1.0, "stop": []})
    conditions = {"samples": 1, "threshold": 1, "seed": 0, "sampling": {"top_p": 1.0, "stop": []}}
    summary = {"verb": "eval", "conditions": conditions}
    (one / "summary.json").write_text(json.dumps(summary))
    assert compared(one, one).differences["all"].p_value == 1.0
    # The start of a second evaluation writes its settings over those of the first.
    saved("one", single([1]), sampling={"top_p": 1.0, "stop": []}, threshold=0.5)
    with pytest.raises(
        DataError, match=r"eval\.threshold is 0\.5 in config\.yaml and 1 in summary"
    ):
        compared(one, one)


def test_the_command_prints_the_verdict_and_writes_every_change(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = saved("one", single([1, 0, 0, 1])), saved("two", single([0, 1, 1, 1]))
    output = tmp_path / "out" / "compare.json"
    outcome = command(capsys, "compare", one, two, f"output={output}", "show=1")
    assert outcome.status == 0, outcome.err
    assert "The difference of +25.0% is within noise: the 95% interval is" in outcome.out
    assert "prompts that became worse: 1\n" in outcome.out
    assert "prompts that became better: 2\n" in outcome.out
    assert "baseline   one says 1.0" in outcome.out and "candidate  two says 0.0" in outcome.out
    # One of the two improvements is shown.
    assert outcome.out.count("candidate  two says 1.0") == 1
    written = json.loads(output.read_text())
    assert f"{output} (replaced)" not in outcome.out
    again = command(capsys, "compare", one, two, f"output={output}")
    assert f"{output} (replaced)" in again.out
    assert written["accuracy"]["all"]["verdict"] == "within noise"
    assert [change["id"] for change in written["regressions"]] == ["s/0"]
    assert len(written["improvements"]) == 2
    assert written["regressions"][0]["candidate"]["responses"][0]["text"] == "two says 0.0"


def test_a_change_is_shown_by_responses_that_differ(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = saved("one", {"s/a": [0.0, 1.0]}), saved("two", {"s/a": [0.0, None]})
    output = tmp_path / "compare.json"
    outcome = command(capsys, "compare", one, two, f"output={output}", "confidence=0.9")
    assert outcome.status == 0, outcome.err
    assert "  s/a: 50% to 0%, label 7" in outcome.out and "90% interval" in outcome.out
    assert "baseline   one says 1.0" in outcome.out
    assert "candidate  two says None" in outcome.out


def test_one_prompt_has_the_widest_interval_and_no_smallest_difference(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = saved("one", {"s/a": [1.0, 0.0]}), saved("two", {"s/a": [1.0, 1.0]})
    found = compared(one, two).differences["all"].difference
    assert (found.low, found.high) == (-1.0, 1.0)
    outcome = command(capsys, "compare", one, two, f"output={tmp_path / 'compare.json'}")
    assert outcome.status == 0, outcome.err
    assert "-100.0% to +100.0%" in outcome.out and "nan%" not in outcome.out
    # Equal differences have no spread: by the formula, no difference would be too small to find.
    one = saved("one", {"s/a": [1.0, 0.0], "s/b": [0.0, 1.0]})
    outcome = command(capsys, "compare", one, one, f"output={tmp_path / 'compare.json'}")
    assert "with probability 0.8" not in outcome.out


def test_words_of_the_command_are_the_two_sides(saved: Callable[..., Path]) -> None:
    one = saved("one", single([1]))
    words = [str(one), "show=2", str(one)]
    assert named(words) == [f'baseline.path="{one}"', "show=2", f'candidate.path="{one}"']
    with pytest.raises(ConfigError, match="3 folders are named"):
        named([str(one)] * 3)
    with pytest.raises(ConfigError, match=r"no run folder .*onn; did you mean .*one"):
        named([str(one.with_name("onn"))])


def test_a_side_that_is_missing_is_refused(
    saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one = saved("one", single([1]))
    assert_refused(command(capsys, "compare", one), "candidate.path is empty")
