"""Values that know how to reduce themselves, so that no split into micro-batches, ranks or orders changes a reported number.

A part may be a number or a tensor of one element. Tensors are kept as they are, and read in one transfer per device when
``Metrics.compute`` is called: adding a metric never waits for an accelerator. Sums are exact (correctly rounded, Shewchuk 1997,
through ``math.fsum``), which is what makes them independent of order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor

Part = Any
"""A number, or a tensor of one element."""


class Metric(ABC):
    """A partial result. ``merge`` takes another of the same kind in; ``compute`` is ``None`` when nothing was counted."""

    __slots__ = ("columns",)

    def __init__(self, *columns: list[Part]) -> None:
        self.columns = columns

    def merge(self, other: Self) -> None:
        """Take the parts of ``other`` in. Raises ``TypeError`` for another kind of metric."""
        if type(other) is not type(self):
            raise TypeError(f"a {type(self).__name__} and a {type(other).__name__} cannot be merged")
        for mine, theirs in zip(self.columns, other.columns, strict=True):
            mine.extend(theirs)

    def copy(self) -> Self:
        """Another metric with the same parts."""
        twin = object.__new__(type(self))
        twin.columns = tuple(list(column) for column in self.columns)
        return twin

    def compute(self) -> float | None:
        """The reduced value; reads tensors."""
        _read([self])
        return self._reduce()

    @abstractmethod
    def _reduce(self) -> float | None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self.columns)}"


class Mean(Metric):
    """``sum / count``, each added over all parts: a token mean is ``Mean(losses.sum(), losses.numel())``."""

    __slots__ = ()

    def __init__(self, sum: Part, count: Part = 1) -> None:
        super().__init__([_detached(sum)], [_detached(count)])

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Mean:
        """The mean of ``values [N]`` where ``mask [N]`` is true; what is masked out may be anything.

        Summed in float64 where the device has it."""
        values = values.detach()
        wide = values if values.device.type == "mps" else values.double()
        if mask is None:
            return cls(wide.sum(), wide.numel())
        return cls(wide.where(mask.bool(), wide.new_zeros(())).sum(), mask.bool().sum())

    def _reduce(self) -> float | None:
        total, count = (exact_sum(column) for column in self.columns)
        return total / count if count else None


class Sum(Metric):
    """Parts added up."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        return exact_sum(self.columns[0])


class Max(Metric):
    """The largest part; a part that is not a number wins, wherever it stands."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        return max(self.columns[0], key=_nan_last)


class Min(Metric):
    """The smallest part; a part that is not a number wins, wherever it stands."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        return min(self.columns[0], key=lambda v: (not math.isnan(v), v))


class Last(Metric):
    """The part with the largest ``at`` (an update number, say); between equals the one that was merged in last."""

    __slots__ = ()

    def __init__(self, value: Part, at: float = 0) -> None:
        super().__init__([_detached(value)], [at])

    def _reduce(self) -> float:
        values, at = self.columns
        newest = max(range(len(at)), key=lambda i: (at[i], i))
        return values[newest]


class Metrics:
    """Metrics by name."""

    __slots__ = ("_by_name",)

    def __init__(self, values: Mapping[str, Metric] | None = None) -> None:
        self._by_name: dict[str, Metric] = {}
        for name, metric in (values or {}).items():
            self.add(name, metric)

    def add(self, name: str, metric: Metric) -> None:
        """Merge ``metric`` into the one called ``name``. Raises ``TypeError`` when that one is of another kind."""
        if name not in self._by_name:
            self._by_name[name] = metric.copy()
            return
        try:
            self._by_name[name].merge(metric)
        except TypeError as error:
            raise TypeError(f"metric {name!r}: {error}") from None

    def merge(self, other: Metrics) -> None:
        """Take in the parts of ``other``: another micro-batch, or another rank."""
        for name, metric in other._by_name.items():
            self.add(name, metric)

    def compute(self) -> dict[str, float]:
        """Every value, in the order in which names were first added, with one transfer per device. Empty means are left out."""
        _read(self._by_name.values())
        reduced = {name: metric._reduce() for name, metric in self._by_name.items()}
        return {name: float(value) for name, value in reduced.items() if value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def exact_sum(values: Iterable[float]) -> float:
    """The correctly rounded sum, whatever the order; infinities of both signs give nan."""
    values = list(values)
    special = [v for v in values if not math.isfinite(v)]
    if special:
        return math.nan if any(math.isnan(v) for v in special) or len(set(special)) > 1 else special[0]
    try:
        return math.fsum(values)
    except OverflowError:  # an intermediate sum left the range; whether one does depends on the order
        total = sum(map(Fraction, values), Fraction())
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def _detached(part: Part) -> Part:
    return part if isinstance(part, int | float) else part.detach()


def _nan_last(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _read(metrics: Iterable[Metric]) -> None:
    """Replace every tensor by its number, with one transfer per device."""
    places = [
        (column, i) for m in metrics for column in m.columns for i, v in enumerate(column) if not isinstance(v, int | float)
    ]
    if not places:
        return
    import torch

    by_device: dict[torch.device, list[tuple[list[Part], int]]] = {}
    for column, i in places:
        by_device.setdefault(column[i].device, []).append((column, i))
    for device, group in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.stack([column[i].reshape(()).to(wide) for column, i in group]).tolist()
        for (column, i), number in zip(group, numbers, strict=True):
            column[i] = number
