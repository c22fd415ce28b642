import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrft.viewer.page import figures, plot_data
from lightrft.viewer.plots import BARS, POINTS, Plot, Series, smooth, thin, time_bars
from tests.unit.viewer.runs import HOSTILE

numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 10**6), numbers), min_size=1, max_size=900))
def test_thinning_keeps_the_ends_the_order_and_the_mean(points):
    points = sorted(points)
    thinned = thin(points, 180)
    assert len(thinned) == min(len(points), 180)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    ys = [y for _, y in points]
    assert all(min(ys) - 1 <= y <= max(ys) + 1 for _, y in thinned)


def test_smoothing_follows_a_straight_line_without_lag():
    line = [(x, 2.0 * x) for x in range(300)]
    assert all(math.isclose(y, 2.0 * x, abs_tol=1e-9) for x, y in smooth(line)[10:-10])


def plot(*series, **options):
    return Plot("Reward", "mean of a step", "0.5", series, **options)


def test_series_of_different_steps_share_one_column_of_steps():
    data = plot(Series("a", [(1, 1.0), (3, 3.0)]), Series("b", [(2, 2 / 3)], 9)).data()
    assert data["steps"] == [1, 2, 3]
    first, second = data["series"]
    assert first["values"] == [1.0, None, 3.0]
    assert second["values"] == [None, 0.666667, None]
    assert second["color"] == 1


def test_a_long_line_is_thinned():
    data = plot(Series("a", [(x, float(x)) for x in range(5000)])).data()
    assert len(data["steps"]) == len(data["series"][0]["values"]) == POINTS


def test_a_plot_is_described_without_its_raw_lines():
    raw = Series("reward", [(1, 0.0), (2, 9.0)], faint=True)
    smoothed = Series("reward, smoothed", [(1, 0.25), (2, 1.0), (3, 0.5)])
    assert plot(raw, smoothed, form="percent").described() == (
        "reward, smoothed: 25% at step 1, 50% at step 3, between 25% and 100%."
    )


def test_bars_add_up_to_the_whole_step():
    bars = time_bars("Time", [1, 2], {"generate": [1.0, 2.0], "update": [3.0, 2.0]})
    assert [series.points for series in bars.series] == [[(1, 1.0), (2, 2.0)], [(1, 3.0), (2, 2.0)]]
    assert [series.label for series in bars.series] == ["generate 38%", "update 62%"]
    assert (bars.now, list(bars.heads)) == ("4 s", ["step 1", "step 2"])
    assert bars.described() == "Mean per step: generate 1.5 s, update 2.5 s."


def test_many_bars_are_averaged_at_equal_distances():
    bars = time_bars("Time", list(range(1000)), {"generate": [float(x) for x in range(1000)]})
    places = [x for x, _ in bars.series[0].points]
    assert len(places) == len(bars.heads) <= BARS
    assert len({b - a for a, b in pairwise(places)}) == 1
    assert bars.heads[0] == "steps 0 to 20, mean"
    assert bars.series[0].points[0] == (10, 10.0)
    assert bars.heads[-1] == "steps 987 to 999, mean"
    assert bars.series[0].points[-1][1] == 993.0


def test_the_data_of_a_plot_cannot_end_its_element():
    hostile = plot(Series(HOSTILE + "<!--", [(1, 2.0)]))
    element = plot_data([hostile])
    head, body, tail = element.partition("</script>")
    assert (body, tail) == ("</script>", "\n")
    data = json.loads(head.partition(">")[2])
    assert data[0]["series"][0]["name"] == HOSTILE + "<!--"
    assert "<" not in head.partition(">")[2]


def test_names_are_escaped():
    lines = [Series(HOSTILE, [(1, 2.0)]), Series(HOSTILE, [(1, 2.0)])]
    html = figures([Plot(HOSTILE, HOSTILE, HOSTILE, lines)])
    assert "<script" not in html
    assert "<img" not in html


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_json_cannot_hold_becomes_a_gap(value):
    data = plot(Series("a", [(1, 1.0), (2, value)])).data()
    assert data["series"][0]["values"] == [1.0, None]
