"""Metrics with exact, order-independent reduction.

The reported value does not depend on the split into micro-batches or ranks, nor on their order. A
part is a number or a tensor of one element. ``Metrics.compute`` reads all tensors in one transfer
per device. Adding a metric therefore never waits for an accelerator. Sums are correctly rounded
(Shewchuk 1997, through ``math.fsum``), which makes them independent of order.
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
"""A number or a tensor of one element."""


class Metric(ABC):
    """A partial result that can be merged with others of the same kind.

    ``compute`` returns None if nothing was counted.
    """

    __slots__ = ("columns",)

    def __init__(self, *columns: list[Part]) -> None:
        self.columns = columns

    def merge(self, other: Self) -> None:
        """Add the parts of ``other``. Raises ``TypeError`` if it is another kind of metric."""
        if type(other) is not type(self):
            raise TypeError(
                f"a {type(self).__name__} and a {type(other).__name__} cannot be merged"
            )
        for mine, theirs in zip(self.columns, other.columns, strict=True):
            mine.extend(theirs)

    def copy(self) -> Self:
        """Return a metric with the same parts, which can be merged independently."""
        # Without ``__init__``, whose arguments differ from class to class.
        twin = object.__new__(type(self))
        twin.columns = tuple(list(column) for column in self.columns)
        return twin

    def compute(self) -> float | None:
        """Return the reduced value. Tensors are copied to the host."""
        _read([self])
        return self._reduce()

    @abstractmethod
    def _reduce(self) -> float | None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}{tuple(self.columns)}"


class Mean(Metric):
    """The ratio ``sum / count``, where both are added over all parts.

    A token mean is ``Mean(losses.sum(), losses.numel())``.
    """

    __slots__ = ()

    def __init__(self, sum: Part, count: Part = 1) -> None:
        super().__init__([_detached(sum)], [_detached(count)])

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Mean:
        """Return the mean of ``values [N]`` where ``mask [N]`` is true.

        The sum is computed in float64 if the device supports it.

        Args:
            values: the values ``[N]``. Masked values may be nan or infinite.
            mask: the mask ``[N]``. None selects all values.
        """
        values = values.detach()
        wide = values if values.device.type == "mps" else values.double()
        if mask is None:
            return cls(wide.sum(), wide.numel())
        # where() and not a product, because nan * 0 is nan
        return cls(wide.where(mask.bool(), wide.new_zeros(())).sum(), mask.bool().sum())

    def _reduce(self) -> float | None:
        total, count = (exact_sum(column) for column in self.columns)
        return total / count if count else None


class Sum(Metric):
    """The sum of all parts."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        return exact_sum(self.columns[0])


class Max(Metric):
    """The largest part. If a part is nan, the result is nan."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        return max(self.columns[0], key=lambda v: (math.isnan(v), v))


class Min(Metric):
    """The smallest part. If a part is nan, the result is nan."""

    __slots__ = ()

    def __init__(self, value: Part) -> None:
        super().__init__([_detached(value)])

    def _reduce(self) -> float:
        # nan compares as neither smaller nor larger, so ``min`` alone would depend on the order.
        return min(self.columns[0], key=lambda v: (not math.isnan(v), v))


class Last(Metric):
    """The part with the largest ``at``, e.g. an update number.

    Among equal ``at``, the part that was merged last is used.
    """

    __slots__ = ()

    def __init__(self, value: Part, at: float = 0) -> None:
        super().__init__([_detached(value)], [at])

    def _reduce(self) -> float:
        values, at = self.columns
        newest = max(range(len(at)), key=lambda i: (at[i], i))
        return values[newest]


class Metrics:
    """A table from name to metric."""

    __slots__ = ("_by_name",)

    def __init__(self, values: Mapping[str, Metric] | None = None) -> None:
        self._by_name: dict[str, Metric] = {}
        for name, metric in (values or {}).items():
            self.add(name, metric)

    def add(self, name: str, metric: Metric) -> None:
        """Merge ``metric`` into the metric called ``name``.

        Raises ``TypeError`` if the existing metric is of another kind.
        """
        if name not in self._by_name:
            self._by_name[name] = metric.copy()
            return
        try:
            self._by_name[name].merge(metric)
        except TypeError as error:
            raise TypeError(f"metric {name!r}: {error}") from None

    def merge(self, other: Metrics) -> None:
        """Add the parts of ``other``, e.g. of another micro-batch or rank."""
        for name, metric in other._by_name.items():
            self.add(name, metric)

    def compute(self) -> dict[str, float]:
        """Return every value, in the order in which the names were first added.

        Makes one transfer per device. Metrics without a value, e.g. a mean with count 0, are left
        out.
        """
        _read(self._by_name.values())
        # ``_read`` has replaced all tensors. One ``compute`` per metric would wait for each.
        reduced = {name: metric._reduce() for name, metric in self._by_name.items()}
        return {name: float(value) for name, value in reduced.items() if value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, independent of order.

    Infinities of both signs give nan.
    """
    values = list(values)
    # ``math.fsum`` raises for infinities of both signs. ``sum`` gives nan for them.
    special = [value for value in values if not math.isfinite(value)]
    if special:
        return sum(special)
    try:
        return math.fsum(values)
    except OverflowError:
        # An intermediate sum overflowed, which depends on the order. Fractions do not overflow.
        total = sum(map(Fraction, values), Fraction())
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def _detached(part: Part) -> Part:
    # A metric must not keep the graph of a loss alive until the end of the step.
    return part if isinstance(part, int | float) else part.detach()


def _read(metrics: Iterable[Metric]) -> None:
    """Replace every tensor by a number, with one transfer per device."""
    by_device: dict[torch.device, list[tuple[list[Part], int]]] = {}
    for metric in metrics:
        for column in metric.columns:
            for i, part in enumerate(column):
                if not isinstance(part, int | float):
                    by_device.setdefault(part.device, []).append((column, i))
    if not by_device:
        return
    # Imported here: reports read metrics without torch, which takes seconds to import.
    import torch

    for device, group in by_device.items():
        # float64 holds every number of a narrower type exactly. MPS does not have it.
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.stack([column[i].reshape(()).to(wide) for column, i in group]).tolist()
        for (column, i), number in zip(group, numbers, strict=True):
            column[i] = number
