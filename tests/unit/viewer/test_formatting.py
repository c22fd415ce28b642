from lightrft.viewer.plots import compact, count, percent, seconds


def test_numbers_are_short():
    values = (0, 0.5, 0.00012, 1234, 12_400, 3_456_789, -0.25)
    short = ["0", "0.5", "0.00012", "1234", "12.4k", "3.46M", "-0.25"]
    assert [compact(value) for value in values] == short
    assert [percent(v) for v in (0.9731, 0.5, 0, 1)] == ["97.3%", "50%", "0%", "100%"]
    assert [count(v) for v in (0.4, 1385.2, 12_400)] == ["0", "1,385", "12.4k"]
    assert [seconds(v) for v in (0.125, 3)] == ["0.125 s", "3 s"]


def test_a_number_just_under_a_unit_is_written_in_it():
    assert [compact(v) for v in (999_499, 999_500, 999_499_999, 999_500_000)] == [
        "999k",
        "1M",
        "999M",
        "1G",
    ]
