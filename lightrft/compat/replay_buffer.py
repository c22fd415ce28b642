"""LightRFT's replay buffers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from lightrft.compat.experience import (
    AnyExperience,
    Item,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from lightrft.utils.errors import ConfigError


class NaiveReplayBuffer:
    """A list of samples, from which batches are sampled.

    Args:
        sample_batch_size: Samples of a batch.
        limit: Most samples; the oldest ones go first. 0 or less sets no limit.
        cpu_offload: Keep samples in the memory of the CPU, and move batches to the accelerator.
        packing_samples: Samples come and go without padding.
    """

    def __init__(
        self,
        sample_batch_size: int,
        limit: int = 0,
        cpu_offload: bool = True,
        packing_samples: bool = False,
    ) -> None:
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.cpu_offload = cpu_offload
        self.packing_samples = packing_samples
        accelerator = torch.accelerator.current_accelerator()
        self.target_device = torch.device("cpu") if accelerator is None else accelerator
        self.items: list[Item] = []

    @torch.no_grad()
    def append(self, experience: AnyExperience) -> None:
        """Add the samples of a batch."""
        if self.cpu_offload:
            experience.to_device("cpu")
        items = split_experience_batch(experience)
        self.items += items if self.packing_samples else remove_padding_in_sequences(items)
        if self.limit > 0:
            self.items = self.items[-self.limit :]

    def clear(self) -> None:
        """Drop all samples."""
        self.items.clear()

    @torch.no_grad()
    def sample(self) -> AnyExperience:
        """Return a batch of different random samples.

        Raises ``ConfigError`` if the buffer has fewer than ``sample_batch_size``.
        """
        if len(self.items) < self.sample_batch_size:
            raise ConfigError(
                f"sample_batch_size = {self.sample_batch_size}, and the buffer has "
                f"{len(self.items)} samples; append more, or lower it"
            )
        experience = self.collate_fn(random.sample(self.items, self.sample_batch_size))
        return experience.to_device(self.target_device) if self.cpu_offload else experience

    def collate_fn(self, batch: Sequence[Item]) -> AnyExperience:
        """Return a batch of the samples ``batch``."""
        return make_experience_batch(batch, self.packing_samples)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    def normalize(self, attribute: str, strategy: Any) -> None:
        """Normalize the advantages of all samples on all ranks to mean 0 and deviation 1.

        Masked actions do not count. LightRFT counts them in the mean.

        Args:
            attribute: Must be ``advantages``.
            strategy: Has ``all_reduce(data, op)``, which sums over all ranks.

        Raises:
            ConfigError: ``attribute`` is another name.
        """
        if attribute != "advantages":
            raise ConfigError(f"attribute = {attribute!r}: only advantages are normalized")
        values, masks = [], []
        for item in self.items:
            row: Any = item.advantages
            mask = item.action_mask
            values.append(row.double())
            masks.append(torch.ones_like(row).bool() if mask is None else mask.bool())
        every, kept = torch.cat(values), torch.cat(masks)
        every = every.where(kept, 0.0)
        total, count = strategy.all_reduce(torch.stack([every.sum(), kept.sum().double()]), "sum")
        mean = total / count.clamp(min=1)
        squares = (every - mean).square().where(kept, 0.0).sum()
        variance = strategy.all_reduce(squares, "sum") / count.clamp(min=1)
        scale = variance.clamp(min=1e-8).rsqrt()
        for item, row in zip(self.items, values, strict=True):
            item.advantages = ((row - mean) * scale).float()


class NaiveReplayBufferVL(NaiveReplayBuffer):
    """``NaiveReplayBuffer`` of samples with media, under its other name."""
