"""The host's state of growing responses, and the experts of their tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrft.engines import sampling as draws
from lightrft.engines.fingerprint import INTEGERS
from lightrft.types import ExpertChoices, Prompt, Request


@dataclass(slots=True, eq=False)
class PromptRequests:
    """The requests of one prompt. ``logits [V]`` of its first response token are kept while some
    requests wait.

    The last ``begun`` tokens of ``prompt`` are a response that is resumed. Placeholders among its
    last ``plain`` tokens stand for no media.
    """

    prompt: Prompt
    # 0 for a prompt without a response
    begun: int = 0
    plain: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    rows: int = 0
    # the session's handle, -1 until the prompt is computed
    handle: int = -1
    logits: Tensor | None = None


class CacheShape(NamedTuple):
    """Shape of the cache. Prompts are padded to the longest prompt, responses to the longest
    response."""

    prompts: int
    prompt_tokens: int
    rows: int
    answer_tokens: int


@dataclass(slots=True)
class GrowingExperts:
    """The experts of a prompt, and of the tokens of its response that were fed to the model.

    Attributes:
        prompt: ``[T, layers, k]``, of the prompt.
        tokens: ``[layers, k]`` of each token of the response.
    """

    prompt: Tensor
    tokens: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(request: Request, prefill: Tensor) -> GrowingExperts:
        """Return the experts of a new row.

        A resumed response keeps the experts that it was sampled with. Only its last token gets the
        experts of the prefill, since it was not fed to the model before.

        Args:
            request: The request.
            prefill: ``[T, layers, k]``, of the prompt and the tokens of a resumed response.
        """
        begun = request.num_generated
        if not begun:
            return GrowingExperts(prefill)
        prompt, resumed = prefill[:-begun], prefill[-begun:]
        earlier = None if request.partial is None else request.partial.experts
        if earlier is not None:
            prompt = earlier.prompt
            resumed = torch.cat([earlier.response[:-1], resumed[-1:]])
        return GrowingExperts(prompt, list(resumed.unbind()))

    def choices(self, length: int) -> ExpertChoices:
        """Return the experts of a response of ``length`` tokens; -1 for tokens that were not
        fed."""
        # a response may end before the last of several tokens that were fed in one step
        kept = self.tokens[: length - 1]
        with torch.inference_mode(False):
            missing = torch.full((length - len(kept), *self.prompt.shape[1:]), -1)
            fed = torch.stack(kept) if kept else self.prompt[:0]
            return ExpertChoices(self.prompt, torch.cat([fed, missing.to(fed.dtype)]))


@dataclass(slots=True)
class GrowingRows:
    """The host's state of growing responses, by row."""

    requests: list[Request] = field(default_factory=list)
    groups: list[PromptRequests] = field(default_factory=list)
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    greedy: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    limits: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # number of response tokens so far; it also counts the tokens of a resumed response
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    # of each row, the experts of its tokens; empty if they are not recorded
    experts: list[GrowingExperts] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def append(
        self, requests: list[Request], groups: list[PromptRequests], limits: list[int]
    ) -> None:
        first = len(self)
        self.requests += requests
        self.groups += groups
        self.keys = np.concatenate([self.keys, draws.seed_keys([r.seed for r in requests])])
        self.greedy = np.concatenate(
            [self.greedy, np.array([r.greedy for r in requests], dtype=bool)]
        )
        self.limits = np.concatenate([self.limits, np.array(limits, dtype=np.int64)])
        held = np.array([r.num_generated for r in requests], dtype=np.int64)
        self.steps = np.concatenate([self.steps, held])
        self._resize(len(self), max(self.tokens.shape[1], int(held.max(initial=0))))
        for row, request in enumerate(requests, start=first):
            if request.partial is not None:
                count = request.num_generated
                self.tokens[row, :count] = request.partial.token_ids
                self.logprobs[row, :count] = request.partial.logprobs
                self.versions[row, :count] = request.partial.versions

    def record(
        self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int
    ) -> None:
        """Append one token to each of ``rows [n]``.

        Args:
            rows: ``[n]``. Indices of the rows.
            tokens: ``[n]``.
            logprobs: ``[n]``.
            version: Version of the policy.
        """
        if int(self.steps[rows].max()) >= self.tokens.shape[1]:
            # doubling keeps the total cost of copies linear in the length of the responses
            self._resize(len(self), max(64, 2 * self.tokens.shape[1]))
        at = rows, self.steps[rows]
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version
        self.steps[rows] += 1

    def evict(self, moves: list[tuple[int, int]], rows: int) -> None:
        for dst, src in moves:
            self.requests[dst], self.groups[dst] = self.requests[src], self.groups[src]
            self.experts[dst : dst + 1] = self.experts[src : src + 1]
        del self.requests[rows:], self.groups[rows:], self.experts[rows:]
        to = [dst for dst, _ in moves]
        of = [src for _, src in moves]
        for name in ("keys", "greedy", "limits", "steps", "tokens", "logprobs", "versions"):
            column = getattr(self, name)
            column[to] = column[of]
            setattr(self, name, column[:rows])

    def _resize(self, rows: int, columns: int) -> None:
        for name in ("tokens", "logprobs", "versions"):
            old = getattr(self, name)
            new = np.zeros((rows, columns), dtype=old.dtype)
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)


def to_host(tokens: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Copy ``tokens [R]`` and ``logprobs [R]`` to the host in one transfer, since each transfer
    waits for the device."""
    bits = logprobs.view(INTEGERS[logprobs.element_size()])
    both = torch.stack([tokens, bits.long()]).cpu()
    return both[0].numpy(), both[1].to(bits.dtype).view(logprobs.dtype).numpy()
