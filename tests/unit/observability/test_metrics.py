import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrft.observability.metrics import Last, Max, Mean, Metrics, Min, Sum, exact_sum

numbers = st.floats(allow_nan=False, allow_infinity=False)
rows = st.lists(st.tuples(numbers, st.integers(0, 5)), min_size=1, max_size=30)


def split(items, seed):
    """A random partition of ``items`` into micro-batches, in random order."""
    rng = random.Random(seed)
    items = list(items)
    rng.shuffle(items)
    parts = []
    while items:
        size = rng.randint(1, len(items))
        parts.append(items[:size])
        items = items[size:]
    return parts


def gather(parts):
    """Each part as a micro-batch's metrics, merged in a tree of random shape."""
    collected = []
    for part in parts:
        metrics = Metrics()
        for value, count in part:
            metrics.add("mean", Mean(value, count))
            metrics.add("sum", Sum(value))
            metrics.add("max", Max(value))
            metrics.add("min", Min(value))
        collected.append(metrics)
    rng = random.Random(len(parts))
    while len(collected) > 1:
        a, b = (
            collected.pop(rng.randrange(len(collected))),
            collected.pop(rng.randrange(len(collected))),
        )
        a.merge(b)
        collected.append(a)
    return collected[0].compute()


@given(rows, st.integers(0, 99), st.integers(0, 99))
def test_every_partition_and_order_gives_the_same_bits(rows, one, other):
    assert gather(split(rows, one)) == gather(split(rows, other))


@given(rows, st.integers(0, 99))
def test_values_equal_exact_arithmetic(rows, seed):
    got = gather(split(rows, seed))
    total = sum((Fraction(v) for v, _ in rows), Fraction())
    count = sum(c for _, c in rows)
    try:
        expected = float(total)
    except OverflowError:
        expected = math.inf if total > 0 else -math.inf
    assert got["sum"] == expected
    assert got["max"] == max(v for v, _ in rows)
    assert got["min"] == min(v for v, _ in rows)
    assert got["mean"] == expected / count if count else "mean" not in got


@given(st.lists(st.floats(), max_size=8), st.randoms())
def test_sums_of_any_floats_do_not_depend_on_order(values, rng):
    shuffled = list(values)
    rng.shuffle(shuffled)
    one, other = exact_sum(values), exact_sum(shuffled)
    assert one == other or (math.isnan(one) and math.isnan(other))


def test_a_token_mean_is_not_the_mean_of_micro_batch_means():
    metrics = Metrics({"loss": Mean.of(torch.tensor([1.0, 1.0, 1.0]))})
    metrics.merge(Metrics({"loss": Mean.of(torch.tensor([5.0]))}))
    assert metrics.compute() == {"loss": 2.0}


def test_masked_values_do_not_count_even_when_they_are_not_numbers():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    assert Mean.of(values, torch.tensor([True, False, True, False])).compute() == 2.0


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(0, 40))
def test_tensor_means_hardly_feel_a_split(values, cut):
    tensor = torch.tensor(values)
    whole, parts = Mean.of(tensor), Mean.of(tensor[:cut])
    parts.merge(Mean.of(tensor[cut:]))
    assert parts.compute() == pytest.approx(whole.compute(), rel=1e-12, abs=1e-12)


def test_not_a_number_is_never_hidden_by_an_extreme():
    for order in ([1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]):
        for kind in (Max, Min):
            metric = kind(order[0])
            for value in order[1:]:
                metric.merge(kind(value))
            assert math.isnan(metric.compute())


def test_last_takes_the_newest_whatever_the_order():
    metric = Last(3.0, at=3)
    metric.merge(Last(9.0, at=9))
    metric.merge(Last(torch.tensor(5.0), at=5))
    assert metric.compute() == 9.0


def test_an_empty_mean_is_left_out():
    assert Metrics({"a": Mean(0.0, 0), "b": Sum(0.0)}).compute() == {"b": 0.0}


def test_kinds_do_not_mix():
    metrics = Metrics({"a": Sum(1.0)})
    with pytest.raises(TypeError, match="'a'"):
        metrics.add("a", Mean(1.0))


def test_merging_does_not_change_what_was_merged_in():
    part = Metrics({"a": Sum(1.0)})
    total = Metrics()
    total.merge(part)
    total.merge(part)
    assert (total.compute(), part.compute()) == ({"a": 2.0}, {"a": 1.0})


def test_tensors_are_read_once_and_only_on_compute(monkeypatch):
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or real(self))
    for name in ("item", "__float__", "__bool__"):
        monkeypatch.setattr(
            torch.Tensor, name, lambda self: pytest.fail("a metric waited for the device")
        )
    metrics = Metrics()
    for i in range(5):
        metrics.add("kl", Mean.of(torch.full((3,), float(i), requires_grad=True)))
        metrics.add("max", Max(torch.tensor(float(i))))
    assert not reads
    assert metrics.compute() == {"kl": 2.0, "max": 4.0}
    assert len(reads) == 1
