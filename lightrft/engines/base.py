"""The sampling seam: what a loop may ask of whatever draws answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.types import Request, Rollout

Fingerprint = dict[str, str]
"""Parameter name to a checksum of what the engine holds."""


def never() -> bool:
    """For whoever is not to be stopped."""
    return False


class Engine(Protocol):
    """Sampling only: native, vllm, sglang, http.

    ``of_all``: one engine stands for all ranks of a run, and the first rank asks it on behalf of all; else each rank has its own.
    ``together``: as many ranks side by side hold one model between them, and must all draw the same answers at one time.
    ``shared``: it samples from the trainer's own weights, and has no copy of them.
    """

    of_all: bool
    together: int
    shared: bool

    def generate(
        self, requests: Iterable[Request], sampling: SamplingConfig, stopped: Callable[[], bool] = never
    ) -> Iterator[Rollout]:
        """One answer to each request, as it finishes, in no order. Requests whose prompts are one object share its computation.

        Once ``stopped`` turns true, which is asked between tokens, those that are not finished come out as they are, with finish
        reason ``abort``; those that were not begun are empty. A request goes on from what was begun of it, by the weights of now: what
        they make of the tokens that are there is computed anew.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Take over ``weights`` as policy ``version``; answers drawn from now on carry that version."""
        ...

    def sleep(self, level: int) -> None:
        """Free memory while others need it: 1 keeps weights, 2 does not."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
