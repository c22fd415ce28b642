import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightrft.viewer.svg import (
    COLUMNS,
    HEIGHT,
    WIDTH,
    Series,
    compact,
    line_plot,
    nice_ticks,
    percent,
    share_bar,
    smooth,
    stacked_bars,
    thin,
)

numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(numbers, numbers)
def test_ticks_are_few_even_and_cover_the_range(a, b):
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    steps = [y - x for x, y in pairwise(ticks)]
    slack = 1e-6 * max(abs(low), abs(high), steps[0])
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert all(math.isclose(s, steps[0], rel_tol=1e-3, abs_tol=slack) for s in steps)


def test_ticks_are_round():
    assert nice_ticks(0.03, 0.97) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(0, 37) == [0, 10, 20, 30, 40]
    assert nice_ticks(5, 5) == [2, 4, 6, 8]


def test_numbers_are_short():
    assert [compact(v) for v in (0, 0.5, 0.00012, 1234, 12_400, 3_456_789, -0.25)] == [
        "0",
        "0.5",
        "0.00012",
        "1234",
        "12.4k",
        "3.46M",
        "-0.25",
    ]
    assert [percent(v) for v in (0.9731, 0.5, 0, 1)] == ["97.3%", "50%", "0%", "100%"]


@given(st.lists(st.tuples(st.integers(0, 10**6), numbers), min_size=1, max_size=900))
def test_thinning_keeps_the_ends_the_order_and_the_mean(points):
    points = sorted(points)
    thinned = thin(points)
    assert len(thinned) <= COLUMNS
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    ys = [y for _, y in points]
    assert all(min(ys) - 1 <= y <= max(ys) + 1 for _, y in thinned)


def test_smoothing_follows_a_straight_line_without_lag():
    line = [(x, 2.0 * x) for x in range(300)]
    assert all(math.isclose(y, 2.0 * x, abs_tol=1e-9) for x, y in smooth(line)[10:-10])


def parse(svg):
    return ET.fromstring(svg)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), numbers), min_size=1, max_size=50, unique_by=lambda p: p[0]
    )
)
def test_every_point_lies_inside_the_plot(points):
    root = parse(line_plot("Reward", [Series("reward", sorted(points), dots=True)]))
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= WIDTH
        assert 0 <= float(circle.get("cy")) <= HEIGHT


def test_higher_values_are_higher_and_hover_says_them():
    root = parse(
        line_plot(
            "Reward",
            [Series("reward", [(1, 0.0), (2, 1.0)]), Series("base", [(1, 0.5), (2, 0.5)], 1)],
        )
    )
    first, second = root.findall("g[@class='at']")
    assert first.find("title").text == "step 1\nreward: 0\nbase: 0.5"
    assert float(second.findall("circle")[0].get("cy")) < float(
        first.findall("circle")[0].get("cy")
    )
    assert "reward: 0 at step 1, 1 at step 2" in root.get("aria-label")


def test_bars_add_up_to_the_whole_step():
    root = parse(stacked_bars("Time", [1, 2], {"generate": [1.0, 2.0], "update": [3.0, 2.0]}))
    heights = [
        sum(float(r.get("height")) for r in bar.findall("rect")) for bar in root.findall("g")
    ]
    assert math.isclose(heights[0], heights[1], abs_tol=0.05)
    assert root.find("g/title").text == "step 1\nupdate: 3 s\ngenerate: 1 s"


def test_many_bars_are_averaged():
    root = parse(stacked_bars("Time", list(range(1000)), {"generate": [1.0] * 1000}))
    assert len(root.findall("g")) <= 48
    assert root.find("g/title").text.startswith("steps 0 to 20, mean")


def test_shares_fill_the_bar():
    widths = re.findall(
        r'width="([\d.]+)"', share_bar("Tokens", {"a": 30.0, "b": 10.0}, ["f0", "f1"])
    )
    assert [float(w) for w in widths] == [750.0, 250.0]


def test_names_are_escaped():
    hostile = "<script>alert('x')</script>\"&"
    for svg in (
        line_plot(hostile, [Series(hostile, [(1, 2.0)])]),
        stacked_bars(hostile, [1], {hostile: [1.0]}),
        share_bar(hostile, {hostile: 1.0}, ["f0"]),
    ):
        assert "script" not in {element.tag for element in parse(svg).iter()}
        assert parse(svg).get("aria-label").startswith(hostile)
