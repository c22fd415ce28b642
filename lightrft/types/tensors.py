"""Tensors of rows of different lengths, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.utils.device_transfer import to_device
from lightrft.utils.lazy_imports import Tensor, torch


@dataclass(slots=True)
class Ragged:
    """Rows of variable length per sample, concatenated.

    Attributes:
        values: ``[N, ...]``. The rows of all samples.
        lengths: ``[B]``. The number of rows of each sample; 0 for a sample without this input.
    """

    values: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def select(self, index: Tensor) -> Ragged:
        """Return the samples ``index [K]``, in this order.

        If ``index`` selects all samples in their order, return this object, since rows may be
        large.
        """
        # The lengths first: a comparison of values would wait for the device each time.
        if index.numel() == len(self):
            everything = torch.arange(len(self), device=index.device)
            if torch.equal(index, everything):
                return self
        return Ragged(self.values[rows_of(self.lengths, index)], self.lengths[index])

    def to(self, device: torch.device | str) -> Ragged:
        """Return the same data on ``device``; tensors already there are shared."""
        return Ragged(to_device(self.values, device), to_device(self.lengths, device))

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the samples of ``parts``."""
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))


Media = dict[str, Ragged]
"""Rows of each model input, by input name, over the samples of a ``Segments``.

Only the models read them.
"""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The values of an integer tensor on the host, for code that must not wait for the device.

    Attributes:
        of_tensor: The tensor.
        numbers: Its values.
    """

    of_tensor: Tensor
    numbers: list[int]

    @staticmethod
    def of(tensor: Tensor, known: HostCopy | None) -> HostCopy:
        """Return ``known`` if it is a copy of this very ``tensor``, else read the tensor."""
        if known is not None and known.of_tensor is tensor:
            return known
        return HostCopy(tensor, tensor.tolist())

    @staticmethod
    def moved(tensor: Tensor, known: HostCopy | None, to: Tensor) -> HostCopy | None:
        """Return the copy for ``to``, which has the same values on another device.

        Returns ``None`` if the values are unknown without waiting for the device.

        Args:
            tensor: The tensor before the move.
            known: A copy, possibly of another tensor.
            to: The tensor after the move.
        """
        if tensor.device.type != "cpu" and (known is None or known.of_tensor is not tensor):
            return None
        return HostCopy(to, HostCopy.of(tensor, known).numbers)


def rows_of(lengths: Tensor, index: Tensor) -> Tensor:
    """Return the flat indices of some runs, run after run.

    ``lengths [B]`` are the lengths of all runs of a flat array; ``index [K]`` selects runs.
    """
    starts = torch.cumsum(lengths, 0) - lengths
    kept = lengths[index]
    ends = torch.cumsum(kept, 0)
    # Read once: without ``output_size``, ``repeat_interleave`` would wait for the device again.
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(starts[index] - (ends - kept), kept, output_size=total)
    return torch.arange(total, device=lengths.device) + shift
