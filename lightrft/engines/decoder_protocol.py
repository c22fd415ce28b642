"""The interface between the native engine and a policy that it samples from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lightrft.types import Prompt


class CompiledSteps(Protocol):
    """Counts of compiled decoding steps.

    Attributes:
        graphs: Number of compiled steps.
        seconds: Time that compiling them took, with the first run of each.
        steps: Number of steps that ran compiled.
        failures: Number of steps that could not be compiled.
        failure: Why the last of them could not. Empty if there are none.
    """

    graphs: int
    seconds: float
    steps: int
    failures: int
    failure: str


class ReadExperts(Protocol):
    """The experts of the last calls of a session, ``[T, layers, k]`` int16 on the host.

    Attributes:
        prompts: By the handle of a prompt, the experts of its tokens.
        rows: By row, the experts ``[layers, k]`` of the token of the last step.
        runs: Of each row, the experts ``[c, layers, k]`` of the tokens of the last ``feed``.
    """

    prompts: dict[int, Tensor]
    rows: dict[int, Tensor]
    runs: list[Tensor]


class DecodeSession(Protocol):
    """A key-value cache over the policy: prompts by handle, responses in rows ``0 .. len - 1``.

    Attributes:
        experts: The experts of the last calls. ``None`` if they are not recorded.
    """

    @property
    def experts(self) -> ReadExperts | None: ...

    def tokens(self, prompts: int, prompt_tokens: int, rows: int, answer_tokens: int, /) -> int:
        """Return the number of tokens whose memory a cache of these shapes takes.

        Args:
            prompts: Number of prompts.
            prompt_tokens: Tokens of the longest prompt.
            rows: Number of responses that grow.
            answer_tokens: Tokens that the longest response may reach.
        """
        ...

    def reserve(
        self, prompts: int, prompt_tokens: int, rows: int, answer_tokens: int, budget: int, /
    ) -> None: ...

    def prefill(
        self,
        prompts: Sequence[Prompt],
        begun: Sequence[int] = (),
    ) -> tuple[list[int], Tensor]:
        """Compute prompts.

        Return a handle for each, and the logits ``[P, V]`` of the first response tokens.

        The last ``begun[p]`` tokens of prompt ``p`` are a response that is resumed.
        """
        ...

    def admit(self, handles: Sequence[int], sealed: Sequence[int] = ()) -> None:
        """Append one row with an empty response for each handle.

        Prompts in ``sealed`` get no further rows.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens [R]``, the last token of each row.

        Return the logits ``[R, V]`` of the next.
        """
        ...

    def evict(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """Move row ``src`` to ``dst`` for each ``(dst, src)``, then keep the first ``rows``."""
        ...

    def release(self, handle: int) -> None: ...


@runtime_checkable
class RollbackSession(DecodeSession, Protocol):
    """A session that can feed several tokens of a row at once, and remove them again."""

    def feed(self, tokens: Tensor, counts: np.ndarray) -> Tensor:
        """Feed ``tokens [T]``: the next ``counts [R]`` tokens of each row, row after row.

        Return the logits ``[T, V]`` after each of them.
        """
        ...

    def roll_back(self, counts: np.ndarray) -> None:
        """Remove the last ``counts [R]`` fed tokens of each row."""
        ...


@runtime_checkable
class PrefixSession(DecodeSession, Protocol):
    """A session that computes no token again that a kept sequence begins with.

    Attributes:
        reused: By handle, the number of tokens of a prompt that were not computed again.
    """

    reused: dict[int, int]

    def remember(self, row: int, prompt: Prompt, token_ids: Sequence[int]) -> None:
        """Keep the keys and values of a row, for later prompts that begin with its tokens.

        Args:
            row: The row.
            prompt: Its prompt.
            token_ids: Its response.
        """
        ...


class DecoderProtocol(Protocol):
    """The interface between the engine and a policy."""

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that the model reads as media, which sampling bans."""
        ...

    def parameters(self) -> Iterable[tuple[str, Tensor]]: ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use the tensors of ``weights`` from now on, and ``forget`` those before."""
        ...

    def session(self) -> DecodeSession: ...

    def forget(self) -> None:
        """Drop what was computed from the weights, or copied from them, outside of sessions."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Return the context manager inside which sessions may be called."""
        ...


@runtime_checkable
class PrefixDecoder(DecoderProtocol, Protocol):
    """A decoder whose sessions may share keys and values."""

    def keep_prefixes(self) -> bool:
        """Keep finished sequences until ``forget``. Return ``False`` if it cannot."""
        ...


@runtime_checkable
class CompilingDecoder(DecoderProtocol, Protocol):
    """A decoder whose steps can be compiled.

    Attributes:
        compiled: What was compiled so far.
    """

    @property
    def compiled(self) -> CompiledSteps: ...

    def compile_steps(
        self, compiler: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
    ) -> None:
        """Compile the steps of sessions that are made from now on.

        Args:
            compiler: Returns a faster form of a step that has run before.

        Raises ``ConfigError`` for a model or a device whose steps cannot be compiled.
        """
        ...
