"""From a batch to optimizer steps (mini-batches) and to forwards (micro-batches). Any size splits; nothing has to divide."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrft.types import Batch


def mini_batches(batch: Batch, count: int, generator: torch.Generator) -> list[Tensor]:
    """Index tensors of ``count`` parts of nearly equal size, in a random order that ``generator`` decides.

    Whole groups stay together, so that their prompts are computed once, unless there are fewer groups than parts.
    """
    if count == 1:
        return [torch.arange(len(batch))]
    if len(batch.prompts) < count:
        return [part.sort().values for part in torch.randperm(len(batch), generator=generator).tensor_split(count) if len(part)]
    parts = torch.randperm(len(batch.prompts), generator=generator).tensor_split(count)
    of = batch.prompt_of.cpu()
    return [index for part in parts if len(index := torch.isin(of, part).nonzero()[:, 0])]


def micro_batches(batch: Batch, budget: int, layout: str) -> list[Tensor]:
    """Index tensors whose forwards see at most ``budget`` tokens each in ``layout``; a single longer answer goes alone.

    Longest groups first, each into the first part with room (first fit decreasing). A group that does not fit is cut.
    """
    prompt_length = batch.prompts.lengths.tolist()
    answer_length = batch.lengths.tolist()
    members: dict[int, list[int]] = {}
    for i, p in enumerate(batch.prompt_of.tolist()):
        members.setdefault(p, []).append(i)

    def cost(prompt: int, rows: list[int]) -> int:
        answers = [answer_length[i] for i in rows]
        if layout == "prefix_shared":
            return prompt_length[prompt] + sum(answers)
        if layout == "padded":
            return len(rows) * (prompt_length[prompt] + max(answers))
        return len(rows) * prompt_length[prompt] + sum(answers)

    pieces: list[tuple[int, int, list[int]]] = []  # cost, longest row, rows
    for prompt, rows in members.items():
        piece: list[int] = []
        for i in sorted(rows, key=lambda i: (-answer_length[i], i)):
            if piece and cost(prompt, [*piece, i]) > budget:
                pieces.append((cost(prompt, piece), prompt_length[prompt] + answer_length[piece[0]], piece))
                piece = []
            piece.append(i)
        pieces.append((cost(prompt, piece), prompt_length[prompt] + answer_length[piece[0]], piece))

    bins: list[tuple[int, int, list[int]]] = []
    for tokens, longest, rows in sorted(pieces, key=lambda p: (-p[1], -p[0], p[2][0])):
        for b, (used, widest, inside) in enumerate(bins):
            wide = max(widest, longest)
            total = wide * (len(inside) + len(rows)) if layout == "padded" else used + tokens
            if total <= budget:
                bins[b] = (used + tokens, wide, inside + rows)
                break
        else:
            bins.append((tokens, longest, rows))
    return [torch.tensor(rows, dtype=torch.long) for _, _, rows in bins]
