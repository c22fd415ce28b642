"""The protocol of sampling engines: the calls that a training loop makes to generate responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightrft.config.strategy import SamplingConfig
from lightrft.types import Request, Rollout

Fingerprint = dict[str, str]
"""A checksum of each parameter that the engine holds, by parameter name."""


def never_stop() -> bool:
    """Return ``False``: the ``stopped`` callback of a call that is never interrupted."""
    return False


class Engine(Protocol):
    """A sampling engine: native, vllm, sglang or http.

    Attributes:
        shared_by_all_ranks: One engine serves all ranks of a run, and rank 0 calls it for all of
            them. If ``False``, each rank has an engine.
        tensor_parallel_size: Number of consecutive ranks that shard one model. They must generate
            the same responses in the same calls.
        shares_weights: The engine samples from the trainer's weights and holds no copy of them.
    """

    shared_by_all_ranks: bool
    tensor_parallel_size: int
    shares_weights: bool

    def generate(
        self,
        requests: Iterable[Request],
        sampling: SamplingConfig,
        stopped: Callable[[], bool] = never_stop,
    ) -> Iterator[Rollout]:
        """Yield one response to each request as it finishes, in no particular order.

        Requests that refer to the same prompt object share its computation. A request with a
        partial response resumes it under the current weights, which recompute the existing tokens.

        Args:
            requests: The prompts to respond to, with their seeds and token limits.
            sampling: Temperature, filters, stop strings and default limits.
            stopped: Called between tokens. Once it returns ``True``, unfinished responses are
                yielded as they are, with finish reason ``abort``. Responses to requests that have
                not started are empty.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Fingerprint:
        """Use ``weights`` as policy ``version``.

        Responses generated from now on carry that version.
        """
        ...

    def sleep(self, level: int) -> None:
        """Free memory for other users of the device.

        Level 1 keeps the weights, level 2 does not.
        """
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class HasLimits(Protocol):
    """An engine that knows once it has started what it cannot generate, such as a server."""

    def check_limits(self, longest: int, sampling: SamplingConfig, key: str, data: str) -> None:
        """Raise ``ConfigError`` if the engine cannot respond to the prompts of a run.

        With an engine that all ranks share, every rank must call it.

        Args:
            longest: Length of the longest prompt, in tokens.
            sampling: Settings of the responses.
            key: Name of the setting that holds ``sampling``, for the message.
            data: Name of the setting that holds the prompts, for the message.
        """
        ...
