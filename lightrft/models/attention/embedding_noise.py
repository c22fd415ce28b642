"""Uniform noise on token embeddings in training (NEFTune, arXiv 2310.05914).

The noise of a row depends on its seed and its length alone. It is the same in every layout, in any
split into micro-batches, and on any number of ranks with devices of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.types import Batch
from lightrft.utils.seeding import torch_generator


@dataclass(frozen=True, slots=True)
class EmbeddingNoise:
    """The noise of a batch of rows: a prompt with its only response each.

    Attributes:
        alpha: ``[B]`` size of the noise.
        seeds: Seed of each row.
        prompts: Length of each prompt.
        responses: Length of each response.
        prompt_of: Index of the prompt of each response.
    """

    alpha: Tensor
    seeds: Sequence[int]
    prompts: Sequence[int]
    responses: Sequence[int]
    prompt_of: Sequence[int]

    @staticmethod
    def of(batch: Batch) -> EmbeddingNoise | None:
        """Return the noise of ``batch``; ``None`` if it has none.

        Raises:
            ValueError: Responses share a prompt, which would need several noises at once.
        """
        if batch.noise_seeds is None or batch.noise_alpha is None or not len(batch):
            return None
        if sorted(batch.groups) != list(range(len(batch.prompts))):
            raise ValueError("noise on embeddings needs a prompt for each response")
        seeds = batch.noise_seeds.tolist()
        lengths = batch.prompts.sizes, batch.responses.sizes
        return EmbeddingNoise(batch.noise_alpha, seeds, *lengths, batch.groups)

    def values(self, width: int) -> Tensor:
        """Return the noise ``[N, width]`` of the prompts' tokens followed by the responses'.

        An entry is uniform in ``[-a, a]`` with ``a = alpha / sqrt(tokens of the row * width)``, as
        in the authors' script.
        """
        device = self.alpha.device
        asked: dict[int, Tensor] = {}
        said: list[Tensor] = []
        for row, p in enumerate(self.prompt_of):
            lengths = [self.prompts[p], self.responses[row]]
            generator = torch_generator(self.seeds[row], device)
            uniform = torch.rand(sum(lengths), width, generator=generator, device=device)
            scale = self.alpha[row] / math.sqrt(sum(lengths) * width)
            prompt, response = (scale * (2 * uniform - 1)).split(lengths)
            asked[p] = prompt
            said.append(response)
        return torch.cat([*(asked[p] for p in sorted(asked)), *said])


@contextmanager
def noisy_embeddings(
    model: PreTrainedModel, noise: EmbeddingNoise | None, source: Tensor
) -> Generator[None, None, None]:
    """Add ``noise`` to the token embeddings inside the context. Features of media get none.

    Args:
        model: The transformers model.
        noise: The noise of the batch. ``None`` adds none.
        source: ``[S * T]`` index of each token of the call among the prompts' tokens followed by
            the responses', -1 for padding.
    """
    if noise is None:
        yield
        return

    def add(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        values = noise.values(out.shape[-1])[source.clamp(min=0)]
        values = values.masked_fill((source < 0)[:, None], 0.0)
        return out + values.view_as(out).to(out.dtype)

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
