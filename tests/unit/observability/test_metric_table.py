"""The table of metrics: every metric of a step says over what it is a mean."""

from __future__ import annotations

import re
from pathlib import Path

import lightrft
from lightrft.observability.metric_table import METRICS, metric_row

NAMESPACES = "reward|response|rollout|policy|critic|cost_critic|lagrangian|curriculum|staleness|prm"
NAME = re.compile(rf'f?"((?:{NAMESPACES})/[A-Za-z_@^/{{}}.]+)"')
PACKAGES = ("learner", "rollout", "trainer", "algorithms", "observability", "workers")


def names_in_code() -> set[str]:
    """Names of metrics, with ``x`` for a part that varies."""
    found = set()
    for package in PACKAGES:
        for file in (Path(lightrft.__file__).parent / package).rglob("*.py"):
            for name in NAME.findall(file.read_text(encoding="utf-8")):
                found.add(re.sub(r"\{[^}]*\}", "x", name))
    return found


def test_every_metric_that_the_code_names_is_in_the_table() -> None:
    names = names_in_code()
    assert {"policy/entropy", "rollout/entropy", "reward/x", "prm/loss"} <= names
    assert sorted(name for name in names if metric_row(name) is None) == []
    literal = {name for name in names if name.startswith("policy/")} - {"policy/x"}
    rows = {row.name for row in METRICS}
    assert sorted(literal - rows) == []


def test_a_metric_has_one_row_and_the_exact_name_wins() -> None:
    assert len({row.name for row in METRICS}) == len(METRICS)
    for row in METRICS:
        assert row.over and row.meaning
        if "<" not in row.name:
            assert metric_row(row.name) is row
    assert metric_row("reward/math/ungraded") is not None
    assert metric_row("rollout/none_of_them") is None
    for name in ("lagrangian/cost", "lagrangian/cost/length", "seconds", "tokens_per_second"):
        assert metric_row(name) is not None
    assert metric_row("lagrangian/cost_window").name == "lagrangian/cost_window</name>"
