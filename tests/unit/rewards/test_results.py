"""Results of reward functions: which number of a dict is the reward, and which dicts are refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.cli.main import main
from lightrft.rewards.contracts import reward_verdicts
from lightrft.rewards.sandbox.results import VALUE, InvalidReward, terms_of

NUMBERS = st.floats(-1e6, 1e6)
KEYS = st.text("abcdef_", min_size=1).filter(lambda key: key not in ("reward", "score"))


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ({"score": 1, "acc": 1, "length": 120}, 1.0),
        ({"length": 120, "score": 0.25}, 0.25),
        ({"reward": 0.5, "score": 7}, 0.5),
        ({"score": True}, 1.0),
        ({"score": Decimal("0.25")}, 0.25),
        ({"reward": Fraction(1, 4)}, 0.25),
        ({"reward": np.float32(0.25)}, 0.25),
        ({"reward": np.array(Decimal("0.25"))}, 0.25),
        ({"reward": torch.tensor(0.25, dtype=torch.bfloat16)}, 0.25),
    ],
)
def test_reward_and_score_name_the_reward_of_a_dict(result: dict[str, Any], reward: float) -> None:
    terms = terms_of(result)
    assert terms.pop(VALUE) == reward
    named = "reward" if "reward" in result else "score"
    assert terms == {key: float(value) for key, value in result.items() if key != named}


@given(st.dictionaries(KEYS, NUMBERS, min_size=1, max_size=5))
def test_a_dict_that_names_no_reward_is_refused_with_its_keys(result: dict[str, float]) -> None:
    with pytest.raises(InvalidReward) as caught:
        terms_of(result)
    assert all(repr(key) in str(caught.value) for key in result)
    assert "'reward'" in str(caught.value)


@given(st.dictionaries(KEYS, NUMBERS, max_size=5), NUMBERS, st.sampled_from(["reward", "score"]))
def test_no_other_value_of_a_dict_changes_the_reward(
    others: dict[str, float], reward: float, name: str
) -> None:
    assert terms_of({**others, name: reward}) == {VALUE: reward, **others}


@pytest.mark.parametrize(
    "value", ["0.5", None, [1.0], {"a": 1.0}, 1j, np.array([0.5]), torch.tensor(1j)]
)
def test_a_score_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidReward, match="not a number"):
        terms_of({"score": value})
    with pytest.raises(InvalidReward, match=r"not a number|a dict with the keys"):
        terms_of(value)


@pytest.mark.parametrize("value", [Decimal("NaN"), Decimal("sNaN"), Decimal("1e999"), 10**400])
def test_a_number_that_is_no_finite_float_is_refused(value: Any) -> None:
    with pytest.raises(InvalidReward, match=r"returned .*(nan|inf|sNaN|too large)"):
        terms_of(value)


def test_check_finds_a_dict_that_names_no_reward(tmp_path: Any) -> None:
    file = tmp_path / "rw.py"
    file.write_text(
        "def f(rollout):\n    return {'acc': 1, 'length': 120}\n\n"
        "def g(rollout):\n    return {'score': 1, 'length': 120}\n"
    )
    broken = {c.check: c.broken for c in reward_verdicts(f"{file}:f", {}, 10.0)}
    assert "'acc', 'length'" in broken["number"]
    assert not any(c.broken for c in reward_verdicts(f"{file}:g", {}, 10.0))


@pytest.mark.parametrize(
    ("parameters", "framework"),
    [
        ("completions, **kwargs", "TRL"),
        ("prompts, completions, answer, **kwargs", "TRL"),
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("queries, prompts, labels", "OpenRLHF"),
        ("reward_inputs", "EasyR1"),
    ],
)
def test_check_names_the_framework_of_a_reward_whatever_its_number_of_arguments(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], parameters: str, framework: str
) -> None:
    file = tmp_path / "rw.py"
    file.write_text(f"def f({parameters}):\n    return 1.0\n")
    assert main(["check", f"{file}:f"]) == 2
    said = capsys.readouterr().err
    assert f"of rewards of {framework}; here a function gets one rollout" in said


@pytest.mark.parametrize("kind", [[], ["--kind", "loss"], ["--kind", "reward"]])
def test_check_refuses_a_name_that_is_no_function(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], kind: list[str]
) -> None:
    file = tmp_path / "rw.py"
    file.write_text("f = 3\n")
    assert main(["check", f"{file}:f", *kind]) == 2
    said = capsys.readouterr().err
    assert "rw.py:f' is" in said
    assert "not a function" in said
