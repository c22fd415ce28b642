"""The constraints of growing responses, and the tokens that they allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.engines.constrained.grammars import (
    GrammarCompiler,
    MatchedRow,
    Matcher,
    constraint_of,
    request_constraint,
)
from lightrft.types import Request, Rollout
from lightrft.utils.device_transfer import to_device
from lightrft.utils.errors import ConfigError, ModelError

_BITS = 8


class ConstrainedRows:
    """The matcher of each growing response. A row without a constraint has none.

    Args:
        compiler: Returns the compiler of constraints, once it is needed.
        sampling: The sampling settings.
        ends: ``[E]``. Token ids that end a response.
    """

    def __init__(
        self, compiler: Callable[[], GrammarCompiler], sampling: SamplingConfig, ends: np.ndarray
    ) -> None:
        self._compiler, self._sampling = compiler, sampling
        self._ends = torch.from_numpy(ends)
        self._matchers: list[Matcher | None] = []
        self._names: list[str] = []

    def append(self, requests: Sequence[Request]) -> None:
        """Append a row for each request. A partial response must match its constraint so far.

        Raises:
            ConfigError: A constraint is malformed, or a partial response does not match it.
        """
        for request in requests:
            constraint = request_constraint(request, self._sampling)
            matcher = None if constraint is None else self._compiler().matcher(constraint)
            begun = [] if request.partial is None else request.partial.token_ids
            if matcher is not None and begun and not matcher.consume(begun):
                raise ConfigError(
                    f"the response to prompt {request.prompt.id!r} holds tokens that its "
                    "constraint does not allow; continue it by the settings it began with"
                )
            self._matchers.append(matcher)
            self._names.append(request.prompt.id)

    def accepted(self, row: int, drafts: Sequence[int]) -> int:
        """Return the number of first tokens of ``drafts`` that row ``row`` allows."""
        matcher = self._matchers[row]
        return len(drafts) if matcher is None else matcher.accepts(drafts)

    def allowed(
        self, vocabulary: int, device: torch.device, drafts: Sequence[Sequence[int]] = ()
    ) -> Tensor | None:
        """Return ``[T, V]`` bool, the tokens that each row of logits allows.

        Returns ``None`` if no row has a constraint.

        Args:
            vocabulary: Number of logits V.
            device: Device of the result.
            drafts: Drafted tokens of each response. Its first row of logits is before them, and one
                row follows each of them. Empty for one row of logits per response.
        """
        if all(matcher is None for matcher in self._matchers):
            return None
        counts = [1 + len(draft) for draft in drafts] or [1] * len(self._matchers)
        starts = np.cumsum(counts) - counts
        rows: list[MatchedRow] = []
        for row, matcher in enumerate(self._matchers):
            if matcher is not None:
                rows.append(MatchedRow(matcher, int(starts[row]), drafts[row] if drafts else ()))
        compiler = self._compiler()
        bits = compiler.bits(rows, sum(counts))
        self._refuse_dead_ends(bits, np.repeat(np.arange(len(counts)), counts))
        free = np.repeat([matcher is None for matcher in self._matchers], counts)
        return unpacked(bits, free, vocabulary, compiler.end, self._ends, device)

    def consume(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Append the sampled tokens of each row."""
        for matcher, own in zip(self._matchers, token_ids, strict=True):
            if matcher is not None:
                # another end token than the matcher's fails, and its row is finished
                matcher.consume(own)

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        for dst, src in moves:
            self._matchers[dst], self._names[dst] = self._matchers[src], self._names[src]
        del self._matchers[rows:], self._names[rows:]

    def _refuse_dead_ends(self, bits: np.ndarray, row_of: np.ndarray) -> None:
        stuck = {int(row_of[at]): "" for at in np.flatnonzero(~bits.any(axis=1))}
        for row, matcher in enumerate(self._matchers):
            if matcher is not None and matcher.error:
                stuck[row] = f": {matcher.error}"
        for row, reason in stuck.items():
            raise ModelError(
                f"no token of the vocabulary continues the response to prompt "
                f"{self._names[row]!r} as its constraint asks{reason}; change the constraint"
            )


def unpacked(
    bits: np.ndarray,
    free: np.ndarray,
    vocabulary: int,
    end: int,
    ends: Tensor,
    device: torch.device,
) -> Tensor:
    """Return ``[T, V]`` bool, the tokens that may be sampled.

    Args:
        bits: ``[T, W]`` int32, a bit for each token.
        free: ``[T]`` bool. Every token is allowed.
        vocabulary: Number of tokens V. Further ones than those of ``bits`` are not allowed.
        end: Token whose bit is 1 where a response may end.
        ends: ``[E]``. Tokens that may end a response there.
        device: Device of the result.
    """
    # packed, since a copy to a device costs more than the rest
    packed = to_device(torch.from_numpy(bits.view(np.uint8)), device)
    shifts = torch.arange(_BITS, device=device, dtype=torch.uint8)
    known = ((packed[:, :, None] >> shifts) & 1).flatten(1).bool()
    anything = to_device(torch.from_numpy(free), device)[:, None]
    allowed = anything.expand(-1, vocabulary).clone()
    allowed[:, : known.shape[1]] |= known[:, :vocabulary]
    at = to_device(ends[ends < vocabulary], device)
    allowed[:, at] |= known[:, end : end + 1]
    return allowed


class ConstrainedTokens:
    """The tokens that constraints allowed at places of finished responses.

    Args:
        compiler: Compiles the constraints.
        rollouts: The responses.
        sampling: The sampling settings that they were generated by.
        ends: ``[E]``. Token ids that end a response.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        rollouts: Sequence[Rollout],
        sampling: SamplingConfig,
        ends: np.ndarray,
    ) -> None:
        self._compiler, self._rollouts, self._sampling = compiler, rollouts, sampling
        self._ends = ends

    def at(self, rows: Sequence[int], steps: Sequence[int], vocabulary: int) -> Tensor:
        """Return ``[n, V]`` bool, the tokens allowed at each place, on the CPU.

        Args:
            rows: ``[n]``. Response of each place.
            steps: ``[n]``. Number of response tokens before each place.
            vocabulary: Number of logits V.
        """
        matchers: list[Matcher | None] = []
        for row, step in zip(rows, steps, strict=True):
            rollout = self._rollouts[row]
            constraint = constraint_of(rollout.prompt, self._sampling)
            matcher = None if constraint is None else self._compiler.matcher(constraint)
            if matcher is not None and step:
                matcher.consume(rollout.token_ids[:step])
            matchers.append(matcher)
        matched = [MatchedRow(m, k) for k, m in enumerate(matchers) if m is not None]
        bits = self._compiler.bits(matched, len(matchers))
        free = np.array([matcher is None for matcher in matchers])
        ends, cpu = torch.from_numpy(self._ends), torch.device("cpu")
        return unpacked(bits, free, vocabulary, self._compiler.end, ends, cpu)
